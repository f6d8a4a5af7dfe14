//! Brings a cluster up from nothing, from a running cluster or from the remains of a crash.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, SystemTime},
};

use crate::{
    certificates::{self, Pair},
    command::{log_tail, open_log, output, program, run, start_error, wait},
    components, deps,
    down::{down, remove_node},
    error::{Error, FileContext, Result},
    host, images,
    kubectl::Kubectl,
    network::{connect, ip, node_network, second_address},
    pause,
    plan::{API_PORT, LAN, MAX_NODES, Node, Plan},
    progress::Progress,
    render::{self, Init, kubeconfig::kubeconfig},
    variant, vm,
};

/// Time limit for the API server to become ready.
const API_LIMIT: Duration = Duration::from_secs(240);
/// Time limit for a node to become ready.
const NODE_LIMIT: Duration = Duration::from_secs(240);
/// The same for the node in a VM under emulation.
const VM_LIMIT: Duration = Duration::from_secs(300);
/// Polling interval.
const INTERVAL: Duration = Duration::from_millis(100);

/// Nodes of a cluster.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Size {
    /// Minimum number of nodes of the own cluster
    #[arg(long, default_value_t = 1)]
    pub nodes: u8,
    /// Adds the node node-vm: Debian with its kernel, systemd and cgroup v2 in QEMU
    #[arg(long)]
    pub vm_node: bool,
}

impl Default for Size {
    fn default() -> Self {
        Self { nodes: 1, vm_node: false }
    }
}

/// Brings the cluster up with at least `size.nodes` nodes, and the node in a VM if it is wanted.
///
/// # Errors
/// Fails if a step fails. The next `up` or `down` cleans up.
pub fn up(plan: &Plan, size: Size, progress: &Progress) -> Result<()> {
    if !(1..=MAX_NODES).contains(&size.nodes) {
        return Err(Error::Refused(format!("--nodes must be between 1 and {MAX_NODES}")));
    }
    deps::check()?;
    host::check_owner(plan)?;
    if plan.state().starts_with("/run") {
        return Err(Error::Refused("the working tree must not be below /run, which nodes replace".into()));
    }
    if let Some(running) = variant::running(plan)?.filter(|running| *running != plan.variant) {
        return Err(Error::Refused(format!(
            "the cluster runs {running}; run `cluster down` before an `up` with {}",
            plan.variant
        )));
    }
    if plan.variant.dual_stack && !Path::new("/proc/sys/net/ipv6").exists() {
        return Err(Error::Refused("--dual-stack needs a kernel with IPv6".into()));
    }
    let bin = components::ensure(plan, progress)?;
    let driver = storage_driver()?;
    let kubectl = Kubectl::new(&bin, plan.kubeconfig());

    let fresh = !serves(plan, &kubectl)?;
    if fresh {
        if has_leftovers(plan) {
            progress.step("cleaning up after an interrupted start or a crash");
            down(plan, progress)?;
        }
        start_control_plane(plan, &bin, &driver, progress)?;
    }
    let mut nodes = plan.nodes(size.nodes);
    nodes.extend(size.vm_node.then(|| plan.vm_node()));
    for node in &nodes {
        if host::init_process(&node.namespace).is_none() {
            start_node(plan, node, &bin, &driver, progress)?;
        }
    }
    if fresh {
        wait_for_api(plan, &kubectl)?;
        progress.step("control plane: API server ready");
    }
    kubectl.apply("creating the bootstrap objects", &render::manifests::bootstrap(plan))?;
    define_snapshots(plan, &kubectl)?;
    // Includes nodes that already run: the `up` that started them may have been interrupted.
    for node in &nodes {
        finish_node(plan, node, &bin, &kubectl, progress)?;
        progress.step(format!("{}: ready", node.name));
    }
    wait_for_namespace(plan, &kubectl)?;
    kubectl.apply("creating the snapshot class", &render::storage::snapshot_class())?;
    progress.step(format!("ready; export KUBECONFIG={}", plan.kubeconfig().display()));
    Ok(())
}

/// Returns the path of the storage driver, beside this program.
fn storage_driver() -> Result<PathBuf> {
    let own = std::env::current_exe().at("find", "the own program")?;
    let driver = own.with_file_name(render::storage::PROGRAM);
    if driver.is_file() {
        Ok(driver)
    } else {
        Err(Error::Refused(format!("{} is missing: run `make build`", driver.display())))
    }
}

/// Creates the definitions of volume snapshots.
fn define_snapshots(plan: &Plan, kubectl: &Kubectl) -> Result<()> {
    let (module, folder) = render::storage::SNAPSHOTS;
    let folder = components::module_folder(plan, &components::CLUSTER, module)?.join(folder);
    let mut command = kubectl.command(&["apply"]);
    for name in render::storage::DEFINITIONS {
        command.arg("--filename").arg(folder.join(format!("snapshot.storage.k8s.io_{name}.yaml")));
    }
    run("creating the definitions of volume snapshots", &mut command).map(drop)
}

