//! Measures a live migration of a guest of 512 MiB between two nodes, against two plain QEMUs on one node that migrate over a unix
//! socket: the same image of QEMU, the same kernel and devices, the same content of memory.
//!
//! Times are those at which a watch shows the fields, since timestamps of the API have a resolution of a second. The blackout is
//! the longest pause between answers to pings every 10 ms from the first node on the layer-2 network.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::AsFd,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_cluster::{
    host,
    plan::{LAN, Plan},
};
use ferrovirt_e2e_tests::{Node, Story, own_cluster, registry, repository};
use kube::{
    api::{DynamicObject, Patch, PatchParams},
    runtime::wait::Condition,
};
use rustix::{
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, recv, sendto, socket_with},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use serde_json::{Value, json};

use crate::{
    Figures, add_medians, percentile,
    start::{bare_pod, out_of_phase, pod, wait},
};

/// Interval of pings.
const INTERVAL: Duration = Duration::from_millis(10);
/// Fills a part of the guest's memory. Copies, since an emulated guest needs a minute to write as much by `tr`.
pub(crate) const FILL: &str = "mkdir -p /fill; mount -t tmpfs -o size=300m none /fill; \
     tr '\\0' x </dev/zero | head -c 1048576 >/fill/seed; \
     for n in $(seq 128); do cat /fill/seed; done >/fill/x; echo filled-$((1+1))";
/// Addresses of the guests, of the first node, and the network of both.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 88, 252, 2);
const PLAIN: Ipv4Addr = Ipv4Addr::new(10, 88, 252, 3);
const NODE: Ipv4Addr = Ipv4Addr::new(10, 88, 252, 1);
/// Metric of the bytes of channels.
const BYTES: &str = "ferrovirt_handler_migration_bytes_total";

/// Measures `moves` migrations, and `rounds` of the plain QEMUs. Does nothing on other clusters than the test cluster, and on one node.
pub(crate) async fn measure(s: &Story, rounds: usize, moves: usize, figures: &mut Figures) -> Result<()> {
    let (Some(plan), takers) = (own_cluster()?, s.takers().await?) else { return Ok(()) };
    if takers.len() < 2 {
        println!("migrations need two nodes: not measured");
        return Ok(());
    }
    let first = plan.node(1).name;
    let node = s.enter_node(&first).await?;
    // An interrupted run has left its QEMUs and taps.
    clean(s, &node).await?;
    node.run(&format!("ip address replace {NODE}/24 dev {LAN}")).await?;
    let result = async {
        measure_vm(s, &plan, moves, figures).await?;
        measure_plain(s, &plan, rounds, figures).await
    };
    let result = result.await;
    clean(s, &node).await?;
    node.leave().await?;
    result
}

async fn clean(s: &Story, node: &Node) -> Result<()> {
    let kill = "for p in /proc/[0-9]*; do grep -qas 'bench-plain' $p/cmdline && [ $p != /proc/$$ ] && kill -9 ${p#/proc/}; done";
    let links = "for tap in bench-a bench-b; do ip link del $tap 2>/dev/null; done";
    node.run(&format!("{kill}; {links}; ip address del {NODE}/24 dev {LAN}; true")).await?;
    if s.api("vm").get_opt("mover").await?.is_some() {
        s.delete("vm", "mover").await?;
    }
    Ok(())
}

/// Returns the VM. Its kernel arguments are those of the plain QEMU.
fn manifest() -> Result<String> {
    let arguments = arguments()?;
    Ok(format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: mover}}
spec:
  runStrategy: Always
  template:
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        memory: {{guest: 512Mi}}
        firmware:
          kernelBoot:
            kernelArgs: {arguments}
            container:
              image: ferrovirt.io/guests/tiny-kernel:devel
              imagePullPolicy: IfNotPresent
              kernelPath: /boot/vmlinuz
              initrdPath: /boot/initrd
        devices: {{interfaces: [{{name: default, masquerade: {{}}}}, {{name: lan, bridge: {{}}}}]}}
      networks: [{{name: default, pod: {{}}}}, {{name: lan, multus: {{networkName: lan}}}}]
"
    ))
}

fn arguments() -> Result<String> {
    let path = repository().join("e2e/guests/tiny/kernel-arguments");
    let saving = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(format!("console=ttyS0 quiet {}", saving.trim()))
}

