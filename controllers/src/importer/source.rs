//! The source of a DataVolume, and those that need CDI.

use api::cdi::{
    DataVolume,
    data_volume::{DataVolumeImportSource, DataVolumeSourceHttp, DataVolumeSourceRegistry},
};

use crate::cache::Key;

/// Prefix of the references of images.
const DOCKER: &str = "docker://";
/// Architecture of the images of Ferrovirt, and thereby of import pods.
const ARCHITECTURE: &str = "amd64";

/// The source of a DataVolume.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Source<'a> {
    /// An empty disk.
    Blank,
    /// An image of a registry.
    Registry {
        /// Reference of the image.
        image: &'a str,
        /// Secret with which kubelet pulls it.
        secret: Option<&'a str>,
    },
    /// A file on a server.
    Http(&'a DataVolumeSourceHttp),
    /// A claim.
    Claim(Key),
    /// A snapshot of a volume.
    Snapshot(Key),
    /// The claim names the object that it is filled from, which others do.
    External,
}

/// Returns the source, or why it is not carried out.
pub(crate) fn source(volume: &DataVolume) -> Result<Source<'_>, String> {
    let spec = &volume.spec;
    if is_external(volume) {
        return Ok(Source::External);
    }
    if !spec.checkpoints.is_empty() {
        return Err("an import in several stages (checkpoints) needs CDI, which is not installed".to_owned());
    }
    if let Some(reference) = &spec.source_ref {
        let namespace = reference.namespace.as_deref().or(volume.metadata.namespace.as_deref()).unwrap_or_default();
        return Err(format!(
            "DataVolume sourceRef not supported: {} {namespace}/{} named no source when the DataVolume was created; \
             create it again once it does",
            reference.kind, reference.name
        ));
    }
    let Some(source) = &spec.source else { return Err("the DataVolume has no source".to_owned()) };
    let archive = spec.content_type.as_deref() == Some("archive");
    let found = concrete(volume, source)?;
    match found {
        Source::Http(_) => Ok(found),
        _ if archive => Err("content type archive is supported for source http only".to_owned()),
        _ => Ok(found),
    }
}

/// Returns true if the claim names the object that it is filled from.
fn is_external(volume: &DataVolume) -> bool {
    let spec = &volume.spec;
    let pvc = spec.pvc.as_ref().is_some_and(|pvc| pvc.data_source.is_some() || pvc.data_source_ref.is_some());
    let storage = spec.storage.as_ref();
    let storage = storage.is_some_and(|storage| storage.data_source.is_some() || storage.data_source_ref.is_some());
    spec.source.is_none() && spec.source_ref.is_none() && (pvc || storage)
}

fn concrete<'a>(volume: &'a DataVolume, source: &'a DataVolumeImportSource) -> Result<Source<'a>, String> {
    let own = volume.metadata.namespace.as_deref().unwrap_or_default();
    let key = |namespace: &str, name: &str| Key::new(if namespace.is_empty() { own } else { namespace }, name);
    let unsupported = [
        ("s3", source.s3.is_some()),
        ("gcs", source.gcs.is_some()),
        ("imageio", source.imageio.is_some()),
        ("vddk", source.vddk.is_some()),
        ("upload", source.upload.is_some()),
    ];
    if let Some((name, _)) = unsupported.iter().find(|(_, is_set)| *is_set) {
        return Err(format!("source {name} needs CDI, which is not installed"));
    }
    if let Some(registry) = &source.registry {
        return image(registry);
    }
    if let Some(http) = &source.http {
        return Ok(Source::Http(http));
    }
    if let Some(pvc) = &source.pvc {
        return Ok(Source::Claim(key(&pvc.namespace, &pvc.name)));
    }
    if let Some(snapshot) = &source.snapshot {
        return Ok(Source::Snapshot(key(&snapshot.namespace, &snapshot.name)));
    }
    if source.blank.is_some() { Ok(Source::Blank) } else { Err("the DataVolume has no source".to_owned()) }
}

