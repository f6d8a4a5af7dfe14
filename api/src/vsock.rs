//! VSOCK: connections between host and guests without a network.

use crate::VirtualMachineInstance;

/// Context ID of the first guest. Lower ones stand for hypervisor, loopback and host.
pub const FIRST_CID: u32 = 3;
/// Context ID of the last guest. The next one stands for any.
pub const LAST_CID: u32 = u32::MAX - 1;
/// Host port at which guests get the installation's CA certificates.
pub const SYSTEM_PORT: u32 = 1;

/// Returns true for context IDs that a guest can have.
#[must_use]
pub fn is_guest(cid: u32) -> bool {
    (FIRST_CID..=LAST_CID).contains(&cid)
}

/// Returns true if the VMI has a VSOCK device.
#[must_use]
pub fn is_attached(instance: &VirtualMachineInstance) -> bool {
    instance.spec.domain.devices.autoattach_vsock == Some(true)
}

/// Returns the context ID of a VMI, if it has a valid one.
#[must_use]
pub fn cid(instance: &VirtualMachineInstance) -> Option<u32> {
    instance.status.as_ref()?.vsock_cid.filter(|cid| is_guest(*cid))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reserved_context_ids_are_rejected() {
        for (value, expected) in [
            (json!(null), None),
            (json!(0), None),
            (json!(1), None),
            (json!(2), None),
            (json!(3), Some(3)),
            (json!(4_294_967_294_u32), Some(LAST_CID)),
            (json!(4_294_967_295_u32), None),
        ] {
            let instance: VirtualMachineInstance = serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m"},
                "spec": {"domain": {"devices": {"autoattachVSOCK": true}}},
                "status": {"VSOCKCID": value},
            }))
            .unwrap();
            assert_eq!(cid(&instance), expected, "{value}");
            assert!(is_attached(&instance));
        }
    }
}