async fn measure_vm(s: &Story, plan: &Plan, moves: usize, figures: &mut Figures) -> Result<()> {
    let configuration = json!({"cniVersion": "1.0.0", "name": "bench", "type": "bridge", "bridge": LAN});
    let definition = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "metadata": {"name": "lan"},
        "spec": {"config": configuration.to_string()},
    });
    s.apply(&definition.to_string()).await?;
    s.apply(&manifest()?).await?;
    s.wait_running("mover").await?;
    let mut console = s.console("mover")?;
    console.login("root", "ferrovirt").await?;
    let set =
        format!("pkill -f 'i eth1'; ip addr flush dev eth1; ip link set eth1 up; ip addr add {GUEST}/24 dev eth1");
    for command in [set.as_str(), FILL] {
        console.output(command).await?;
    }
    console.leave().await?;

    let (mut pods, mut begins, mut times, mut pauses, mut rates) = (vec![], vec![], vec![], vec![], vec![]);
    for round in 0..moves {
        let name = format!("pod-of-move-{round}");
        pods.push(pod(s, &name, bare_pod(s, &name)).await?.0);
        let name = format!("move-{round}");
        let before = bytes(s).await?;
        let pings = Pings::start(plan, GUEST);
        out_of_phase().await;
        let migration = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration", "metadata": {"name": name},
            "spec": {"vmiName": "mover"},
        });
        let created = Instant::now();
        s.apply(&migration.to_string()).await?;
        let uid = s.get("vmim", &name).await?["metadata"]["uid"].clone();
        wait(s.api("vmi"), "mover", has(&uid, "startTimestamp")).await.context("the migration does not begin")?;
        let begun = created.elapsed();
        wait(s.api("vmi"), "mover", has(&uid, "endTimestamp")).await.context("the migration does not end")?;
        let moved = created.elapsed().saturating_sub(begun);
        let ended =
            |vmim: &Value| ["Succeeded", "Failed"].contains(&vmim["status"]["phase"].as_str().unwrap_or_default());
        let end = s.wait("vmim", &name, "end", Duration::from_secs(60), ended).await?;
        ensure!(end["status"]["phase"] == "Succeeded", "{}", end["status"]);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let pause = pings.end()?;
        // Both nodes count each byte.
        let rate = (bytes(s).await? - before) / 2.0 / f64::from(1 << 20) / moved.as_secs_f64();
        println!(
            "migration {round}: begins after {begun:.2?}, takes {moved:.2?}, blackout {pause:.3?}, {rate:.0} MiB/s"
        );
        begins.push(begun.as_secs_f64());
        times.push(moved.as_secs_f64());
        pauses.push(pause.as_secs_f64() * 1000.0);
        rates.push(rate);
    }
    for (name, values) in [("migration_max_s", &times), ("migration_blackout_max_ms", &pauses)] {
        figures.insert(name.into(), percentile(values, 100).context("no migration")?);
    }
    let measured = [
        ("pod_beside_migration_running_s", pods),
        ("migration_begin_s", begins),
        ("migration_s", times),
        ("migration_blackout_ms", pauses),
        ("migration_channel_mib_s", rates),
    ];
    add_medians(figures, measured)?;
    s.delete("vm", "mover").await?;
    s.wait_gone("vmi", "mover", Duration::from_secs(120)).await
}

/// Returns true if the VMI shows this time of the migration.
pub(crate) fn has(uid: &Value, field: &'static str) -> impl Condition<DynamicObject> {
    let uid = uid.clone();
    move |vmi: Option<&DynamicObject>| {
        let state = vmi.map(|vmi| &vmi.data["status"]["migrationState"]);
        state.is_some_and(|state| state["migrationUid"] == uid && state[field].is_string())
    }
}

