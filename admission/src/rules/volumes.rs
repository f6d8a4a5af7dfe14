//! Volumes.

use api::{
    VirtualMachineInstanceSpec,
    config::ClusterConfig,
    quantity,
    vmi::volumes::{ContainerDiskSource, HostDisk, Volume},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::api::core::v1::LocalObjectReference;

use super::{
    gates,
    images::{validate_path, validate_pull_policy},
};
use crate::context::{FieldErrors, PathText, names};

/// Most bytes of inline cloud-init data.
pub(super) const CLOUD_INIT_MAX: usize = 2048;

/// Validates the volumes.
pub(super) fn validate(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let list = format_args!("{root}.volumes");
    for (index, volume) in spec.volumes.iter().enumerate() {
        let path = format_args!("{list}[{index}]");
        if let Some(other) = spec.volumes.iter().take(index).position(|other| other.name == volume.name) {
            errors.invalid(format!("{path}.name"), format!("{path} and {list}[{other}] must not have the same Name."));
        }
        // The name of a volume with a disk is reported with the disk.
        if spec.domain.devices.disks.iter().all(|disk| disk.name != volume.name) {
            for error in names::label_errors(&volume.name) {
                errors.invalid(format!("{path}.name"), error);
            }
        }
        validate_volume(path, volume, config, errors);
    }
    for (name, count) in [
        ("serviceAccount volume", spec.volumes.iter().filter(|volume| volume.service_account.is_some()).count()),
        ("downwardMetric volume", spec.volumes.iter().filter(|volume| volume.downward_metrics.is_some()).count()),
        ("memory dump volume", spec.volumes.iter().filter(|volume| volume.memory_dump.is_some()).count()),
    ] {
        if count > 1 {
            errors.invalid(list, format!("{list} must have max one {name} set"));
        }
    }
    for (index, volume) in spec.volumes.iter().enumerate() {
        if let Some(disk) = &volume.container_disk {
            validate_container_disk(format_args!("{list}[{index}].containerDisk"), disk, errors);
        }
    }
    if !spec.utility_volumes.is_empty() {
        errors.invalid(
            format!("{root}.utilityVolumes"),
            "cannot create VMI with utility volumes in spec, utility volumes can only be added via hotplug",
        );
    }
}

fn sources(volume: &Volume) -> usize {
    [
        volume.persistent_volume_claim.is_some(),
        volume.sysprep.is_some(),
        volume.cloud_init_no_cloud.is_some(),
        volume.cloud_init_config_drive.is_some(),
        volume.container_disk.is_some(),
        volume.ephemeral.is_some(),
        volume.empty_disk.is_some(),
        volume.host_disk.is_some(),
        volume.data_volume.is_some(),
        volume.config_map.is_some(),
        volume.secret.is_some(),
        volume.downward_api.is_some(),
        volume.service_account.is_some(),
        volume.downward_metrics.is_some(),
        volume.memory_dump.is_some(),
        volume.container_path.is_some(),
    ]
    .into_iter()
    .filter(|set| *set)
    .count()
}

fn validate_volume(path: PathText<'_>, volume: &Volume, config: &ClusterConfig, errors: &mut FieldErrors) {
    if volume.data_volume.as_ref().is_some_and(|source| source.name.is_empty()) {
        errors.required(format!("{path}.name"), "DataVolume 'name' must be set");
    }
    if sources(volume) != 1 {
        errors.invalid(path, format!("{path} must have exactly one source type set"));
    }
    if let Some(source) = &volume.cloud_init_no_cloud {
        CloudInit {
            kind: "cloudInitNoCloud",
            user: (&source.user_data, &source.user_data_base64, &source.secret_ref),
            network: (&source.network_data, &source.network_data_base64, &source.network_data_secret_ref),
        }
        .check(path, errors);
    }
    if let Some(source) = &volume.cloud_init_config_drive {
        CloudInit {
            kind: "cloudInitConfigDrive",
            user: (&source.user_data, &source.user_data_base64, &source.secret_ref),
            network: (&source.network_data, &source.network_data_base64, &source.network_data_secret_ref),
        }
        .check(path, errors);
    }
    if volume.downward_metrics.is_some() {
        gates::are_on("volumes[].downwardMetrics", path, config, errors);
    }
    if let Some(disk) = &volume.host_disk {
        validate_host_disk(path, disk, config, errors);
    }
    let named = [
        ("configMap.name", volume.config_map.as_ref().map(|source| source.name.as_str())),
        ("secret.secretName", volume.secret.as_ref().map(|source| source.secret_name.as_deref().unwrap_or_default())),
        (
            "serviceAccount.serviceAccountName",
            volume.service_account.as_ref().map(|source| source.service_account_name.as_deref().unwrap_or_default()),
        ),
        (
            "sysprep.configMap.name",
            volume.sysprep.as_ref().and_then(|source| source.config_map.as_ref()).map(|source| source.name.as_str()),
        ),
        (
            "sysprep.secret.name",
            volume.sysprep.as_ref().and_then(|source| source.secret.as_ref()).map(|source| source.name.as_str()),
        ),
    ];
    for (field, name) in named {
        if name == Some("") {
            let field = format!("{path}.{field}");
            let message = format!("{field} is a required field");
            errors.invalid(field, message);
        }
    }
    if volume.ephemeral.as_ref().is_some_and(|source| source.persistent_volume_claim.is_none()) {
        let field = format!("{path}.ephemeral.persistentVolumeClaim");
        let message = format!("{field} is a required field");
        errors.invalid(field, message);
    }
    let claims = [
        ("persistentVolumeClaim", volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str())),
        (
            "ephemeral.persistentVolumeClaim",
            volume
                .ephemeral
                .as_ref()
                .and_then(|source| source.persistent_volume_claim.as_ref())
                .map(|claim| claim.claim_name.as_str()),
        ),
    ];
    for (field, name) in claims {
        if name == Some("") {
            let field = format!("{path}.{field}.claimName");
            let message = format!("{field} is a required field");
            errors.invalid(field, message);
        }
    }
    if let Some(disk) = &volume.empty_disk
        && quantity::units(&disk.capacity).is_ok_and(|bytes| bytes <= 0)
    {
        let field = format!("{path}.emptyDisk.capacity");
        let message = format!("{field} '{}': must be greater than 0", disk.capacity.0);
        errors.invalid(field, message);
    }
    if let Some(source) = &volume.sysprep
        && source.config_map.is_some() == source.secret.is_some()
    {
        errors.invalid(
            format!("{path}.sysprep"),
            format!("{path}.sysprep must have exactly one of configMap and secret set"),
        );
    }
}

