//! The base of the engine, which knows no job: requests (`request`), the state that all jobs share (`base`), the end of the domain
//! (`ending`), inputs and effects (`effect`), the record of migrations (`migration`), and the state that virt-handler sees
//! (`publish`).

mod base;
mod effect;
mod ending;
mod migration;
mod publish;
mod request;

pub(crate) use self::{
    base::{Base, Link, Looking, Next, Stage, daemon_is_late, disconnected},
    effect::{DomainCall, Effect, GuestCall, Input, JobInput, SaveRecord, Work},
    migration::{MigrationEnd, MigrationLimits, MigrationRecord, base_images, copied_disks, moved_disks},
    publish::{is_apart, is_over, may_be_silent, not_released, noun, pluggable, waits_for_disk},
    request::{Action, Answer, JobName, Request, RequestError, RequestId, Wanted},
};
pub(crate) use crate::migration::{BaseImage, ChannelMode};
