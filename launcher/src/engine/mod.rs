//! The engine: one task owns the domain and makes every change.
//!
//! ```text
//!            Hello                 Sync                        guest or QEMU ends
//!  Waiting ---------> Waiting -------------> Live -------------------------------------+
//!     |   (connects to  |      start job:      |  Pause, Unpause, Reset, SoftReboot,    |
//!     |    libvirt)     |      disks, XML,     |  Sync (differences),                   |
//!     |                 |      define, create  |  shutdown job (repeated, then forced)  v
//!     |                 +-- cannot start ------|------------------------------------> Ended
//!     |                                        |                                        |
//!     +-- Shutdown, Kill, Terminate -----------|--------------------------------------->|
//!                                                                 Finish, or too long   |
//!                                                                                       v
//!                                                                                     exit
//! ```
//!
//! A migration to another launcher ends `Live` as a shutdown does, once the target runs the guest; one to this launcher leads from
//! `Waiting` to `Live` without a start.
//!
//! The state is a value (`model`). [`decide`](decide::decide) maps it and an input (domain event, result, time, request) to
//! the next state and effects; pure. The driver (`driver`) carries the effects out and feeds their results back. Domain events
//! are taken before requests. At most one job holds the job slot; a request that conflicts with it is refused with the job's
//! name. A restarted worker adopts a running domain before it prepares or ends anything, and starts in `Live`.

mod decide;
mod driver;
mod model;

pub(crate) use self::{
    driver::{Driver, EngineHandle, Outcome},
    model::{Action, RequestError, may_be_silent},
};
