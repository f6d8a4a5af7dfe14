//! Live migration from the view of a user: the guest goes on at another node, with everything that it has.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Story, TIMEOUT, is_true,
    storage::{Backing, Storage, delete_vmis_after},
    story, story_large,
};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use crate::{
    data_volumes::{storage, wait_phase},
    live_resize::{self, READY, condition, memory_between, processors, run},
    manifests,
    moves::{
        MINUTES, alone, arrived, begin, console, has_ended, is_long, migrate, two_nodes, vm, vm_with_lan, with_claims,
        with_policy,
    },
    processors::despite_aborts,
    witness::{Lan, Witness, has_lan, write_alone, written},
};

#[test]
fn vm_moves_to_another_node_and_its_guest_goes_on() {
    story("migration", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        let scratch = "          - {name: seed, disk: {bus: virtio}}\n";
        let manifest = manifests::masqueraded("box", "Always")
            .replace(scratch, &format!("{scratch}          - {{name: scratch, disk: {{bus: virtio}}}}\n"))
            .replace(
                "      - name: seed\n",
                "      - {name: scratch, emptyDisk: {capacity: 16Mi}}\n      - name: seed\n",
            );
        s.apply(&manifest).await?;
        s.wait_running("box").await?;
        let movable = |vmi: &Value| is_true(vmi, "LiveMigratable");
        let before = s.wait("vmi", "box", "be migratable", TIMEOUT, movable).await?;
        ensure!(before["status"]["migrationMethod"] == "BlockMigration", "{}", before["status"]["migrationMethod"]);
        let mut console = s.console("box")?;
        console.login("root", "story").await?;
        // Files on the container disk and the emptyDisk, and a page for a Service.
        run(&mut console, "echo container-$((40+2)) >/disk/mark; sync").await?;
        let find = "scratch=; for d in /sys/block/vd*; do [ $(cat $d/size) = 32768 ] && scratch=/dev/${d##*/}; done";
        run(&mut console, find).await?;
        run(&mut console, "echo empty-$((40+2)) | dd of=$scratch bs=512 conv=sync,fsync 2>/dev/null").await?;
        run(&mut console, "mkdir -p /www && echo still-here >/www/index.html && httpd -p 8080 -h /www").await?;
        let witness = Witness::start(&mut console).await?;
        console.leave().await?;
        s.virt(&["expose", "vm", "box", "--name=box", "--port=80", "--target-port=8080"]).await?;
        s.toolbox("visitor").await?;
        visited(s, TIMEOUT).await.context("before the migration")?;

        let (said, served) = move_while_served(s, &before).await?;
        ensure!(said.contains("VM box was migrated from node"), "kubectl virt migrate --wait: {said}");
        eprintln!("the Service reaches the guest {served:?} after the switch");
        let migrations = s.list("vmim", "").await?;
        let [migration] = migrations.as_slice() else { anyhow::bail!("{} migrations", migrations.len()) };
        let after =
            arrived(s, &before, migration["metadata"]["name"].as_str().context("migration without name")?).await?;
        ensure!(after["status"]["migrationState"]["mode"] == "PreCopy", "{}", after["status"]["migrationState"]);
        // New connections reach only the new pod.
        let pod = alone(s, "box").await?;
        let address = pod["status"]["podIP"].as_str().context("pod without address")?;
        let only = "jsonpath={.items[*].endpoints[?(@.conditions.ready==true)].addresses[*]}";
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let words = ["get", "endpointslices", "-l", "kubernetes.io/service-name=box", "-o", only];
            let ready = s.kubectl(&words).await?;
            if ready.split_whitespace().eq([address]) {
                break;
            }
            ensure!(Instant::now() < deadline, "endpoints: {ready}, the pod has {address}");
            sleep(Duration::from_millis(500)).await;
        }
        let shown = s.wait("vmi", "box", "show the new address", TIMEOUT, |vmi| {
            vmi["status"]["interfaces"][0]["ipAddress"] == address
        });
        shown.await?;

        let mut console = s.reopen_console("box", "root", "story").await?;
        Witness::goes_on(&mut console, &witness).await?;
        for (command, expected) in [
            ("cat /disk/mark", "container-42"),
            ("head -c 8 $scratch", "empty-42"),
            ("hostname", "box-guest"),
            // The guest still writes to disks that were copied.
            ("echo more >>/disk/mark; sync; tail -n 1 /disk/mark", "more"),
        ] {
            let shown = run(&mut console, command).await?;
            ensure!(shown == expected, "{command}: {shown:?}, not {expected:?}");
        }
        console.leave().await?;
        s.wait_event("box", "Migrated", TIMEOUT).await?;
        // The new launcher obeys.
        s.virt(&["stop", "box"]).await?;
        s.wait_gone("vmi", "box", MINUTES).await
    });
}

