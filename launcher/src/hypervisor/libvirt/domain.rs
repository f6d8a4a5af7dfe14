//! libvirt's calls for the VMI's domain.

use std::{path::PathBuf, sync::Arc, time::Duration};

use protocol::StatsReply;
use virt::{connect::Connect, domain::Domain as VirtDomain, stream::Stream, sys};

use super::{
    callbacks,
    connection::{CallKind, Connection},
    lifecycle::{is_io_error, lifecycle},
    migration, stats,
};
use crate::{
    domain::{
        destination::{MovedDisk, destination_xml},
        pinning::Pinning,
        resumed::resumed_xml,
    },
    hypervisor::{
        Call, DeviceChange, Domain, DomainFacts, HypervisorError, MigrateCall, MigrateWay, Progress, RebootWay, Signals,
    },
};

/// Time limit of a plain call.
const CALL_DEADLINE: Duration = Duration::from_secs(20);
/// Time after which a reboot has reached the guest agent: a former query of it takes at most 10 s, and libvirt gives up a
/// silent guest agent after 5 s. Then libvirt waits until the guest has ended its services. Shorter than the deadlines of
/// virt-handler (20 s) and virt-api (25 s).
const REBOOT_DEADLINE: Duration = Duration::from_secs(16);
/// Limit of a memory dump: a terabyte on slow storage.
const DUMP_DEADLINE: Duration = Duration::from_secs(3600);
/// Limit of a migration. The engine has its own limits, which abort it; this one bounds a daemon that never answers.
const MIGRATE_DEADLINE: Duration = Duration::from_secs(30 * 24 * 3600);
/// Time limit of QEMU's start.
const CREATE_DEADLINE: Duration = Duration::from_secs(120);
/// Time limit of statistics.
const STATS_DEADLINE: Duration = Duration::from_secs(3);
/// Time limit of setting the guest's clock.
const SET_TIME_DEADLINE: Duration = Duration::from_secs(10);
/// Time beyond its own limit that libvirt has to report a guest agent without answer.
const AGENT_GRACE: Duration = Duration::from_secs(2);
/// Prefix of libvirt's message for an error of the guest agent (`qemuAgentCheckError`).
const GUEST_AGENT_REFUSED: &str = "unable to execute QEMU agent command";
/// Limit of a screenshot, in bytes of its uncompressed form (a little above 3840x2160 in 24 bit).
const SCREENSHOT_LIMIT: usize = 32 * 1024 * 1024;

/// The VMI's domain through a connection to libvirt's daemon.
pub(super) struct LibvirtDomain {
    connection: Connection,
    name: String,
}

impl LibvirtDomain {
    pub(super) const fn new(connection: Connection, name: String) -> Self {
        Self { connection, name }
    }

