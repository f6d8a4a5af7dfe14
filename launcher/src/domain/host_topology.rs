//! The CPUs of a pod in the topology of their node, as a launcher reports them to another.

use serde::{Deserialize, Serialize};

/// CPUs that a pod may use, in the topology of its node. The form is that of the reference's `targetNodeTopology`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct HostTopology {
    pub(crate) numa: HostNuma,
}

/// The NUMA cells, in the order of their numbers.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct HostNuma {
    #[serde(default)]
    pub(crate) cells: Vec<HostCell>,
}

/// A NUMA cell.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct HostCell {
    #[serde(default)]
    pub(crate) id: u32,
    #[serde(default)]
    pub(crate) cpus: Vec<HostCpu>,
    /// Distances to cells.
    #[serde(default)]
    pub(crate) distances: Vec<HostDistance>,
}

/// A CPU: a thread of a core.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct HostCpu {
    #[serde(default)]
    pub(crate) id: u32,
    /// The threads of its core, itself included.
    #[serde(default)]
    pub(crate) siblings: Vec<u32>,
}

/// The distance to a cell.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct HostDistance {
    #[serde(default)]
    pub(crate) id: u32,
    #[serde(default)]
    pub(crate) value: u32,
}