/// Migrates with the command, and returns its output and the time from the change of the node to a connection to the Service.
async fn move_while_served(s: &Story, before: &Value) -> Result<(String, Duration)> {
    let said = s.virt(&["migrate", "box", "--wait"]);
    let served = async {
        let api = s.api("vmi");
        let deadline = Instant::now() + MINUTES;
        while api.get("box").await?.data["status"]["nodeName"] == before["status"]["nodeName"] {
            ensure!(Instant::now() < deadline, "the VMI does not leave its node");
            sleep(Duration::from_millis(50)).await;
        }
        let switched = Instant::now();
        visited(s, TIMEOUT).await.context("after the migration")?;
        Ok(switched.elapsed())
    };
    tokio::try_join!(said, served)
}

/// Waits until a pod gets the page of the guest through the Service.
async fn visited(s: &Story, within: Duration) -> Result<()> {
    let deadline = Instant::now() + within;
    loop {
        match s.exec("visitor", &["wget", "-q", "-T", "1", "-O", "-", "http://box/"]).await {
            Ok(page) if page.contains("still-here") => return Ok(()),
            outcome => ensure!(Instant::now() < deadline, "the Service does not answer: {outcome:?}"),
        }
        sleep(Duration::from_millis(100)).await;
    }
}

#[test]
fn vm_with_shared_claim_moves_back_and_forth() {
    story("migration-claims", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        let Some(raw) = Storage::make_for_many(s, "raw", Backing::Device).await? else { return Ok(()) };
        raw.lend(s, async |_| back_and_forth(s).await).await
    });
}

async fn back_and_forth(s: &Story) -> Result<()> {
    // Not of the default class: a shared claim of it would make the claims for the state of VMs shared, in other stories too.
    let files = storage("csi-no-snapshots", "Filesystem", 16).replace("ReadWriteOnce", "ReadWriteMany");
    let spec = format!("{{source: {{blank: {{}}}}, storage: {files}}}");
    let template = format!("  dataVolumeTemplates: [{{metadata: {{name: files}}, spec: {spec}}}]\n  template:\n");
    let manifest = with_claims(&vm("box", "Always"), &["files", "raw"])
        .replace("  template:\n", &template)
        .replace("persistentVolumeClaim: {claimName: files}", "dataVolume: {name: files}");
    s.apply(&manifest).await?;
    wait_phase(s, "files", "Succeeded").await?;
    s.wait_running("box").await?;
    let mut guest = console(s, "box").await?;
    run(&mut guest, "modprobe -qa virtio_blk; echo kept-$((40+2)) | dd of=/dev/vdb bs=512 conv=sync,fsync 2>/dev/null")
        .await?;
    let mut witness = Witness::start(&mut guest).await?;
    write_alone(&mut guest, "/dev/vda").await?;
    let mut records = written(&mut guest, 0).await?;
    guest.leave().await?;
    for round in 1..=if is_long() { 20 } else { 3 } {
        let step = async {
            let vmi = migrate(s, "box").await?;
            ensure!(vmi["status"]["migrationMethod"] == "LiveMigration", "{}", vmi["status"]["migrationMethod"]);
            let mut guest = console(s, "box").await?;
            witness = Witness::goes_on(&mut guest, &witness).await?;
            records = written(&mut guest, records).await?;
            run(&mut guest, "echo 1 >/proc/sys/vm/drop_caches").await?;
            let kept = run(&mut guest, "head -c 7 /dev/vdb").await?;
            ensure!(kept == "kept-42", "the block claim holds {kept:?}");
            guest.leave().await
        };
        step.await.with_context(|| format!("migration {round}"))?;
    }
    Ok(())
}