    /// Runs an ordinary call with the domain.
    fn call<T, F>(&self, what: &'static str, deadline: Duration, call: F) -> Call<T>
    where
        T: Send + 'static,
        F: FnOnce(&VirtDomain) -> Result<T, HypervisorError> + Send + 'static,
    {
        self.call_of(CallKind::Ordinary, what, deadline, call)
    }

    /// Runs a call of this kind with the domain.
    fn call_of<T, F>(&self, kind: CallKind, what: &'static str, deadline: Duration, call: F) -> Call<T>
    where
        T: Send + 'static,
        F: FnOnce(&VirtDomain) -> Result<T, HypervisorError> + Send + 'static,
    {
        let name = self.name.clone();
        self.run(kind, what, deadline, move |connect| {
            without_zero(&name)?;
            call(&VirtDomain::lookup_by_name(connect, &name)?)
        })
    }

    /// Runs a call of this kind with the connection.
    fn run<T, F>(&self, kind: CallKind, what: &'static str, deadline: Duration, call: F) -> Call<T>
    where
        T: Send + 'static,
        F: FnOnce(&Connect) -> Result<T, HypervisorError> + Send + 'static,
    {
        let connection = self.connection.clone();
        Box::pin(async move { connection.run(kind, what, deadline, call).await })
    }
}

/// Rejects a string that libvirt's C interface would cut off.
fn without_zero(text: &str) -> Result<(), HypervisorError> {
    if text.contains('\0') { Err(HypervisorError::ZeroByte) } else { Ok(()) }
}

/// Returns the XML with which the domain arrives at the target; `None` if it is as it is here.
fn destination(
    domain: &VirtDomain,
    moved: &[MovedDisk],
    pinning: Option<&Pinning>,
) -> Result<Option<String>, HypervisorError> {
    if moved.is_empty() && pinning.is_none() {
        return Ok(None);
    }
    let mut disks = Vec::with_capacity(moved.len());
    for disk in moved {
        without_zero(&disk.target)?;
        // The size that the guest sees, also of a disk that was moved before and is smaller than its claim.
        disks.push((disk.clone(), domain.get_block_info(&disk.target, 0)?.capacity));
    }
    let xml = domain.get_xml_desc(sys::VIR_DOMAIN_XML_MIGRATABLE | sys::VIR_DOMAIN_XML_SECURE)?;
    destination_xml(&xml, &disks, pinning).map(Some).ok_or(HypervisorError::NoDestination)
}

impl Domain for LibvirtDomain {
    fn signals(&self) -> Arc<Signals> {
        self.connection.signals().clone()
    }

    /// Reads the capabilities cache and the CPU models in the daemon (30 ms). The answer, QEMU's version, is discarded.
    fn warm_up(&self) -> Call<()> {
        self.run(CallKind::Ordinary, "version", CALL_DEADLINE, |connect| Ok(connect.get_hyp_version().map(drop)?))
    }

    fn define(&self, xml: String) -> Call<()> {
        self.run(CallKind::Ordinary, "define", CALL_DEADLINE, move |connect| {
            without_zero(&xml)?;
            Ok(VirtDomain::define_xml(connect, &xml).map(drop)?)
        })
    }

    fn definition(&self) -> Call<String> {
        self.call("definition", CALL_DEADLINE, |domain| Ok(domain.get_xml_desc(sys::VIR_DOMAIN_XML_INACTIVE)?))
    }

    fn create(&self, paused: bool) -> Call<()> {
        let flags = if paused { sys::VIR_DOMAIN_START_PAUSED } else { sys::VIR_DOMAIN_NONE };
        self.call("create", CREATE_DEADLINE, move |domain| Ok(domain.create_with_flags(flags).map(drop)?))
    }

    fn facts(&self) -> Call<DomainFacts> {
        self.call("state", CALL_DEADLINE, |domain| {
            let (state, reason) = domain.get_state()?;
            let active = domain.is_active()?;
            let memory = if active { domain.get_info()?.memory.saturating_mul(1024) } else { 0 };
            let xml = if active { domain.get_xml_desc(0)? } else { String::new() };
            let disk_errors = if is_io_error(state, reason) { callbacks::disk_errors(domain) } else { Ok(Vec::new()) };
            // The state is valid even if the failing disk is unknown.
            let disk_errors = disk_errors.unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot read the errors of the domain's disks");
                Vec::new()
            });
            let (lifecycle, reason) = lifecycle(state, reason);
            Ok(DomainFacts { lifecycle, reason, memory, xml, disk_errors })
        })
    }

    fn suspend(&self) -> Call<()> {
        self.call("suspend", CALL_DEADLINE, |domain| Ok(domain.suspend().map(drop)?))
    }

    fn resume(&self) -> Call<()> {
        self.call("resume", CALL_DEADLINE, |domain| Ok(domain.resume().map(drop)?))
    }

    fn reset(&self) -> Call<()> {
        self.call("reset", CALL_DEADLINE, |domain| Ok(domain.reset().map(drop)?))
    }

    fn reboot(&self, way: RebootWay) -> Call<()> {
        let (kind, flags) = match way {
            RebootWay::GuestAgent => (CallKind::GuestAgent, sys::VIR_DOMAIN_REBOOT_GUEST_AGENT),
            RebootWay::Acpi => (CallKind::Ordinary, sys::VIR_DOMAIN_REBOOT_ACPI_POWER_BTN),
        };
        let reboot = self.call_of(kind, "reboot", REBOOT_DEADLINE, move |domain| Ok(domain.reboot(flags).map(drop)?));
        Box::pin(async move { rebooted(way, reboot.await) })
    }

    fn shutdown(&self) -> Call<()> {
        // libvirt tries the guest agent first, if one is connected.
        self.call_of(CallKind::GuestAgent, "shutdown", CALL_DEADLINE, |domain| {
            Ok(domain.shutdown_flags(sys::VIR_DOMAIN_SHUTDOWN_DEFAULT).map(drop)?)
        })
    }

    fn destroy(&self, gently: bool) -> Call<()> {
        let flags = if gently { sys::VIR_DOMAIN_DESTROY_GRACEFUL } else { sys::VIR_DOMAIN_DESTROY_DEFAULT };
        self.call_of(CallKind::End, "destroy", CALL_DEADLINE, move |domain| {
            Ok(domain.destroy_flags(flags).map(drop)?)
        })
    }

    fn grow_disk(&self, target: String, size: u64) -> Call<bool> {
        self.call("grow a disk", CALL_DEADLINE, move |domain| {
            without_zero(&target)?;
            if domain.get_block_info(&target, 0)?.capacity >= size {
                return Ok(false);
            }
            domain.block_resize(&target, size, sys::VIR_DOMAIN_BLOCK_RESIZE_BYTES)?;
            Ok(true)
        })
    }

    fn plug_vcpus(&self, vcpus: u32) -> Call<()> {
        // libvirt plugs one after the other.
        self.call("plug vCPUs", CREATE_DEADLINE, move |domain| {
            let apply = |flags: u32| domain.set_vcpus_flags(vcpus, flags).map(drop).map_err(HypervisorError::from);
            match apply(sys::VIR_DOMAIN_VCPU_LIVE | sys::VIR_DOMAIN_VCPU_CONFIG) {
                // The domain counts. Each start defines it anew.
                Err(HypervisorError::Libvirt { .. }) => apply(sys::VIR_DOMAIN_VCPU_LIVE),
                result => result,
            }
        })
    }

    fn dump_memory(&self, path: PathBuf) -> Call<()> {
        self.call_of(CallKind::Job, "dump the memory", DUMP_DEADLINE, move |domain| {
            let path = path.to_string_lossy();
            without_zero(&path)?;
            let format = sys::VIR_DOMAIN_CORE_DUMP_FORMAT_RAW;
            domain
                .core_dump_with_format(&path, format, sys::VIR_DUMP_MEMORY_ONLY)
                .map(drop)
                .map_err(HypervisorError::from)
        })
    }

    fn save_memory(&self, path: PathBuf) -> Call<()> {
        self.call_of(CallKind::Job, "save the memory", DUMP_DEADLINE, move |domain| {
            callbacks::save(domain, &path.to_string_lossy())
        })
    }

    fn restore_memory(&self, path: PathBuf) -> Call<()> {
        let name = self.name.clone();
        self.run(CallKind::Job, "restore the memory", DUMP_DEADLINE, move |connect| {
            let path = path.to_string_lossy();
            without_zero(&name)?;
            without_zero(&path)?;
            let definition = VirtDomain::lookup_by_name(connect, &name)?;
            let definition = definition.get_xml_desc(sys::VIR_DOMAIN_XML_INACTIVE | sys::VIR_DOMAIN_XML_SECURE)?;
            let saved = VirtDomain::save_image_get_xml_desc(connect, &path, 0)?;
            let xml = resumed_xml(&definition, &saved)
                .ok_or_else(|| HypervisorError::SavedMemory("the file does not describe its domain".into()))?;
            without_zero(&xml)?;
            Ok(VirtDomain::domain_restore_flags(connect, &path, Some(&xml), sys::VIR_DOMAIN_SAVE_PAUSED)?)
        })
    }

    fn change_device(&self, change: DeviceChange, xml: String) -> Call<()> {
        self.call("change a device", CALL_DEADLINE, move |domain| {
            without_zero(&xml)?;
            let apply = |flags: u32| {
                match change {
                    DeviceChange::Attach => domain.attach_device_flags(&xml, flags),
                    DeviceChange::Detach => domain.detach_device_flags(&xml, flags),
                    DeviceChange::Update => domain.update_device_flags(&xml, flags),
                }
                .map(drop)
                .map_err(HypervisorError::from)
            };
            match apply(sys::VIR_DOMAIN_AFFECT_LIVE | sys::VIR_DOMAIN_AFFECT_CONFIG) {
                // Of a repeated request, the definition may have the result already. Each start defines the domain anew.
                Err(HypervisorError::Libvirt { .. }) => apply(sys::VIR_DOMAIN_AFFECT_LIVE),
                result => result,
            }
        })
    }

    fn migrate(&self, migration: MigrateCall) -> Call<()> {
        self.call_of(CallKind::Job, "migrate", MIGRATE_DEADLINE, move |domain| {
            let xml = destination(domain, &migration.moved, migration.pinning.as_ref())?;
            let (control, parameters, flags) = migration::parameters(&migration, xml)?;
            if migration.way == MigrateWay::PostCopy {
                // The guest must not leave before post-copy is started: libvirt could resume it at both ends then.
                domain.migrate_set_max_downtime(0, 0)?;
            }
            domain
                .migrate_to_uri3(Some(&control), parameters, flags)
                .map_err(|error| migration::failure(HypervisorError::from(error)))
        })
    }

    fn migration_progress(&self) -> Call<Option<Progress>> {
        self.call("progress of the migration", STATS_DEADLINE, |domain| {
            Ok(migration::progress(&callbacks::job_stats(domain)?))
        })
    }

    fn abort_migration(&self) -> Call<()> {
        self.call_of(CallKind::End, "abort the migration", CALL_DEADLINE, callbacks::abort_job)
    }

    fn start_post_copy(&self) -> Call<()> {
        self.call("start post-copy", CALL_DEADLINE, callbacks::start_post_copy)
    }

    fn set_max_downtime(&self, milliseconds: u64) -> Call<()> {
        self.call("set the longest downtime", CALL_DEADLINE, move |domain| {
            Ok(domain.migrate_set_max_downtime(milliseconds, 0).map(drop)?)
        })
    }

    fn set_time(&self, seconds: i64) -> Call<()> {
        self.call_of(CallKind::GuestAgent, "set time", SET_TIME_DEADLINE, move |domain| {
            Ok(domain.set_time(seconds, 0, 0).map(drop)?)
        })
    }

    fn guest_agent_command(&self, command: String, deadline: Duration) -> Call<String> {
        // libvirt's own limit ends first, so that no thread stays behind.
        let seconds = i32::try_from(deadline.as_secs().max(1)).unwrap_or(i32::MAX);
        self.call_of(CallKind::GuestAgent, "guest agent", deadline + AGENT_GRACE, move |domain| {
            without_zero(&command)?;
            match domain.qemu_agent_command(&command, seconds, 0) {
                Ok(answer) => Ok(answer),
                // libvirt uses one error number for errors of the guest agent and its own failures; only the message
                // differs.
                Err(error) if error.message().contains(GUEST_AGENT_REFUSED) => {
                    Err(HypervisorError::GuestAgentRefused(error.message().to_owned()))
                }
                Err(error) => Err(error.into()),
            }
        })
    }

    fn stats(&self) -> Call<StatsReply> {
        self.call("stats", STATS_DEADLINE, |domain| {
            let parameters = callbacks::domain_stats(domain)?;
            // The other statistics are valid without it.
            let maps = callbacks::vcpu_maps(domain, stats::most_vcpus(&parameters)).ok();
            let cpu_affinity = maps.map(|maps| stats::pairs(&maps));
            Ok(StatsReply { cpu_affinity, ..stats::stats(&parameters, &domain.get_xml_desc(0)?) })
        })
    }

    fn screenshot(&self) -> Call<(String, Vec<u8>)> {
        let name = self.name.clone();
        self.run(CallKind::Ordinary, "screenshot", CALL_DEADLINE, move |connect| {
            let domain = VirtDomain::lookup_by_name(connect, &name)?;
            let stream = Stream::new(connect, 0)?;
            let kind = domain.screenshot(&stream, 0, 0)?;
            let mut picture = Vec::new();
            let mut buffer = vec![0; 64 * 1024];
            loop {
                match stream.recv(&mut buffer)? {
                    0 => break,
                    n if picture.len() + n > SCREENSHOT_LIMIT => {
                        stream.abort()?;
                        return Err(HypervisorError::PictureTooLarge);
                    }
                    n => picture.extend_from_slice(buffer.get(..n).unwrap_or_default()),
                }
            }
            stream.finish()?;
            Ok((kind, picture))
        })
    }
}

/// Returns the result of a request for a reboot. The guest agent ends with the guest's services: sooner, without an answer,
/// or so late that libvirt still waits for it.
fn rebooted(way: RebootWay, result: Result<(), HypervisorError>) -> Result<(), HypervisorError> {
    match (way, result) {
        (RebootWay::GuestAgent, Err(HypervisorError::GuestAgentUnresponsive(_) | HypervisorError::Timeout(_))) => {
            Ok(())
        }
        (_, result) => result,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Occupies all calls of a kind until the senders are dropped.
    async fn occupy(connection: &Connection, kind: CallKind) -> Vec<mpsc::Sender<()>> {
        let mut held = Vec::new();
        for _ in 0..kind.limit() {
            let (release, released) = mpsc::channel::<()>();
            let (started, has_started) = tokio::sync::oneshot::channel();
            let connection = connection.clone();
            tokio::spawn(async move {
                let block = move |_: &Connect| {
                    let _ = started.send(());
                    let _ = released.recv();
                    Ok(())
                };
                connection.run(kind, "test", CALL_DEADLINE, block).await
            });
            has_started.await.unwrap();
            held.push(release);
        }
        held
    }

    #[test]
    fn guest_that_ends_its_services_for_long_is_rebooted() {
        let refused = HypervisorError::GuestAgentRefused("no".to_owned());
        for (way, result, expected) in [
            (RebootWay::GuestAgent, Ok(()), Ok(())),
            (RebootWay::GuestAgent, Err(HypervisorError::GuestAgentUnresponsive("gone".to_owned())), Ok(())),
            (RebootWay::GuestAgent, Err(HypervisorError::Timeout("reboot")), Ok(())),
            (RebootWay::GuestAgent, Err(refused.clone()), Err(refused)),
            (RebootWay::GuestAgent, Err(HypervisorError::Busy), Err(HypervisorError::Busy)),
            (RebootWay::Acpi, Err(HypervisorError::Timeout("reboot")), Err(HypervisorError::Timeout("reboot"))),
        ] {
            assert_eq!(rebooted(way, result.clone()), expected, "{way:?} {result:?}");
        }
    }

    // libvirt's test driver needs no daemon. A wedged guest agent holds calls for as long as the guest runs.
    #[tokio::test]
    async fn domain_ends_while_all_other_calls_are_held() {
        let connection = Connection::open("test:///default".to_owned(), CALL_DEADLINE).await.unwrap();
        let domain = LibvirtDomain::new(connection.clone(), "test".to_owned());
        let guest_agent = occupy(&connection, CallKind::GuestAgent).await;
        assert_eq!(domain.guest_agent_command("{}".to_owned(), CALL_DEADLINE).await, Err(HypervisorError::Busy));
        assert_eq!(domain.set_time(0).await, Err(HypervisorError::Busy));
        assert_eq!(domain.shutdown().await, Err(HypervisorError::Busy));
        assert_eq!(domain.facts().await.map(|facts| facts.lifecycle), Ok(protocol::Lifecycle::Running));
        let ordinary = occupy(&connection, CallKind::Ordinary).await;
        assert_eq!(domain.facts().await, Err(HypervisorError::Busy));
        assert_eq!(domain.destroy(false).await, Ok(()));
        drop((guest_agent, ordinary));
        let ended = tokio::time::timeout(CALL_DEADLINE, async {
            loop {
                match domain.facts().await {
                    Err(HypervisorError::Busy) => tokio::time::sleep(Duration::from_millis(5)).await,
                    facts => return facts.map(|facts| facts.lifecycle),
                }
            }
        });
        assert_eq!(ended.await.unwrap(), Ok(protocol::Lifecycle::Shutoff));
    }
}