/// Returns the bytes that channels have transferred on all nodes.
async fn bytes(s: &Story) -> Result<f64> {
    let lines = s.metrics("virt-handler").await?;
    let values = lines.iter().filter(|line| line.starts_with(BYTES));
    Ok(values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}

/// Functions for two QEMUs in a pod. Monitor and serial port are named pipes.
const FUNCTIONS: &str = "cd /tmp; until_log() { for i in $(seq 1200); do grep -q \"$2\" $1.log && return; sleep 0.1; done; return 1; }; \
     say() { echo \"$2\" >$1.in; }";

async fn measure_plain(s: &Story, plan: &Plan, rounds: usize, figures: &mut Figures) -> Result<()> {
    // The pod uses devices and the network of the node.
    let labels = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}});
    s.cluster_api("Namespace").patch(&s.namespace, &PatchParams::default(), &Patch::Merge(labels)).await?;
    let registry = registry();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain"},
        "spec": {
            "nodeName": plan.node(1).name, "hostNetwork": true, "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": false,
            "containers": [{
                "name": "qemu", "image": format!("{registry}/virt-launcher:devel-debug"),
                "imagePullPolicy": "IfNotPresent", "command": ["sleep", "3600"],
                "securityContext": {"privileged": true, "runAsUser": 0},
                "volumeMounts": [{"name": "guest", "mountPath": "/guest"}, {"name": "tmp", "mountPath": "/tmp"}],
            }],
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "guest", "image": {
                    "reference": format!("{registry}/guests/tiny-kernel:devel"), "pullPolicy": "IfNotPresent"}},
            ],
        },
    });
    s.apply(&pod.to_string()).await?;
    s.wait("Pod", "plain", "be Running", Duration::from_secs(120), |pod| pod["status"]["phase"] == "Running").await?;
    let run = async |script: &str| s.exec("plain", &["bash", "-c", &format!("{FUNCTIONS}; {script}")]).await;
    let (mut moves, mut pauses) = (vec![], vec![]);
    for round in 0..rounds {
        run(&format!("rm -f /tmp/*; {}", qemu("a", "")?)).await.context("start the source")?;
        run("until_log a-serial login: && say a-serial root && until_log a-serial assword && sleep 1 && \
             say a-serial ferrovirt && sleep 5")
        .await
        .context("log in")?;
        let set =
            format!("pkill -f 'i eth1'; ip addr flush dev eth1; ip link set eth1 up; ip addr add {PLAIN}/24 dev eth1");
        run(&format!("cat >script <<'END'\n{set}; {FILL}\nEND\ncat script >a-serial.in; until_log a-serial filled-2"))
            .await
            .context("fill the memory")?;
        run(&qemu("b", "-incoming unix:/tmp/move")?).await.context("start the target")?;
        let pings = Pings::start(plan, PLAIN);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let shown = run(
            "sleep 1; say a-monitor 'migrate_set_parameter max-bandwidth 100G'; say a-monitor 'migrate -d unix:/tmp/move'; \
             for i in $(seq 600); do say a-monitor 'info migrate'; sleep 0.1; \
               grep -qi 'status:.*completed' a-monitor.log && break; done; sleep 1; \
             grep -i 'total time' a-monitor.log | tail -n 1",
        )
        .await
        .context("migrate")?;
        let pause = pings.end()?;
        let digits: String =
            shown.chars().skip_while(|char| !char.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
        let moved: f64 = digits.parse().with_context(|| format!("no time of the migration: {shown:?}"))?;
        println!("plain QEMU {round}: takes {moved} ms, blackout {pause:.3?}");
        moves.push(moved / 1000.0);
        pauses.push(pause.as_secs_f64() * 1000.0);
        run("say a-monitor quit; say b-monitor quit; sleep 1; pkill -f bench-plai[n]; \
             for tap in bench-a bench-b; do ip link del $tap; done; true")
        .await?;
    }
    add_medians(figures, [("plain_migration_s", moves), ("plain_blackout_ms", pauses)])?;
    s.delete("Pod", "plain").await
}

/// Returns the devices that the domain of the VM has besides the interface on the layer-2 network. Each takes time when it is loaded.
fn devices() -> String {
    let port = |index: u32| {
        let multifunction = if index == 0 { ",multifunction=on" } else { "" };
        let (port, number) = (16 + index, index + 1);
        format!(
            "-device pcie-root-port,port={port},chassis={number},id=pci.{number},bus=pcie.0,addr=0x2.0x{index}{multifunction} "
        )
    };
    let ports: String = (0..8).map(port).collect();
    format!(
        "{ports} -device VGA,vgamem_mb=16,bus=pcie.0,addr=0x1 -device virtio-scsi-pci-non-transitional,bus=pci.6 \
         -device virtio-serial-pci-non-transitional,bus=pci.5 -device virtio-balloon-pci-non-transitional,bus=pci.7 \
         -netdev user,id=default -device virtio-net-pci-non-transitional,netdev=default,bus=pci.1"
    )
}

