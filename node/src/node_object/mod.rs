//! The node's own object: the heartbeat annotation and labels that virt-handler writes ([`heartbeat`], [`labels`] of [`facts`]), and the
//! allocatable devices that it reads before it reports ready ([`readiness`]).

mod facts;
pub(crate) mod heartbeat;
mod labels;
pub(crate) mod readiness;
