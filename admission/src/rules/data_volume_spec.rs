//! Specs of DataVolumes: the rules of CDI, with its messages, and the uses that need CDI.

use api::{
    cdi::{
        DataVolumeSpec,
        annotation::{CHECK_STATIC_VOLUME, POPULATED_FOR, PRE_POPULATED},
        data_volume::{DataVolumeImportSource, DataVolumeSourceHttp, DataVolumeSourceRegistry},
    },
    quantity,
};
use k8s_openapi::{
    api::core::v1::VolumeResourceRequirements,
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
};

use crate::context::FieldErrors;

/// The only kind of a `sourceRef`.
pub(crate) const DATA_SOURCE: &str = "DataSource";

/// Smallest size of a claim.
const MIN_SIZE: i64 = 1 << 20;
/// Prefix of the references of images.
const DOCKER: &str = "docker://";
/// Algorithms of checksums with their numbers of hexadecimal digits.
const CHECKSUMS: [(&str, usize); 4] = [("md5", 32), ("sha1", 40), ("sha256", 64), ("sha512", 128)];
/// Feature that a use lacks, for the message "is not supported yet".
const CDI: &str = "imports that need CDI (Containerized Data Importer), which the cluster does not have";

/// Returns the errors of the spec at `root`: the first one of claim and source each.
pub(crate) fn validate(root: &str, spec: &DataVolumeSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    validate_claim(root, spec, &mut errors);
    validate_source(root, spec, &mut errors);
    errors
}

/// Returns true if the content is that of a claim or snapshot, whose size is the default.
pub(crate) fn is_clone(spec: &DataVolumeSpec) -> bool {
    let source = spec.source.as_ref();
    spec.source_ref.is_some() || source.is_some_and(|source| source.pvc.is_some() || source.snapshot.is_some())
}

fn validate_claim(root: &str, spec: &DataVolumeSpec, errors: &mut FieldErrors) {
    let (kind, resources, mode) = match (&spec.pvc, &spec.storage) {
        (None, None) => return errors.invalid(format!("{root}.PVC"), "Missing Data volume PVC"),
        (Some(_), Some(_)) => {
            let message = "Duplicate storage definition, both target storage and target pvc defined";
            return errors.invalid(format!("{root}.PVC.Storage"), message);
        }
        (Some(pvc), None) => ("PVC", pvc.resources.as_ref(), &pvc.volume_mode),
        (None, Some(storage)) => ("Storage", Some(&storage.resources), &storage.volume_mode),
    };
    let field = format!("{root}.{}.resources.requests.storage", kind.to_lowercase());
    match size(resources) {
        None if kind == "Storage" && is_clone(spec) => {}
        None => return errors.required(field, format!("{kind} size is missing")),
        Some(size) if quantity::units(size).is_ok_and(|bytes| bytes >= MIN_SIZE) => {}
        Some(_) => return errors.invalid(field, format!("{kind} size should be at least 1MiB")),
    }
    if let Some(pvc) = &spec.pvc {
        match pvc.access_modes.as_deref().unwrap_or_default() {
            [_] => {}
            [] => {
                let message = "Required value: at least 1 access mode is required";
                return errors.required(format!("{root}.pvc.accessModes"), message);
            }
            _ => return errors.invalid(format!("{root}.pvc.accessModes"), "PVC multiple accessModes"),
        }
    }
    if is_archive(spec) && mode.as_deref() == Some("Block") {
        errors.invalid(format!("{root}.contentType"), "ContentType Archive cannot have block volumeMode");
    }
}

fn size(resources: Option<&VolumeResourceRequirements>) -> Option<&Quantity> {
    resources?.requests.as_ref()?.get("storage")
}

fn is_archive(spec: &DataVolumeSpec) -> bool {
    spec.content_type.as_deref() == Some("archive")
}

fn validate_source(root: &str, spec: &DataVolumeSpec, errors: &mut FieldErrors) {
    let field = format!("{root}.source");
    match (spec.is_externally_populated(), &spec.source, &spec.source_ref) {
        (true, None, None) => {}
        (true, _, _) => errors.invalid(field, "External population is incompatible with Source and SourceRef"),
        (false, None, None) | (false, Some(_), Some(_)) => {
            errors.invalid(field, "Data volume should have either Source or SourceRef, or be externally populated");
        }
        (false, None, Some(reference)) => {
            if reference.kind != DATA_SOURCE {
                errors.invalid(format!("{root}.sourceRef.kind"), unsupported_kind(&reference.kind));
            } else if reference.name.is_empty() {
                errors.required(format!("{root}.sourceRef.name"), "sourceRef name is missing");
            }
        }
        (false, Some(source), None) => match members(source).as_slice() {
            [] => errors.invalid(field, "Missing Data volume source"),
            [name] => validate_member(root, name, source, spec, errors),
            _ => errors.invalid(field, "Multiple Data volume sources"),
        },
    }
}

/// Returns the message about another kind of a `sourceRef`.
pub(crate) fn unsupported_kind(kind: &str) -> String {
    format!("Unsupported sourceRef kind {kind}, currently only {DATA_SOURCE} is supported")
}