fn validate_container_disk(path: PathText<'_>, disk: &ContainerDiskSource, errors: &mut FieldErrors) {
    if disk.image.trim().is_empty() {
        errors.required(format!("{path}.image"), format!("{path}.image must not be empty"));
    }
    validate_pull_policy(path, disk.image_pull_policy.as_deref(), errors);
    if let Some(file) = disk.path.as_deref().filter(|file| !file.is_empty()) {
        let path = path.to_string();
        validate_path(&path, &path, file, errors);
    }
}

fn validate_host_disk(path: PathText<'_>, disk: &HostDisk, config: &ClusterConfig, errors: &mut FieldErrors) {
    gates::are_on("volumes[].hostDisk.path", path, config, errors);
    let field = |name: &str| format!("{path}.hostDisk.{name}");
    if disk.path.is_empty() {
        errors.not_found(field("path"), format!("{} is required for hostDisk volume", field("path")));
    } else if disk.place().is_none() {
        let message = format!("{} '{}' must be the absolute path of a file in a directory", field("path"), disk.path);
        errors.invalid(field("path"), message);
    }
    if !["Disk", "DiskOrCreate"].contains(&disk.type_.as_str()) {
        errors.invalid(
            field("type"),
            format!("{} has invalid value '{}', allowed are 'Disk' or 'DiskOrCreate'", field("type"), disk.type_),
        );
    }
    if disk.type_ == "Disk" && disk.capacity.as_ref().is_some_and(|capacity| quantity::units(capacity) != Ok(0)) {
        errors.invalid(
            field("capacity"),
            format!("{} is allowed to pass only with {} equal to 'DiskOrCreate'", field("capacity"), field("type")),
        );
    }
}

