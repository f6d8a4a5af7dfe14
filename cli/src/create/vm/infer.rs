//! Inference of instance type and preference from a volume.

use serde_json::{Value, json};

use super::{Options, Parts};
use crate::Error;

/// Returns the inferred instance type.
pub(super) fn instancetype(parts: &Parts, options: &Options) -> Result<Option<Value>, Error> {
    inferred(parts, options.infer_instancetype, options.infer_instancetype_from.as_deref())
}

/// Returns the inferred preference.
pub(super) fn preference(parts: &Parts, options: &Options) -> Result<Option<Value>, Error> {
    inferred(parts, options.infer_preference, options.infer_preference_from.as_deref())
}

/// Returns a reference to the volume. An inference that was not requested may fail, here and in the cluster.
fn inferred(parts: &Parts, wanted: Option<bool>, from: Option<&str>) -> Result<Option<Value>, Error> {
    let is_explicit = wanted.is_some() || from.is_some();
    if wanted == Some(false) {
        return Ok(None);
    }
    match volume(parts, from) {
        Ok(volume) if is_explicit => Ok(Some(json!({"inferFromVolume": volume}))),
        Ok(volume) => Ok(Some(json!({"inferFromVolume": volume, "inferFromVolumeFailurePolicy": "Ignore"}))),
        Err(error) if is_explicit => Err(Error::Usage(error)),
        Err(_) => Ok(None),
    }
}

/// Returns the volume to infer from: the given one, that with the lowest boot order, or the first.
fn volume<'p>(parts: &'p Parts, from: Option<&'p str>) -> Result<&'p str, String> {
    let first = || parts.volumes.first().and_then(|volume| volume["name"].as_str());
    let chosen = from.or_else(|| parts.boot_orders.values().next().map(String::as_str)).or_else(first);
    let name = chosen.ok_or("at least one volume is needed to infer an instance type or preference")?;
    let volume = parts.volume(name).ok_or_else(|| format!("there is no volume with name \"{name}\""))?;
    if !volume["persistentVolumeClaim"].is_null() {
        return Ok(name);
    }
    if volume["dataVolume"].is_null() {
        return Err("inference of instancetype or preference works only with datasources, datavolumes or pvcs".into());
    }
    let template = parts.templates.iter().find(|template| template["metadata"]["name"] == name);
    let is_usable = template.is_none_or(|template| {
        let source = &template["spec"]["source"];
        let is_copied = ["pvc", "registry", "snapshot"].iter().any(|kind| !source[kind].is_null());
        is_copied || template["spec"]["sourceRef"]["kind"] == "DataSource"
    });
    let why = "this datavolume is not valid to infer an instancetype or preference from (source needs to be PVC, Registry or \
               Snapshot, sourceRef needs to be DataSource)";
    if is_usable { Ok(name) } else { Err(why.to_owned()) }
}