/// Returns the names of the members that are set.
pub(crate) fn members(source: &DataVolumeImportSource) -> Vec<&'static str> {
    [
        ("blank", source.blank.is_some()),
        ("gcs", source.gcs.is_some()),
        ("http", source.http.is_some()),
        ("imageio", source.imageio.is_some()),
        ("pvc", source.pvc.is_some()),
        ("registry", source.registry.is_some()),
        ("s3", source.s3.is_some()),
        ("snapshot", source.snapshot.is_some()),
        ("upload", source.upload.is_some()),
        ("vddk", source.vddk.is_some()),
    ]
    .into_iter()
    .filter_map(|(name, is_set)| is_set.then_some(name))
    .collect()
}

fn validate_member(
    root: &str,
    name: &str,
    source: &DataVolumeImportSource,
    spec: &DataVolumeSpec,
    errors: &mut FieldErrors,
) {
    let path = format!("{root}.source.{name}");
    let pvc = source.pvc.as_ref().map(|pvc| &pvc.name);
    if let Some(of) = pvc.or(source.snapshot.as_ref().map(|snapshot| &snapshot.name))
        && of.is_empty()
    {
        errors.required(format!("{path}.name"), format!("name of the source {name} is missing"));
    }
    if let Some(http) = &source.http {
        validate_http(&path, http, errors);
    }
    if let Some(registry) = &source.registry {
        let is_set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if is_set(&registry.url) == is_set(&registry.image_stream) {
            errors.invalid(&path, "Source registry should have either url or imageStream");
        }
    }
    if is_archive(spec) && ["blank", "registry"].contains(&name) {
        errors.invalid(format!("{root}.contentType"), format!("ContentType must be kubevirt when Source is {name}"));
    }
}

fn validate_http(path: &str, http: &DataVolumeSourceHttp, errors: &mut FieldErrors) {
    let address = http.url.strip_prefix("http://").or(http.url.strip_prefix("https://"));
    if address.is_none_or(|address| address.is_empty() || address.starts_with('/')) {
        errors.invalid(format!("{path}.url"), format!("Invalid source URL: {}", http.url));
    }
    let Some(checksum) = http.checksum.as_deref().filter(|checksum| !checksum.is_empty()) else { return };
    let digits = |(algorithm, digits): (&str, &str)| {
        let length = CHECKSUMS.iter().find(|(name, _)| *name == algorithm).map(|(_, length)| *length);
        length == Some(digits.len()) && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
    };
    if !checksum.split_once(':').is_some_and(digits) {
        let message =
            format!("Invalid checksum {checksum}: expected md5, sha1, sha256 or sha512, a colon and the digits");
        errors.invalid(format!("{path}.checksum"), message);
    }
}

/// Returns the uses in a valid spec at `root` that the importer does not carry out.
pub(crate) fn unsupported(root: &str, spec: &DataVolumeSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let mut lacks = |path: &str, reason: &str| {
        let path = format!("{root}.{path}");
        errors.not_supported(&path, format!("{path} is not supported yet: {reason}"));
    };
    if !spec.checkpoints.is_empty() {
        lacks("checkpoints", CDI);
    }
    let Some(source) = &spec.source else { return errors };
    for name in members(source) {
        if ["gcs", "imageio", "s3", "upload", "vddk"].contains(&name) {
            lacks(&format!("source.{name}"), CDI);
        } else if is_archive(spec) && name != "http" {
            lacks("contentType", "archives from other sources than http");
        }
    }
    if let Some((field, reason)) = source.registry.as_ref().and_then(unsupported_registry) {
        lacks(&format!("source.registry.{field}"), reason);
    }
    errors
}

/// Returns the annotations in the metadata at `root` that the importer does not carry out. It would fill the claim of a volume that the
/// user wants to keep.
pub(crate) fn unsupported_annotations(root: &str, metadata: &ObjectMeta) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let has = |key: &str| metadata.annotations.as_ref().is_some_and(|all| all.contains_key(key));
    // The claim of one that somebody else fills is waited for.
    if has(CHECK_STATIC_VOLUME) && !has(PRE_POPULATED) {
        let path = format!("{root}.annotations[{CHECK_STATIC_VOLUME}]");
        let message = format!(
            "{path} is not supported yet: {CDI}. Create a claim of this name with spec.volumeName and annotation \
             {POPULATED_FOR} instead"
        );
        errors.not_supported(path, message);
    }
    errors
}

/// Returns the first field of a registry source that is not carried out. kubelet pulls the image, with its own settings.
fn unsupported_registry(registry: &DataVolumeSourceRegistry) -> Option<(&'static str, &'static str)> {
    let text = |text: &'_ Option<String>| text.clone().filter(|text| !text.is_empty());
    let architecture = registry.platform.as_ref().and_then(|platform| text(&platform.architecture));
    if text(&registry.image_stream).is_some() {
        Some(("imageStream", CDI))
    } else if text(&registry.cert_config_map).is_some() {
        Some(("certConfigMap", "certificates of a registry; the nodes must trust it"))
    } else if architecture.is_some_and(|architecture| architecture != "amd64") {
        Some(("platform.architecture", "images of another architecture than that of the nodes"))
    } else if text(&registry.url).is_some_and(|url| url.len() <= DOCKER.len() || !url.starts_with(DOCKER)) {
        Some(("url", "references that do not begin with docker://"))
    } else {
        None
    }
}
