//! A node: configuration of containerd, kubelet, kube-proxy and the pod network.

use std::{
    fmt::Display,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde_json::json;

use super::{After, Init, Service, flags, text};
use crate::{
    pause::IMAGE as PAUSE_IMAGE,
    plan::{API_PORT, CLUSTER_DOMAIN, Node, Plan, VM_NODE_LABEL},
};

/// Socket of containerd inside the node.
pub(crate) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";

/// Returns the configuration of the node's first process. `bin` is the folder of the components, `driver` the storage driver.
#[must_use]
pub(crate) fn init(plan: &Plan, node: &Node, bin: &Path, driver: &Path) -> Init {
    let api = After::Tcp(SocketAddr::from((plan.control_address(), API_PORT)));
    let folder = |name: &str| text(&node.folder.join(name));
    let service = |name: &str, command: Vec<String>, after: Option<After>| Service {
        name: name.into(),
        command,
        log: node.logs.join(format!("{name}.log")),
        after,
    };
    let containerd = vec![text(&bin.join("containerd")), "--config".into(), folder("containerd.toml")];
    let of_vm = [("node-labels", format!("{VM_NODE_LABEL}=true")), ("housekeeping-interval", "60s".to_owned())];
    let kubelet_flags = [
        ("config", folder("kubelet.yaml")),
        ("kubeconfig", folder("kubelet.kubeconfig")),
        ("hostname-override", node.name.clone()),
        ("node-ip", plan.families(node.address, node.address6)),
    ];
    let kubelet = flags(
        bin.join("kubelet"),
        &kubelet_flags.into_iter().chain(of_vm.into_iter().filter(|_| node.is_vm())).collect::<Vec<_>>(),
    );
    let proxy = flags(
        bin.join("kube-proxy"),
        &[("config", folder("kube-proxy.yaml")), ("hostname-override", node.name.clone())],
    );
    Init {
        hostname: node.name.clone(),
        own_run: true,
        binds: node.own_folders(),
        sysctls: sysctls(plan).map(|name| (name.into(), "1".into())).collect(),
        cgroup: plan.system_cgroup(),
        path: bin.to_path_buf(),
        services: vec![
            service("containerd", containerd, None),
            service("kube-proxy", proxy, Some(api)),
            service("kubelet", kubelet, Some(After::Unix(PathBuf::from(CONTAINERD_SOCKET)))),
            super::storage::node_service(plan, node, driver),
        ],
    }
}

/// Returns the settings of a node's network, as paths below /proc/sys, that must be 1.
pub(crate) fn sysctls(plan: &Plan) -> impl Iterator<Item = &'static str> {
    // Traffic between two pods of a node must also pass the service rules, or answers come from the wrong address.
    let v4 = ["net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"];
    let v6 = ["net/ipv6/conf/all/forwarding", "net/bridge/bridge-nf-call-ip6tables"];
    v4.into_iter().chain(plan.variant.dual_stack.then_some(v6).into_iter().flatten())
}

/// Renders the configuration of kubelet.
#[must_use]
pub(crate) fn kubelet(plan: &Plan, node: &Node) -> String {
    let folder = |name: &str| text(&node.folder.join(name));
    let mut configuration = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": folder("ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": folder("kubelet-server.crt"),
        "tlsPrivateKeyFile": folder("kubelet-server.key"),
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
        "failSwapOn": false,
        "clusterDNS": [plan.dns_service_address().to_string()],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": folder("resolv.conf"),
        // The disk belongs to the developer: its fill level must not evict pods or images.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
        // Lowering the score requires a capability that containers often lack.
        "oomScoreAdj": 0,
        // Devices of virt-handler appear on the node at this interval, and each installation waits for them. The interval for
        // unchanged reports keeps its default.
        "nodeStatusUpdateFrequency": "2s",
        "nodeStatusReportFrequency": "5m",
        // Stories kill containers often. The delay would grow to five minutes.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "5s"},
        "enableProfilingHandler": false,
        "featureGates": plan.variant.feature_gates,
    });
    let of_host = if node.is_vm() {
        // A soft taint: VMIs and other pods go to this slow node if they select it.
        json!({
            "cgroupDriver": "systemd",
            // Its processor is busy without reports.
            "nodeStatusUpdateFrequency": "10s",
            "registerWithTaints": [{"key": VM_NODE_LABEL, "value": "true", "effect": "PreferNoSchedule"}],
        })
    } else {
        json!({
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": format!("/{}", node.cgroup),
            "enforceNodeAllocatable": [],
            // Many developers' hosts and containers still mount cgroup version 1.
            "failCgroupV1": false,
        })
    };
    super::merge(&mut configuration, of_host);
    if plan.variant.static_cpus.contains(&node.name) {
        // The policy requires a reservation, and sets the first CPU aside for it and for all other pods. Less than a whole CPU
        // leaves these pods, with their requests, room beside an exclusive CPU on nodes of two.
        super::merge(&mut configuration, json!({"cpuManagerPolicy": "static", "kubeReserved": {"cpu": "100m"}}));
    }
    super::json_text(&configuration)
}

