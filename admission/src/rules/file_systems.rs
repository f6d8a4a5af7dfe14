//! File systems that virtiofsd serves.

use std::collections::BTreeSet;

use api::{VirtualMachineInstanceSpec, config::ClusterConfig, virtiofs};

use super::gates;
use crate::context::FieldErrors;

/// Validates file systems. The reference accepts those that no guest gets: without a directory in the launcher pod, or with a
/// name that the device cannot hold.
pub(super) fn validate(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let devices = &spec.domain.devices;
    let list = format!("{root}.domain.devices.filesystems");
    let mut names = BTreeSet::new();
    for (index, name) in devices.filesystems.iter().map(|filesystem| &filesystem.name).enumerate() {
        let mut invalid = |message: String| errors.invalid(format!("{list}[{index}].name"), message);
        if name.len() > virtiofs::NAME_LIMIT {
            let limit = virtiofs::NAME_LIMIT;
            invalid(format!("must be no more than {limit} characters: the guest mounts the file system by this name"));
        }
        if !names.insert(name) {
            invalid(format!("another file system has the name {name}"));
        }
        let Some(volume) = spec.volumes.iter().find(|volume| volume.name == *name) else {
            invalid(format!("no volume has the name {name}"));
            continue;
        };
        if !virtiofs::is_shareable(volume) {
            invalid(format!(
                "volume {name} cannot be shared: a file system needs a configMap, containerPath, downwardAPI, secret, \
                 serviceAccount, or a claim or DataVolume that is not hotpluggable"
            ));
        }
        if !virtiofs::is_claim(volume) {
            continue;
        }
        if devices.disks.iter().any(|disk| disk.name == *name) {
            invalid(format!(
                "claim of volume {name} cannot be a disk and a file system: the guest would write to both"
            ));
        }
        gates::are_on("domain.devices.filesystems[].name", &list, config, errors);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::rules::testing::*;

    /// Returns a change of a spec with these file systems besides the disk `root`, and with this volume of name `v`.
    fn with(names: &[&str], source: Value) -> Value {
        let filesystems: Vec<Value> = names.iter().map(|name| json!({"name": name, "virtiofs": {}})).collect();
        let mut volume = source;
        volume["name"] = json!("v");
        json!({"domain": {"devices": {"filesystems": filesystems}},
            "volumes": [{"name": "root", "containerDisk": {"image": "a:b"}}, volume]})
    }

    #[test]
    fn each_file_system_has_a_directory_and_a_name_of_its_own() {
        let map = || json!({"configMap": {"name": "c"}});
        accepts(with(&["v"], map()));
        accepts(with(&["v"], json!({"serviceAccount": {"serviceAccountName": "a"}})));
        let long = "n".repeat(37);
        for (change, index, message) in [
            (with(&["v", "v"], map()), 1, "another file system has the name v"),
            (with(&["x"], map()), 0, "no volume has the name x"),
            (with(&[&long], map()), 0, "no more than 36 characters"),
            (with(&["v"], json!({"emptyDisk": {"capacity": "1Gi"}})), 0, "cannot be shared"),
            (with(&["root"], map()), 0, "cannot be shared"),
        ] {
            refuses(change, &format!("spec.domain.devices.filesystems[{index}].name"), message);
        }
    }

    #[test]
    fn claim_is_either_a_disk_or_a_file_system() {
        let claim = with(&["root"], json!({"configMap": {"name": "c"}}));
        let mut change = claim;
        change["volumes"][0] = json!({"name": "root", "persistentVolumeClaim": {"claimName": "c"}});
        refuses(change, "spec.domain.devices.filesystems[0].name", "cannot be a disk and a file system");
    }
}
