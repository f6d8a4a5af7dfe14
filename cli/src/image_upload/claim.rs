//! The target of an upload: its manifest, and the states on the way.

use k8s_openapi::{api::core::v1::PersistentVolumeClaim, apimachinery::pkg::api::resource::Quantity};
use serde_json::{Map, Value, json};

use super::{Target, UploadOptions, unmet};
use crate::{Error, guest::text, wait::Progress};

/// Marks a claim as target of an upload.
pub(super) const TARGET: &str = "cdi.kubevirt.io/storage.upload.target";
const CONTENT_TYPE: &str = "cdi.kubevirt.io/storage.contentType";
const BIND_AT_ONCE: &str = "cdi.kubevirt.io/storage.bind.immediate.requested";
const POD_READY: &str = "cdi.kubevirt.io/storage.pod.ready";
const POD_PHASE: &str = "cdi.kubevirt.io/storage.pod.phase";
const APPLY_PROFILE: &str = "cdi.kubevirt.io/applyStorageProfile";
const USES_POPULATOR: &str = "cdi.kubevirt.io/storage.usePopulator";
/// Part of the message about a write that its client repeats.
const CONFLICT: &str = "the object has been modified";

fn content_type(options: &UploadOptions) -> &'static str {
    if options.is_archive() { "archive" } else { "kubevirt" }
}

/// Returns the labels with the defaults for VMs.
fn labels(options: &UploadOptions) -> Map<String, Value> {
    let instancetype_kind = options.default_instancetype.as_ref().and(options.default_instancetype_kind.as_ref());
    let preference_kind = options.default_preference.as_ref().and(options.default_preference_kind.as_ref());
    [
        ("instancetype.kubevirt.io/default-instancetype", options.default_instancetype.as_ref()),
        ("instancetype.kubevirt.io/default-instancetype-kind", instancetype_kind),
        ("instancetype.kubevirt.io/default-preference", options.default_preference.as_ref()),
        ("instancetype.kubevirt.io/default-preference-kind", preference_kind),
    ]
    .into_iter()
    .filter_map(|(label, value)| Some((label.to_owned(), json!(value?))))
    .collect()
}

/// Returns the part of the spec that DataVolumes and claims share.
fn storage(options: &UploadOptions) -> Result<Value, Error> {
    let size = options.size.as_deref().unwrap_or_default();
    let quantity = Quantity(size.to_owned());
    if !api::quantity::units(&quantity).is_ok_and(|bytes| bytes > 0) {
        return Err(Error::Usage(format!("invalid size={size}: it must be a quantity such as 10Gi")));
    }
    let mut storage = json!({"resources": {"requests": {"storage": size}}});
    if let Some(class) = &options.storage_class {
        storage["storageClassName"] = json!(class);
    }
    if let Some(mode) = &options.access_mode {
        storage["accessModes"] = json!([mode]);
    }
    let mode = if options.is_archive() { Some("filesystem") } else { options.volume_mode.as_deref() };
    if let Some(mode) = mode {
        storage["volumeMode"] = json!(if mode == "block" { "Block" } else { "Filesystem" });
    }
    Ok(storage)
}

/// Returns the DataVolume of an upload.
pub(super) fn data_volume(options: &UploadOptions, name: &str) -> Result<Value, Error> {
    let annotations = if options.force_bind { json!({BIND_AT_ONCE: ""}) } else { json!({}) };
    Ok(json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
        "metadata": {"name": name, "annotations": annotations, "labels": labels(options)},
        "spec": {"source": {"upload": {}}, "contentType": content_type(options), "storage": storage(options)?},
    }))
}

/// Returns the claim of an upload.
pub(super) fn claim(options: &UploadOptions, name: &str) -> Result<Value, Error> {
    let mut annotations = json!({TARGET: "", CONTENT_TYPE: content_type(options)});
    if options.force_bind {
        annotations[BIND_AT_ONCE] = json!("");
    }
    let mut labels = labels(options);
    labels.insert(APPLY_PROFILE.to_owned(), json!("true"));
    Ok(json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "annotations": annotations, "labels": labels}, "spec": storage(options)?,
    }))
}

