//! Effects in metrics, traces and logs.

use super::{Effect, Kind, WriteOptions};

/// Returns verb and resource.
pub(super) fn label(effect: &Effect) -> (&'static str, &'static str) {
    match effect {
        Effect::Create { kind, .. } => ("create", kind.plural()),
        Effect::CreateDataVolume { .. } => ("create", Kind::DataVolume.plural()),
        Effect::CreateSnapshotContent { .. } => ("create", Kind::VmSnapshotContent.plural()),
        Effect::CopyRevision { .. } => ("create", Kind::ControllerRevision.plural()),
        Effect::Quiesce { freeze: Some(_), .. } => ("freeze", Kind::Instance.plural()),
        Effect::Quiesce { .. } => ("unfreeze", Kind::Instance.plural()),
        Effect::RequireTaken { .. } => ("get", "volumesnapshotcontents"),
        Effect::Patch { kind, .. } => ("patch", kind.plural()),
        Effect::Delete { kind, .. } => ("delete", kind.plural()),
        Effect::Evict { .. } => ("evict", Kind::Pod.plural()),
        Effect::Restore { .. } => ("restore", Kind::Pod.plural()),
        Effect::ReadWarnings { .. } | Effect::ReadClaimWarning { .. } => ("list", "events"),
        Effect::ReadUsers { .. } => ("list", Kind::Pod.plural()),
        Effect::Event(_) => ("event", "events"),
    }
}

/// Returns the options and the name of the object.
pub(super) fn parts(effect: &Effect) -> (WriteOptions, &str) {
    match effect {
        Effect::Create { options, object, .. } => {
            let name = object["metadata"]["name"].as_str().or(object["metadata"]["generateName"].as_str());
            (options.clone(), name.unwrap_or_default())
        }
        Effect::CreateDataVolume { creation, options } => {
            (options.clone(), creation.data_volume.metadata.name.as_deref().unwrap_or_default())
        }
        Effect::CreateSnapshotContent { creation, options } => {
            (options.clone(), creation.content.metadata.name.as_deref().unwrap_or_default())
        }
        Effect::CopyRevision { copy, options } => (options.clone(), &copy.name),
        Effect::RequireTaken { content, options, .. } => (options.clone(), content),
        Effect::Patch { options, name, .. }
        | Effect::Quiesce { options, name, .. }
        | Effect::Delete { options, name, .. }
        | Effect::Evict { options, name, .. } => (options.clone(), name),
        Effect::Restore { name, .. } => (WriteOptions::default(), name.as_deref().unwrap_or_default()),
        Effect::ReadWarnings { pod, .. } => (WriteOptions::default(), pod),
        Effect::ReadUsers { claims, .. } => {
            (WriteOptions::default(), claims.keys().next().map(String::as_str).unwrap_or_default())
        }
        Effect::ReadClaimWarning { claim, .. } => (WriteOptions::default(), claim),
        Effect::Event(_) => (WriteOptions::default(), ""),
    }
}
