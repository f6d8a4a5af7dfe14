//! Plan of a cluster: every name, address and path is derived from the instance number and the folder of the workspace.
//! Pure: nothing here changes the host.

use std::{
    fmt::Display,
    net::{Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    kubernetes::Variant,
};

/// Maximum number of nodes of a cluster.
pub const MAX_NODES: u8 = 20;
/// Name of the node in a VM.
pub const VM_NODE: &str = "node-vm";
/// Label of the node in a VM, with the value `true`.
pub const VM_NODE_LABEL: &str = "test.ferrovirt.io/vm-node";
/// Its number, which determines its addresses.
const VM_NUMBER: u8 = MAX_NODES + 1;
/// Number of the first IPv6 network of pods.
const PODS6: u16 = 0x100;
/// Number of the IPv6 network of services.
const SERVICES6: u16 = 0x200;
/// Highest instance number of a cluster on one host.
pub const MAX_INSTANCE: u8 = 9;
/// The port of the API server.
pub const API_PORT: u16 = 6443;
/// Bridge in each node that connects pods of all nodes on layer 2.
pub const LAN: &str = "lan0";
/// Port of this bridge that leads to the other nodes. Network plugins of users may name a bridge `lan`.
pub const LAN_PORT: &str = "lan0-port";
/// The namespace of an installation of Ferrovirt.
pub const INSTALLATION_NAMESPACE: &str = "kubevirt";
/// The DNS domain of the cluster.
pub const CLUSTER_DOMAIN: &str = "cluster.local";

/// An IPv4 network in CIDR notation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// The first address.
    pub base: Ipv4Addr,
    /// The length of the prefix.
    pub prefix: u8,
}

impl Network {
    /// Returns the address at `offset` from the base.
    #[must_use]
    pub fn address(&self, offset: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.base).wrapping_add(offset))
    }

    /// Returns true if two networks share an address.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let shorter = self.prefix.min(other.prefix);
        let mask = u32::MAX.checked_shl(32 - u32::from(shorter)).unwrap_or(0);
        u32::from(self.base) & mask == u32::from(other.base) & mask
    }
}

impl Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

impl std::str::FromStr for Network {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        let (base, prefix) = text.split_once('/').unwrap_or((text, "32"));
        let prefix = prefix.parse::<u8>().map_err(|_| ())?;
        if prefix > 32 {
            return Err(());
        }
        Ok(Self { base: base.parse().map_err(|_| ())?, prefix })
    }
}

/// An IPv6 network in CIDR notation, of a cluster with both address families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network6 {
    /// The first address.
    pub base: Ipv6Addr,
    /// The length of the prefix.
    pub prefix: u8,
}

impl Display for Network6 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

/// Returns the file that serializes changes to the cluster with this state folder.
#[must_use]
pub fn lock_of(state: &Path) -> PathBuf {
    state.with_extension("lock")
}

/// Names, addresses and paths of one cluster.
#[derive(Clone, Debug)]
pub struct Plan {
    instance: u8,
    /// The folder of the workspace.
    pub workspace: PathBuf,
    /// Version and feature gates of Kubernetes.
    pub variant: Variant,
}

impl Plan {
    /// Returns the plan of cluster number `instance` of a workspace, with the default version of Kubernetes.
    ///
    /// # Errors
    /// Fails if the instance number is too large.
    pub fn new(workspace: PathBuf, instance: u8) -> Result<Self> {
        if instance > MAX_INSTANCE {
            return Err(Error::Refused(format!("--instance must be between 0 and {MAX_INSTANCE}")));
        }
        Ok(Self { instance, workspace, variant: Variant::default() })
    }

    /// Returns the prefix of all names on the host.
    #[must_use]
    pub fn prefix(&self) -> String {
        format!("fv{}", self.instance)
    }

    /// Returns the network of the control plane, the nodes and the host's end.
    #[must_use]
    pub fn node_network(&self) -> Network {
        Network { base: Ipv4Addr::new(10, self.octet(), 0, 0), prefix: 24 }
    }

    /// Returns the network of all pods.
    #[must_use]
    pub fn pods(&self) -> Network {
        Network { base: Ipv4Addr::new(10, self.octet() + 1, 0, 0), prefix: 16 }
    }

    /// Returns the network of service addresses.
    #[must_use]
    pub fn services(&self) -> Network {
        Network { base: Ipv4Addr::new(10, self.octet() + 2, 0, 0), prefix: 16 }
    }