/// Returns a script that starts a QEMU on the layer-2 network.
fn qemu(name: &str, more: &str) -> Result<String> {
    let arguments = arguments()?;
    let devices = devices();
    Ok(format!(
        "ip tuntap add bench-{name} mode tap && ip link set bench-{name} master {LAN} up && \
         for pipe in monitor serial; do mkfifo {name}-$pipe.in {name}-$pipe.out; \
           (cat {name}-$pipe.out >{name}-$pipe.log) </dev/null >/dev/null 2>&1 & done; \
         (qemu-system-x86_64 -name bench-plain-{name} -machine q35 -accel tcg -cpu max -m 512 -nodefaults -display none \
           {devices} -kernel /guest/boot/vmlinuz -initrd /guest/boot/initrd -append '{arguments}' \
           -netdev tap,id=lan,ifname=bench-{name},script=no,downscript=no \
           -device virtio-net-pci-non-transitional,netdev=lan,mac=02:00:00:88:00:03,bus=pci.2 \
           -chardev pipe,id=monitor,path=/tmp/{name}-monitor -mon chardev=monitor \
           -chardev pipe,id=serial,path=/tmp/{name}-serial -serial chardev:serial {more}) \
           </dev/null >{name}.log 2>&1 & sleep 1; pgrep -f bench-plain-{name} >/dev/null || {{ cat {name}.log; exit 1; }}"
    ))
}

/// Pings from the first node.
struct Pings {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Duration>>,
}

impl Pings {
    fn start(plan: &Plan, to: Ipv4Addr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (namespace, until) = (host::namespace_path(&plan.node(1).namespace), stop.clone());
        // A thread of its own, which cannot leave the network namespace.
        Self { stop, thread: thread::spawn(move || ping(namespace, to, &until)) }
    }

    /// Ends the pings and returns the longest pause between two answers.
    fn end(self) -> Result<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(pause) => pause,
            Err(_) => anyhow::bail!("the thread of the pings has ended"),
        }
    }
}

fn ping(namespace: PathBuf, to: Ipv4Addr, stop: &AtomicBool) -> Result<Duration> {
    let file = std::fs::File::open(&namespace).with_context(|| namespace.display().to_string())?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .context("cannot enter the network of the node")?;
    let icmp = socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, Some(ipproto::ICMP))?;
    let address = SocketAddrV4::new(to, 0);
    let id = 0x4656_u16;
    let (mut number, mut last, mut longest) = (0_u16, None::<Instant>, Duration::ZERO);
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        if Instant::now() >= next {
            next += INTERVAL;
            number = number.wrapping_add(1);
            // While the guest is not there, the kernel may refuse to send.
            let _ = sendto(&icmp, &echo_request(id, number), SendFlags::DONTWAIT, &address);
        }
        let mut packet = [0_u8; 128];
        while let Ok((length, _)) = recv(&icmp, &mut packet, RecvFlags::DONTWAIT) {
            let packet = packet.get(..length).unwrap_or_default();
            // An IP header without options precedes the message.
            let is_answer = packet.get(12..16) == Some(&to.octets()[..])
                && packet.get(20) == Some(&0)
                && packet.get(24..26) == Some(&id.to_be_bytes()[..]);
            if is_answer {
                let now = Instant::now();
                longest = longest.max(last.map_or(Duration::ZERO, |last| now - last));
                last = Some(now);
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
    let last = last.context("no ping was answered")?;
    ensure!(last.elapsed() < Duration::from_secs(1), "pings are not answered any more");
    Ok(longest)
}

/// Returns an ICMP echo request (RFC 792).
fn echo_request(id: u16, number: u16) -> [u8; 16] {
    let mut packet = [0_u8; 16];
    packet[0] = 8;
    packet[4..6].copy_from_slice(&id.to_be_bytes());
    packet[6..8].copy_from_slice(&number.to_be_bytes());
    let sum: u32 = packet.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !(((folded & 0xffff) + (folded >> 16)) as u16);
    packet[2..4].copy_from_slice(&checksum.to_be_bytes());
    packet
}

#[cfg(test)]
mod tests {
    use super::echo_request;

    #[test]
    fn words_of_an_echo_request_sum_up_to_ones() {
        for number in [0, 1, 0x1234, u16::MAX] {
            let packet = echo_request(0x4656, number);
            let sum: u32 = packet.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
            assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "{number}");
        }
    }
}
