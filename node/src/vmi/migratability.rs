//! Obstacles to the live migration of a VMI.

use api::{
    VirtualMachineInstance,
    constants::reason::NOT_MIGRATABLE,
    tsc::{self, Need},
    virtiofs,
};
use protocol::features::Feature;

/// An obstacle to a live migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Obstacle {
    /// Reason of the condition.
    pub reason: &'static str,
    pub message: String,
    /// It is also an obstacle to a migration that copies storage.
    pub with_storage: bool,
}

/// Access mode of a claim that several nodes can write.
const SHARED: &str = "ReadWriteMany";
/// Annotation that permits migration with a bridge binding on the pod network.
const ALLOW_BRIDGE: &str = "kubevirt.io/allow-pod-bridge-network-live-migration";

/// Returns all obstacles; the condition shows the first one. `lacks_feature`: the launcher is of a release without live
/// migration.
pub(super) fn obstacles(vmi: &VirtualMachineInstance, lacks_feature: bool) -> Vec<Obstacle> {
    let mut found = Vec::new();
    let mut add = |reason, message: String, with_storage| found.push(Obstacle { reason, message, with_storage });
    if let Some(message) = interface(vmi) {
        add("InterfaceNotLiveMigratable", message, true);
    }
    let domain = &vmi.spec.domain;
    if !domain.devices.host_devices.is_empty() {
        add("HostDeviceNotLiveMigratable", "VMI specifies non-migratable generic PCI host device".into(), true);
    }
    match domain.devices.gpus.len() {
        0 => {}
        1 => {
            let message = "VMI specifies a GPU but feature gate VGPULiveMigration is not enabled";
            add("HostDeviceNotLiveMigratable", message.into(), true);
        }
        _ => add("HostDeviceNotLiveMigratable", "VMI specifies too many GPUs".into(), true),
    }
    if let Some(security) = &domain.launch_security {
        if security.sev.is_some() || security.snp.is_some() {
            add("SEVNotLiveMigratable", "VMI uses SEV".into(), true);
        }
        if security.tdx.is_some() {
            add("TDXNotLiveMigratable", "VMI uses TDX".into(), true);
        }
    }
    let unmet = match tsc::need(vmi) {
        Need::Nothing => None,
        Need::Migration => Some(
            "HyperV Reenlightenment VMIs cannot migrate when TSC Frequency is not exposed on the cluster: guest timers might be inconsistent",
        ),
        Need::Boot => Some("VMI with invtsc CPU feature must have tsc frequency defined in order to boot"),
    };
    if let Some(message) = unmet.filter(|_| tsc::frequency(vmi).is_none()) {
        add("NoTSCFrequencyNotLiveMigratable", message.into(), true);
    }
    let passthrough = domain.features.as_ref().and_then(|features| features.hyperv_passthrough.as_ref());
    if passthrough.is_some_and(|hyperv| hyperv.enabled.unwrap_or(true)) {
        add("HypervPassthroughNotLiveMigratable", "VMI uses hyperv passthrough".into(), true);
    }
    if let Some(message) = disks(vmi) {
        add("DisksNotLiveMigratable", message, false);
    }
    if lacks_feature {
        let message = format!("virt-launcher does not support {}: restart the VM", Feature::LiveMigration.name());
        add(NOT_MIGRATABLE, message, true);
    }
    found
}

/// Returns `BlockMigration` if disks would have to be copied, also those that prevent a migration.
pub(super) fn method(vmi: &VirtualMachineInstance) -> &'static str {
    let moved = vmi.status.as_ref().is_some_and(|status| !status.migrated_volumes.is_empty());
    let local = vmi.spec.volumes.iter().any(|volume| {
        volume.persistent_volume_claim.is_none()
            && volume.data_volume.is_none()
            && !volume.host_disk.as_ref().is_some_and(|disk| disk.shared.unwrap_or(false))
            && !virtiofs::is_shared(&vmi.spec, &volume.name)
            && !is_read_only_cdrom(vmi, &volume.name)
    });
    if moved || local || disks(vmi).is_some() { "BlockMigration" } else { "LiveMigration" }
}