/// Renders the configuration of kube-proxy.
#[must_use]
pub(crate) fn kube_proxy(plan: &Plan, node: &Node) -> String {
    super::json_text(&json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": text(&node.folder.join("kube-proxy.kubeconfig"))},
        "mode": "nftables",
        "clusterCIDR": plan.families(plan.pods(), plan.pods6()),
        // Limits of the connection table are settings of the host, not of a network namespace.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "oomScoreAdj": 0,
    }))
}

/// Name of the CNI plugin that attaches pods to additional networks.
pub(crate) const MORE_NETWORKS: &str = "more-networks";

/// Returns the folder of CNI plugins that belong to the node.
#[must_use]
pub(crate) fn own_plugins(node: &Node) -> PathBuf {
    node.folder.join("cni/bin")
}

/// Returns the path of the kubeconfig for Multus.
#[must_use]
pub(crate) fn networks_kubeconfig(node: &Node) -> PathBuf {
    node.folder.join("multus.kubeconfig")
}

/// Renders the CNI plugin that runs Multus for pods with additional networks. For other pods Multus would read the pod from
/// the API server and write to it without need.
///
/// It is the first plugin of the chain. Multus requires a delegate for the pod's first link, and gets one that creates
/// none.
#[must_use]
pub(crate) fn more_networks(bin: &Path) -> String {
    format!(
        "#!/bin/sh
configuration=$(cat)
case \"$configuration\" in
*'\"v1.multus-cni.io/default-network\":'*)
	[ \"$CNI_COMMAND\" = ADD ] || exit 0
	echo '{{\"cniVersion\":\"1.0.0\",\"code\":100,\"msg\":\"this cluster cannot give a pod another network in place of its own\"}}'
	exit 1
	;;
*'\"k8s.v1.cni.cncf.io/networks\":'*)
	printf '%s' \"$configuration\" | exec '{multus}'
	exit
	;;
esac
case \"$CNI_COMMAND\" in
ADD) echo '{{\"cniVersion\":\"1.0.0\",\"interfaces\":[],\"ips\":[]}}' ;;
VERSION) echo '{{\"cniVersion\":\"1.0.0\",\"supportedVersions\":[\"0.4.0\",\"1.0.0\"]}}' ;;
esac
",
        multus = bin.join("multus").display()
    )
}

/// Renders the CNI configuration: a bridge per node, addresses from the node's part of the pod network, and additional
/// networks on request.
#[must_use]
pub(crate) fn cni(plan: &Plan, node: &Node) -> String {
    let mut ranges = vec![json!([{"subnet": node.pods.to_string()}])];
    if plan.variant.dual_stack {
        ranges.push(json!([{"subnet": node.pods6.to_string()}]));
    }
    format!(
        "{:#}\n",
        json!({
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": MORE_NETWORKS,
                    "capabilities": {"io.kubernetes.cri.pod-annotations": true},
                    "kubeconfig": text(&networks_kubeconfig(node)),
                    "delegates": [{"cniVersion": "1.0.0", "name": "none", "type": "passthru-cni"}],
                },
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isDefaultGateway": true,
                    "hairpinMode": true,
                    "ipMasq": false,
                    "ipam": {"type": "host-local", "ranges": ranges},
                },
                {"type": "portmap", "capabilities": {"portMappings": true}, "backend": "nftables"},
            ],
        })
    )
}

/// Renders the configuration of containerd. `snapshotter` must work on the node's file system.
#[must_use]
pub(crate) fn containerd(node: &Node, bin: &Path, snapshotter: &str) -> String {
    format!(
        "version = 3
root = '/var/lib/containerd'
state = '/run/containerd'
oom_score = 0

[grpc]
  address = '{CONTAINERD_SOCKET}'

[plugins.'io.containerd.cri.v1.runtime']
  # Lowering a container's score needs a capability that is missing where the cluster itself runs in a container.
  restrict_oom_score_adj = {shares_host}
  # Import pods write block volumes as an unprivileged user.
  device_ownership_from_security_context = true

  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = 'runc'

    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'

      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        SystemdCgroup = {vm}

  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['{bin}', '{own}']
    conf_dir = '/etc/cni/net.d'

[plugins.'io.containerd.cri.v1.images']
  snapshotter = '{snapshotter}'

  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{PAUSE_IMAGE}'

  [plugins.'io.containerd.cri.v1.images'.registry]
    config_path = '{registries}'
",
        bin = bin.display(),
        shares_host = !node.is_vm(),
        vm = node.is_vm(),
        registries = registries(node).display(),
        own = own_plugins(node).display(),
    )
}