/// Returns true if the control plane runs and becomes ready in time.
fn serves(plan: &Plan, kubectl: &Kubectl) -> Result<bool> {
    if host::init_process(&plan.control_namespace()).is_none() || !plan.kubeconfig().exists() {
        return Ok(false);
    }
    // A busy host or an interrupted start must not discard a running cluster.
    match wait_for_api(plan, kubectl) {
        Ok(()) => Ok(true),
        Err(Error::Timeout { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn has_leftovers(plan: &Plan) -> bool {
    !host::namespaces(plan).is_empty() || host::owner(plan).is_some()
}

fn start_control_plane(plan: &Plan, bin: &Path, driver: &Path, progress: &Progress) -> Result<()> {
    host::check_routes(plan)?;
    progress.step("control plane: certificates and configuration");
    for old in [plan.state(), plan.kubeconfig()] {
        if old.is_dir() {
            fs::remove_dir_all(&old).at("remove", &old)?;
        }
    }
    for folder in [plan.control(), plan.logs(), plan.shared()] {
        fs::create_dir_all(&folder).at("create", &folder)?;
    }
    variant::record(plan)?;
    host::prepare(&[])?;
    host::make_cgroup(&plan.system_cgroup())?;
    certificates::write_control_plane(plan, SystemTime::now())?;
    for (file, certificate) in
        [("controller-manager", "controller-manager"), ("scheduler", "scheduler"), ("dns", "dns")]
    {
        let path = plan.control().join(format!("{file}.kubeconfig"));
        write_kubeconfig(plan, &path, &Pair::read(&plan.pki(), certificate)?)?;
    }
    write_kubeconfig(plan, &render::storage::kubeconfig_path(plan), &Pair::read(&plan.pki(), "storage")?)?;
    write_kubeconfig(plan, &plan.kubeconfig(), &Pair::read(&plan.pki(), "admin")?)?;
    write(&plan.control().join("audit-policy.yaml"), &render::control::audit_policy())?;
    write(&plan.control().join("Corefile"), &render::control::corefile(plan))?;

    progress.step("control plane: network");
    let (host_link, peer) = (plan.host_link(), format!("{}p", plan.host_link()));
    let namespace = plan.control_namespace();
    // The link is created first because it records the owner of all other names.
    ip(
        "creating the host's link",
        None,
        &format!(
            "link add {host_link} type veth peer name {peer}
             link set {host_link} alias {state}",
            state = plan.state().display()
        ),
    )?;
    run("creating the control plane's namespace", &mut program("ip", ["netns", "add", &namespace]))?;
    ip(
        "connecting the host",
        None,
        &format!(
            "link set {peer} netns {namespace}
             address add {address}/{prefix} dev {host_link}
             link set {host_link} up",
            address = plan.host_address(),
            prefix = plan.node_network().prefix,
        ),
    )?;
    ip(
        "creating the bridge",
        Some(&namespace),
        &format!(
            "link set lo up
             link add br0 type bridge
             link set {peer} master br0
             link set {peer} up
             address add {address}/{prefix} dev br0
             link set br0 up
             link add {LAN} type bridge
             link set {LAN} up
             {second}",
            address = plan.control_address(),
            prefix = plan.node_network().prefix,
            second = second_address(plan, "br0", plan.control_address6()),
        ),
    )?;
    progress.step(format!("control plane: etcd, API server, controllers, scheduler of {}, DNS", plan.variant));
    let init = render::control::init(plan, bin, driver);
    start_init(&namespace, &init, &plan.control(), &plan.logs().join("init.log"))
}

/// Creates the needs of nodes on the host outside of their namespaces.
fn prepare_host(node: &Node) -> Result<()> {
    let (own, seen): (Vec<_>, Vec<_>) = node.own_folders().into_iter().unzip();
    for folder in own {
        fs::create_dir_all(&folder).at("create", folder)?;
    }
    host::prepare(&seen)?;
    if !Path::new("/proc/sys/net/bridge").exists() && deps::exists("modprobe") {
        // Without it pods cannot reach services with endpoints on their own node. The kernel may have it built in.
        output("loading br_netfilter", &mut program("modprobe", ["br_netfilter"]))?;
    }
    host::make_cgroup(&node.cgroup)
}

fn start_node(plan: &Plan, node: &Node, bin: &Path, driver: &Path, progress: &Progress) -> Result<()> {
    progress.step(format!("{}: configuration and network", node.name));
    remove_node(node)?;
    fs::create_dir_all(&node.logs).at("create", &node.logs)?;
    let init = if node.is_vm() {
        let content = vm::content(node);
        write_files(plan, node, &content.join("node"), &Path::new(render::vm::DISK).join("bin"), "overlayfs")?;
        write(&content.join("network"), &node_network(plan, node))?;
        write(&content.join("nat"), &render::node::nat(plan, node))?;
        vm::prepare(plan, node, bin, driver, progress)?
    } else {
        fs::create_dir_all(&node.folder).at("create", &node.folder)?;
        prepare_host(node)?;
        let snapshotter = if overlay_works(&node.folder)? { "overlayfs" } else { "native" };
        write_files(plan, node, &node.folder, bin, snapshotter)?;
        render::node::init(plan, node, bin, driver)
    };
    pause::write(&node.folder.join("pause.tar"))?;
    connect(plan, node)?;
    progress.step(format!("{}: containerd, kubelet, kube-proxy", node.name));
    start_init(&node.namespace, &init, &node.folder, &node.logs.join("init.log"))
}

/// Writes certificates and configuration of a node to the folder `into`. `bin` is the folder of the components on the node.
fn write_files(plan: &Plan, node: &Node, into: &Path, bin: &Path, snapshotter: &str) -> Result<()> {
    let at = |path: PathBuf| path.strip_prefix(&node.folder).map_or(path.clone(), |path| into.join(path));
    let (network, plugins) = (into.join("cni/net.d"), at(render::node::own_plugins(node)));
    let registry = at(render::node::registries(node).join(plan.registry()));
    let others = at(render::node::registries(node).join(render::node::OTHER_REGISTRIES));
    for folder in [&network, &plugins, &registry, &others] {
        fs::create_dir_all(folder).at("create", folder)?;
    }
    certificates::write_node(plan, node, into, SystemTime::now())?;
    let kubelet = Pair::read(into, "kubelet-client")?;
    write_kubeconfig(plan, &into.join("kubelet.kubeconfig"), &kubelet)?;
    let proxy = Pair::read(&plan.pki(), "proxy")?;
    write_kubeconfig(plan, &into.join("kube-proxy.kubeconfig"), &proxy)?;
    let networks = Pair::read(&plan.pki(), "networks")?;
    write_kubeconfig(plan, &at(render::node::networks_kubeconfig(node)), &networks)?;
    let plugin = plugins.join(render::node::MORE_NETWORKS);
    write(&plugin, &render::node::more_networks(bin))?;
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).at("make executable", &plugin)?;
    write(&network.join("10-pods.conflist"), &render::node::cni(plan, node))?;
    write(&into.join("kubelet.yaml"), &render::node::kubelet(plan, node))?;
    write(&into.join("kube-proxy.yaml"), &render::node::kube_proxy(plan, node))?;
    write(&into.join("resolv.conf"), "")?;
    write(&into.join("containerd.toml"), &render::node::containerd(node, bin, snapshotter))?;
    write(&registry.join("hosts.toml"), &render::node::registry(plan))?;
    write(&others.join("hosts.toml"), render::node::UNREACHABLE)
}

/// Returns true if overlayfs works on the file system of a folder.
fn overlay_works(folder: &Path) -> Result<bool> {
    let test = folder.join("overlay-test");
    for part in ["lower", "upper", "work", "merged"] {
        let part = test.join(part);
        fs::create_dir_all(&part).at("create", part)?;
    }
    let at = |part: &str| test.join(part).display().to_string();
    let options = format!("lowerdir={},upperdir={},workdir={}", at("lower"), at("upper"), at("work"));
    // The mount ends with the mount namespace of the command.
    let mut mount = program("unshare", ["--mount", "mount", "-t", "overlay", "overlay", "-o", &options]);
    mount.arg(test.join("merged"));
    let works = output("trying overlayfs", &mut mount)?.status.success();
    fs::remove_dir_all(&test).at("remove", test)?;
    Ok(works)
}

/// Starts the first process of a namespace, detached from this process.
fn start_init(namespace: &str, init: &Init, folder: &Path, log: &Path) -> Result<()> {
    let configuration = folder.join("init.json");
    let text = serde_json::to_string_pretty(init)
        .map_err(|source| Error::Document { what: configuration.display().to_string(), source })?;
    write(&configuration, &text)?;
    let own = std::env::current_exe().at("find", "the own program")?;
    let log_file = open_log(log)?;
    let mut command = Command::new("setsid");
    command
        .arg("nsenter")
        // `ip netns exec` would mount a new /sys, which hides the cgroups.
        .arg(format!("--net={}", host::namespace_path(namespace).display()))
        .args(["unshare", "--pid", "--fork", "--kill-child", "--uts", "--mount", "--propagation", "private"])
        .arg(own)
        .arg("init")
        .arg(&configuration)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log_file.try_clone().at("open", log)?)
        .stderr(log_file);
    let step = format!("starting {namespace}");
    let mut child = command.spawn().map_err(|source| start_error(&step, &command, source))?;
    wait(
        &step,
        Duration::from_secs(60),
        Duration::from_millis(20),
        || {
            let ended = child.try_wait().map_err(|source| start_error(&step, &command, source))?;
            if ended.is_some() {
                return Err(Error::Refused(format!("{step}: it exited at once{}", log_tail(log))));
            }
            Ok(host::init_process(namespace).is_some())
        },
        || log_tail(log),
    )?;
    Ok(())
}

fn wait_for_api(plan: &Plan, kubectl: &Kubectl) -> Result<()> {
    let address = SocketAddr::from((plan.control_address(), API_PORT));
    let log = plan.logs().join("kube-apiserver.log");
    wait(
        "waiting for the API server",
        API_LIMIT,
        INTERVAL,
        || {
            if TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err() {
                return Ok(false);
            }
            Ok(kubectl.answer("reading /readyz", &["get", "--raw=/readyz"])?.is_some())
        },
        || log_tail(&log) + &log_tail(&plan.logs().join("etcd.log")),
    )
}

/// Completes the set-up that needs the running node and API server, and waits until the node is ready.
fn finish_node(plan: &Plan, node: &Node, bin: &Path, kubectl: &Kubectl, progress: &Progress) -> Result<()> {
    let name = node.name.as_str();
    let limit = if node.is_vm() { VM_LIMIT } else { NODE_LIMIT };
    let pid = host::init_process(&node.namespace)
        .ok_or_else(|| Error::Refused(format!("{name} exited{}", log_tail(&node.logs.join("init.log")))))?;
    let containerd = node.logs.join("containerd.log");
    let socket = PathBuf::from(format!("/proc/{pid}/root{}", render::node::CONTAINERD_SOCKET));
    wait(
        &format!("{name}: waiting for containerd"),
        limit,
        INTERVAL,
        || {
            let in_vm = || vm::command(pid, &["test", "-S", render::node::CONTAINERD_SOCKET]).is_ok();
            Ok(if node.is_vm() { in_vm() } else { socket.exists() })
        },
        || if node.is_vm() { log_tail(&node.logs.join("console.log")) } else { log_tail(&containerd) },
    )?;
    // containerd creates its socket before it serves, so the first attempts can fail.
    wait(
        &format!("{name}: importing images"),
        limit,
        INTERVAL,
        || Ok(images::copy_to_new(plan, node, pid, bin, progress).is_ok()),
        || log_tail(&containerd),
    )?;
    images::import(plan, node, pid, bin, &node.folder.join("pause.tar"))?;
    let kubelet = node.logs.join("kubelet.log");
    let mut ranges = vec![node.pods.to_string()];
    ranges.extend(plan.variant.dual_stack.then(|| node.pods6.to_string()));
    let range = serde_json::json!({"spec": {"podCIDR": node.pods.to_string(), "podCIDRs": ranges}});
    wait(
        &format!("{name}: waiting until it registers"),
        limit,
        INTERVAL,
        || {
            let patch = ["patch", "node", name, "--patch", &range.to_string()];
            Ok(kubectl.answer("setting the pod network of the node", &patch)?.is_some())
        },
        || log_tail(&kubelet),
    )?;
    let path = "jsonpath={.status.conditions[?(@.type==\"Ready\")].status}";
    wait(
        &format!("{name}: waiting until it is ready"),
        limit,
        INTERVAL,
        || {
            let ready = kubectl.answer("reading the node", &["get", "node", name, "-o", path])?;
            Ok(ready.is_some_and(|text| text == "True"))
        },
        || log_tail(&kubelet) + &log_tail(&containerd),
    )
}

/// Waits for the default service account. Pods cannot be created before, and the controllers create it last.
fn wait_for_namespace(plan: &Plan, kubectl: &Kubectl) -> Result<()> {
    wait(
        "waiting for the default service account",
        Duration::from_secs(180),
        INTERVAL,
        || Ok(kubectl.answer("reading it", &["get", "serviceaccount", "default", "-n", "default"])?.is_some()),
        || log_tail(&plan.logs().join("kube-controller-manager.log")),
    )
}

fn write_kubeconfig(plan: &Plan, path: &Path, user: &Pair) -> Result<()> {
    let authority = plan.pki().join("ca.crt");
    let authority = fs::read_to_string(&authority).at("read", authority)?;
    certificates::write_private(path, &kubeconfig(&plan.prefix(), &plan.api_url(), &authority, user))
}

fn write(path: &Path, content: &str) -> Result<()> {
    fs::write(path, content).at("write", path)
}
