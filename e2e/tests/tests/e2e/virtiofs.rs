//! File systems that the guest shares with its pod by virtiofs.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Console, Story, signal,
    storage::{Backing, Storage, delete_vmis_after, on_host},
    story, story_alone,
};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use crate::{
    kills::uid,
    live_resize::{condition, run},
    moves::{MINUTES, console, migrate, two_nodes, vm},
};

/// Most memory of an idle virtiofsd in KiB, without that of the guest.
const MEMORY: u64 = 6 * 1024;

const CONFIGURATION: &str = "
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {color: blue}
---
apiVersion: v1
kind: Secret
metadata: {name: key}
stringData: {password: s3cret}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: robot}
";

/// Returns a VM that shares volumes, each under its name.
fn sharing(name: &str, volumes: &Value) -> String {
    let names = volumes.as_array().into_iter().flatten().map(|volume| json!({"name": volume["name"], "virtiofs": {}}));
    let filesystems: Vec<Value> = names.collect();
    vm(name, "Always")
        .replace("devices: {interfaces", &format!("devices: {{filesystems: {}, interfaces", json!(filesystems)))
        .replace("      networks: ", &format!("      volumes: {volumes}\n      networks: "))
}

/// Returns a script that mounts file systems under their names.
fn mount(names: &[&str]) -> String {
    let each = names.iter().map(|name| format!("mkdir -p /share/{name} && mount -t virtiofs {name} /share/{name}"));
    each.collect::<Vec<_>>().join(" && ")
}

