//! The node's own object: the heartbeat annotation and labels that virt-handler writes ([`heartbeat`], [`labels`] of [`facts`]), the
//! allocatable devices that it reads before it reports ready ([`readiness`]); and settings of the node: same-page merging ([`ksm`]),
//! a seccomp profile ([`seccomp`]).

mod facts;
pub(crate) mod heartbeat;
mod ksm;
mod labels;
pub(crate) mod readiness;
pub(crate) mod seccomp;
