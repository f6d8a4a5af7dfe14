//! Rates between two readings of a domain's counters.

use api::subresources::DomainUsage;
use serde_json::{Value, json};

/// Rates of a domain.
#[derive(Debug, PartialEq)]
pub(super) struct Rates {
    /// Processors in use.
    pub cpu: Option<f64>,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Bytes that the guest uses, else the resident memory of the domain's process.
    pub memory_used: Option<u64>,
    /// Memory that the guest has.
    pub memory_total: Option<u64>,
    /// Disks: bytes read and written per second.
    pub disks: Vec<Device>,
    /// Interfaces: bytes received and sent per second.
    pub interfaces: Vec<Device>,
}

/// Rates of a device.
#[derive(Debug, PartialEq)]
pub(super) struct Device {
    /// Name in the spec.
    pub name: String,
    /// Bytes per second in both directions.
    pub bytes: Option<(f64, f64)>,
}

impl Rates {
    /// Returns the sums of all disks.
    pub(super) fn disk(&self) -> Option<(f64, f64)> {
        sum(&self.disks)
    }

    /// Returns the sums of all interfaces.
    pub(super) fn network(&self) -> Option<(f64, f64)> {
        sum(&self.interfaces)
    }

    /// Returns the part of the guest's memory that is in use.
    #[expect(clippy::cast_precision_loss, reason = "a percentage is printed")]
    pub(super) fn memory_share(&self) -> Option<f64> {
        let total = self.memory_total.filter(|total| *total > 0)?;
        Some(self.memory_used? as f64 / total as f64)
    }

    /// Returns the rates as a document.
    pub(super) fn document(&self) -> Value {
        let devices = |devices: &[Device], first: &str, second: &str| {
            let device = |device: &Device| {
                let mut shown = json!({"name": device.name});
                if let Some((one, other)) = device.bytes {
                    shown[first] = json!(one);
                    shown[second] = json!(other);
                }
                shown
            };
            devices.iter().map(device).collect::<Vec<_>>()
        };
        json!({
            "vcpus": self.vcpus, "cpuCores": self.cpu,
            "memory": {"usedBytes": self.memory_used, "guestBytes": self.memory_total},
            "disks": devices(&self.disks, "readBytesPerSecond", "writeBytesPerSecond"),
            "interfaces": devices(&self.interfaces, "receiveBytesPerSecond", "transmitBytesPerSecond"),
        })
    }
}

fn sum(devices: &[Device]) -> Option<(f64, f64)> {
    let mut known = devices.iter().filter_map(|device| device.bytes).peekable();
    known.peek()?;
    Some(known.fold((0.0, 0.0), |sum, bytes| (sum.0 + bytes.0, sum.1 + bytes.1)))
}

/// Returns the growth of a counter per second. A counter that has shrunk began anew: the domain was started or migrated.
#[expect(clippy::cast_precision_loss, reason = "rates are rounded anyway")]
fn rate(before: u64, after: u64, seconds: f64) -> Option<f64> {
    let grown = after.checked_sub(before)?;
    (seconds > 0.0).then(|| grown as f64 / seconds)
}

/// Returns the rates between two readings.
pub(super) fn rates(before: &DomainUsage, after: &DomainUsage) -> Rates {
    let seconds = after.timestamp.0.duration_since(before.timestamp.0).as_secs_f64();
    let both = |first: (u64, u64), second: (u64, u64)| {
        Some((rate(first.0, second.0, seconds)?, rate(first.1, second.1, seconds)?))
    };
    let cpu = before.cpu_nanoseconds.zip(after.cpu_nanoseconds);
    let memory = &after.memory;
    let guest_used = memory.available_bytes.zip(memory.usable_bytes);
    let guest_used = guest_used.map(|(available, usable)| available.saturating_sub(usable));
    let disks = after.disks.iter().map(|disk| {
        let former = before.disks.iter().find(|former| former.name == disk.name);
        let bytes = former
            .and_then(|former| both((former.read_bytes, former.write_bytes), (disk.read_bytes, disk.write_bytes)));
        Device { name: disk.name.clone(), bytes }
    });
    let interfaces = after.interfaces.iter().map(|nic| {
        let former = before.interfaces.iter().find(|former| former.name == nic.name);
        let bytes = former.and_then(|former| {
            both((former.receive_bytes, former.transmit_bytes), (nic.receive_bytes, nic.transmit_bytes))
        });
        Device { name: nic.name.clone(), bytes }
    });
    Rates {
        cpu: cpu.and_then(|(first, second)| rate(first, second, seconds)).map(|nanoseconds| nanoseconds / 1e9),
        vcpus: after.vcpus,
        memory_used: guest_used.or(memory.resident_bytes),
        memory_total: if guest_used.is_some() { memory.available_bytes } else { memory.domain_bytes },
        disks: disks.collect(),
        interfaces: interfaces.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(second: u64, cpu: u64, more: Value) -> DomainUsage {
        let mut usage = json!({
            "timestamp": format!("2026-11-29T06:00:{second:02}.500000Z"), "vcpus": 1, "cpuNanoseconds": cpu,
        });
        if let (Some(usage), Value::Object(more)) = (usage.as_object_mut(), more) {
            usage.extend(more);
        }
        serde_json::from_value(usage).unwrap()
    }

    #[test]
    fn rates_are_differences_per_second() {
        let (empty, second) = (|| json!({}), 1_000_000_000);
        for (before, after, cpu) in [
            (reading(0, 0, empty()), reading(2, second, empty()), Some(0.5)),
            (reading(0, 5, empty()), reading(2, 4, empty()), None),
            (reading(2, 0, empty()), reading(2, second, empty()), None),
        ] {
            assert_eq!(rates(&before, &after).cpu, cpu, "{after:?}");
        }
    }

    #[test]
    fn devices_are_compared_by_name_and_new_ones_have_no_rate_yet() {
        let disk = |name: &str, read: u64| json!({"name": name, "readBytes": read});
        let before = reading(0, 0, json!({"disks": [disk("b", 0), disk("a", 10)]}));
        let after = reading(1, 0, json!({"disks": [disk("a", 30), disk("b", 5), disk("c", 9)]}));
        let rates = rates(&before, &after);
        let bytes = rates.disks.iter().map(|disk| disk.bytes).collect::<Vec<_>>();
        assert_eq!(bytes, [Some((20.0, 0.0)), Some((5.0, 0.0)), None]);
        assert_eq!((rates.disk(), rates.network()), (Some((25.0, 0.0)), None));
    }

    #[test]
    fn memory_is_that_of_the_guest_if_its_balloon_reports_it() {
        for (memory, expected) in [
            (
                json!({"availableBytes": 100, "usableBytes": 30, "residentBytes": 500, "domainBytes": 128}),
                (Some(70), Some(100)),
            ),
            (json!({"residentBytes": 64, "domainBytes": 128}), (Some(64), Some(128))),
            (json!({}), (None, None)),
        ] {
            let after = reading(1, 0, json!({"memory": memory}));
            let rates = rates(&after, &after);
            assert_eq!((rates.memory_used, rates.memory_total), expected, "{memory}");
        }
    }
}
