//! The machines of this node: one task each, the only place that changes anything about its machine.
//!
//! A task is fed by the watch of VirtualMachineInstances and by the launcher's state stream. After each piece of news
//! it asks [`decide::decide`], a pure function of what is known, what to do, and carries that out; what comes of it is
//! news again. Nothing is kept on disk: after a restart of the agent the view grows anew from the objects and the
//! launchers' sockets, and running machines do not notice.
//!
//! ```text
//!              socket found, peer checked        hello answered to our UID; network ready
//!   Waiting ────────────────────────────▶ Preparing ───────────────────────────────▶ Starting
//!      ▲ │                                   │  ▲                                   (Sync called)
//!      │ │ VMI gone, no socket               │  │ call failed: wait 1 s .. 60 s          │
//!      │ ▼                                   │  └────────────────────────────────────────┤
//!   Retired ◀──────────── VMI gone           │ VMI deleted or final                      │ RUNNING seen
//!      ▲                                     ▼                                           ▼
//!      │  launcher gone          ┌───── Finishing ◀─── final phase written ── Ended ◀── Live ◀─┐
//!      └─────────────────────────┘   (Finish called)                           ▲         │      │ Sync on change
//!                                                          SHUTOFF, CRASHED    │         ├──────┘
//!                                                                              │         │ VMI deleted
//!                                                                              └─ Stopping (Shutdown, after grace Kill)
//!
//!   From every state but Waiting a lost connection leads back to Waiting; what was known of the machine is kept.
//!   Scheduled or Running with no connection for 30 s (never had one: 180 s) is a lost machine: phase Failed.
//! ```
//!
//! The stage is not stored: it follows from what is known ([`state::Machine::stage`]), so that a restarted agent
//! arrives at the same place.

mod conditions;
mod decide;
mod directory;
mod facts;
mod host;
mod interfaces;
mod migratability;
mod phase;
mod records;
mod state;
mod status;
mod task;
#[cfg(test)]
pub(crate) mod tests;

pub use directory::{Handle, Machines, follow};
pub use host::{ConnectError, Host, NetworkFailure, NodeHost, Settings};
pub use records::{ApiRecords, Records, WriteError};
pub use state::{Announcement, Refusal, Request};
