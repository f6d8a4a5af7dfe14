//! The hypervisor under the engine: [`Hypervisor`] starts it and connects to it, [`Domain`] is the connection for the VMI's
//! domain, [`Signals`] reports domain events. [`libvirt`] implements the traits and holds the only unsafe code; `fake` is for
//! tests.

mod error;
#[cfg(test)]
pub(crate) mod fake;
pub mod libvirt;
mod signals;

use std::{fmt::Debug, path::PathBuf, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use protocol::{Lifecycle, StatsReply};

pub use self::error::{HypervisorError, StartError};
pub(crate) use self::signals::Signals;
use crate::domain::{destination::MovedDisk, diff::DeviceChange, pinning::Pinning};

/// A call in progress. It ends within the call's time limit.
pub(crate) type Call<T> = BoxFuture<'static, Result<T, HypervisorError>>;

/// A hypervisor on which one domain runs.
pub(crate) trait Hypervisor: Debug + Send + 'static {
    /// Writes the node's capabilities cache. Must precede the first connection, which would otherwise probe QEMU for
    /// seconds.
    fn write_cache(&self, files: &[protocol::CacheFile]) -> Result<(), StartError>;

    /// Starts the hypervisor's daemon, or takes over one that runs, and keeps it running. Does nothing the second time.
    fn start(&mut self) -> Result<(), StartError>;

    /// Connects to the daemon. `None` if it does not listen yet.
    fn connect(&self) -> Call<Option<Arc<dyn Domain>>>;

    /// Ends the daemon. A guest that runs is not touched.
    fn stop(&mut self) -> BoxFuture<'static, ()>;
}

/// A connection to the hypervisor for the VMI's domain.
pub(crate) trait Domain: Send + Sync + 'static {
    /// Returns the signals of this connection.
    fn signals(&self) -> Arc<Signals>;
    /// Makes the daemon read its caches ahead of a start.
    fn warm_up(&self) -> Call<()>;
    /// Defines the domain or replaces its definition.
    fn define(&self, xml: String) -> Call<()>;
    /// Returns the definition with the addresses that the hypervisor assigned to devices.
    fn definition(&self) -> Call<String>;
    /// Starts the defined domain, paused if requested.
    fn create(&self, paused: bool) -> Call<()>;
    /// Reads state, memory and active XML.
    fn facts(&self) -> Call<DomainFacts>;
    /// Pauses the guest's CPUs.
    fn suspend(&self) -> Call<()>;
    /// Resumes the guest's CPUs.
    fn resume(&self) -> Call<()>;
    /// Presses the reset button.
    fn reset(&self) -> Call<()>;
    /// Requests a reboot of the guest.
    fn reboot(&self, way: RebootWay) -> Call<()>;
    /// Requests a shutdown of the guest.
    fn shutdown(&self) -> Call<()>;
    /// Ends QEMU: with SIGTERM only if `gently`, else followed by SIGKILL.
    fn destroy(&self, gently: bool) -> Call<()>;
    /// Resizes a disk. Returns false if it already has the size.
    fn grow_disk(&self, target: String, size: u64) -> Call<bool>;
    /// Plugs vCPUs into the running domain, up to this number.
    fn plug_vcpus(&self, vcpus: u32) -> Call<()>;
    /// Changes a device of the running domain and of its definition. A detached device stays until the guest releases it.
    fn change_device(&self, change: DeviceChange, xml: String) -> Call<()>;
    /// Writes the guest's memory to a file as an ELF core. The guest stands still meanwhile.
    fn dump_memory(&self, path: PathBuf) -> Call<()>;
    /// Writes the guest's memory to a file and ends the domain. The guest runs on if that fails.
    fn save_memory(&self, path: PathBuf) -> Call<()>;
    /// Starts the defined domain from the memory in a file, without running the guest.
    fn restore_memory(&self, path: PathBuf) -> Call<()>;
    /// Moves the running domain to another libvirt daemon. Returns when the domain has ended here, or after a failure.
    fn migrate(&self, migration: MigrateCall) -> Call<()>;
    /// Reads the progress of the migration in progress; `None` without one.
    fn migration_progress(&self) -> Call<Option<Progress>>;
    /// Aborts the migration in progress.
    fn abort_migration(&self) -> Call<()>;
    /// Lets the guest of a migration leave at once, before all memory is copied.
    fn start_post_copy(&self) -> Call<()>;
    /// Sets the longest time in milliseconds for which no guest runs.
    fn set_max_downtime(&self, milliseconds: u64) -> Call<()>;
    /// Sets the guest's clock, in seconds since 1970, through the guest agent.
    fn set_time(&self, seconds: i64) -> Call<()>;
    /// Sends a command (JSON) to the guest agent and returns its answer (JSON).
    fn guest_agent_command(&self, command: String, deadline: Duration) -> Call<String>;
    /// Returns the domain's statistics.
    fn stats(&self) -> Call<StatsReply>;
    /// Takes a screenshot of the first display: MIME type and bytes.
    fn screenshot(&self) -> Call<(String, Vec<u8>)>;
}

