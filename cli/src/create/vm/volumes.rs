//! Container disks, claims and answer files.

use serde_json::json;

use super::{
    super::params::{Params, check_label, invalid},
    Parts,
};
use crate::Error;

const VOLUME: [&str; 3] = ["src", "name", "bootorder"];

/// Adds the volumes of `--volume-containerdisk`.
pub(super) fn container_disks(parts: &mut Parts, vm: &str, values: &[String]) -> Result<(), Error> {
    let flag = "volume-containerdisk";
    for (at, value) in values.iter().enumerate() {
        let params = Params::parse(flag, value, &VOLUME)?;
        let image = params.required("src")?;
        let default = format!("{vm}-containerdisk-{at}");
        let name = Some(params.get("name")).filter(|name| !name.is_empty()).unwrap_or(&default);
        check_label(flag, name)?;
        parts.add(flag, name, json!({"containerDisk": {"image": image}}), params.boot_order())?;
    }
    Ok(())
}

/// Adds the volumes of `--volume-pvc`.
pub(super) fn claims(parts: &mut Parts, values: &[String]) -> Result<(), Error> {
    let flag = "volume-pvc";
    for value in values {
        let params = Params::parse(flag, value, &VOLUME)?;
        let claim = params.local_source("pvc")?;
        let name = Some(params.get("name")).filter(|name| !name.is_empty()).unwrap_or(claim);
        check_label(flag, name)?;
        parts.add(flag, name, json!({"persistentVolumeClaim": {"claimName": claim}}), params.boot_order())?;
    }
    Ok(())
}

/// Adds the volume of `--volume-sysprep`.
pub(super) fn sysprep(parts: &mut Parts, value: &str) -> Result<(), Error> {
    let flag = "volume-sysprep";
    let params = Params::parse(flag, value, &["src", "type"])?;
    let name = params.local_source("configmap or secret")?;
    let kind = match params.get("type").to_ascii_lowercase().as_str() {
        "" | "configmap" => "configMap",
        "secret" => "secret",
        other => {
            let supported = "supported values are: configmap, secret";
            return Err(invalid(flag, format_args!("invalid sysprep source type \"{other}\", {supported}")));
        }
    };
    parts.add(flag, "sysprepdisk", json!({"sysprep": {kind: {"name": name}}}), None)
}