#[test]
fn hot_plugged_volume_nic_cpu_and_memory_move_with_the_vm() {
    story_large("migration-plugged", async |s| {
        let Some([node, _]) = two_nodes(s).await? else { return Ok(()) };
        let Some(lan) = Lan::define(s, &node).await? else { return Ok(()) };
        let storage = Storage::make_for_many(s, "plug", Backing::Device).await;
        let result = match &storage {
            Ok(Some(_)) => despite_aborts(s, "box", async || plugged(s, &lan).await).await,
            _ => Ok(()),
        };
        let gone = delete_vmis_after(s, &result).await;
        lan.leave().await?;
        if let Some(storage) = storage? {
            storage.remove(s).await?;
        }
        result.and(gone)
    });
}

async fn plugged(s: &Story, lan: &Lan) -> Result<()> {
    let devices = "        devices: {interfaces: [{name: default, masquerade: {}}]}\n      \
                   networks: [{name: default, pod: {}}]\n";
    // More would make QEMU abort under emulation; virt-launcher refuses to move such a guest.
    let manifest = live_resize::vm("box", "sockets: 1", ", maxGuest: 2Gi").replace("        devices: {}\n", devices);
    s.apply(&manifest).await?;
    s.wait_running("box").await?;
    let mut guest = console(s, "box").await?;
    run(&mut guest, READY).await?;
    run(&mut guest, "modprobe -qa virtio_blk; true").await?;
    s.virt(&["addvolume", "box", "--volume-name=plug", "--bus=virtio", "--serial=PLUG"]).await?;
    s.virt(&["set", "cpu", "box", "--sockets=2", "--wait"]).await?;
    s.virt(&["set", "memory", "box", "--guest=2Gi", "--wait"]).await?;
    let find = "for i in $(seq 60); do d=$(grep -ls PLUG /sys/block/*/serial) && break; sleep 1; done; \
                d=/dev/$(echo $d | cut -d/ -f4)";
    run(&mut guest, find).await?;
    run(&mut guest, "echo plugged-$((40+2)) | dd of=$d bs=512 conv=sync,fsync 2>/dev/null").await?;
    // A migration plugs the interface.
    let spec = json!({
        "domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}, {"name": "lan", "bridge": {}}]}},
        "networks": [{"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "lan"}}],
    });
    let patch = Patch::Merge(json!({"spec": {"template": {"spec": spec}}}));
    s.api("vm").patch("box", &PatchParams::default(), &patch).await?;
    s.wait("vmi", "box", "require a migration", TIMEOUT, |vmi| condition(vmi, "MigrationRequired").is_some()).await?;
    let mut witness = Witness::start(&mut guest).await?;
    guest.leave().await?;
    for way in ["there", "back"] {
        let step = async {
            migrate(s, "box").await?;
            s.wait("vmi", "box", "have the interface", MINUTES, has_lan).await?;
            let mut guest = console(s, "box").await?;
            witness = Witness::goes_on(&mut guest, &witness).await?;
            ensure!(run(&mut guest, &processors(2)).await? == "2", "the guest has lost a processor");
            run(&mut guest, &memory_between(1700, 2048)).await?;
            run(&mut guest, "echo 1 >/proc/sys/vm/drop_caches").await?;
            let data = run(&mut guest, "head -c 10 $d").await?;
            ensure!(data == "plugged-42", "the disk holds {data:?}");
            if way == "there" {
                lan.give_address(&mut guest).await?;
            }
            // A new one each time. On a busy host, a process that ran on two emulated processors during a migration was seen to
            // die of a wrong return address. Guests of one processor hold their connection (see `connected`).
            if let Err(error) = lan.connect(&mut guest).await {
                let log = run(&mut guest, "dmesg | tail -n 20").await?;
                return Err(error.context(format!("connect to a guest with this log: {log}")));
            }
            guest.leave().await?;
            let is_complete = |vmi: &Value| {
                let mut volumes = vmi["status"]["volumeStatus"].as_array().into_iter().flatten();
                volumes.any(|entry| entry["name"] == "plug" && entry["phase"] == "Ready")
                    && ["MigrationRequired", "HotVCPUChange", "HotMemoryChange"]
                        .iter()
                        .all(|change| condition(vmi, change).is_none())
            };
            s.wait("vmi", "box", "have its volume and no change in progress", TIMEOUT, is_complete).await.map(drop)
        };
        step.await.context(way)?;
    }
    // It can still be taken away.
    s.virt(&["removevolume", "box", "--volume-name=plug"]).await?;
    let released = |vmi: &Value| !vmi["status"]["volumeStatus"].to_string().contains("\"plug\"");
    s.wait("vmi", "box", "have no plugged volume", MINUTES, released).await.map(drop)
}

#[test]
fn vm_with_multiqueue_and_a_plugged_vcpu_migrates_there_and_back() {
    story("migration-queues", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        let manifest = vm("box", "Always")
            .replace("devices: {interfaces", "devices: {networkInterfaceMultiqueue: true, interfaces")
            .replace("memory: {guest: 128Mi}", "cpu: {sockets: 1}\n        memory: {guest: 128Mi}");
        s.apply(&manifest).await?;
        s.wait_running("box").await?;
        let mut guest = console(s, "box").await?;
        run(&mut guest, "mkdir -p /www && echo still-here >/www/index.html && httpd -p 8080 -h /www").await?;
        guest.leave().await?;
        s.virt(&["expose", "vm", "box", "--name=box", "--port=80", "--target-port=8080"]).await?;
        s.toolbox("visitor").await?;
        s.virt(&["set", "cpu", "box", "--sockets=2", "--wait"]).await?;
        let queues = |vmi: &Value| vmi["status"]["interfaces"][0]["queueCount"].as_u64();
        for way in ["there", "back"] {
            s.virt(&["migrate", "box", "--wait"]).await.context(way)?;
            visited(s, TIMEOUT).await.context(way)?;
            s.wait("vmi", "box", "have one queue", TIMEOUT, |vmi| queues(vmi) == Some(1)).await.context(way)?;
        }
        let uid = s.get("vmi", "box").await?["metadata"]["uid"].clone();
        s.virt(&["restart", "box", "--grace-period=0", "--force"]).await?;
        let has_two = |vmi: &Value| vmi["metadata"]["uid"] != uid && queues(vmi) == Some(2);
        s.wait("vmi", "box", "have two queues after a restart", MINUTES, has_two).await.map(drop)
    });
}

#[test]
fn canceled_migration_leaves_the_guest_at_its_source() {
    story("migration-cancel", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        s.apply(&vm("box", "Always")).await?;
        let before = s.wait_running("box").await?;
        let mut guest = console(s, "box").await?;
        let witness = Witness::start(&mut guest).await?;
        guest.leave().await?;

        // Without a pod for the target the migration stays Pending.
        s.apply("{apiVersion: v1, kind: ResourceQuota, metadata: {name: full}, spec: {hard: {pods: 1}}}").await?;
        let full = |quota: &Value| quota["status"]["used"]["pods"] == "1";
        s.wait("ResourceQuota", "full", "count the pod", TIMEOUT, full).await?;
        let migration = begin(s, "box").await?;
        let rejected = |vmim: &Value| condition(vmim, "migrationRejectedByResourceQuota").is_some();
        let held = s.wait("vmim", &migration, "be rejected by the quota", MINUTES, rejected).await?;
        ensure!(held["status"]["phase"] == "Pending", "{}", held["status"]);
        s.virt(&["migrate-cancel", "box"]).await?;
        s.wait_gone("vmim", &migration, MINUTES).await?;
        s.delete("ResourceQuota", "full").await?;
        stayed(s, &before, &witness).await.context("canceled while Pending")?;

        // At one MiB a second data flows for long.
        with_policy(s, json!({"bandwidthPerMigration": "1Mi"}), async |_| {
            let migration = begin(s, "box").await?;
            let runs = |vmim: &Value| vmim["status"]["phase"] == "Running" || has_ended(vmim);
            let running = s.wait("vmim", &migration, "be Running", MINUTES, runs).await?;
            ensure!(running["status"]["phase"] == "Running", "{}", running["status"]);
            let progress = |vmi: &Value| vmi["metadata"]["annotations"]["ferrovirt.io/migration-progress"].is_string();
            s.wait("vmi", "box", "show its progress", TIMEOUT, progress).await?;
            s.virt(&["migrate-cancel", "box"]).await?;
            s.wait_gone("vmim", &migration, MINUTES).await
        })
        .await?;
        let aborted = |vmi: &Value| vmi["status"]["migrationState"]["abortStatus"] == "Succeeded";
        let vmi = s.wait("vmi", "box", "show the abort", TIMEOUT, aborted).await?;
        let state = &vmi["status"]["migrationState"];
        ensure!(state["failed"] == true && state["completed"] == true && state["abortRequested"] == true, "{state}");
        stayed(s, &before, &witness).await.context("canceled while Running")?;
        // An abort does not harm later migrations.
        migrate(s, "box").await?;
        let mut guest = console(s, "box").await?;
        Witness::goes_on(&mut guest, &witness).await?;
        guest.leave().await
    });
}