fn interface(vmi: &VirtualMachineInstance) -> Option<String> {
    let network = vmi.spec.networks.iter().find(|network| network.pod.is_some())?;
    let interfaces = &vmi.spec.domain.devices.interfaces;
    if interfaces.is_empty() {
        return None;
    }
    let Some(primary) = interfaces.iter().find(|interface| interface.name == network.name) else {
        return Some(format!("no primary interface found for network {}", network.name));
    };
    let bridge_allowed = primary.bridge.is_some()
        && vmi.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(ALLOW_BRIDGE));
    if primary.masquerade.is_some() || primary.passt_binding.is_some() || bridge_allowed {
        return None;
    }
    Some("cannot migrate VMI which does not use masquerade or a migratable plugin to connect to the pod network".into())
}

fn disks(vmi: &VirtualMachineInstance) -> Option<String> {
    let status = vmi.status.as_ref();
    for volume in &vmi.spec.volumes {
        if volume.host_disk.as_ref().is_some_and(|disk| !disk.shared.unwrap_or(false)) {
            return Some("cannot migrate VMI with non-shared HostDisk".into());
        }
        let claim = match (&volume.persistent_volume_claim, &volume.data_volume) {
            (Some(claim), _) => &claim.claim_name,
            (None, Some(data_volume)) => &data_volume.name,
            (None, None) => continue,
        };
        if status.is_some_and(|status| status.migrated_volumes.iter().any(|moved| moved.volume_name == volume.name)) {
            continue;
        }
        let info = status
            .and_then(|status| status.volume_status.iter().find(|entry| entry.name == volume.name))
            .and_then(|entry| entry.persistent_volume_claim_info.as_ref());
        const RULE: &str = "live migration requires that all PVCs must be shared (using ReadWriteMany access mode)";
        match info {
            None => return Some(format!("cannot migrate VMI: Unable to determine if PVC {claim} is shared, {RULE}")),
            Some(info) if !info.access_modes.iter().any(|mode| mode == SHARED) => {
                return Some(format!("cannot migrate VMI: PVC {claim} is not shared, {RULE}"));
            }
            Some(_) => {}
        }
    }
    None
}

