//! A node: containerd, kubelet, kube-proxy and the pod network's configuration.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde_json::json;

use super::{After, Init, Service, flags, text};
use crate::{
    pause::IMAGE as PAUSE_IMAGE,
    plan::{API_PORT, CLUSTER_DOMAIN, Node, Plan},
};

/// containerd's socket, as seen inside the node.
pub const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";

/// What the node's first process runs. `bin` is the folder of the components.
#[must_use]
pub fn init(plan: &Plan, node: &Node, bin: &Path) -> Init {
    let api = After::Tcp(SocketAddr::from((plan.control_address(), API_PORT)));
    let folder = |name: &str| text(&node.folder.join(name));
    let service = |name: &str, command: Vec<String>, after: Option<After>| Service {
        name: name.into(),
        command,
        log: node.logs.join(format!("{name}.log")),
        after,
    };
    let containerd = vec![text(&bin.join("containerd")), "--config".into(), folder("containerd.toml")];
    let kubelet = flags(
        bin.join("kubelet"),
        &[
            ("config", folder("kubelet.yaml")),
            ("kubeconfig", folder("kubelet.kubeconfig")),
            ("hostname-override", node.name.clone()),
            ("node-ip", node.address.to_string()),
        ],
    );
    let proxy = flags(
        bin.join("kube-proxy"),
        &[("config", folder("kube-proxy.yaml")), ("hostname-override", node.name.clone())],
    );
    Init {
        hostname: node.name.clone(),
        own_run: true,
        binds: node.own_folders(),
        sysctls: vec![
            ("net/ipv4/ip_forward".into(), "1".into()),
            // Traffic between two pods of a node must pass the service rules too, or answers come from the wrong address.
            ("net/bridge/bridge-nf-call-iptables".into(), "1".into()),
        ],
        cgroup: plan.system_cgroup(),
        path: bin.to_path_buf(),
        services: vec![
            service("containerd", containerd, None),
            service("kube-proxy", proxy, Some(api)),
            service("kubelet", kubelet, Some(After::Unix(PathBuf::from(CONTAINERD_SOCKET)))),
        ],
    }
}

/// The kubelet's configuration.
#[must_use]
pub fn kubelet(plan: &Plan, node: &Node) -> String {
    let folder = |name: &str| text(&node.folder.join(name));
    super::yaml(&json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": text(&plan.pki().join("ca.crt"))},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": folder("kubelet-server.crt"),
        "tlsPrivateKeyFile": folder("kubelet-server.key"),
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{}", node.cgroup),
        "enforceNodeAllocatable": [],
        // Many developers' machines and containers still mount version 1.
        "failCgroupV1": false,
        "failSwapOn": false,
        "clusterDNS": [plan.dns_service_address().to_string()],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": folder("resolv.conf"),
        // The disk is the developer's own: how full it is must not evict pods or images.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
        // Lowering the score needs a capability that containers often lack.
        "oomScoreAdj": 0,
        // How soon the devices of the node agent show on the node, on which each installation waits. What does not change
        // is reported as rarely as ever.
        "nodeStatusUpdateFrequency": "2s",
        "nodeStatusReportFrequency": "5m",
        "enableProfilingHandler": false,
    }))
}

/// kube-proxy's configuration.
#[must_use]
pub fn kube_proxy(plan: &Plan, node: &Node) -> String {
    super::yaml(&json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": text(&node.folder.join("kube-proxy.kubeconfig"))},
        "mode": "nftables",
        "clusterCIDR": plan.pods().to_string(),
        // The limits of the connection table belong to the host, not to a network namespace.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "oomScoreAdj": 0,
    }))
}

/// The CNI configuration: a bridge a node, addresses from the node's part of the pod network.
#[must_use]
pub fn cni(node: &Node) -> String {
    format!(
        "{:#}\n",
        json!({
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isDefaultGateway": true,
                    "hairpinMode": true,
                    "ipMasq": false,
                    "ipam": {"type": "host-local", "ranges": [[{"subnet": node.pods.to_string()}]]},
                },
                {"type": "portmap", "capabilities": {"portMappings": true}, "backend": "nftables"},
            ],
        })
    )
}

