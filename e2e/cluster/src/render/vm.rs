//! The node in a VM: the command of QEMU, the script that runs at its start, and units of systemd for the services of a node.
//!
//! ```text
//! /dev/vda  the disk of Debian; writes go to an overlay
//! /dev/vdb  the programs of the cluster and the files of the node, read-only, mounted at /opt/cluster
//! 9p        the folders of logs and of shared volumes, at the paths that they have on the host
//! ```

use std::path::{Path, PathBuf};

use super::{After, Init, Service, text};
use crate::plan::{LAN_PORT, Node, Plan};

/// Mount point of the disk with the programs of the cluster.
pub(crate) const DISK: &str = "/opt/cluster";
/// Label of this disk, which the unit `cluster-node` of the guest mounts.
pub(crate) const DISK_LABEL: &str = "cluster";
/// Socket of the guest agent, inside the mount namespace of the node's first process.
pub(crate) const AGENT_SOCKET: &str = "/run/agent.sock";
/// Huge pages of 2 MiB, for one guest of 128 MiB.
const HUGE_PAGES: u32 = 64;
/// Memory of the VM in MiB: 3 GiB and the huge pages.
const MEMORY: u32 = 3072 + 2 * HUGE_PAGES;

/// Further arguments of the kernel. Those after `net.ifnames` save time under emulation; see the README of the guests. Without timers
/// of high resolution, the sleeps of 20 µs of Go's runtime last a tick each: kubelet and containerd at rest take 14 % instead of 24 %.
/// Mitigations of faults of processors cost time, and the emulated one has none.
const KERNEL_ARGUMENTS: &str = "root=LABEL=node rw console=ttyS0 net.ifnames=0 highres=off cryptomgr.notests noreplace-smp \
    mitigations=off init_on_alloc=0 clearcpuid=erms nokaslr initcall_blacklist=jent_mod_init,crypto_kdf108_init,init_encrypted,\
    load_system_certificate_list,trace_eval_init,tracer_init_tracefs,init_kprobe_trace,ftrace_check_for_weak_functions";

/// Files of the VM on the host.
pub(crate) struct Files<'a> {
    /// Root with the packages of QEMU.
    pub qemu: &'a Path,
    /// Folder of Debian's kernel.
    pub kernel: &'a Path,
    /// The overlay.
    pub overlay: &'a Path,
    /// The disk with the programs of the cluster.
    pub disk: &'a Path,
    /// True if KVM runs guests on this host.
    pub kvm: bool,
}

/// Returns the program of a Debian root and its arguments, run with the libraries of the root.
pub(crate) fn from_root(root: &Path, program: &str) -> Vec<String> {
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let name = program.rsplit('/').next().unwrap_or(program);
    vec![
        text(&libraries.join("ld-linux-x86-64.so.2")),
        "--inhibit-cache".into(),
        "--library-path".into(),
        text(&libraries),
        "--argv0".into(),
        name.into(),
        text(&root.join(program)),
    ]
}

/// Returns the configuration of the node's first process on the host, which runs QEMU.
pub(crate) fn init(plan: &Plan, node: &Node, bin: &Path, files: &Files<'_>) -> Init {
    Init {
        hostname: node.name.clone(),
        own_run: true,
        binds: Vec::new(),
        sysctls: Vec::new(),
        cgroup: plan.system_cgroup(),
        path: bin.to_path_buf(),
        services: vec![Service {
            name: "qemu".into(),
            command: qemu(plan, node, files),
            log: node.logs.join("qemu.log"),
            after: None,
        }],
    }
}

