//! What the status of a VMI says about its migration, as plain values. [`super::migration`] decides on them.

use std::net::IpAddr;

use api::{
    VirtualMachineInstance, address::is_dialable, vmi::migration::VirtualMachineInstanceMigrationState as State,
};

/// Connections of a migration that this node relays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// From the node of the source to a launcher of this node.
    Target {
        /// UID of the migration.
        migration: String,
        source_node: String,
        /// UID of the launcher's pod.
        pod: String,
    },
    /// From a launcher of this node to the node of the target.
    Source {
        /// UID of the migration.
        migration: String,
        /// Node of the target.
        node: String,
        /// Address of its virt-handler.
        address: IpAddr,
        /// Port of its virt-handler.
        port: u16,
        /// UID of the launcher's pod.
        pod: String,
    },
}

/// End of a migration at which this node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The domain leaves this node.
    Source,
    /// The domain comes to this node.
    Target,
}

/// The migration in the status of a VMI, as this node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Migration {
    /// UID of the migration.
    pub(super) uid: String,
    /// This node's end.
    pub(super) side: Side,
    pub(super) source_node: String,
    pub(super) target_node: String,
    /// Address and port of the target's virt-handler, once the target is ready.
    pub(super) endpoint: Option<(IpAddr, u16)>,
    /// Address of the target that another node cannot have. It is not dialled.
    pub(super) refused_address: Option<IpAddr>,
    /// The status has the start time.
    pub(super) started: bool,
    /// The status has the end time.
    pub(super) ended: bool,
    /// It is over: completed or failed.
    pub(super) over: bool,
    pub(super) failed: bool,
    /// A user aborts it.
    pub(super) abort_requested: bool,
    /// The target's node has a pod of the VMI.
    pub(super) target_pod_active: bool,
    /// The source's node has a pod of the VMI.
    pub(super) source_pod_active: bool,
}

impl Migration {
    /// Returns the migration of a VMI if it concerns `node`.
    pub(super) fn of(vmi: &VirtualMachineInstance, node: &str) -> Option<Self> {
        let status = vmi.status.as_ref()?;
        let state = status.migration_state.as_ref()?;
        let uid = state.migration_uid.clone().filter(|uid| !uid.is_empty())?;
        let (source, target) = (state.source_node.clone()?, state.target_node.clone().filter(|name| !name.is_empty())?);
        let side = match (source == node, target == node) {
            (true, false) => Side::Source,
            (false, true) => Side::Target,
            _ => return None,
        };
        Some(Self {
            uid,
            side,
            endpoint: endpoint(state).filter(|(address, _)| is_dialable(*address)),
            refused_address: address(state).filter(|address| !is_dialable(*address)),
            started: state.start_timestamp.is_some(),
            ended: state.end_timestamp.is_some(),
            over: state.completed || state.failed,
            failed: state.failed,
            abort_requested: state.abort_requested,
            target_pod_active: status.active_pods.values().any(|name| *name == target),
            source_pod_active: status.active_pods.values().any(|name| *name == source),
            source_node: source,
            target_node: target,
        })
    }
}

fn address(state: &State) -> Option<IpAddr> {
    state.target_node_address.as_ref()?.parse().ok()
}

/// Returns address and port of the target's virt-handler.
fn endpoint(state: &State) -> Option<(IpAddr, u16)> {
    let address = address(state)?;
    let port = state.target_direct_migration_node_ports.iter().find(|(_, channel)| **channel == 0)?.0;
    Some((address, port.parse().ok().filter(|port| *port != 0)?))
}