/// Returns the folder with the registries that containerd reaches in a way of their own.
#[must_use]
pub(crate) fn registries(node: &Node) -> PathBuf {
    node.folder.join("registries")
}

/// Renders the settings for a registry on the host, which has no certificate.
#[must_use]
pub(crate) fn registry(plan: &Plan) -> String {
    format!("[host.'http://{}']\n  capabilities = ['pull', 'resolve']\n", plan.registry())
}

/// Folder of the settings for registries without a folder of their own.
pub(crate) const OTHER_REGISTRIES: &str = "_default";

/// Settings for other registries: nothing listens at this port, so a pull fails at once. No traffic leaves the host, so otherwise it
/// would fail after the time limits of lookups by DNS, during which kubelet cannot end the pod.
pub(crate) const UNREACHABLE: &str = "server = 'http://127.0.0.1:1'\n";

/// Renders the NAT rules of the node's network namespace: traffic of pods to addresses outside of the pod network gets the
/// node's address, because there is no route back to pods.
#[must_use]
pub(crate) fn nat(plan: &Plan, node: &Node) -> String {
    let table = |family: &str, own: &dyn Display, all: &dyn Display| {
        format!(
            "table {family} ferrovirt-cluster {{
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    {family} saddr {own} {family} daddr != {all} oifname \"eth0\" masquerade
  }}
}}
"
        )
    };
    let mut rules = table("ip", &node.pods, &plan.pods());
    if plan.variant.dual_stack {
        rules.push_str(&table("ip6", &node.pods6, &plan.pods6()));
    }
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan::new(PathBuf::from("/src"), 0).unwrap()
    }

    #[test]
    fn kubelet_uses_the_nodes_own_cgroup_and_tolerates_version_one() {
        let value: serde_json::Value = serde_json::from_str(&kubelet(&plan(), &plan().node(2))).unwrap();
        assert_eq!(value["cgroupRoot"], "/ferrovirt-fv0/node-2");
        assert_eq!(value["failCgroupV1"], false);
        assert_eq!(value["enforceNodeAllocatable"], json!([]));
        assert_eq!(value["authentication"]["anonymous"]["enabled"], false);
        assert_eq!(value["clusterDNS"][0], "10.212.0.10");
        assert_eq!(value["featureGates"], json!({}));
    }

    #[test]
    fn one_node_can_have_a_static_cpu_manager() {
        let mut plan = plan();
        plan.variant.static_cpus = vec!["node-2".into()];
        for (node, policy) in [(1, json!(null)), (2, json!("static"))] {
            let value: serde_json::Value = serde_json::from_str(&kubelet(&plan, &plan.node(node))).unwrap();
            assert_eq!(value["cpuManagerPolicy"], policy, "{node}");
        }
    }

    #[test]
    fn node_in_a_vm_has_the_defaults_of_a_distribution_for_cgroups() {
        let node = plan().vm_node();
        let value: serde_json::Value = serde_json::from_str(&kubelet(&plan(), &node)).unwrap();
        assert_eq!(value["cgroupDriver"], "systemd");
        for default in ["cgroupRoot", "failCgroupV1", "enforceNodeAllocatable"] {
            assert!(value[default].is_null(), "{default}");
        }
        assert_eq!(value["registerWithTaints"][0]["effect"], "PreferNoSchedule");
        let text = containerd(&node, Path::new("/opt/bin"), "overlayfs");
        assert!(text.contains("SystemdCgroup = true") && text.contains("restrict_oom_score_adj = false"));
    }

    #[test]
    fn containerd_pins_the_sandbox_image_and_restricts_scores() {
        let text = containerd(&plan().node(1), Path::new("/opt/bin"), "native");
        assert!(text.contains("restrict_oom_score_adj = true"));
        assert!(text.contains("sandbox = 'ferrovirt.io/pause:devel'"));
        assert!(text.contains("snapshotter = 'native'"));
        assert!(text.contains("config_path = '/src/build/cluster/node-1/registries'"));
        assert!(registry(&plan()).starts_with("[host.'http://10.210.0.254:5000']\n"));
        assert!(text.contains("bin_dirs = ['/opt/bin', '/src/build/cluster/node-1/cni/bin']"));
    }

    #[test]
    fn pod_addresses_come_from_the_nodes_part() {
        let value: serde_json::Value = serde_json::from_str(&cni(&plan(), &plan().node(2))).unwrap();
        assert_eq!(value["plugins"][1]["ipam"]["ranges"], json!([[{"subnet": "10.211.2.0/24"}]]));
    }

    #[test]
    fn node_of_a_cluster_with_both_families_has_both() {
        let mut plan = plan();
        plan.variant.dual_stack = true;
        let node = plan.vm_node();
        let value: serde_json::Value = serde_json::from_str(&cni(&plan, &node)).unwrap();
        let ranges = json!([[{"subnet": "10.211.21.0/24"}], [{"subnet": "fd66:7600:0:115::/64"}]]);
        assert_eq!(value["plugins"][1]["ipam"]["ranges"], ranges);
        let value: serde_json::Value = serde_json::from_str(&kube_proxy(&plan, &node)).unwrap();
        assert_eq!(value["clusterCIDR"], "10.211.0.0/16,fd66:7600:0:100::/56");
        let init = init(&plan, &node, Path::new("/opt/bin"), Path::new("/opt/csi-driver"));
        let command = init.services[2].command.join(" ");
        assert!(command.contains("--node-ip=10.210.0.31,fd66:7600::25"), "{command}");
        assert!(init.sysctls.iter().any(|(name, _)| name == "net/bridge/bridge-nf-call-ip6tables"));
        let rules = nat(&plan, &node);
        assert!(rules.contains("ip6 saddr fd66:7600:0:115::/64 ip6 daddr != fd66:7600:0:100::/56 oifname"), "{rules}");
    }

    #[test]
    fn multus_runs_only_for_pods_with_additional_networks() {
        let value: serde_json::Value = serde_json::from_str(&cni(&plan(), &plan().node(1))).unwrap();
        assert_eq!(value["plugins"][0]["kubeconfig"], "/src/build/cluster/node-1/multus.kubeconfig");
        let folder = std::env::temp_dir().join(format!("ferrovirt-networks-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("multus"), "#!/bin/sh\nread -r text\necho \"multus: $text\"\n").unwrap();
        std::process::Command::new("chmod").arg("+x").arg(folder.join("multus")).status().unwrap();
        let script = more_networks(&folder);
        let run = |command: &str, configuration: &str| {
            use std::io::Write;
            let mut shell = std::process::Command::new("sh")
                .args(["-c", &script])
                .env("CNI_COMMAND", command)
                .stdin(std::process::Stdio::piped())
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            shell.stdin.take().unwrap().write_all(configuration.as_bytes()).unwrap();
            String::from_utf8(shell.wait_with_output().unwrap().stdout).unwrap().trim().to_owned()
        };
        let none = r#"{"cniVersion":"1.0.0","interfaces":[],"ips":[]}"#;
        assert_eq!(run("ADD", r#"{"runtimeConfig":{}}"#), none);
        assert_eq!(run("ADD", r#"{"runtimeConfig":{"note":"\"k8s.v1.cni.cncf.io/networks\":"}}"#), none);
        assert_eq!(run("DEL", r#"{"runtimeConfig":{}}"#), "");
        let asks = r#"{"runtimeConfig":{"k8s.v1.cni.cncf.io/networks":"lan"}}"#;
        assert_eq!(run("ADD", asks), format!("multus: {asks}"));
        assert_eq!(run("DEL", asks), format!("multus: {asks}"));
        assert!(run("ADD", r#"{"v1.multus-cni.io/default-network":"lan"}"#).contains("in place of its own"));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn traffic_between_pods_keeps_its_source() {
        assert!(nat(&plan(), &plan().node(1)).contains("ip saddr 10.211.1.0/24 ip daddr != 10.211.0.0/16"));
    }

    #[test]
    fn kube_proxy_leaves_the_hosts_connection_limits_alone() {
        let value: serde_json::Value = serde_json::from_str(&kube_proxy(&plan(), &plan().node(1))).unwrap();
        assert_eq!(value["conntrack"]["maxPerCore"], 0);
        assert_eq!(value["mode"], "nftables");
    }

    #[test]
    fn host_paths_of_pods_belong_to_the_node() {
        let init = init(&plan(), &plan().node(1), Path::new("/opt/bin"), Path::new("/opt/csi-driver"));
        assert!(init.own_run);
        for path in ["/var/lib/kubelet", "/etc/cni", "/var/log/pods"] {
            assert!(init.binds.iter().any(|(_, seen)| seen == Path::new(path)), "{path}");
        }
    }
}
