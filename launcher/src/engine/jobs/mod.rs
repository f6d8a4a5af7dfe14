//! The jobs: long works on the domain, of which at most one holds the job slot. One folder a job; no job knows another.
//!
//! A job is a value whose steps carry their data. [`Steps::take`] maps it, the base and an input to the next step, or ends it.

/// Patterns of results by the job that gets them, and of results that several jobs get. A job lists its own without it: the
/// compiler reports the jobs that forget a new input.
macro_rules! results_of {
    ($($job:ident)*) => { $(results_of!(@$job))|* };
    (@start) => {
        JobInput::Defined(_) | JobInput::TagsWritten(_) | JobInput::Created(_) | JobInput::MemoryMarked(_)
            | JobInput::MemoryUnmarked(_)
    };
    (@sync) => {
        JobInput::Compared { .. } | JobInput::DiskGrown(_) | JobInput::VcpusPlugged(_) | JobInput::DeviceChanged(_)
    };
    (@shutdown) => { JobInput::ShutdownRequested(_) };
    (@dump) => { JobInput::MemoryDumped(_) };
    (@save) => {
        JobInput::SaveRecorded(_) | JobInput::MemorySaved(_) | JobInput::MemoryKept(_) | JobInput::MemoryDiscarded(_)
    };
    (@source) => {
        JobInput::Migrated(_) | JobInput::Departed(_) | JobInput::ProgressRead(_) | JobInput::MigrationAborted(_)
            | JobInput::PostCopyStarted(_) | JobInput::Released(_) | JobInput::ImagesCompared { .. }
    };
    // Results that several jobs get.
    (@prepared) => { JobInput::Prepared(_) };
    (@served) => { JobInput::Served(_) };
    (@opened) => { JobInput::MigrationOpened(_) };
    (@resumed) => { JobInput::Resumed(_) };
    (@paused) => { JobInput::Paused(_) };
}

pub(crate) mod dump;
pub(crate) mod migration_source;
pub(crate) mod migration_target;
pub(crate) mod save;
pub(crate) mod shutdown;
pub(crate) mod start;
pub(crate) mod sync;

use std::{ops::Deref, time::Duration};

use tokio::time::Instant;

use super::model::{Action, Base, JobInput, JobName, RequestError, RequestId};
use crate::hypervisor::HypervisorError;

/// Time limit of a wait for libvirt's daemon.
const DAEMON_DEADLINE: Duration = Duration::from_secs(60);
/// Pause between attempts of a migration or to end a save or dump, and interval of reads of a migration's progress.
const INTERVAL: Duration = Duration::from_secs(1);
/// libvirt's error (VIR_ERR_OPERATION_TIMEOUT) of a call that has waited for another job of the domain.
const OPERATION_TIMEOUT: u32 = 68;
/// libvirt's error (VIR_ERR_OPERATION_INVALID) of a call that it has not begun: the domain does not run.
const OPERATION_INVALID: u32 = 55;
/// Limit of requests that wait for a job.
pub(crate) const WAITING: usize = 16;
/// Failure of an aborted migration.
const ABORTED: &str = "Live migration has been aborted";

/// The name of a job, for refusals and results.
pub(crate) trait Named {
    /// Returns the name.
    fn name(&self) -> JobName;
}

/// A job: its steps and its place among the other works.
pub(crate) trait Steps: Named {
    /// Decides on an input. `None` ends the job. A late result, for which the step does not wait, changes nothing.
    fn take(self, base: &mut Base, input: JobInput) -> Option<Self>
    where
        Self: Sized;
    /// Decides on the end of the domain.
    fn end(self, base: &mut Base) -> Option<Self>
    where
        Self: Sized;
    /// Decides on a request to end the domain. The request is returned if it is to be decided as without this job.
    fn end_domain(self, _: &mut Base, request: EndRequest) -> (Option<Self>, Option<EndRequest>)
    where
        Self: Sized,
    {
        (Some(self), Some(request))
    }
    /// Returns the step in words.
    fn progress(&self) -> &'static str;
    /// Returns the time of the next [`JobInput::Timer`].
    fn wake(&self) -> Option<Instant> {
        None
    }
    /// Decides that an action on the guest is refused meanwhile.
    fn conflicts(&self, _: Action) -> bool {
        true
    }
    /// Fails if the domain cannot be brought in line with a VMI meanwhile.
    fn check_sync(&self) -> Result<(), RequestError> {
        Ok(())
    }
    /// Reports that the job publishes the end of the domain: the guest may run elsewhere.
    fn keeps_end(&self) -> bool {
        false
    }
    /// Reports that the domain is not read, because it would be found half-started: a read follows in any case.
    fn holds_reads(&self) -> bool {
        false
    }
    /// Returns the error of a request that conflicts with the job.
    fn conflict(&self) -> RequestError {
        RequestError::Conflict { job: self.name(), progress: self.progress() }
    }
}

/// Returns true for errors after which the same call can succeed.
fn is_repeated(error: &HypervisorError) -> bool {
    match error {
        HypervisorError::Disconnected(_) | HypervisorError::Busy => true,
        HypervisorError::Libvirt { code, .. } => *code == OPERATION_TIMEOUT,
        _ => false,
    }
}

/// A request to end the domain.
pub(crate) type EndRequest = (RequestId, Action);

/// Declares the jobs: their enum, their names, and the dispatch of [`Steps`].
macro_rules! jobs {
    ($($(#[doc = $text:literal])* $name:ident($job:ty),)*) => {
        /// A job in progress.
        #[derive(Clone, Debug)]
        pub(crate) enum Job {
            $($(#[doc = $text])* $name(Box<$job>),)*
        }

        $(impl From<$job> for Job {
            fn from(job: $job) -> Self {
                Self::$name(Box::new(job))
            }
        }

        impl $job {
            const NAME: JobName = JobName::$name;
        }

        impl Named for $job {
            fn name(&self) -> JobName {
                Self::NAME
            }
        })*

        impl Job {
            pub(crate) fn take(self, base: &mut Base, input: JobInput) -> Option<Self> {
                match self { $(Self::$name(job) => job.take(base, input).map(Self::from),)* }
            }

            pub(crate) fn end(self, base: &mut Base) -> Option<Self> {
                match self { $(Self::$name(job) => job.end(base).map(Self::from),)* }
            }

            pub(crate) fn end_domain(self, base: &mut Base, request: EndRequest) -> (Option<Self>, Option<EndRequest>) {
                match self {
                    $(Self::$name(job) => {
                        let (job, request) = job.end_domain(base, request);
                        (job.map(Self::from), request)
                    })*
                }
            }
        }

        impl Deref for Job {
            type Target = dyn Steps;

            fn deref(&self) -> &Self::Target {
                match self { $(Self::$name(job) => &**job,)* }
            }
        }
    };
}

jobs! {
    /// The domain starts.
    Start(start::Start),
    /// The running domain is brought in line with a VMI, beside the job slot.
    Sync(sync::Sync),
    /// The guest is asked to shut down, and the domain is destroyed after the grace period.
    Shutdown(shutdown::Shutdown),
    /// The guest's memory is written to a volume.
    MemoryDump(dump::MemoryDump),
    /// The guest's memory is saved to a volume, and the domain ends.
    MemorySave(save::MemorySave),
    /// The domain moves to another launcher.
    MigrationSource(migration_source::MigrationSource),
    /// The domain moves to this launcher.
    MigrationTarget(migration_target::MigrationTarget),
}
