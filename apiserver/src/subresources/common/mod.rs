//! Parts that several subresources share.
//!
//! - [`specification`]: the form of a subresource; [`call`]: a request with its services; [`schema`]: JSON schemas.
//! - [`vmi_checks`]: state of a VMI; [`stream`]: WebSockets; [`state_change`]: changes of a VM's state.
//! - [`volumes`], [`memory_dump`], [`sev`], [`object_graph`], [`expansion`]: one subject each.

pub(crate) mod call;
pub(super) mod expansion;
pub(super) mod guest_agent;
pub(super) mod memory_dump;
pub(super) mod object_graph;
pub(super) mod schema;
pub(super) mod sev;
pub(crate) mod specification;
pub(super) mod state_change;
pub(super) mod stream;
#[cfg(test)]
pub(super) mod testing;
pub(super) mod vmi_checks;
pub(super) mod volumes;
