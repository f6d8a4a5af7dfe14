//! Parameters and progress of a migration in libvirt's form. Pure.

use virt::{domain::MigrateParameters, sys};

use super::stats::Parameter;
use crate::hypervisor::{HypervisorError, MigrateCall, MigrateWay, Progress};

/// libvirt counts the bandwidth in MiB a second.
const MEBIBYTE: u64 = 1 << 20;

/// QEMU's message for a slice that exceeds its image or device (`raw_apply_options`).
const SLICE_TOO_LARGE: &str = "actual size of the containing file";

/// Returns the URI of the control connection, the parameters and the flags of a migration. `destination` is the XML with which the
/// domain arrives.
///
/// The daemons talk to each other (`PEER2PEER`), so the migration outlives the worker. The domain stays defined here, so that its
/// state says that it has migrated. It arrives paused: a guest runs there only after it has ended here. In post-copy it runs there
/// before; libvirt never resumes it here from then on.
pub(super) fn parameters(
    call: &MigrateCall,
    destination: Option<String>,
) -> Result<(String, MigrateParameters, u32), HypervisorError> {
    let mut flags = sys::VIR_MIGRATE_LIVE | sys::VIR_MIGRATE_PEER2PEER | sys::VIR_MIGRATE_PERSIST_DEST;
    flags |= match call.way {
        MigrateWay::PreCopy => sys::VIR_MIGRATE_PAUSED,
        MigrateWay::PostCopy => sys::VIR_MIGRATE_POSTCOPY,
    };
    let is_pre_copy = call.way == MigrateWay::PreCopy;
    let mut parameters =
        MigrateParameters { uri: Some(format!("unix://{}", call.memory.display())), ..MigrateParameters::default() };
    if !call.copied.is_empty() {
        flags |= sys::VIR_MIGRATE_NON_SHARED_INC;
        parameters.migrate_disks.clone_from(&call.copied);
        parameters.disks_uri = Some(format!("unix://{}", call.disks.display()));
    }
    if call.bandwidth > 0 {
        let limit = Some((call.bandwidth / MEBIBYTE).max(1));
        (parameters.bandwidth, parameters.bandwidth_postcopy) = (limit, limit.filter(|_| !is_pre_copy));
    }
    if call.auto_converge && is_pre_copy {
        flags |= sys::VIR_MIGRATE_AUTO_CONVERGE;
    }
    if call.allow_unsafe {
        flags |= sys::VIR_MIGRATE_UNSAFE;
    }
    // QEMU 10.0 has no post-copy over several connections.
    if call.memory_connections > 1 && is_pre_copy {
        flags |= sys::VIR_MIGRATE_PARALLEL;
        parameters.parallel_connections = i32::try_from(call.memory_connections).ok();
    }
    // Also that of the definition: a target that persists the source's would have its disks.
    parameters.persist_xml.clone_from(&destination);
    parameters.dest_xml = destination;
    let control = format!("qemu+unix:///session?socket={}", call.control.display());
    let texts = [Some(&control), parameters.uri.as_ref(), parameters.disks_uri.as_ref(), parameters.dest_xml.as_ref()];
    if texts.into_iter().flatten().chain(&parameters.migrate_disks).any(|text| text.contains('\0')) {
        return Err(HypervisorError::ZeroByte);
    }
    Ok((control, parameters, flags))
}

/// Returns the failure of a migration. QEMU of the target refuses a disk that does not fit into its claim before any data is copied.
pub(super) fn failure(error: HypervisorError) -> HypervisorError {
    match error {
        HypervisorError::Libvirt { message, .. } if message.contains(SLICE_TOO_LARGE) => {
            HypervisorError::DestinationTooSmall(message)
        }
        error => error,
    }
}

