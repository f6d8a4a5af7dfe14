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
//! Layers, strictly one way: the base that all jobs share (`model`) <- the jobs (`jobs`, one folder each) <- [`decide`](decide::decide),
//! which maps the state, a value, and an input (domain event, result, time, request) to the next state and effects, pure <- the
//! driver (`driver`), which carries the effects out and feeds their results back. Domain events are taken before requests. At most
//! one job holds the job slot; a request that conflicts with it is refused with the job's name. A restarted worker adopts a running domain before it prepares or ends anything, and starts in `Live`.

mod decide;
mod driver;
mod jobs;
mod model;

pub(crate) use self::{
    driver::{Driver, EngineHandle, Outcome},
    model::{Action, Request, RequestError, Wanted, may_be_silent},
};
