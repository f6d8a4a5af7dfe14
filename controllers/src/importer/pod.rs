//! The import pod: it mounts the claim and its source, and fills the claim.
//!
//! It is an ordinary pod in the namespace of its claim: `restricted`, without a token, with limits. kubelet pulls the image of a
//! registry source and mounts it, so that the pod has neither a registry client nor its credentials.

use std::collections::BTreeMap;

use api::{
    cdi::{DataVolume, annotation, data_volume::DataVolumeSourceHttp, label as cdi_label},
    constants::{annotation as pod_annotation, component, label},
    names,
};
use importer::task::{
    BLOCK_DEVICE, CERTS_DIR, ContentType, DATA_DIR, HttpSource, IMAGE_DIR, SCRATCH_DIR, SECRET_DIR, SOURCE_DEVICE,
    SOURCE_DIR, Source as TaskSource, TASK_VARIABLE, Target, Task, scratch_limit,
};
use k8s_openapi::{
    api::core::v1::{
        Container, EmptyDirVolumeSource, EnvVar, LocalObjectReference, Pod, PodSecurityContext, PodSpec,
        SecurityContext, Toleration, Volume,
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};

use super::claim;
use crate::{
    pod_parts::{self, device, mount},
    resources::claims::CachedClaim,
};

/// Beginning of the names of import pods.
const PREFIX: &str = "importer-";
/// Folder of the Secrets with headers.
const HEADERS_DIR: &str = "/headers";
/// Longest task. Linux limits a variable to 128 KiB.
const TASK_LIMIT: usize = 64 * 1024;
/// Secrets with headers at most.
const HEADER_SECRETS: usize = 16;
/// Annotations of a DataVolume that its pod gets, with the values of those that are missing.
const ANNOTATIONS: [(&str, &str); 4] = [
    (pod_annotation::NETWORKS, ""),
    (pod_annotation::DEFAULT_NETWORK, ""),
    // A proxy beside the program would keep the pod running.
    ("sidecar.istio.io/inject", "false"),
    ("linkerd.io/inject", "disabled"),
];
/// Annotation of a DataVolume with the priority class of its pods.
const PRIORITY_CLASS: &str = "cdi.kubevirt.io/storage.pod.priorityclassname";
/// Annotation of a DataVolume with the service account of its pods.
const SERVICE_ACCOUNT: &str = "cdi.kubevirt.io/storage.pod.serviceAccountName";

/// The content that a pod writes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Content<'a> {
    /// An empty disk.
    Blank,
    /// An image of a registry, with the Secret for its pull.
    Registry(&'a str, Option<&'a str>),
    /// A file on a server.
    Http(&'a DataVolumeSourceHttp),
    /// Another claim of the namespace.
    Claim(&'a CachedClaim),
    /// That of the claim, which its driver makes for its first consumer.
    Existing,
}

/// Everything that a pod is rendered from.
pub(crate) struct Inputs<'a> {
    /// The DataVolume.
    pub volume: &'a DataVolume,
    /// The claim that is filled.
    pub claim: &'a CachedClaim,
    /// The controller of the pod: the DataVolume, or the temporary claim of a clone in another namespace.
    pub owner: OwnerReference,
    /// The content.
    pub content: Content<'a>,
    /// Those of the VM that gets the disk. Its claim may be on nodes that only they admit to.
    pub tolerations: &'a [Toleration],
    /// Image of the importer.
    pub image: &'a str,
    /// When kubelet pulls it.
    pub pull_policy: &'a str,
}

/// Returns the name of the pod that fills a claim.
pub(crate) fn name(claim: &str) -> String {
    // The name is that of the host in the pod as well, which is shorter.
    format!("{PREFIX}{}", names::shortened(claim, names::LABEL_LIMIT - PREFIX.len()))
}

/// Renders the pod, or returns why it cannot be made.
pub(crate) fn render(inputs: &Inputs<'_>) -> Result<Pod, String> {
    let spec = &inputs.volume.spec;
    let annotated = |key: &str| inputs.volume.metadata.annotations.as_ref()?.get(key).cloned();
    let set = |value: Option<String>| value.filter(|value| !value.is_empty());
    let pull_secret = match &inputs.content {
        Content::Registry(_, Some(secret)) => Some(vec![LocalObjectReference { name: (*secret).to_owned() }]),
        _ => None,
    };
    Ok(Pod {
        metadata: metadata(inputs),
        spec: Some(PodSpec {
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            service_account_name: set(spec.service_account_name.clone()).or_else(|| set(annotated(SERVICE_ACCOUNT))),
            priority_class_name: set(spec.priority_class_name.clone()).or_else(|| set(annotated(PRIORITY_CLASS))),
            restart_policy: Some("OnFailure".to_owned()),
            image_pull_secrets: pull_secret,
            tolerations: (!inputs.tolerations.is_empty()).then(|| inputs.tolerations.to_vec()),
            // The images are built for it.
            node_selector: Some(map([("kubernetes.io/os", "linux"), ("kubernetes.io/arch", "amd64")])),
            security_context: Some(PodSecurityContext {
                fs_group_change_policy: Some("OnRootMismatch".to_owned()),
                ..pod_parts::pod_security()
            }),
            containers: vec![container(inputs)?],
            volumes: Some(volumes(inputs)),
            ..PodSpec::default()
        }),
        ..Pod::default()
    })
}

fn map<const N: usize>(entries: [(&str, &str); N]) -> BTreeMap<String, String> {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn metadata(inputs: &Inputs<'_>) -> ObjectMeta {
    let claim = &inputs.claim.metadata;
    let of_volume = inputs.volume.metadata.annotations.as_ref();
    let annotations = ANNOTATIONS.into_iter().filter_map(|(key, default)| {
        let value = of_volume.and_then(|all| all.get(key)).map_or(default, String::as_str);
        (!value.is_empty()).then(|| (key.to_owned(), value.to_owned()))
    });
    ObjectMeta {
        name: Some(name(claim.name.as_deref().unwrap_or_default())),
        namespace: claim.namespace.clone(),
        labels: Some(map([
            (label::APP, component::VIRT_IMPORTER),
            (cdi_label::APP, cdi_label::APP_VALUE),
            (cdi_label::COMPONENT, "importer"),
        ])),
        annotations: Some(annotations.collect()),
        owner_references: Some(vec![inputs.owner.clone()]),
        ..ObjectMeta::default()
    }
}

fn container(inputs: &Inputs<'_>) -> Result<Container, String> {
    let (mut mounts, mut devices) = (Vec::new(), Vec::new());
    if inputs.claim.block {
        devices.push(device("data", BLOCK_DEVICE))
    } else {
        mounts.push(mount("data", DATA_DIR, inputs.content == Content::Existing))
    }
    match &inputs.content {
        Content::Blank | Content::Existing => {}
        Content::Registry(..) => mounts.extend([mount("image", IMAGE_DIR, true), mount("scratch", SCRATCH_DIR, false)]),
        Content::Claim(source) if source.block => devices.push(device("source", SOURCE_DEVICE)),
        Content::Claim(_) => mounts.push(mount("source", SOURCE_DIR, true)),
        Content::Http(http) => {
            mounts.push(mount("scratch", SCRATCH_DIR, false));
            mounts.extend(given(http.cert_config_map.as_ref()).map(|_| mount("certs", CERTS_DIR, true)));
            mounts.extend(given(http.secret_ref.as_ref()).map(|_| mount("secret", SECRET_DIR, true)));
            let headers = (0..http.secret_extra_headers.len()).map(header);
            mounts.extend(headers.map(|(name, path)| mount(&name, &path, true)));
        }
    }
    Ok(Container {
        name: component::IMPORT_CONTAINER.to_owned(),
        image: Some(inputs.image.to_owned()),
        image_pull_policy: Some(inputs.pull_policy.to_owned()),
        command: Some(vec!["/usr/bin/virt-importer".to_owned()]),
        env: Some(vec![EnvVar { name: TASK_VARIABLE.to_owned(), value: Some(task(inputs)?), value_from: None }]),
        security_context: Some(SecurityContext {
            read_only_root_filesystem: Some(true),
            ..pod_parts::container_security()
        }),
        resources: Some(pod_parts::resources(["100m", "60M"], ["2", "600M"])),
        volume_mounts: (!mounts.is_empty()).then_some(mounts),
        volume_devices: (!devices.is_empty()).then_some(devices),
        ..Container::default()
    })
}

/// Returns a name that is not empty.
fn given(name: Option<&String>) -> Option<&String> {
    name.filter(|name| !name.is_empty())
}

/// Returns name and mount path of the volume with the headers of a Secret.
fn header(index: usize) -> (String, String) {
    (format!("headers-{index}"), format!("{HEADERS_DIR}/{index}"))
}

fn volumes(inputs: &Inputs<'_>) -> Vec<Volume> {
    let claim = |name: &str, claim: &CachedClaim, read_only: bool| {
        pod_parts::claim(name, claim.metadata.name.as_deref().unwrap_or_default(), read_only)
    };
    let secret = |name: &str, secret: &String| pod_parts::secret(name, Some(secret.clone()), None);
    let scratch = || {
        let request = inputs.claim.requested_bytes().and_then(|size| u64::try_from(size).ok()).unwrap_or_default();
        let limit = api::quantity::bytes(i64::try_from(scratch_limit(request)).unwrap_or(i64::MAX));
        let source = EmptyDirVolumeSource { size_limit: Some(limit), ..EmptyDirVolumeSource::default() };
        pod_parts::empty_dir("scratch", source)
    };
    let mut volumes = vec![claim("data", inputs.claim, false)];
    match &inputs.content {
        Content::Blank | Content::Existing => {}
        // Used for a compressed image of another format than raw.
        Content::Registry(image, _) => volumes.extend([pod_parts::image("image", image, None), scratch()]),
        // kubelet mounts it read-only, and storage that can attaches it so.
        Content::Claim(source) => volumes.push(claim("source", source, true)),
        Content::Http(http) => {
            volumes.push(scratch());
            let certs = given(http.cert_config_map.as_ref()).map(|name| pod_parts::config_map("certs", name, None));
            volumes.extend(certs);
            volumes.extend(given(http.secret_ref.as_ref()).map(|name| secret("secret", name)));
            let headers = http.secret_extra_headers.iter().enumerate();
            volumes.extend(headers.map(|(index, name)| secret(&header(index).0, name)));
        }
    }
    volumes
}

/// Returns the task of the program as JSON.
fn task(inputs: &Inputs<'_>) -> Result<String, String> {
    let spec = &inputs.volume.spec;
    let requested = inputs.claim.requested_bytes();
    let is_archive = spec.content_type.as_deref() == Some("archive");
    // The disk in a file system is smaller than its claim.
    let size = requested.map(|size| if inputs.claim.block { size } else { claim::without_overhead(size) });
    let source = match &inputs.content {
        Content::Blank => TaskSource::Blank {},
        Content::Registry(..) => TaskSource::Registry {},
        Content::Claim(_) => TaskSource::Claim {},
        Content::Existing => TaskSource::Existing {},
        Content::Http(http) => TaskSource::Http(http_source(http)?),
    };
    let task = Task {
        source,
        content_type: if is_archive { ContentType::Archive } else { ContentType::Kubevirt },
        target: if inputs.claim.block { Target::Block } else { Target::Filesystem },
        size: size.filter(|_| !is_archive).and_then(|size| u64::try_from(size).ok()),
        preallocation: spec.preallocation.unwrap_or_default(),
        // Storage that keeps several claims in one file system shows the free space of all.
        overhead_free: requested.filter(|_| !inputs.claim.block).and_then(|size| u64::try_from(size).ok()),
    };
    let text = serde_json::to_string(&task).map_err(|error| format!("the task cannot be written: {error}"))?;
    if text.len() > TASK_LIMIT {
        return Err(format!("url and headers of source http are longer than {TASK_LIMIT} bytes"));
    }
    Ok(text)
}

fn http_source(http: &DataVolumeSourceHttp) -> Result<HttpSource, String> {
    if http.secret_extra_headers.len() > HEADER_SECRETS {
        return Err(format!("source http: secretExtraHeaders names more than {HEADER_SECRETS} Secrets"));
    }
    Ok(HttpSource {
        url: http.url.clone(),
        certs: given(http.cert_config_map.as_ref()).is_some(),
        secret: given(http.secret_ref.as_ref()).is_some(),
        headers: http.extra_headers.clone(),
        secret_header_files: (0..http.secret_extra_headers.len()).map(|index| header(index).1).collect(),
        checksum: http.checksum.clone().filter(|checksum| !checksum.is_empty()),
        insecure_skip_verify: http.insecure_skip_verify.unwrap_or_default(),
    })
}

/// Returns true if the pod stays after its success.
pub(crate) fn is_retained(volume: &DataVolume) -> bool {
    let annotations = volume.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(annotation::RETAIN_POD)).is_some_and(|value| value == "true")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use serde_json::{Value, json};

    use super::*;
    use crate::runtime::Kind;

    fn claim(name: &str, block: bool) -> CachedClaim {
        let claim = json!({
            "metadata": {"name": name, "namespace": "n", "uid": format!("uid-{name}")},
            "spec": {"volumeMode": if block { "Block" } else { "Filesystem" }, "resources": {"requests": {"storage": "106Mi"}}},
        });
        serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap().into()
    }

    fn volume(spec: &Value) -> DataVolume {
        let annotations = json!({"k8s.v1.cni.cncf.io/networks": "net", "other": "x", "linkerd.io/inject": "enabled"});
        let metadata = json!({"name": "d", "namespace": "n", "uid": "u", "annotations": annotations});
        let object =
            json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "metadata": metadata, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    fn rendered(volume: &DataVolume, content: Content<'_>, block: bool) -> Value {
        let inputs = Inputs {
            volume,
            claim: &claim("d", block),
            owner: Kind::DataVolume.owner_reference(&volume.metadata),
            content,
            tolerations: &[Toleration { key: Some("vms".to_owned()), ..Toleration::default() }],
            image: "importer:1",
            pull_policy: "IfNotPresent",
        };
        serde_json::to_value(render(&inputs).unwrap()).unwrap()
    }

    fn task_of(pod: &Value) -> Task {
        serde_json::from_str(pod["spec"]["containers"][0]["env"][0]["value"].as_str().unwrap()).unwrap()
    }

    #[test]
    fn pod_passes_the_restricted_standard() {
        let spec = json!({"serviceAccountName": "builder", "priorityClassName": "low"});
        let pod = rendered(&volume(&spec), Content::Blank, false);
        let spec = &pod["spec"];
        let of_pod = &spec["securityContext"];
        assert_eq!(
            (&of_pod["runAsNonRoot"], &of_pod["runAsUser"], &of_pod["fsGroup"]),
            (&json!(true), &json!(107), &json!(107))
        );
        assert_eq!(of_pod["seccompProfile"], json!({"type": "RuntimeDefault"}));
        assert_eq!(
            (&spec["automountServiceAccountToken"], &spec["restartPolicy"]),
            (&json!(false), &json!("OnFailure"))
        );
        assert_eq!(spec["tolerations"], json!([{"key": "vms"}]));
        assert_eq!((&spec["serviceAccountName"], &spec["priorityClassName"]), (&json!("builder"), &json!("low")));
        let own = &spec["containers"][0]["securityContext"];
        assert_eq!(
            (&own["allowPrivilegeEscalation"], &own["capabilities"]),
            (&json!(false), &json!({"drop": ["ALL"]}))
        );
        assert_eq!(spec["containers"][0]["resources"]["limits"], json!({"cpu": "2", "memory": "600M"}));
    }

    #[test]
    fn pod_is_found_by_its_labels_and_owner() {
        let pod = rendered(&volume(&json!({})), Content::Blank, false);
        let metadata = &pod["metadata"];
        assert_eq!((&metadata["name"], &metadata["namespace"]), (&json!("importer-d"), &json!("n")));
        assert_eq!(
            metadata["labels"],
            json!({"kubevirt.io": "virt-importer", "app": "containerized-data-importer", "cdi.kubevirt.io": "importer"})
        );
        assert_eq!(metadata["ownerReferences"][0]["uid"], "u");
        assert_eq!(
            metadata["annotations"],
            json!({"k8s.v1.cni.cncf.io/networks": "net", "linkerd.io/inject": "enabled", "sidecar.istio.io/inject": "false"})
        );
        assert_eq!(name(&"x".repeat(253)).len(), 63);
    }

    #[test]
    fn source_and_claim_are_mounted() {
        let http = json!({
            "url": "https://h/i", "certConfigMap": "ca", "secretRef": "s", "extraHeaders": ["A: b"],
            "secretExtraHeaders": ["h"], "checksum": "md5:00", "insecureSkipVerify": true,
        });
        let volume = volume(&json!({"source": {"http": http}, "preallocation": true}));
        let http = volume.spec.source.as_ref().unwrap().http.as_ref().unwrap();
        let source = claim("s", true);
        let names = |list: &Value, key: &str| -> Vec<String> {
            list.as_array().into_iter().flatten().map(|item| item[key].as_str().unwrap().to_owned()).collect()
        };
        for (content, block, mounts, devices) in [
            (Content::Blank, false, vec!["/data"], vec![]),
            (Content::Blank, true, vec![], vec!["/dev/cdi-block-volume"]),
            (Content::Registry("r/i", Some("pull")), false, vec!["/data", "/image", "/scratch"], vec![]),
            (Content::Http(http), false, vec!["/data", "/scratch", "/certs", "/secret", "/headers/0"], vec![]),
            (Content::Claim(&source), true, vec![], vec!["/dev/cdi-block-volume", "/dev/cdi-source-volume"]),
            (Content::Existing, false, vec!["/data"], vec![]),
            (Content::Existing, true, vec![], vec!["/dev/cdi-block-volume"]),
        ] {
            let pod = rendered(&volume, content.clone(), block);
            let container = &pod["spec"]["containers"][0];
            assert_eq!(names(&container["volumeMounts"], "mountPath"), mounts, "{content:?}");
            assert_eq!(names(&container["volumeDevices"], "devicePath"), devices, "{content:?}");
            let volumes = pod["spec"]["volumes"].as_array().unwrap();
            assert_eq!(volumes.len(), mounts.len() + devices.len(), "{content:?}");
            let task = task_of(&pod);
            let size = if block { 106 << 20 } else { 100 << 20 };
            assert_eq!((task.size, task.preallocation), (Some(size), true), "{content:?}");
            let read_only = container["volumeMounts"][0]["readOnly"] == true;
            assert_eq!(read_only, content == Content::Existing && !block, "{content:?}");
        }
        let pod = rendered(&volume, Content::Registry("r/i", Some("pull")), false);
        assert_eq!(pod["spec"]["imagePullSecrets"], json!([{"name": "pull"}]));
        assert_eq!(pod["spec"]["volumes"][1]["image"], json!({"reference": "r/i"}));
        assert_eq!(pod["spec"]["volumes"][2]["emptyDir"]["sizeLimit"], "384256Ki");
        let pod = rendered(&volume, Content::Claim(&source), true);
        assert_eq!(pod["spec"]["volumes"][1]["persistentVolumeClaim"], json!({"claimName": "s", "readOnly": true}));
        let pod = rendered(&volume, Content::Http(http), false);
        assert_eq!(pod["spec"]["imagePullSecrets"], Value::Null);
        assert_eq!(pod["spec"]["volumes"][1]["emptyDir"]["sizeLimit"], "384256Ki");
        let TaskSource::Http(source) = task_of(&pod).source else { panic!("{pod}") };
        assert!(source.certs && source.secret && source.insecure_skip_verify);
        assert_eq!(
            (source.headers, source.secret_header_files),
            (vec!["A: b".to_owned()], vec!["/headers/0".to_owned()])
        );
        assert_eq!(source.checksum.as_deref(), Some("md5:00"));
    }

    #[test]
    fn task_is_bounded() {
        let refused = |http: Value| {
            let volume = volume(&json!({"source": {"http": http}}));
            let inputs = Inputs {
                volume: &volume,
                claim: &claim("d", false),
                owner: OwnerReference::default(),
                content: Content::Http(volume.spec.source.as_ref().unwrap().http.as_ref().unwrap()),
                tolerations: &[],
                image: "i",
                pull_policy: "Always",
            };
            render(&inputs).unwrap_err()
        };
        let long = refused(json!({"url": "http://h", "extraHeaders": ["x".repeat(TASK_LIMIT)]}));
        assert!(long.contains("longer than"), "{long}");
        let many = refused(json!({"url": "http://h", "secretExtraHeaders": vec!["s"; 17]}));
        assert!(many.contains("more than 16 Secrets"), "{many}");
    }
}