/// Returns the progress that statistics of a job report; `None` if there is none.
pub(super) fn progress(statistics: &[(String, Parameter)]) -> Option<Progress> {
    let number = |name: &str| {
        statistics.iter().find(|(known, _)| known == name).and_then(|(_, value)| match value {
            Parameter::Number(number) => Some(*number),
            Parameter::Text(_) => None,
        })
    };
    if statistics.is_empty() {
        return None;
    }
    let page = number("memory_page_size").unwrap_or(4096);
    Some(Progress {
        total: number("data_total").unwrap_or(0),
        disks: number("disk_total").unwrap_or(0),
        processed: number("data_processed").unwrap_or(0),
        remaining: number("data_remaining").unwrap_or(0),
        rate: number("memory_bps").unwrap_or(0).saturating_add(number("disk_bps").unwrap_or(0)),
        dirty_rate: number("memory_dirty_rate").unwrap_or(0).saturating_mul(page),
        iteration: number("memory_iteration").unwrap_or(0),
        downtime_ms: number("downtime").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call() -> MigrateCall {
        MigrateCall { control: "/p/c".into(), memory: "/p/m".into(), disks: "/p/d".into(), ..MigrateCall::default() }
    }

    #[test]
    fn a_migration_is_live_between_daemons_and_arrives_paused() {
        let (control, parameters, flags) = parameters(&call(), None).unwrap();
        assert_eq!(control, "qemu+unix:///session?socket=/p/c");
        assert_eq!(parameters.uri.as_deref(), Some("unix:///p/m"));
        assert_eq!((parameters.disks_uri, parameters.bandwidth, parameters.migrate_disks.len()), (None, None, 0));
        assert_eq!((parameters.dest_xml, parameters.persist_xml), (None, None));
        assert_eq!(flags, 1 | 2 | 8 | 32);
    }

    #[test]
    fn options_become_flags_and_parameters() {
        let options = MigrateCall {
            copied: vec!["vda".into()],
            bandwidth: 5 << 20,
            auto_converge: true,
            allow_unsafe: true,
            memory_connections: 4,
            ..call()
        };
        let (_, found, flags) = parameters(&options, None).unwrap();
        assert_eq!(flags & !(1 | 2 | 8 | 32), 128 | 512 | 8192 | 131_072);
        assert_eq!((found.disks_uri.as_deref(), found.bandwidth), (Some("unix:///p/d"), Some(5)));
        assert_eq!((found.migrate_disks, found.parallel_connections), (vec!["vda".to_owned()], Some(4)));
        let slow = MigrateCall { bandwidth: 1, ..call() };
        assert_eq!(parameters(&slow, None).unwrap().1.bandwidth, Some(1), "0 would be no limit");
        let broken = MigrateCall { copied: vec!["v\0".into()], ..call() };
        assert_eq!(parameters(&broken, None).err(), Some(HypervisorError::ZeroByte));
    }

    #[test]
    fn a_domain_arrives_and_stays_with_the_disks_of_the_target() {
        let (_, found, flags) = parameters(&call(), Some("<domain/>".into())).unwrap();
        assert_eq!((found.dest_xml.as_deref(), found.persist_xml.as_deref()), (Some("<domain/>"), Some("<domain/>")));
        assert_eq!(flags, 1 | 2 | 8 | 32);
        assert_eq!(parameters(&call(), Some("<\0".into())).err(), Some(HypervisorError::ZeroByte));
    }

    #[test]
    fn a_claim_that_is_too_small_is_named_as_the_cause() {
        let libvirt = |message: &str| HypervisorError::Libvirt { code: 1, message: message.into() };
        let qemu = "internal error: QEMU unexpectedly closed the monitor (vm='ns_box'): -blockdev {}: The sum of offset (0) and size \
                    (8) has to be smaller or equal to the  actual size of the containing file (4)";
        let text = failure(libvirt(qemu)).to_string();
        let cause =
            "Volume migration cannot be performed because the destination volume is smaller than the source volume: ";
        assert_eq!(text.strip_prefix(cause), Some(qemu));
        for error in [libvirt("broken"), HypervisorError::NoDomain] {
            assert_eq!(failure(error.clone()), error);
        }
    }

    #[test]
    fn a_guest_in_post_copy_runs_at_the_target_at_once() {
        let options = MigrateCall { bandwidth: 5 << 20, auto_converge: true, memory_connections: 4, ..call() };
        let call = MigrateCall { way: MigrateWay::PostCopy, ..options.clone() };
        let (_, found, flags) = parameters(&call, None).unwrap();
        assert_eq!(flags, 1 | 2 | 8 | 32_768);
        assert_eq!((found.bandwidth, found.bandwidth_postcopy), (Some(5), Some(5)));
        assert_eq!(found.parallel_connections, None);
        assert_eq!(parameters(&options, None).unwrap().1.bandwidth_postcopy, None);
    }

    #[test]
    fn progress_is_read_from_the_statistics_of_the_job() {
        assert_eq!(progress(&[]), None);
        let statistics = [
            ("data_total", 100),
            ("disk_total", 40),
            ("data_remaining", 30),
            ("memory_bps", 5),
            ("disk_bps", 2),
            ("memory_dirty_rate", 3),
            ("memory_page_size", 10),
        ];
        let statistics = statistics.map(|(name, value)| (name.to_owned(), Parameter::Number(value)));
        let expected =
            Progress { total: 100, disks: 40, remaining: 30, rate: 7, dirty_rate: 30, ..Progress::default() };
        assert_eq!(progress(&statistics), Some(expected));
    }
}