/// Returns the DataSource with the uploaded image.
pub(super) fn data_source(options: &UploadOptions, name: &str, namespace: &str) -> Value {
    json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataSource",
        "metadata": {"name": name, "labels": labels(options)},
        "spec": {"source": {"pvc": {"name": name, "namespace": namespace}}},
    })
}

/// Returns the change of a DataSource that exists, which loses a source of another kind.
pub(super) fn data_source_patch(manifest: &Value) -> Value {
    let mut patch = manifest.clone();
    for other in ["snapshot", "dataSource"] {
        patch["spec"]["source"][other] = Value::Null;
    }
    patch
}

fn annotation<'a>(claim: &'a PersistentVolumeClaim, name: &str) -> Option<&'a str> {
    claim.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

/// Returns true if the claim is marked as target of an upload.
pub(super) fn is_target(claim: &PersistentVolumeClaim) -> bool {
    annotation(claim, TARGET).is_some()
}

/// Returns the reason why nothing can be uploaded to an existing claim.
pub(super) fn obstacle(
    options: &UploadOptions,
    name: &str,
    claim: &PersistentVolumeClaim,
    data_volume: Option<&Value>,
    namespace: &str,
) -> Option<String> {
    if options.target == Target::Dv {
        let Some(data_volume) = data_volume else {
            return Some(format!("No DataVolume is associated with the existing PVC {namespace}/{name}"));
        };
        let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
        if data_volume["metadata"]["annotations"][USES_POPULATOR] == "true" && phase == Some("Bound") {
            return Some(format!("PVC {name} already successfully populated"));
        }
    }
    if annotation(claim, POD_PHASE) == Some("Succeeded") {
        return Some(format!("PVC {name} already successfully imported/cloned/updated"));
    }
    if !is_target(claim) && !options.no_create && options.target == Target::Pvc {
        return Some(format!("PVC {name} not available for upload"));
    }
    if options.is_archive() && options.target == Target::Pvc && annotation(claim, CONTENT_TYPE) != Some("archive") {
        return Some(format!("PVC {name} doesn't have archive contentType annotation"));
    }
    None
}

/// Returns the number of restarts of the server that receives the data.
pub(super) fn restarts(data_volume: &Value) -> u64 {
    data_volume["status"]["restartCount"].as_u64().unwrap_or_default()
}

fn phase(data_volume: &Value) -> &str {
    data_volume["status"]["phase"].as_str().unwrap_or_default()
}

/// Decides whether data can be sent to a DataVolume.
pub(super) fn data_volume_ready(data_volume: Option<&Value>, force_bind: bool) -> Progress {
    let Some(data_volume) = data_volume else {
        return Progress::Failed("the DataVolume was deleted".to_owned());
    };
    match phase(data_volume) {
        "UploadReady" => Progress::Done("the upload can begin".to_owned()),
        phase @ ("WaitForFirstConsumer" | "PendingPopulation") if !force_bind => Progress::Failed(format!(
            "cannot upload to DataVolume in {phase} phase, make sure the PVC is Bound, or use force-bind flag"
        )),
        phase @ ("Succeeded" | "Failed") => Progress::Failed(format!("the DataVolume is in phase {phase} already")),
        phase => {
            let phase = if phase.is_empty() { "Pending" } else { phase };
            let why = unmet(data_volume).map(|why| format!(": {why}")).unwrap_or_default();
            Progress::Waiting(format!("{phase}{why}"))
        }
    }
}

/// Decides whether data can be sent to a claim.
pub(super) fn claim_ready(claim: Option<&Value>) -> Progress {
    let Some(claim) = claim else { return Progress::Failed("the PVC was deleted".to_owned()) };
    match claim["metadata"]["annotations"][POD_READY].as_str() {
        Some("true") => Progress::Done("the upload can begin".to_owned()),
        _ => {
            Progress::Waiting(format!("the PVC is {}, its upload server is not ready", text(&claim["status"]["phase"])))
        }
    }
}