/// Sources of cloud-init data: inline text, encoded text, secret.
type Data<'a> = (&'a Option<String>, &'a Option<String>, &'a Option<LocalObjectReference>);

struct CloudInit<'a> {
    kind: &'static str,
    user: Data<'a>,
    network: Data<'a>,
}

impl CloudInit<'_> {
    fn check(&self, volume: PathText<'_>, errors: &mut FieldErrors) {
        let path = format_args!("{volume}.{}", self.kind);
        let user =
            self.data(path, self.user, "userdata", "userDataBase64", "UserDataSecretRef", "userdatasource", errors);
        let network = self.data(
            path,
            self.network,
            "networkdata",
            "networkDataBase64",
            "NetworkDataSecretRef",
            "networkdata source",
            errors,
        );
        if user == 0 && network == 0 {
            errors.invalid(path, format!("{path} must have at least one userdatasource or one networkdatasource set."));
        }
    }

    /// Validates one type of data and returns the number of its sources.
    #[expect(clippy::too_many_arguments, reason = "the messages of the two types have no common pattern")]
    fn data(
        &self,
        path: PathText<'_>,
        (text, encoded, secret): Data<'_>,
        name: &str,
        encoded_field: &str,
        secret_field: &str,
        source: &str,
        errors: &mut FieldErrors,
    ) -> usize {
        let text = text.as_deref().filter(|text| !text.is_empty());
        let encoded = encoded.as_deref().filter(|encoded| !encoded.is_empty());
        let secret = secret.as_ref().is_some_and(|secret| !secret.name.is_empty());
        let mut length = text.map_or(0, str::len);
        if let Some(encoded) = encoded {
            match decode_base64(encoded) {
                Some(decoded) => length = decoded.len(),
                None => errors.invalid(
                    format!("{path}.{encoded_field}"),
                    format!("{path}.{encoded_field}.{}.{encoded_field} is not a valid base64 value.", self.kind),
                ),
            }
        }
        let count = usize::from(text.is_some()) + usize::from(encoded.is_some()) + usize::from(secret);
        if count > 1 {
            errors.invalid(path, format!("{path} must have only one {source} set."));
        }
        if length > CLOUD_INIT_MAX {
            errors.invalid(
                path,
                format!(
                    "{path} {name} exceeds {CLOUD_INIT_MAX} byte limit. Should use {secret_field} for larger data."
                ),
            );
        }
        count
    }
}

/// Decodes data, whose encoder can have wrapped lines.
pub(super) fn decode_base64(encoded: &str) -> Option<Vec<u8>> {
    STANDARD.decode(encoded.trim().replace(['\r', '\n'], "")).ok()
}

