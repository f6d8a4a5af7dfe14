//! virt-handler's side of the launcher protocol: [`client`] calls a launcher, [`watch`] follows its state, [`paced`] bounds the
//! rate at which its connection is read. [`capabilities`] is the cache that Hello transfers.
//!
//! The VMI of a launcher is known from its socket: from the pod whose directory contains it and whose process answers on it.
//! Nothing that arrives over the connection can change that.

pub(crate) mod capabilities;
mod client;
#[cfg(test)]
pub(crate) mod fake;
mod locate;
mod paced;
mod watch;

pub(crate) use client::{CALL_TIMEOUT, GUEST_TIMEOUT, Launcher, LauncherError, Reply, bounded};
pub(crate) use locate::{Candidates, candidates, is_pod_uid};
pub(crate) use watch::{Report, follow};
