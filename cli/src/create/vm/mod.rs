//! `create vm`. The order of the volumes is fixed: container disks, claims, imports, then what the guest is configured with.

mod access;
mod cloud_init;
mod import;
mod infer;
#[cfg(test)]
mod tests;
mod volumes;

use std::{collections::BTreeMap, path::PathBuf};

use clap::{Args, builder::BoolishValueParser};
use serde_json::{Value, json};

use super::{
    metadata, name_or, object,
    params::{self, invalid, split_prefix},
};
use crate::Error;

/// Memory without an instance type.
const MEMORY: &str = "512Mi";
/// Run strategies.
const RUN_STRATEGIES: [&str; 5] = ["Always", "Manual", "Halted", "Once", "RerunOnFailure"];
/// Data sources of cloud-init.
const CLOUD_INIT: [&str; 3] = ["nocloud", "configdrive", "none"];

/// Options of `create vm`.
#[derive(Args)]
pub(crate) struct Options {
    /// Name; default: generated
    #[arg(long)]
    name: Option<String>,
    /// Run strategy
    #[arg(long, value_parser = RUN_STRATEGIES, ignore_case = true, default_value = "Always")]
    run_strategy: String,
    /// Seconds that the guest has to shut down
    #[arg(long, value_name = "SECONDS", default_value_t = 180)]
    termination_grace_period: i64,
    /// Size of the memory; default: 512Mi
    #[arg(long, conflicts_with_all = ["instancetype", "infer_instancetype", "infer_instancetype_from"])]
    memory: Option<String>,
    /// Instance type, as NAME, virtualmachineclusterinstancetype/NAME or virtualmachineinstancetype/NAME
    #[arg(long, conflicts_with_all = ["infer_instancetype", "infer_instancetype_from"])]
    instancetype: Option<String>,
    /// Infer the instance type from the first boot volume; by default, if that is possible
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new(),
        conflicts_with = "infer_instancetype_from"
    )]
    infer_instancetype: Option<bool>,
    /// Infer the instance type from this volume
    #[arg(long, value_name = "VOLUME")]
    infer_instancetype_from: Option<String>,
    /// Preference, as NAME, virtualmachineclusterpreference/NAME or virtualmachinepreference/NAME
    #[arg(long, conflicts_with_all = ["infer_preference", "infer_preference_from"])]
    preference: Option<String>,
    /// Infer the preference from the first boot volume; by default, if that is possible
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new(),
        conflicts_with = "infer_preference_from"
    )]
    infer_preference: Option<bool>,
    /// Infer the preference from this volume
    #[arg(long, value_name = "VOLUME")]
    infer_preference_from: Option<String>,
    /// Container disk as src:IMAGE[,name:NAME][,bootorder:N]; can be repeated
    #[arg(long, value_name = "PARAMS")]
    volume_containerdisk: Vec<String>,
    /// Claim as src:CLAIM[,name:NAME][,bootorder:N]; can be repeated
    #[arg(long, value_name = "PARAMS")]
    volume_pvc: Vec<String>,
    /// Import as type:TYPE,size:SIZE[,name:NAME][,bootorder:N] and the parameters of the type; can be repeated. blank. gcs: url,
    /// secretref. http: url, secretref, certconfigmap, extraheaders, secretextraheaders. imageio: url, diskid, secretref,
    /// certconfigmap. pvc, snapshot: src:NAMESPACE/NAME. ds: src:[NAMESPACE/]NAME. registry: url or imagestream, pullmethod,
    /// secretref, certconfigmap. s3: url, secretref, certconfigmap. vddk: url, uuid, thumbprint, secretref, backingfile,
    /// initimageurl. The size may be left out for pvc, snapshot and ds
    #[arg(long, value_name = "PARAMS")]
    volume_import: Vec<String>,
    /// Answer file for Windows as src:NAME[,type:configmap|secret]
    #[arg(long, value_name = "PARAMS")]
    volume_sysprep: Option<String>,
    /// User that cloud-init configures
    #[arg(long, conflicts_with = "cloud_init_user_data")]
    user: Option<String>,
    /// File with the password of the user, which is stored in clear text in the manifest
    #[arg(long, value_name = "FILE", conflicts_with = "cloud_init_user_data")]
    password_file: Option<PathBuf>,
    /// Public SSH key of the user; can be repeated
    #[arg(long, value_name = "KEY", value_delimiter = ',', conflicts_with = "cloud_init_user_data")]
    ssh_key: Vec<String>,
    /// Let the guest agent manage SSH keys on systems with SELinux
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new(),
        conflicts_with = "cloud_init_user_data"
    )]
    ga_manage_ssh: Option<bool>,
    /// Access credential as src:SECRET[,type:ssh|password][,method:ga|nocloud|configdrive][,user:NAME]; can be repeated
    #[arg(long, value_name = "PARAMS")]
    access_cred: Vec<String>,
    /// Data source of cloud-init; default: nocloud
    #[arg(long, value_parser = CLOUD_INIT, ignore_case = true)]
    cloud_init: Option<String>,
    /// User data of cloud-init in base64
    #[arg(long, value_name = "BASE64")]
    cloud_init_user_data: Option<String>,
    /// Network data of cloud-init in base64
    #[arg(long, value_name = "BASE64")]
    cloud_init_network_data: Option<String>,
    /// Deprecated: use --volume-import with type:ds
    #[arg(long, value_name = "PARAMS")]
    volume_datasource: Vec<String>,
    /// Deprecated: use --volume-import with type:pvc
    #[arg(long, value_name = "PARAMS")]
    volume_clone_pvc: Vec<String>,
    /// Deprecated: use --volume-import with type:blank
    #[arg(long, value_name = "PARAMS")]
    volume_blank: Vec<String>,
}

