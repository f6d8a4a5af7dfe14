//! The VMIs of this node: one task each, the only place that changes a VMI, its launcher or its status.
//!
//! [`directory`] watches the objects and starts the tasks. A task ([`task`], restarted by [`restart`] after a panic) is fed by
//! the watch and by the launcher's state stream. After each input, [`decide`], a pure function of what is [`observed`], returns
//! effects, and [`effects`] executes them; their outcomes are inputs again. A call to the launcher is a row of [`calls`]. The [`role`] of the node is decided first: the owner
//! decides phase and loss, and both ends of a [`migration`] have a task of their own. Nothing is stored on disk: a restarted
//! virt-handler rebuilds its state from the objects and the launchers' sockets, and running domains are not affected.
//!
//! ```text
//!              socket found, peer checked        Hello answered for our UID; network ready
//!   Waiting ────────────────────────────▶ Preparing ───────────────────────────────▶ Starting
//!      ▲ │                                   │  ▲                                   (Sync called)
//!      │ │ VMI gone, no socket               │  │ call failed: wait 1 s .. 60 s          │
//!      │ ▼                                   │  └────────────────────────────────────────┤
//!   Retired ◀──────────── VMI gone           │ VMI deleted or final                      │ RUNNING reported
//!      ▲                                     ▼                                           ▼
//!      │  launcher gone          ┌───── Finishing ◀─── final phase written ── Ended ◀── Live ◀─┐
//!      └─────────────────────────┘   (Finish called)                           ▲         │      │ Sync on change
//!                                                          SHUTOFF, CRASHED    │         ├──────┘
//!                                                                              │         │ VMI deleted
//!                                                                              └─ Stopping (Shutdown, after grace Kill)
//!
//!   Live migration, node of the source (the owner until ownership passes)
//!
//!   Live ── target is ready ──▶ Migrate called ── copied, QEMU ended ──▶ (target takes over) ──▶ Left ── Finish ──▶ Retired
//!    ▲      nothing changes the domain    │
//!    └──────── failed, aborted ───────────┘
//!
//!   and of the target
//!
//!   Waiting ──▶ Receiving: network, volumes, PrepareMigration ──▶ address published ── guest runs ──▶ Live (the owner): Sync,
//!                   │ failed                                          │ failed                       then completed
//!                   └──────────────▶ Kill, Finish, label removed ◀────┘  ──▶ Retired
//!
//!   From every stage but Waiting a lost connection leads back to Waiting; the observed state is kept.
//!   A Scheduled or Running VMI without a connection for 30 s (if there never was one: 180 s) is lost: phase Failed.
//! ```
//!
//! The stage is derived from what is observed ([`observed::Observed::stage`]), so that a restarted virt-handler arrives at the
//! same stage.

mod awaited_save;
mod call;
mod calls;
mod conditions;
mod decide;
mod desired;
mod directory;
mod dump;
mod effect;
mod effects;
mod event;
mod facts;
mod handle;
mod hibernation;
mod host;
mod host_disks;
mod interfaces;
mod launcher_volumes;
mod migratability;
mod migration;
mod migration_facts;
mod nics;
mod observed;
mod phase;
mod pod_network;
mod records;
mod request;
mod resize;
mod restart;
mod role;
mod sessions;
mod status;
mod task;
#[cfg(test)]
pub(crate) mod tests;
mod trace;
mod volumes;

pub(crate) use directory::{Vmis, follow};
pub(crate) use event::Event;
pub(crate) use handle::Handle;
pub(crate) use host::NodeHost;
pub(crate) use records::ApiRecords;
pub(crate) use request::{Refusal, Request};
pub(crate) use sessions::{Ending, Session};