/// Way of a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum MigrateWay {
    /// All memory is copied before the guest leaves. It arrives paused.
    #[default]
    PreCopy,
    /// The guest leaves when post-copy is started, and runs at the target at once.
    PostCopy,
}

/// Parameters of a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MigrateCall {
    /// Socket of the control connection, of the memory and of the disks. That of the memory and of the disks is the same path in
    /// both pods.
    pub(crate) control: PathBuf,
    /// See `control`.
    pub(crate) memory: PathBuf,
    /// See `control`.
    pub(crate) disks: PathBuf,
    /// How the guest leaves.
    pub(crate) way: MigrateWay,
    /// Device names of the disks that are copied.
    pub(crate) copied: Vec<String>,
    /// Those of them that have another file or device at the target, or that may be larger there.
    pub(crate) moved: Vec<MovedDisk>,
    /// CPUs of the target's pod for the threads of the domain; `None` if they are not dedicated.
    pub(crate) pinning: Option<Pinning>,
    /// Bytes a second; 0: no limit.
    pub(crate) bandwidth: u64,
    /// Slows the guest down if its memory changes faster than it is copied.
    pub(crate) auto_converge: bool,
    /// Continues a migration that libvirt regards as unsafe.
    pub(crate) allow_unsafe: bool,
    /// Connections for the memory; 0 or 1: one.
    pub(crate) memory_connections: u32,
}

/// Progress of a migration. Sizes in bytes of memory and disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Size of everything.
    pub(crate) total: u64,
    /// Size of the disks in it.
    pub(crate) disks: u64,
    /// Copied.
    pub(crate) processed: u64,
    /// To be copied.
    pub(crate) remaining: u64,
    /// Bytes a second.
    pub(crate) rate: u64,
    /// Bytes of memory a second that the guest changes.
    pub(crate) dirty_rate: u64,
    /// Number of passes over the memory.
    pub(crate) iteration: u64,
    /// Time for which no guest ran, in milliseconds.
    pub(crate) downtime_ms: u64,
}

/// Error of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskFailure {
    /// Reading or writing failed.
    InputOutput,
    /// Its storage is full.
    NoSpace,
}

/// Method of a guest's reboot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RebootWay {
    /// Through the guest agent.
    GuestAgent,
    /// By the ACPI power button.
    Acpi,
}

/// Facts of a domain, read in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DomainFacts {
    /// State.
    pub(crate) lifecycle: Lifecycle,
    /// Reason of the state, in libvirt's words.
    pub(crate) reason: &'static str,
    /// Current balloon size in bytes.
    pub(crate) memory: u64,
    /// Active domain XML; empty if the domain does not run.
    pub(crate) xml: String,
    /// Disks with an error, by target, while the guest is stopped by one.
    pub(crate) disk_errors: Vec<(String, DiskFailure)>,
}