/// Returns why the target has no volume, by its events and with the words of `virtctl`. An event outlives its cause, so that one is told
/// only while the claim, or its volume, is missing.
pub(super) fn cause(events: &Value, data_volume: Option<&Value>, claim: Option<&Value>) -> Option<String> {
    let (object, reason, words) = match (claim, data_volume) {
        (Some(claim), _) if claim["status"]["phase"] == "Pending" => {
            (claim, "ProvisioningFailed", "Provisioning failed")
        }
        (None, Some(data_volume)) => (data_volume, "ErrClaimNotValid", "Claim not valid"),
        _ => return None,
    };
    let of_object = |event: &&Value| {
        event["involvedObject"]["uid"] == object["metadata"]["uid"]
            && event["reason"] == reason
            && !text(&event["message"]).contains(CONFLICT)
    };
    let event = events["items"].as_array()?.iter().rfind(of_object)?;
    Some(format!("{words}: {}", text(&event["message"])))
}

/// Decides whether an upload is processed. A server that restarts has lost the data, and would wait for new data for ever.
pub(super) fn processed(data_volume: Option<&Value>, claim: Option<&Value>, restarts_before: u64) -> Progress {
    let done = || Progress::Done("the image is processed".to_owned());
    let Some(data_volume) = data_volume else {
        return match claim.map(|claim| &claim["metadata"]["annotations"][POD_PHASE]) {
            None => Progress::Failed("the target was deleted".to_owned()),
            Some(phase) if *phase == "Succeeded" => done(),
            Some(phase) => Progress::Waiting(format!("the upload server is {}", text(phase))),
        };
    };
    match phase(data_volume) {
        "Succeeded" => done(),
        "Failed" => Progress::Failed(unmet(data_volume).unwrap_or_else(|| "the DataVolume has failed".to_owned())),
        "UploadReady" if restarts(data_volume) > restarts_before => {
            let why = unmet(data_volume).map(|why| format!(": {why}")).unwrap_or_default();
            Progress::Failed(format!("the image could not be processed, and the server waits for another one{why}"))
        }
        phase => Progress::Waiting(phase.to_owned()),
    }
}