/// Returns errors for volumes of a VMI without disk or filesystem.
pub(crate) fn validate_mapping(spec: &VirtualMachineInstanceSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let devices = &spec.domain.devices;
    for (index, volume) in spec.volumes.iter().enumerate() {
        let disk = devices.disks.iter().any(|disk| disk.name == volume.name);
        let filesystem = devices.filesystems.iter().any(|filesystem| filesystem.name == volume.name);
        if volume.memory_dump.is_none() && !disk && !filesystem {
            let field = format!("spec.domain.volumes[{index}].name");
            let message = format!("{field} '{}' not found. No disk has this name.", volume.name);
            errors.invalid(field, message);
        }
        let Some(source) = &volume.container_path else { continue };
        let (field, name) = (format!("spec.domain.volumes[{index}]"), &volume.name);
        if disk {
            let message = format!("ContainerPath volume '{name}' must be mapped to a filesystem, not a disk");
            errors.invalid(field.clone(), message);
        }
        if !filesystem {
            let message = format!(
                "ContainerPath volume '{name}' must have a matching filesystem defined in spec.domain.devices.filesystems"
            );
            errors.invalid(field.clone(), message);
        }
        let reserved = ["/var/run/kubevirt", "/var/run/libvirt"];
        if let Some(prefix) = reserved.into_iter().find(|prefix| source.path.starts_with(prefix)) {
            let message = format!("ContainerPath volume '{name}' uses reserved path prefix '{prefix}'");
            errors.invalid(format!("{field}.containerPath.path"), message);
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::rules::testing::*;

    fn volume(source: Value) -> Value {
        let mut volume = json!({"name": "root"});
        for (key, value) in source.as_object().unwrap() {
            volume[key] = value.clone();
        }
        json!({"volumes": [volume]})
    }

    #[test]
    fn volume_has_one_source_and_a_unique_name() {
        refuses(volume(json!({})), "spec.volumes[0]", "must have exactly one source type set");
        refuses(
            volume(json!({"containerDisk": {"image": "a"}, "emptyDisk": {"capacity": "1Gi"}})),
            "spec.volumes[0]",
            "must have exactly one source type set",
        );
        refuses(
            json!({"volumes": [{"name": "root", "containerDisk": {"image": "a"}}, {"name": "root", "containerDisk": {"image": "a"}}]}),
            "spec.volumes[1].name",
            "spec.volumes[1] and spec.volumes[0] must not have the same Name.",
        );
        let three = json!({"name": "root", "containerDisk": {"image": "a"}});
        let twice = messages(json!({"volumes": [three, three, three]}));
        assert_eq!(twice.iter().filter(|text| text.contains("and spec.volumes[0] must not have")).count(), 2);
        assert!(!twice.iter().any(|text| text.contains("spec.volumes[2] and spec.volumes[1]")));
        refuses(
            volume(json!({"name": "../x", "containerDisk": {"image": "a"}})),
            "spec.volumes[0].name",
            "RFC 1123 label",
        );
    }

    #[test]
    fn container_disk_names_image_and_file() {
        let disk = |disk: Value| volume(json!({"containerDisk": disk}));
        let field = "spec.volumes[0].containerDisk";
        accepts(disk(json!({"image": "a:b", "path": "/disk/root.img", "imagePullPolicy": "Never"})));
        refuses(disk(json!({"image": ""})), "spec.volumes[0].containerDisk.image", "must not be empty");
        refuses(disk(json!({"image": "a", "path": "/"})), field, "must not point to root");
        refuses(disk(json!({"image": "a", "path": "/disk/../etc/shadow"})), field, "without relative components");
        refuses(
            disk(json!({"image": "a", "imagePullPolicy": "Sometimes"})),
            "spec.volumes[0].containerDisk.imagePullPolicy",
            "Unsupported value: \"Sometimes\"",
        );
    }

    #[test]
    fn cloud_init_has_one_source_of_each_kind() {
        let cloud = |source: Value| volume(json!({"cloudInitNoCloud": source}));
        let field = "spec.volumes[0].cloudInitNoCloud";
        accepts(cloud(json!({"userData": "#!/bin/sh"})));
        accepts(cloud(json!({"userDataBase64": "IyEvYmluL3No", "networkData": "version: 2"})));
        accepts(cloud(json!({"userDataBase64": "IyEv\r\nYmlu\nL3No\n"})));
        accepts(cloud(json!({"secretRef": {"name": "s"}})));
        refuses(cloud(json!({})), field, "must have at least one userdatasource or one networkdatasource set.");
        refuses(cloud(json!({"userData": "a", "secretRef": {"name": "s"}})), field, "only one userdatasource set.");
        refuses(
            cloud(json!({"networkData": "a", "networkDataBase64": "YQ=="})),
            field,
            "only one networkdata source set.",
        );
        refuses(
            cloud(json!({"userDataBase64": "%%%"})),
            "spec.volumes[0].cloudInitNoCloud.userDataBase64",
            "is not a valid base64 value.",
        );
    }

    #[test]
    fn inline_cloud_init_data_is_small() {
        let user = |length: usize| volume(json!({"cloudInitConfigDrive": {"userData": "x".repeat(length)}}));
        accepts(user(2048));
        refuses(
            user(2049),
            "spec.volumes[0].cloudInitConfigDrive",
            "userdata exceeds 2048 byte limit. Should use UserDataSecretRef",
        );
        let network = volume(json!({"cloudInitNoCloud": {"networkData": "x".repeat(3000)}}));
        refuses(
            network,
            "spec.volumes[0].cloudInitNoCloud",
            "networkdata exceeds 2048 byte limit. Should use NetworkDataSecretRef",
        );
    }

    #[test]
    fn references_are_named() {
        accepts(volume(json!({"persistentVolumeClaim": {"claimName": "c"}})));
        accepts(volume(json!({"configMap": {"name": "c"}})));
        refuses(
            volume(json!({"persistentVolumeClaim": {"claimName": ""}})),
            "spec.volumes[0].persistentVolumeClaim.claimName",
            "is a required field",
        );
        refuses(volume(json!({"configMap": {}})), "spec.volumes[0].configMap.name", "is a required field");
        refuses(volume(json!({"secret": {}})), "spec.volumes[0].secret.secretName", "is a required field");
        refuses(
            volume(json!({"serviceAccount": {}})),
            "spec.volumes[0].serviceAccount.serviceAccountName",
            "is a required field",
        );
        for source in ["configMap", "secret"] {
            let field = format!("spec.volumes[0].sysprep.{source}.name");
            refuses(volume(json!({"sysprep": {source: {}}})), &field, "is a required field");
            accepts(volume(json!({"sysprep": {source: {"name": "a"}}})));
        }
        let field = "spec.volumes[0].ephemeral.persistentVolumeClaim";
        refuses(volume(json!({"ephemeral": {}})), field, "is a required field");
        refuses(volume(json!({"dataVolume": {"name": ""}})), "spec.volumes[0].name", "DataVolume 'name' must be set");
    }

    #[test]
    fn empty_disk_has_a_size() {
        accepts(volume(json!({"emptyDisk": {"capacity": "1Gi"}})));
        refuses(volume(json!({"emptyDisk": {"capacity": 0}})), "spec.volumes[0].emptyDisk.capacity", "greater than 0");
    }

    /// The reference offered them to all VMIs.
    #[test]
    fn cve_2024_31419_no_guest_gets_metrics_of_its_node_without_their_gate() {
        refuses(volume(json!({"downwardMetrics": {}})), "spec.volumes[0]", "DownwardMetrics feature gate");
        let device = json!({"domain": {"devices": {"downwardMetrics": {}}}});
        refuses(device, "spec.domain.devices.downwardMetrics", "DownwardMetrics feature gate");
    }

    #[test]
    fn gated_volumes_need_their_gate() {
        refuses(
            volume(json!({"hostDisk": {"path": "/d/a.img", "type": "Disk"}})),
            "spec.volumes[0]",
            "HostDisk feature gate",
        );
        refuses(
            json!({"utilityVolumes": [{"name": "u", "claimName": "c"}]}),
            "spec.utilityVolumes",
            "utility volumes can only be added via hotplug",
        );
    }

    #[test]
    fn every_volume_of_a_vmi_is_used() {
        let mut spec = vmi_spec(json!({}));
        assert!(validate_mapping(&spec).is_empty());
        spec.domain.devices.disks.clear();
        let message = "spec.domain.volumes[0].name 'root' not found. No disk has this name.";
        assert_eq!(validate_mapping(&spec).as_slice()[0].message, message);
    }
}