    fn octet(&self) -> u8 {
        210 + 3 * self.instance
    }

    /// Returns the IPv6 network of the control plane and the nodes. IPv6 networks exist in namespaces only, so that they cannot
    /// collide with routes of the host.
    #[must_use]
    pub fn node_network6(&self) -> Network6 {
        Network6 { base: self.address6(0, 0), prefix: 64 }
    }

    /// Returns the IPv6 network of all pods.
    #[must_use]
    pub fn pods6(&self) -> Network6 {
        Network6 { base: self.address6(PODS6, 0), prefix: 56 }
    }

    /// Returns the IPv6 network of service addresses.
    #[must_use]
    pub fn services6(&self) -> Network6 {
        Network6 { base: self.address6(SERVICES6, 0), prefix: 112 }
    }

    /// Returns an address of a network of /64 in the cluster's local prefix.
    fn address6(&self, network: u16, host: u16) -> Ipv6Addr {
        Ipv6Addr::new(0xfd66, 0x7600, u16::from(self.instance), network, 0, 0, 0, host)
    }

    /// Returns the IPv6 address of the control plane.
    #[must_use]
    pub fn control_address6(&self) -> Ipv6Addr {
        self.address6(0, 1)
    }

    /// Returns the value of a setting that has one value for each address family of the cluster.
    #[must_use]
    pub fn families(&self, v4: impl Display, v6: impl Display) -> String {
        if self.variant.dual_stack { format!("{v4},{v6}") } else { v4.to_string() }
    }

    /// Returns the address of the control plane (API server and DNS server).
    #[must_use]
    pub fn control_address(&self) -> Ipv4Addr {
        self.node_network().address(1)
    }

    /// Returns the address of the host's end of the cluster's network.
    #[must_use]
    pub fn host_address(&self) -> Ipv4Addr {
        self.node_network().address(254)
    }

    /// Returns host and port at which nodes pull from a registry on the host, over plain HTTP.
    #[must_use]
    pub fn registry(&self) -> String {
        format!("{}:5000", self.host_address())
    }

    /// Returns the service address of the API server.
    #[must_use]
    pub fn api_service_address(&self) -> Ipv4Addr {
        self.services().address(1)
    }

    /// Returns the service address of the cluster's DNS.
    #[must_use]
    pub fn dns_service_address(&self) -> Ipv4Addr {
        self.services().address(10)
    }

    /// Returns the URL of the API server, as nodes and host reach it.
    #[must_use]
    pub fn api_url(&self) -> String {
        format!("https://{}:{API_PORT}", self.control_address())
    }

    /// Returns the name of the control plane's network namespace.
    #[must_use]
    pub fn control_namespace(&self) -> String {
        format!("{}-control", self.prefix())
    }

    /// Returns the name of the host's end of the link to the cluster.
    #[must_use]
    pub fn host_link(&self) -> String {
        format!("{}-host", self.prefix())
    }

