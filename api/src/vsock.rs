//! VSOCK: connections between a host and its guests that take no network.

use crate::VirtualMachineInstance;

/// Context id of the first guest: those below stand for hypervisor, loopback and host.
pub const FIRST_CID: u32 = 3;
/// Context id of the last guest: the one above stands for any.
pub const LAST_CID: u32 = u32::MAX - 1;
/// Port of the host at which guests get the certificates of the installation's authorities.
pub const SYSTEM_PORT: u32 = 1;

/// Whether a guest can have this context id.
#[must_use]
pub fn is_guest(cid: u32) -> bool {
    (FIRST_CID..=LAST_CID).contains(&cid)
}

/// Whether the machine has a VSOCK device.
#[must_use]
pub fn is_attached(instance: &VirtualMachineInstance) -> bool {
    instance.spec.domain.devices.autoattach_vsock == Some(true)
}

/// The context id of a machine, if it was given one that a guest can have.
#[must_use]
pub fn cid(instance: &VirtualMachineInstance) -> Option<u32> {
    instance.status.as_ref()?.vsock_cid.filter(|cid| is_guest(*cid))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reserved_context_ids_are_nobodys() {
        for (told, expected) in [
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
                "status": {"VSOCKCID": told},
            }))
            .unwrap();
            assert_eq!(cid(&instance), expected, "{told}");
            assert!(is_attached(&instance));
        }
    }
}