#[test]
fn guest_sees_configuration_and_its_changes_also_after_a_migration() {
    story("virtiofs-configuration", async |s| {
        s.apply(CONFIGURATION).await?;
        let volumes = json!([
            {"name": "settings", "configMap": {"name": "settings"}},
            {"name": "key", "secret": {"secretName": "key"}},
            {"name": "account", "serviceAccount": {"serviceAccountName": "robot"}},
            {"name": "about", "downwardAPI": {"fields": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        ]);
        s.apply_when_accepted(&sharing("guest", &volumes)).await?;
        s.wait_running("guest").await?;
        let mut guest = console(s, "guest").await?;
        run(&mut guest, &mount(&["settings", "key", "account", "about"])).await?;
        let seen =
            run(&mut guest, "cat /share/settings/color; echo; cat /share/key/password; echo; cat /share/about/labels")
                .await?;
        ensure!(
            seen.starts_with("blue") && seen.contains("s3cret") && seen.contains("kubevirt.io/created-by"),
            "{seen}"
        );
        // The token belongs to root of the guest.
        let token = run(&mut guest, "stat -L -c %u /share/account/token; cut -d . -f 1 /share/account/token").await?;
        ensure!(token.starts_with('0') && token.contains("eyJ"), "{token}");
        let (refused, code) = guest.run("echo red > /share/settings/color").await?;
        ensure!(code != 0, "the ConfigMap was changed: {refused}");

        change(s, "settings", "ConfigMap", &json!({"data": {"color": "green"}})).await?;
        change(s, "key", "Secret", &json!({"stringData": {"password": "n3w"}})).await?;
        sees(&mut guest, "/share/settings/color", "green").await?;
        sees(&mut guest, "/share/key/password", "n3w").await?;
        if two_nodes(s).await?.is_none() {
            return guest.leave().await;
        }
        guest.leave().await?;
        migrate(s, "guest").await?;
        let mut guest = console(s, "guest").await?;
        let seen = run(&mut guest, "cat /share/settings/color; echo; cat /share/key/password").await?;
        ensure!(seen.starts_with("green") && seen.contains("n3w"), "after the migration: {seen}");
        change(s, "settings", "ConfigMap", &json!({"data": {"color": "black"}})).await?;
        sees(&mut guest, "/share/settings/color", "black").await?;
        guest.leave().await
    });
}

async fn change(s: &Story, name: &str, kind: &str, change: &Value) -> Result<()> {
    s.api(kind).patch(name, &PatchParams::default(), &Patch::Merge(change)).await?;
    Ok(())
}

/// Waits until a file has this content. kubelet renews it about once a minute.
async fn sees(guest: &mut Console, file: &str, content: &str) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let seen = run(guest, &format!("cat {file}")).await?;
        if seen == content {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{file} still has {seen:?}");
        sleep(Duration::from_secs(2)).await;
    }
}

#[test]
fn guest_shares_a_claim_and_reaches_nothing_beside_it() {
    story_alone("virtiofs-claim", async |s| {
        let Some(files) = Storage::make_for_many(s, "files", Backing::Directory).await? else { return Ok(()) };
        let outcome = claim(s, &files).await;
        let gone = delete_vmis_after(s, &outcome).await;
        set_gates(s, &Value::Null).await?;
        files.remove(s).await?;
        outcome.and(gone)
    });
}

async fn claim(s: &Story, files: &Storage) -> Result<()> {
    let volumes = json!([{"name": "files", "persistentVolumeClaim": {"claimName": "files"}}]);
    let refused = s.refused_soon(&sharing("guest", &volumes)).await?;
    ensure!(refused.contains("virtiofs is not allowed: virtiofs feature gate is not enabled for PVC"), "{refused}");
    set_gates(s, &json!(["EnableVirtioFsStorageVolumes"])).await?;
    s.apply_when_accepted(&sharing("guest", &volumes)).await?;
    let vmi = s.wait_running("guest").await?;
    let memory = memory(s, &vmi).await?;
    ensure!(memory <= MEMORY, "an idle virtiofsd has {memory} KiB");

    let directory = &files.directory;
    // These lead to the pod or to the node only for a program that follows them there.
    let traps = format!(
        "cd {directory} && echo from-the-node > note && ln -s /etc/os-release absolute && ln -s ../../../../etc/passwd up \
         && mkfifo pipe && mknod null c 1 3 && chgrp 107 note && chmod 664 note"
    );
    on_host(s, &files.node, &traps).await?;
    let mut guest = console(s, "guest").await?;
    run(&mut guest, &mount(&["files"])).await?;
    let read = run(&mut guest, "cat /share/files/note; cat /share/files/up | head -n 1").await?;
    ensure!(read.contains("from-the-node") && read.contains("root:x:0:0:root:/root:/bin/sh"), "{read}");
    let (seen, code) = guest.run("cat /share/files/absolute").await?;
    ensure!(code != 0, "the guest read a file of the pod: {seen}");
    let kinds = run(&mut guest, "stat -c %F /share/files/pipe /share/files/null; ls /share/files/..").await?;
    ensure!(kinds.contains("fifo") && kinds.contains("character special file") && kinds.ends_with("files"), "{kinds}");
    run(&mut guest, "echo from-the-guest > /share/files/reply; sync; exec 7< /share/files/note").await?;
    let reply = on_host(s, &files.node, &format!("cat {directory}/reply; stat -c %u {directory}/reply")).await?;
    ensure!(reply.contains("from-the-guest") && reply.trim().ends_with("107"), "{reply}");
    guest.leave().await?;

    if two_nodes(s).await?.is_some() {
        migrate(s, "guest").await?;
    }
    let mut guest = console(s, "guest").await?;
    let read = run(&mut guest, "cat <&7; exec 7<&-; echo moved > /share/files/moved; sync; ls /share/files").await?;
    ensure!(read.contains("from-the-node") && read.contains("moved"), "{read}");
    let boot = run(&mut guest, "cat /proc/sys/kernel/random/boot_id").await?;
    // The guest loses the file system, and nothing else.
    let pod = s.launcher_pod("guest").await?;
    s.on_node(&s.node_of("guest").await?, &signal("virtiofsd", &uid(&pod)?, "KILL")).await.context("kill virtiofsd")?;
    let after = run(&mut guest, "sleep 2; cat /proc/sys/kernel/random/boot_id").await?;
    ensure!(after == boot, "the guest was restarted");
    guest.leave().await?;
    s.virt(&["restart", "guest"]).await?;
    let former = uid(&vmi)?;
    let is_new = |vmi: &Value| vmi["metadata"]["uid"] != json!(former) && vmi["status"]["phase"] == "Running";
    s.wait("vmi", "guest", "run again", MINUTES, is_new).await?;
    let mut guest = console(s, "guest").await?;
    run(&mut guest, &mount(&["files"])).await?;
    let read = run(&mut guest, "cat /share/files/reply").await?;
    ensure!(read == "from-the-guest", "after the restart: {read}");
    guest.leave().await
}

#[test]
fn guest_reads_a_path_of_its_pod_once_the_gate_is_on() {
    story_alone("virtiofs-path", async |s| {
        let outcome = path_of_the_pod(s).await;
        let gone = delete_vmis_after(s, &outcome).await;
        set_gates(s, &Value::Null).await?;
        outcome.and(gone)
    });
}

async fn path_of_the_pod(s: &Story) -> Result<()> {
    s.apply(CONFIGURATION).await?;
    // The API server mounts the token, as a webhook would mount another one.
    let volumes = |path: &str| {
        json!([
            {"name": "account", "serviceAccount": {"serviceAccountName": "robot"}},
            {"name": "path", "containerPath": {"path": path, "readOnly": true}},
        ])
    };
    s.apply(&sharing("guest", &volumes("/var/run/secrets/kubernetes.io/serviceaccount"))).await?;
    let is_refused = |vmi: &Value| {
        condition(vmi, "Synchronized").is_some_and(|shown| shown["reason"] == "ContainerPathVolumesDisabled")
    };
    s.wait("vmi", "guest", "name the gate", MINUTES, is_refused).await?;
    set_gates(s, &json!(["ContainerPathVolumes"])).await?;
    // A path of the launcher itself is not shared.
    s.apply_when_accepted(&sharing("curious", &volumes("/run/kubevirt-private"))).await?;
    s.wait_running("guest").await?;
    let mut guest = console(s, "guest").await?;
    run(&mut guest, &mount(&["account", "path"])).await?;
    run(&mut guest, "cmp /share/account/token /share/path/token").await?;
    let (refused, code) = guest.run("touch /share/path/file").await?;
    ensure!(code != 0, "the guest wrote to the pod: {refused}");
    guest.leave().await?;
    let is_refused = |vmi: &Value| {
        condition(vmi, "Synchronized").is_some_and(|shown| {
            let message = shown["message"].as_str().unwrap_or_default();
            shown["reason"] == "MissingVirtiofsContainers"
                && message.contains("path /run/kubevirt-private is in no directory")
        })
    };
    s.wait("vmi", "curious", "name the path", MINUTES, is_refused).await?;
    Ok(())
}

/// Returns the memory of the VMI's virtiofsd in KiB, without that of the guest.
async fn memory(s: &Story, vmi: &Value) -> Result<u64> {
    let name = vmi["metadata"]["name"].as_str().context("VMI without name")?;
    let pod = uid(&s.launcher_pod(name).await?)?;
    let script = format!(
        "for p in /proc/[0-9]*; do grep -qs -e {pod} $p/cgroup && grep -qsx virtiofsd $p/comm \
         && grep -E \"^Pss_(Anon|File):\" $p/smaps_rollup; done; true"
    );
    let found = s.on_node(&s.node_of(name).await?, &script).await?;
    let sizes = found.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    let sizes: Vec<u64> = sizes.collect();
    ensure!(!sizes.is_empty(), "virtiofsd does not run");
    Ok(sizes.into_iter().sum())
}

async fn set_gates(s: &Story, gates: &Value) -> Result<()> {
    let patch = json!({"spec": {"configuration": {"developerConfiguration": {"featureGates": gates}}}});
    s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}