fn is_read_only_cdrom(vmi: &VirtualMachineInstance, volume: &str) -> bool {
    vmi.spec
        .domain
        .devices
        .disks
        .iter()
        .filter(|disk| disk.name == volume)
        .any(|disk| disk.cdrom.as_ref().is_some_and(|cdrom| cdrom.readonly.unwrap_or(true)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vmi(spec: Value, status: Value) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "m"}, "spec": spec, "status": status,
        }))
        .unwrap()
    }

    fn first(vmi: &VirtualMachineInstance) -> (&'static str, String) {
        let found = obstacles(vmi, true).swap_remove(0);
        (found.reason, found.message)
    }

    #[test]
    fn a_masquerade_vmi_with_shared_disks_has_no_obstacle() {
        let spec = json!({"domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}]}},
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "c"}}]});
        let status = json!({"volumeStatus": [{"name": "root", "target": "vda",
            "persistentVolumeClaimInfo": {"accessModes": ["ReadWriteMany"]}}]});
        let vmi = vmi(spec, status);
        assert_eq!(obstacles(&vmi, false), []);
        assert_eq!(first(&vmi).0, "NotMigratable");
        assert_eq!(method(&vmi), "LiveMigration");
    }

    #[test]
    fn a_claim_that_is_copied_is_no_obstacle() {
        let spec = json!({"domain": {"devices": {}},
            "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "c"}}]});
        let claim = json!({"accessModes": ["ReadWriteOnce"]});
        let status = json!({
            "volumeStatus": [{"name": "root", "target": "vda", "persistentVolumeClaimInfo": claim}],
            "migratedVolumes": [{"volumeName": "root", "sourcePVCInfo": claim, "destinationPVCInfo": claim}],
        });
        let vmi = vmi(spec, status);
        assert_eq!((obstacles(&vmi, false), method(&vmi)), (vec![], "BlockMigration"));
    }

    #[test]
    fn only_a_shared_disk_of_the_node_can_stay() {
        for (shared, reason, method_) in
            [(true, None, "LiveMigration"), (false, Some("DisksNotLiveMigratable"), "BlockMigration")]
        {
            let disk = json!({"path": "/d", "type": "Disk", "shared": shared});
            let vmi = vmi(json!({"domain": {"devices": {}}, "volumes": [{"name": "d", "hostDisk": disk}]}), json!({}));
            assert_eq!(obstacles(&vmi, false).first().map(|first| first.reason), reason);
            assert_eq!(method(&vmi), method_);
        }
    }

    #[test]
    fn a_bridge_on_the_pod_network_is_an_obstacle() {
        let spec = json!({"domain": {"devices": {"interfaces": [{"name": "default", "bridge": {}}]}},
            "networks": [{"name": "default", "pod": {}}]});
        assert_eq!(first(&vmi(spec, json!({}))).0, "InterfaceNotLiveMigratable");
    }

    #[test]
    fn a_counter_without_a_chosen_frequency_is_an_obstacle() {
        let spec = json!({"domain": {"devices": {}, "features": {"hyperv": {"reenlightenment": {"enabled": true}}}}});
        let (reason, message) = first(&vmi(spec.clone(), json!({})));
        assert_eq!(reason, "NoTSCFrequencyNotLiveMigratable");
        let expected = "HyperV Reenlightenment VMIs cannot migrate when TSC Frequency is not exposed on the cluster";
        assert!(message.starts_with(expected), "{message}");
        let chosen = json!({"topologyHints": {"tscFrequency": 2_000_000_000}});
        assert_eq!(first(&vmi(spec, chosen)).0, "NotMigratable");
    }

    #[test]
    fn huge_pages_dedicated_cpus_and_numa_nodes_are_no_obstacle() {
        let cpu = json!({"cores": 1, "dedicatedCpuPlacement": true, "numa": {"guestMappingPassthrough": {}}});
        let memory = json!({"guest": "64Mi", "hugepages": {"pageSize": "2Mi"}});
        let pinned = vmi(json!({"domain": {"devices": {}, "cpu": cpu, "memory": memory}}), json!({}));
        assert_eq!(obstacles(&pinned, false), []);
    }

    #[test]
    fn a_claim_of_one_node_is_an_obstacle_and_would_have_to_be_copied() {
        for mut volume in [json!({"persistentVolumeClaim": {"claimName": "c"}}), json!({"dataVolume": {"name": "c"}})] {
            volume["name"] = json!("root");
            let spec = json!({"domain": {"devices": {}}, "volumes": [volume]});
            let unknown = vmi(spec.clone(), json!({}));
            let (reason, message) = first(&unknown);
            assert_eq!((reason, method(&unknown)), ("DisksNotLiveMigratable", "BlockMigration"));
            assert!(message.contains("Unable to determine if PVC c is shared"), "{message}");
            for (mode, shared) in [("ReadWriteOnce", false), ("ReadOnlyMany", false), ("ReadWriteMany", true)] {
                let claim = json!({"accessModes": [mode]});
                let entry = json!({"name": "root", "target": "vda", "persistentVolumeClaimInfo": claim});
                let known = vmi(spec.clone(), json!({"volumeStatus": [entry]}));
                assert_eq!(method(&known), if shared { "LiveMigration" } else { "BlockMigration" }, "{mode}");
                assert_eq!(first(&known).1.starts_with("cannot migrate VMI: PVC c is not shared"), !shared, "{mode}");
            }
        }
    }

    #[test]
    fn a_container_disk_has_to_be_copied_unless_it_is_a_cdrom() {
        let disk = json!({"domain": {"devices": {"disks": [{"name": "root", "disk": {"bus": "virtio"}}]}},
            "volumes": [{"name": "root", "containerDisk": {"image": "i"}}]});
        assert_eq!(method(&vmi(disk, json!({}))), "BlockMigration");
        let cdrom = json!({"domain": {"devices": {"disks": [{"name": "root", "cdrom": {"bus": "sata"}}]}},
            "volumes": [{"name": "root", "containerDisk": {"image": "i"}}]});
        assert_eq!(method(&vmi(cdrom, json!({}))), "LiveMigration");
    }
}