    /// Returns the folder for all files of this cluster.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.build().join(self.suffixed("cluster"))
    }

    /// Returns the folder of build results.
    #[must_use]
    pub fn build(&self) -> PathBuf {
        self.workspace.join("build")
    }

    /// Returns the administrator's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.build().join(self.suffixed("kubeconfig"))
    }

    /// Returns the folder that all nodes see, for volumes of several nodes.
    #[must_use]
    pub fn shared(&self) -> PathBuf {
        self.state().join("shared")
    }

    /// Returns the file that serializes changes to this cluster.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        lock_of(&self.state())
    }

    fn suffixed(&self, name: &str) -> String {
        if self.instance == 0 { name.to_owned() } else { format!("{name}-{}", self.instance) }
    }

    /// Returns the folder of log files, which `down` keeps.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.state().join("logs")
    }

    /// Returns the path of the API server's audit log, which `down` keeps.
    #[must_use]
    pub fn audit_log(&self) -> PathBuf {
        self.state().join("audit.log")
    }

    /// Returns the file that records version and feature gates of the running cluster.
    #[must_use]
    pub fn variant_record(&self) -> PathBuf {
        self.state().join("variant.json")
    }

    /// Returns the folder of certificates and keys.
    #[must_use]
    pub fn pki(&self) -> PathBuf {
        self.state().join("pki")
    }

    /// Returns the folder of the control plane's configuration and data.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.state().join("control")
    }

    /// Returns the cgroup above all pods of all nodes, relative to the root of each hierarchy.
    #[must_use]
    pub fn cgroup(&self) -> String {
        format!("ferrovirt-{}", self.prefix())
    }

    /// Returns the cgroup of the cluster's own processes, relative to the root of each hierarchy.
    #[must_use]
    pub fn system_cgroup(&self) -> String {
        format!("{}/system", self.cgroup())
    }

    /// Returns the node with this number, counted from 1.
    #[must_use]
    pub fn node(&self, number: u8) -> Node {
        self.named_node(number, format!("node-{number}"))
    }

    /// Returns the node in a VM.
    #[must_use]
    pub fn vm_node(&self) -> Node {
        self.named_node(VM_NUMBER, VM_NODE.to_owned())
    }

    fn named_node(&self, number: u8, name: String) -> Node {
        Node {
            number,
            namespace: format!("{}-{name}", self.prefix()),
            link: format!("{}-n{number}", self.prefix()),
            lan_link: format!("{}-n{number}l", self.prefix()),
            address: self.node_network().address(10 + u32::from(number)),
            address6: self.address6(0, 0x10 + u16::from(number)),
            pods: Network { base: self.pods().address(u32::from(number) << 8), prefix: 24 },
            pods6: Network6 { base: self.address6(PODS6 + u16::from(number), 0), prefix: 64 },
            cgroup: format!("{}/{name}", self.cgroup()),
            folder: self.state().join(&name),
            logs: self.logs().join(&name),
            name,
        }
    }

    /// Returns the first `count` nodes.
    #[must_use]
    pub fn nodes(&self, count: u8) -> Vec<Node> {
        (1..=count).map(|number| self.node(number)).collect()
    }

    /// Returns the node with this network namespace, if it belongs to this cluster.
    #[must_use]
    pub fn node_of_namespace(&self, namespace: &str) -> Option<Node> {
        let vm = self.vm_node();
        if namespace == vm.namespace {
            return Some(vm);
        }
        let number = namespace.strip_prefix(&format!("{}-node-", self.prefix()))?.parse().ok()?;
        (1..=MAX_NODES).contains(&number).then(|| self.node(number))
    }
}

/// Names, addresses and paths of one node.
#[derive(Clone, Debug)]
pub struct Node {
    /// Counted from 1.
    pub number: u8,
    /// The name of the Node object.
    pub name: String,
    /// The network namespace.
    pub namespace: String,
    /// Name of the control plane's end of the link to the node.
    pub link: String,
    /// Name of the control plane's end of the node's link to the layer-2 network.
    pub lan_link: String,
    /// The node's address.
    pub address: Ipv4Addr,
    /// Its IPv6 address, in clusters with both families.
    pub address6: Ipv6Addr,
    /// The network of its pods.
    pub pods: Network,
    /// The IPv6 network of its pods, in clusters with both families.
    pub pods6: Network6,
    /// The cgroup of its pods, relative to each hierarchy's root.
    pub cgroup: String,
    /// Its configuration and data.
    pub folder: PathBuf,
    /// Its log files.
    pub logs: PathBuf,
}

impl Node {
    /// Returns true for the node in a VM.
    #[must_use]
    pub fn is_vm(&self) -> bool {
        self.number == VM_NUMBER
    }

    /// Returns folders of the node and the host paths over which they are mounted in the node's mount namespace. They give pods
    /// the node's own files in hostPath volumes.
    #[must_use]
    pub fn own_folders(&self) -> Vec<(PathBuf, PathBuf)> {
        [
            ("kubelet", "/var/lib/kubelet"),
            ("containerd", "/var/lib/containerd"),
            ("cni-state", "/var/lib/cni"),
            ("log-pods", "/var/log/pods"),
            ("log-containers", "/var/log/containers"),
            ("cni", "/etc/cni"),
        ]
        .into_iter()
        .map(|(own, seen)| (self.folder.join(own), PathBuf::from(seen)))
        .collect()
    }
}

/// Returns the folder of the workspace: the nearest parent of `start` that contains the components of the test cluster.
///
/// # Errors
/// Fails if there is none.
pub fn find_workspace(start: &Path) -> Result<PathBuf> {
    start
        .ancestors()
        .find(|folder| folder.join("e2e/cluster/components").is_dir())
        .map(Path::to_path_buf)
        .ok_or_else(|| Error::Refused(format!("{} is not inside a Ferrovirt working tree", start.display())))
}

#[cfg(test)]
mod tests;
