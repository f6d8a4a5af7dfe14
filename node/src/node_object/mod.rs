//! The node's own object: the heartbeat annotation and labels that virt-handler writes ([`heartbeat`], [`labels`]), and the
//! allocatable devices that it reads before it reports ready ([`readiness`]).

pub(crate) mod heartbeat;
mod labels;
pub(crate) mod readiness;