/// Checks that the guest has gone on in its first pod, and that no other is left.
async fn stayed(s: &Story, before: &Value, witness: &Witness) -> Result<()> {
    let pod = alone(s, "box").await?;
    let vmi = s.get("vmi", "box").await?;
    ensure!(vmi["status"]["nodeName"] == before["status"]["nodeName"], "the VMI has left its node");
    ensure!(pod["spec"]["nodeName"] == before["status"]["nodeName"], "{}", pod["spec"]["nodeName"]);
    ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
    ensure!(vmi["metadata"]["annotations"]["ferrovirt.io/migration-progress"].is_null(), "{}", vmi["metadata"]);
    let mut guest = console(s, "box").await?;
    Witness::goes_on(&mut guest, witness).await?;
    guest.leave().await
}

#[test]
fn connection_on_a_layer_2_network_survives() {
    story("migration-lan", async |s| {
        let Some([node, _]) = two_nodes(s).await? else { return Ok(()) };
        let Some(lan) = Lan::define(s, &node).await? else { return Ok(()) };
        let result = connected(s, &lan).await;
        let gone = delete_vmis_after(s, &result).await;
        lan.leave().await?;
        result.and(gone)
    });
}

async fn connected(s: &Story, lan: &Lan) -> Result<()> {
    s.apply(&vm_with_lan("box", "Always")).await?;
    s.wait_running("box").await?;
    let mut guest = console(s, "box").await?;
    lan.give_address(&mut guest).await?;
    let mac = run(&mut guest, "cat /sys/class/net/eth1/address").await?;
    lan.connect(&mut guest).await?;
    guest.leave().await?;
    for way in ["there", "back"] {
        let (count, _) = lan.goes_on(0).await?;
        migrate(s, "box").await?;
        let (_, pause) = lan.goes_on(count).await.with_context(|| way.to_owned())?;
        eprintln!("{way}: the connection has stood still for {pause:.2} s at most");
    }
    let mut guest = console(s, "box").await?;
    let now = run(&mut guest, "cat /sys/class/net/eth1/address").await?;
    ensure!(now == mac, "the MAC address has changed from {mac} to {now}");
    guest.leave().await
}