/// containerd's configuration. `snapshotter` is the one that works on the disk below.
#[must_use]
pub fn containerd(bin: &Path, snapshotter: &str) -> String {
    format!(
        "version = 3
root = '/var/lib/containerd'
state = '/run/containerd'
oom_score = 0

[grpc]
  address = '{CONTAINERD_SOCKET}'

[plugins.'io.containerd.cri.v1.runtime']
  # Lowering a container's score needs a capability that is missing where the cluster itself runs in a container.
  restrict_oom_score_adj = true

  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = 'runc'

    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'

      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        SystemdCgroup = false

  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['{bin}']
    conf_dir = '/etc/cni/net.d'

[plugins.'io.containerd.cri.v1.images']
  snapshotter = '{snapshotter}'

  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{PAUSE_IMAGE}'
",
        bin = bin.display(),
    )
}

/// Rules of the node's network namespace: what pods send to addresses outside of the pod network leaves with the
/// node's address, since nobody there knows a way back to pods.
#[must_use]
pub fn nat(plan: &Plan, node: &Node) -> String {
    format!(
        "table ip ferrovirt-cluster {{
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {own} ip daddr != {all} oifname \"eth0\" masquerade
  }}
}}
",
        own = node.pods,
        all = plan.pods(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan::new(PathBuf::from("/src"), 0).unwrap()
    }

    #[test]
    fn kubelet_uses_the_nodes_own_cgroup_and_tolerates_version_one() {
        let value: serde_json::Value = serde_yaml::from_str(&kubelet(&plan(), &plan().node(2))).unwrap();
        assert_eq!(value["cgroupRoot"], "/ferrovirt-fv0/node-2");
        assert_eq!(value["failCgroupV1"], false);
        assert_eq!(value["enforceNodeAllocatable"], json!([]));
        assert_eq!(value["authentication"]["anonymous"]["enabled"], false);
        assert_eq!(value["clusterDNS"][0], "10.212.0.10");
    }

    #[test]
    fn containerd_pins_the_sandbox_image_and_restricts_scores() {
        let text = containerd(Path::new("/opt/bin"), "native");
        assert!(text.contains("restrict_oom_score_adj = true"));
        assert!(text.contains("sandbox = 'ferrovirt.io/pause:devel'"));
        assert!(text.contains("snapshotter = 'native'"));
        assert!(text.contains("bin_dirs = ['/opt/bin']"));
    }

    #[test]
    fn pod_addresses_come_from_the_nodes_part() {
        let value: serde_json::Value = serde_json::from_str(&cni(&plan().node(2))).unwrap();
        assert_eq!(value["plugins"][0]["ipam"]["ranges"][0][0]["subnet"], "10.211.2.0/24");
    }

    #[test]
    fn traffic_between_pods_keeps_its_source() {
        assert!(nat(&plan(), &plan().node(1)).contains("ip saddr 10.211.1.0/24 ip daddr != 10.211.0.0/16"));
    }

    #[test]
    fn kube_proxy_leaves_the_hosts_connection_limits_alone() {
        let value: serde_json::Value = serde_yaml::from_str(&kube_proxy(&plan(), &plan().node(1))).unwrap();
        assert_eq!(value["conntrack"]["maxPerCore"], 0);
        assert_eq!(value["mode"], "nftables");
    }

    #[test]
    fn what_pods_mount_from_the_host_is_the_nodes_own() {
        let init = init(&plan(), &plan().node(1), Path::new("/opt/bin"));
        assert!(init.own_run);
        for path in ["/var/lib/kubelet", "/var/lib/kubevirt-node-labeller", "/etc/cni", "/var/log/pods"] {
            assert!(init.binds.iter().any(|(_, seen)| seen == Path::new(path)), "{path}");
        }
    }
}
