//! Counters of a domain, read from its launcher.

use api::{
    VirtualMachineInstance,
    subresources::{DiskUsage, DomainUsage, InterfaceUsage, MemoryUsage},
};
use axum::{
    Json,
    extract::{Path, State},
};
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::MicroTime, jiff::Timestamp};
use protocol::{StatsReply, StatsRequest};

use super::{Failure, Served};
use crate::{launcher::CALL_TIMEOUT, vmi::Refusal};

pub(super) async fn serve(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
) -> Result<Json<DomainUsage>, Failure> {
    let handle = served.handle(&namespace, &name)?;
    let vmi = handle.vmi().ok_or_else(|| Failure::unknown(&namespace, &name))?;
    let _slot = served.call_slot(&namespace)?;
    let stats = handle.launcher()?.call(StatsRequest {}, CALL_TIMEOUT).await.map_err(Refusal::from)?;
    Ok(Json(usage(&vmi, &stats, MicroTime(Timestamp::now()))))
}

/// Returns the counters of the devices in the spec: a launcher must not make the answer longer.
fn usage(vmi: &VirtualMachineInstance, stats: &StatsReply, timestamp: MicroTime) -> DomainUsage {
    let devices = &vmi.spec.domain.devices;
    let disk = |name: &str| {
        let disk = stats.disks.iter().find(|known| known.name == name)?;
        Some(DiskUsage {
            name: name.to_owned(),
            read_bytes: disk.read_bytes,
            read_requests: disk.read_requests,
            write_bytes: disk.write_bytes,
            write_requests: disk.write_requests,
        })
    };
    let interface = |name: &str| {
        let interface = stats.interfaces.iter().find(|known| known.name == name)?;
        Some(InterfaceUsage {
            name: name.to_owned(),
            receive_bytes: interface.receive_bytes,
            receive_packets: interface.receive_packets,
            transmit_bytes: interface.transmit_bytes,
            transmit_packets: interface.transmit_packets,
        })
    };
    let memory = stats.memory.as_ref();
    let bytes = |kibibytes: Option<u64>| kibibytes.map(|size| size.saturating_mul(1024));
    DomainUsage {
        timestamp,
        vcpus: api::overhead::vcpus(&vmi.spec.domain),
        cpu_nanoseconds: stats.cpu.as_ref().map(|cpu| cpu.time),
        memory: MemoryUsage {
            domain_bytes: bytes(memory.and_then(|memory| memory.domain)),
            available_bytes: bytes(memory.and_then(|memory| memory.available)),
            usable_bytes: bytes(memory.and_then(|memory| memory.usable)),
            resident_bytes: bytes(memory.and_then(|memory| memory.resident)),
        },
        disks: devices.disks.iter().filter_map(|device| disk(&device.name)).collect(),
        interfaces: devices.interfaces.iter().filter_map(|device| interface(&device.name)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use protocol::{CpuStats, DiskStats, InterfaceStats, MemoryStats};
    use serde_json::json;

    use super::*;

    #[test]
    fn only_devices_of_the_spec_are_counted() {
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m"},
            "spec": {"domain": {"cpu": {"sockets": 2}, "devices": {
                "disks": [{"name": "root"}, {"name": "new"}], "interfaces": [{"name": "default", "masquerade": {}}],
            }}},
        }))
        .unwrap();
        let disk = |name: &str, read| DiskStats { name: name.into(), read_bytes: read, ..DiskStats::default() };
        let interface =
            |name: &str| InterfaceStats { name: name.into(), receive_bytes: 7, ..InterfaceStats::default() };
        let stats = StatsReply {
            cpu: Some(CpuStats { time: 9, ..CpuStats::default() }),
            memory: Some(MemoryStats { domain: Some(2), resident: Some(u64::MAX), ..MemoryStats::default() }),
            disks: vec![disk("invented", 1), disk("root", 5)],
            interfaces: vec![interface("invented"), interface("default")],
            ..StatsReply::default()
        };
        let usage = json!(usage(&vmi, &stats, MicroTime(Timestamp::UNIX_EPOCH)));
        assert_eq!((&usage["vcpus"], &usage["cpuNanoseconds"]), (&json!(2), &json!(9)));
        assert_eq!(usage["memory"], json!({"domainBytes": 2048, "residentBytes": u64::MAX}));
        assert_eq!(usage["disks"].as_array().map(Vec::len), Some(1), "{usage}");
        assert_eq!((&usage["disks"][0]["name"], &usage["disks"][0]["readBytes"]), (&json!("root"), &json!(5)));
        assert_eq!(usage["interfaces"].as_array().map(Vec::len), Some(1), "{usage}");
        assert_eq!(usage["timestamp"], "1970-01-01T00:00:00.000000Z");
    }
}