#[test]
fn paused_vm_stays_paused() {
    story("migration-paused", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        s.apply(&vm("box", "Always")).await?;
        s.wait_running("box").await?;
        let mut guest = console(s, "box").await?;
        Witness::start(&mut guest).await?;
        let looked = Instant::now();
        let witness = Witness::look(&mut guest).await?;
        s.virt(&["pause", "vm", "box"]).await?;
        s.wait("vmi", "box", "be paused", TIMEOUT, |vmi| condition(vmi, "Paused").is_some()).await?;
        let pausing = looked.elapsed();
        guest.leave().await?;
        let before = s.get("vmi", "box").await?;
        let migration = begin(s, "box").await?;
        let vmi = arrived(s, &before, &migration).await?;
        let paused = condition(&vmi, "Paused").context("the VMI is not paused any more")?;
        ensure!(paused["reason"] == "PausedByUser", "{paused}");
        // Longer than the counter may advance below.
        sleep(Duration::from_secs(5)).await;
        ensure!(condition(&s.get("vmi", "box").await?, "Paused").is_some(), "the VMI was unpaused");
        let unpaused = Instant::now();
        s.virt(&["unpause", "vm", "box"]).await?;
        let mut guest = console(s, "box").await?;
        let after = Witness::goes_on(&mut guest, &witness).await?;
        // Ten counts a second since it was unpaused, and those before the pause took effect.
        let most = witness.count + 30 + 10 * (pausing + unpaused.elapsed()).as_secs();
        ensure!(after.count <= most, "the guest ran while it was paused: {witness:?} {after:?}");
        guest.leave().await
    });
}
