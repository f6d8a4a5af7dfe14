//! The values of the engine: requests (`request`), the state (`state`) with its job slot (`job`, `migration`), inputs and
//! effects (`effect`), and the form of the state that virt-handler sees (`publish`).

mod effect;
mod job;
mod migration;
mod publish;
mod request;
mod state;

pub(crate) use self::{
    effect::{Effect, GuestCall, Input},
    job::{Job, Shutdown, Start, StartStep},
    migration::{
        Direction, InStep, Limit, MigrationIn, MigrationOut, MigrationRecord, OutStep, PostCopy, copied_disks,
        moved_disks,
    },
    publish::{errors_by_volume, forget_guest, may_be_silent, waits_for_disk},
    request::{Action, Answer, JobName, Request, RequestError, RequestId, Wanted},
    state::{AfterRead, Kill, Link, LiveStep, LiveSync, Looking, NextSync, REFRESH, Stage, State},
};
pub(crate) use crate::migration::ChannelMode;