/// Returns the command of QEMU. One vCPU under emulation: QEMU may abort with several (its issue 1921). Two under KVM, of which a
/// static CPU manager can give one to a pod.
fn qemu(plan: &Plan, node: &Node, files: &Files<'_>) -> Vec<String> {
    let mut command = from_root(files.qemu, "usr/bin/qemu-system-x86_64");
    let mut option = |name: &str, value: String| command.extend([format!("-{name}"), value]);
    for folder in ["usr/share/qemu", "usr/share/seabios"] {
        option("L", text(&files.qemu.join(folder)));
    }
    option("name", format!("{0},process={0}", node.name));
    option("machine", "q35".into());
    option("accel", if files.kvm { "kvm".into() } else { "tcg,tb-size=512".to_owned() });
    option("cpu", if files.kvm { "host".into() } else { "max".to_owned() });
    if files.kvm {
        option("smp", "2".into());
    }
    option("m", MEMORY.to_string());
    option("display", "none".into());
    option("kernel", text(&files.kernel.join("vmlinuz")));
    option("initrd", text(&files.kernel.join("initrd")));
    // Reserved at the start: kubelet counts them when it starts.
    option("append", format!("{KERNEL_ARGUMENTS} hugepages={HUGE_PAGES}"));
    option("drive", format!("file={},format=qcow2,if=virtio,cache=unsafe", files.overlay.display()));
    option("drive", format!("file={},format=raw,if=virtio,readonly=on", files.disk.display()));
    for (index, tap) in TAPS.iter().enumerate() {
        option("netdev", format!("tap,id={tap},ifname={tap},script=no,downscript=no"));
        option("device", format!("virtio-net-pci,netdev={tap},mac=52:54:00:66:76:{index:02x},romfile="));
    }
    for (tag, folder) in shares(plan, node) {
        option("fsdev", format!("local,id={tag},path={},security_model=none", folder.display()));
        option("device", format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"));
    }
    option("chardev", format!("file,id=console,path={},append=on", node.logs.join("console.log").display()));
    option("serial", "chardev:console".into());
    option("chardev", format!("socket,id=agent,path={AGENT_SOCKET},server=on,wait=off"));
    option("device", "virtio-serial".into());
    option("device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0".into());
    option("device", "virtio-rng-pci".into());
    command.extend(["-nodefaults".into(), "-no-user-config".into()]);
    command
}

/// Interfaces of QEMU: on the network of the nodes, and on the layer-2 network.
const TAPS: [&str; 2] = ["tap0", "tap1"];

/// Returns `ip` commands that connect the interfaces of QEMU with the links to the control plane.
pub(crate) fn bridges() -> String {
    let links = ["eth0", LAN_PORT];
    TAPS.iter()
        .zip(links)
        .enumerate()
        .map(|(index, (tap, link))| {
            format!(
                "link add br{index} type bridge
                 tuntap add dev {tap} mode tap
                 link set {tap} master br{index}
                 link set {link} master br{index}
                 link set {tap} up
                 link set {link} up
                 link set br{index} up\n"
            )
        })
        .collect()
}

/// Returns tag and path of the folders that the guest shares with the host.
fn shares(plan: &Plan, node: &Node) -> [(&'static str, PathBuf); 2] {
    [("shared", plan.shared()), ("logs", node.logs.clone())]
}

/// Renders the script that the guest runs at its start. `network` are `ip` commands in the disk's file `network`.
pub(crate) fn setup(plan: &Plan, node: &Node, services: &[Service]) -> String {
    let folder = node.folder.display();
    let mut script = format!(
        "set -e
hostname {name}
mkdir -p {folder} /etc/cni
mount --bind {DISK}/node {folder}
mount --bind {DISK}/node/cni /etc/cni
modprobe -a virtio_net 9pnet_virtio
until test -e /sys/class/net/eth0 && test -e /sys/class/net/eth1; do sleep 0.2; done
ip link set eth1 name {LAN_PORT}
ip -batch {DISK}/network
nft -f {DISK}/nat
sysctl --quiet{settings} fs.inotify.max_user_instances=1024
",
        name = node.name,
        settings = super::node::sysctls(plan).map(|name| format!(" {}=1", name.replace('/', "."))).collect::<String>(),
    );
    for (tag, path) in shares(plan, node) {
        let path = path.display();
        script.push_str(&format!(
            "mkdir -p {path}\nmount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none {tag} {path}\n"
        ));
    }
    script.push_str(&format!("cp {DISK}/units/*.service /run/systemd/system/\nsystemctl daemon-reload\n"));
    script.push_str("systemctl start --no-block");
    for service in services {
        script.push_str(&format!(" {}", service.name));
    }
    script.push('\n');
    script
}

/// Returns the services of the node: those of other nodes, and one that copies the journal to the logs.
pub(crate) fn services(plan: &Plan, node: &Node) -> Vec<Service> {
    let bin = Path::new(DISK).join("bin");
    let mut services = super::node::init(plan, node, &bin, &bin.join(super::storage::PROGRAM)).services;
    services.push(Service {
        name: "journal".into(),
        command: ["journalctl", "--follow", "--no-tail", "--boot"].map(str::to_owned).into(),
        log: node.logs.join("journal.log"),
        after: None,
    });
    services
}

/// Renders the unit of a service. Containers and volumes outlive a restart. Go collects garbage late, for time and not memory is short.
pub(crate) fn unit(service: &Service) -> String {
    let awaited = match &service.after {
        Some(After::Unix(path)) => {
            format!("ExecStartPre=sh -c \"until test -S {}; do sleep 0.2; done\"\n", path.display())
        }
        // The service itself tries again.
        _ => String::new(),
    };
    format!(
        "[Unit]
Description={name} of the test cluster
StartLimitIntervalSec=0

[Service]
Environment=PATH={DISK}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin GOGC=400
{awaited}ExecStart={command}
StandardOutput=append:{log}
StandardError=append:{log}
Restart=always
RestartSec=1
KillMode=process
Delegate=yes
TasksMax=infinity
",
        name = service.name,
        command = service.command.iter().map(|part| quoted(part)).collect::<Vec<_>>().join(" "),
        log = service.log.display(),
    )
}

/// Quotes a part of a command line for systemd.
fn quoted(part: &str) -> String {
    let escaped = part.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%").replace('$', "$$");
    format!("\"{escaped}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan::new(PathBuf::from("/src"), 3).unwrap()
    }

    #[test]
    fn qemu_has_one_processor_or_kvm_with_two_where_it_works() {
        let plan = plan();
        let path = Path::new("/x");
        let command = |kvm| {
            let files = Files { qemu: path, kernel: path, overlay: path, disk: path, kvm };
            qemu(&plan, &plan.vm_node(), &files).join(" ")
        };
        assert!(command(false).contains("-accel tcg,tb-size=512 -cpu max -m 3200"));
        assert!(command(false).contains(" hugepages=64 "));
        assert!(command(true).contains("-accel kvm -cpu host -smp 2 "));
        assert!(!command(false).contains(" -smp "));
        assert!(command(false).contains("path=/src/build/cluster-3/shared,security_model=none"));
    }

    #[test]
    fn services_of_a_node_become_units_with_programs_of_the_disk() {
        let plan = plan();
        let services = services(&plan, &plan.vm_node());
        let names: Vec<_> = services.iter().map(|service| service.name.as_str()).collect();
        assert_eq!(names, ["containerd", "kube-proxy", "kubelet", "csi-driver", "journal"]);
        let kubelet = unit(&services[2]);
        assert!(
            kubelet.contains(
                "ExecStart=\"/opt/cluster/bin/kubelet\" \"--config=/src/build/cluster-3/node-vm/kubelet.yaml\""
            )
        );
        assert!(kubelet.contains("ExecStartPre=sh -c \"until test -S /run/containerd/containerd.sock"));
        assert!(kubelet.contains("\"--node-labels=test.ferrovirt.io/vm-node=true\""));
        let script = setup(&plan, &plan.vm_node(), &services);
        assert!(script.ends_with("systemctl start --no-block containerd kube-proxy kubelet csi-driver journal\n"));
        assert!(script.contains("cache=none logs /src/build/cluster-3/logs/node-vm\n"));
        let forwards = |dual_stack| {
            let mut plan = plan.clone();
            plan.variant.dual_stack = dual_stack;
            setup(&plan, &plan.vm_node(), &services).contains(" net.ipv6.conf.all.forwarding=1 ")
        };
        assert_eq!([false, true].map(forwards), [false, true]);
        assert!(script.contains(" net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1 fs."));
    }

    #[test]
    fn commands_are_quoted_for_systemd() {
        assert_eq!(quoted("a b%$\"\\"), "\"a b%%$$\\\"\\\\\"");
    }

    #[test]
    fn both_interfaces_are_bridged() {
        assert!(bridges().contains("link set eth0 master br0"));
        assert!(bridges().contains("link set lan0-port master br1"));
    }
}