/// The parts of the VM that flags add.
#[derive(Default)]
struct Parts {
    volumes: Vec<Value>,
    disks: Vec<Value>,
    templates: Vec<Value>,
    /// Names of volumes by their boot order.
    boot_orders: BTreeMap<u32, String>,
}

impl Parts {
    /// Adds a volume with its disk, which it needs for a boot order only.
    fn add(&mut self, flag: &str, name: &str, source: Value, boot_order: Option<u32>) -> Result<(), Error> {
        if self.volume(name).is_some() {
            return Err(invalid(flag, format_args!("there is already a volume with name \"{name}\"")));
        }
        let mut volume = json!({"name": name});
        if let (Some(volume), Value::Object(source)) = (volume.as_object_mut(), source) {
            volume.extend(source);
        }
        self.volumes.push(volume);
        let Some(order) = boot_order else { return Ok(()) };
        if order == 0 {
            return Err(invalid(flag, "bootorder must be greater than 0"));
        }
        if self.boot_orders.insert(order, name.to_owned()).is_some() {
            return Err(invalid(flag, format_args!("bootorder {order} was specified multiple times")));
        }
        self.disks.push(json!({"name": name, "bootOrder": order}));
        Ok(())
    }

    fn volume(&self, name: &str) -> Option<&Value> {
        self.volumes.iter().find(|volume| volume["name"] == name)
    }
}

/// Returns a reference to an instance type or preference. Without a kind, the cluster's default applies.
fn matcher(flag: &str, value: &str, kinds: [&str; 2]) -> Result<Value, Error> {
    let (kind, name) = split_prefix(value).map_err(|why| invalid(flag, why))?;
    let kind = kind.to_ascii_lowercase();
    if !kind.is_empty() && !kinds.contains(&kind.as_str()) {
        let supported = kinds.join(", ");
        return Err(invalid(flag, format_args!("invalid {flag} kind \"{kind}\", supported values are: {supported}")));
    }
    Ok(object([("name", json!(name)), ("kind", json!(kind))]))
}

/// Returns the value in the spelling of the API.
fn spelled(values: &[&'static str], value: &str) -> &'static str {
    values.iter().find(|known| known.eq_ignore_ascii_case(value)).copied().unwrap_or_default()
}

/// Returns the manifest.
pub(super) fn manifest(options: &Options, namespace: Option<&str>) -> Result<Value, Error> {
    let name = name_or(options.name.as_deref(), "vm-");
    let memory = params::quantity(options.memory.as_deref().unwrap_or(MEMORY)).map_err(|e| invalid("memory", e))?;
    let mut parts = Parts::default();
    volumes::container_disks(&mut parts, &name, &options.volume_containerdisk)?;
    volumes::claims(&mut parts, &options.volume_pvc)?;
    import::imports(&mut parts, options)?;
    if let Some(sysprep) = &options.volume_sysprep {
        volumes::sysprep(&mut parts, sysprep)?;
    }
    let access = access::credentials(options)?;
    cloud_init::add(&mut parts, options, &access)?;
    let named =
        |flag, value: &Option<String>, kinds| value.as_deref().map(|value| matcher(flag, value, kinds)).transpose();
    let instancetypes = ["virtualmachineinstancetype", "virtualmachineclusterinstancetype"];
    let preferences = ["virtualmachinepreference", "virtualmachineclusterpreference"];
    let instancetype = match named("instancetype", &options.instancetype, instancetypes)? {
        None if options.memory.is_none() => infer::instancetype(&parts, options)?,
        named => named,
    };
    let preference = match named("preference", &options.preference, preferences)? {
        None => infer::preference(&parts, options)?,
        named => named,
    };
    // The memory is the fallback for an inference that may fail.
    let is_sized = instancetype.as_ref().is_some_and(|found| found["inferFromVolumeFailurePolicy"].is_null());
    let domain = object([
        ("devices", object([("disks", json!(parts.disks))])),
        ("memory", if is_sized { Value::Null } else { json!({"guest": memory}) }),
        ("resources", json!({})),
    ]);
    Ok(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": metadata(&name, namespace),
        "spec": object([
            ("runStrategy", json!(spelled(&RUN_STRATEGIES, &options.run_strategy))),
            ("instancetype", json!(instancetype)),
            ("preference", json!(preference)),
            ("dataVolumeTemplates", json!(parts.templates)),
            ("template", json!({"metadata": {}, "spec": object([
                ("terminationGracePeriodSeconds", json!(options.termination_grace_period)),
                ("domain", domain),
                ("volumes", json!(parts.volumes)),
                ("accessCredentials", json!(access.credentials)),
            ])})),
        ]),
        "status": {},
    }))
}