/// Returns the image of a registry source. kubelet pulls it, so that its own settings hold.
fn image(registry: &DataVolumeSourceRegistry) -> Result<Source<'_>, String> {
    if registry.image_stream.as_deref().is_some_and(|name| !name.is_empty()) {
        return Err("source registry: imageStream is not supported: name the image with url".to_owned());
    }
    if registry.cert_config_map.as_deref().is_some_and(|name| !name.is_empty()) {
        return Err(
            "source registry: certConfigMap is not supported: the node pulls the image, and must trust the registry"
                .to_owned(),
        );
    }
    let platform = registry.platform.as_ref().and_then(|platform| platform.architecture.as_deref());
    if let Some(architecture) = platform.filter(|name| !name.is_empty() && *name != ARCHITECTURE) {
        return Err(format!(
            "source registry: architecture {architecture} is not supported: nodes pull {ARCHITECTURE}"
        ));
    }
    let url = registry.url.as_deref().unwrap_or_default();
    if url.starts_with("oci-archive:") {
        return Err("source registry: oci-archive is not supported: push the image to a registry".to_owned());
    }
    let image = url.strip_prefix(DOCKER).filter(|image| !image.is_empty());
    let image = image.ok_or_else(|| format!("source registry: url {url:?} does not begin with {DOCKER}"))?;
    Ok(Source::Registry { image, secret: registry.secret_ref.as_deref().filter(|name| !name.is_empty()) })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn volume(spec: &Value) -> DataVolume {
        let metadata = json!({"name": "d", "namespace": "n"});
        let object =
            json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "metadata": metadata, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn sources_are_carried_out() {
        let claim = |namespace: &str| Source::Claim(Key::new(namespace, "c"));
        for (spec, expected) in [
            (json!({"source": {"blank": {}}}), Source::Blank),
            (
                json!({"source": {"registry": {"url": "docker://r/i:1"}}}),
                Source::Registry { image: "r/i:1", secret: None },
            ),
            (
                json!({"source": {"registry": {"url": "docker://r/i", "secretRef": "s", "pullMethod": "node",
                    "platform": {"architecture": "amd64"}}}}),
                Source::Registry { image: "r/i", secret: Some("s") },
            ),
            (json!({"source": {"pvc": {"namespace": "o", "name": "c"}}}), claim("o")),
            (json!({"source": {"pvc": {"namespace": "", "name": "c"}}}), claim("n")),
            (json!({"source": {"snapshot": {"namespace": "o", "name": "s"}}}), Source::Snapshot(Key::new("o", "s"))),
            (
                json!({"storage": {"dataSource": {"kind": "VolumeSnapshot", "name": "s"}, "resources": {}}}),
                Source::External,
            ),
        ] {
            assert_eq!(source(&volume(&spec)).unwrap(), expected, "{spec}");
        }
    }

    #[test]
    fn what_needs_cdi_is_refused_by_name() {
        for (spec, named) in [
            (json!({"source": {"upload": {}}}), "source upload needs CDI"),
            (json!({"source": {"s3": {"url": "u"}}}), "source s3 needs CDI"),
            (json!({"source": {"gcs": {"url": "u"}}}), "source gcs needs CDI"),
            (json!({"source": {"vddk": {}}}), "source vddk needs CDI"),
            (json!({"source": {"imageio": {"url": "u", "diskId": "d"}}}), "source imageio needs CDI"),
            (json!({"source": {"registry": {"url": "oci-archive://f"}}}), "oci-archive is not supported"),
            (json!({"source": {"registry": {"url": "r/i"}}}), "does not begin with docker://"),
            (json!({"source": {"registry": {"imageStream": "i"}}}), "imageStream is not supported"),
            (
                json!({"source": {"registry": {"url": "docker://r", "certConfigMap": "c"}}}),
                "certConfigMap is not supported",
            ),
            (
                json!({"source": {"registry": {"url": "docker://r", "platform": {"architecture": "arm64"}}}}),
                "architecture arm64 is not supported",
            ),
            (json!({"source": {"blank": {}}, "contentType": "archive"}), "archive is supported for source http only"),
            (json!({"sourceRef": {"kind": "DataSource", "name": "s"}}), "DataSource n/s named no source"),
            (json!({"source": {"blank": {}}, "checkpoints": [{"current": "a", "previous": ""}]}), "checkpoints"),
            (json!({"source": {}}), "has no source"),
            (json!({}), "has no source"),
        ] {
            let refusal = source(&volume(&spec)).unwrap_err();
            assert!(refusal.contains(named), "{spec}: {refusal}");
        }
    }
}