/// Returns the address of the upload proxy in CDI's configuration.
pub(super) fn proxy_url(config: &Value) -> Option<String> {
    let urls = [&config["spec"]["uploadProxyURLOverride"], &config["status"]["uploadProxyURL"]];
    urls.into_iter().filter_map(Value::as_str).find(|url| !url.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{Command, parse};

    fn options(words: &[&str]) -> UploadOptions {
        let words = [&["kubectl-virt", "image-upload"], words].concat();
        let cli = parse(words).unwrap_or_else(|error| panic!("{error}"));
        let Command::ImageUpload(options) = cli.command else { panic!("another command") };
        *options
    }

    #[test]
    fn wrong_arguments_are_rejected_before_any_request() {
        for words in [
            &["dv", "a", "--size=1Gi"][..],
            &["dv", "a", "--image-path=i"],
            &["pod", "a", "--size=1Gi", "--image-path=i"],
            &["dv", "a", "--size=1Gi", "--image-path=i", "--archive-path=a"],
            &["dv", "a", "--size=1Gi", "--image-path=i", "--default-preference-kind=VirtualMachinePreference"],
            &["dv", "a", "--no-create", "--image-path=i", "--default-instancetype=u1.nano"],
            &["dv", "a", "--size=1Gi", "--image-path=i", "--volume-mode=tape"],
            &["pvc", "a", "--size=1Gi", "--image-path=i", "--access-mode=ReadOnlyMany"],
        ] {
            assert!(parse([&["kubectl-virt", "image-upload"], words].concat()).is_err(), "{words:?}");
        }
        assert!(data_volume(&options(&["dv", "a", "--size=big", "--image-path=i"]), "a").is_err());
    }

    #[test]
    fn targets_equal_those_of_virtctl() {
        let full = options(&[
            "DV",
            "a",
            "--size=1Gi",
            "--image-path=i",
            "--storage-class=fast",
            "--access-mode=ReadWriteMany",
            "--volume-mode=block",
            "--force-bind",
            "--default-instancetype=u1.nano",
            "--default-preference=alpine",
            "--default-preference-kind=VirtualMachinePreference",
        ]);
        assert_eq!(
            data_volume(&full, "a").unwrap(),
            json!({
                "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
                "metadata": {
                    "name": "a", "annotations": {"cdi.kubevirt.io/storage.bind.immediate.requested": ""},
                    "labels": {
                        "instancetype.kubevirt.io/default-instancetype": "u1.nano",
                        "instancetype.kubevirt.io/default-preference": "alpine",
                        "instancetype.kubevirt.io/default-preference-kind": "VirtualMachinePreference",
                    },
                },
                "spec": {"source": {"upload": {}}, "contentType": "kubevirt", "storage": {
                    "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "fast",
                    "accessModes": ["ReadWriteMany"], "volumeMode": "Block",
                }},
            })
        );
        let archive = options(&["pvc", "a", "--size=1Gi", "--archive-path=i"]);
        let claim = claim(&archive, "a").unwrap();
        assert_eq!(
            claim["metadata"],
            json!({
                "name": "a", "labels": {"cdi.kubevirt.io/applyStorageProfile": "true"},
                "annotations": {
                    "cdi.kubevirt.io/storage.upload.target": "", "cdi.kubevirt.io/storage.contentType": "archive",
                },
            })
        );
        assert_eq!(claim["spec"]["volumeMode"], "Filesystem");
    }

    #[test]
    fn data_source_has_one_source() {
        let made = data_source(&options(&["dv", "a", "--size=1Gi", "--image-path=i"]), "a", "ns");
        let source = json!({"pvc": {"name": "a", "namespace": "ns"}});
        assert_eq!(made["spec"], json!({"source": source}));
        let mut expected = made.clone();
        expected["spec"]["source"] = json!({"pvc": source["pvc"], "snapshot": null, "dataSource": null});
        assert_eq!(data_source_patch(&made), expected);
    }

    #[test]
    fn existing_claims_are_checked() {
        let claim = |annotations: Value, phase: &str| -> PersistentVolumeClaim {
            serde_json::from_value(json!({"metadata": {"annotations": annotations}, "status": {"phase": phase}}))
                .unwrap()
        };
        let (new, old) = (["pvc", "a", "--size=1Gi", "--image-path=i"], ["pvc", "a", "--no-create", "--image-path=i"]);
        let data_volume = ["dv", "a", "--size=1Gi", "--image-path=i"];
        let populated = json!({"metadata": {"annotations": {USES_POPULATOR: "true"}}});
        for (words, found, known, expected) in [
            (&new[..], claim(json!({TARGET: ""}), "Bound"), None, None),
            (&new, claim(json!({}), "Bound"), None, Some("PVC a not available for upload")),
            (&old, claim(json!({}), "Bound"), None, None),
            (
                &old,
                claim(json!({POD_PHASE: "Succeeded"}), "Bound"),
                None,
                Some("PVC a already successfully imported/cloned/updated"),
            ),
            (
                &data_volume,
                claim(json!({}), "Bound"),
                None,
                Some("No DataVolume is associated with the existing PVC ns/a"),
            ),
            (&data_volume, claim(json!({}), "Bound"), Some(&populated), Some("PVC a already successfully populated")),
            (&data_volume, claim(json!({}), "Pending"), Some(&populated), None),
            (
                &["pvc", "a", "--no-create", "--archive-path=i"],
                claim(json!({TARGET: ""}), "Bound"),
                None,
                Some("PVC a doesn't have archive contentType annotation"),
            ),
        ] {
            assert_eq!(obstacle(&options(words), "a", &found, known, "ns").as_deref(), expected, "{words:?}");
        }
    }

    #[test]
    fn phases_decide_when_data_are_sent() {
        let in_phase = |phase: &str| {
            json!({"status": {"phase": phase, "restartCount": 1, "conditions": [
                {"type": "Bound", "status": "False", "message": "no class"},
            ]}})
        };
        for (phase, force, expected) in [
            ("UploadReady", false, Progress::Done("the upload can begin".into())),
            ("", false, Progress::Waiting("Pending: no class".into())),
            ("WaitForFirstConsumer", true, Progress::Waiting("WaitForFirstConsumer: no class".into())),
            (
                "PendingPopulation",
                false,
                Progress::Failed(
                    "cannot upload to DataVolume in PendingPopulation phase, make sure the PVC is Bound, or use force-bind flag"
                        .into(),
                ),
            ),
        ] {
            assert_eq!(data_volume_ready(Some(&in_phase(phase)), force), expected, "{phase}");
        }
        assert!(matches!(processed(Some(&in_phase("UploadReady")), None, 0), Progress::Failed(_)));
        assert!(matches!(processed(Some(&in_phase("UploadReady")), None, 1), Progress::Waiting(_)));
        assert!(matches!(processed(Some(&in_phase("Succeeded")), None, 0), Progress::Done(_)));
        let claim = |name: &str, value: &str| json!({"metadata": {"annotations": {name: value}}});
        assert!(matches!(processed(None, Some(&claim(POD_PHASE, "Succeeded")), 0), Progress::Done(_)));
        assert!(matches!(processed(None, None, 0), Progress::Failed(_)));
        assert!(matches!(claim_ready(Some(&claim(POD_READY, "true"))), Progress::Done(_)));
        assert!(matches!(claim_ready(Some(&claim(POD_READY, "false"))), Progress::Waiting(_)));
    }

    #[test]
    fn events_tell_why_there_is_no_volume() {
        let event = |uid: &str, reason: &str, message: &str| -> Value {
            json!({"involvedObject": {"name": "a", "uid": uid}, "reason": reason, "message": message})
        };
        let events = json!({"items": [
            event("claim", "ProvisioningFailed", "no class"),
            event("claim", "ProvisioningFailed", "update: the object has been modified"),
            event("former", "ProvisioningFailed", "no space"),
            event("volume", "ErrClaimNotValid", "no mode"),
        ]});
        let data_volume = json!({"metadata": {"uid": "volume"}});
        let claim = |uid: &str, phase: &str| json!({"metadata": {"uid": uid}, "status": {"phase": phase}});
        for (volume, found, expected) in [
            (None, None, None),
            (None, Some(claim("claim", "Pending")), Some("Provisioning failed: no class")),
            (Some(&data_volume), Some(claim("claim", "Pending")), Some("Provisioning failed: no class")),
            (Some(&data_volume), Some(claim("claim", "Bound")), None),
            (Some(&data_volume), Some(claim("new", "Pending")), None),
            (Some(&data_volume), None, Some("Claim not valid: no mode")),
        ] {
            assert_eq!(cause(&events, volume, found.as_ref()).as_deref(), expected, "{found:?}");
        }
        assert_eq!(cause(&json!({}), Some(&data_volume), None), None);
    }

    #[test]
    fn override_of_the_proxys_address_comes_first() {
        let config = json!({"spec": {"uploadProxyURLOverride": "a"}, "status": {"uploadProxyURL": "b"}});
        assert_eq!(proxy_url(&config).as_deref(), Some("a"));
        assert_eq!(proxy_url(&json!({"status": {"uploadProxyURL": "b"}})).as_deref(), Some("b"));
        assert_eq!(proxy_url(&json!({"spec": {"uploadProxyURLOverride": ""}})), None);
    }
}
