//! `--volume-import`: DataVolumes that the VM creates.

use serde_json::{Value, json};

use super::{
    super::{
        object,
        params::{self, Params, check_label, invalid},
        random_name,
    },
    Options, Parts,
};
use crate::Error;

const FLAG: &str = "volume-import";
/// Parameters of each type.
const COMMON: [&str; 4] = ["type", "size", "name", "bootorder"];

/// A type of sources with a URL.
struct Source {
    kind: &'static str,
    /// Field of the DataVolume's source.
    field: &'static str,
    /// Parameters with their fields.
    params: &'static [(&'static str, &'static str)],
    /// Parameters that must be given.
    required: &'static [&'static str],
}

const SOURCES: [Source; 6] = [
    Source { kind: "gcs", field: "gcs", params: &[URL, SECRET], required: &["url"] },
    Source {
        kind: "http",
        field: "http",
        params: &[URL, SECRET, CERTIFICATES, EXTRA_HEADERS, SECRET_EXTRA_HEADERS],
        required: &["url"],
    },
    Source {
        kind: "imageio",
        field: "imageio",
        params: &[URL, ("diskid", "diskId"), SECRET, CERTIFICATES],
        required: &["url", "diskid"],
    },
    Source {
        kind: "registry",
        field: "registry",
        params: &[URL, ("imagestream", "imageStream"), ("pullmethod", "pullMethod"), SECRET, CERTIFICATES],
        required: &[],
    },
    Source { kind: "s3", field: "s3", params: &[URL, SECRET, CERTIFICATES], required: &["url"] },
    Source {
        kind: "vddk",
        field: "vddk",
        params: &[
            URL,
            ("uuid", "uuid"),
            ("thumbprint", "thumbprint"),
            SECRET,
            ("backingfile", "backingFile"),
            ("initimageurl", "initImageURL"),
        ],
        required: &["url", "uuid", "thumbprint", "secretref", "backingfile"],
    },
];
const URL: (&str, &str) = ("url", "url");
const SECRET: (&str, &str) = ("secretref", "secretRef");
const CERTIFICATES: (&str, &str) = ("certconfigmap", "certConfigMap");
const EXTRA_HEADERS: (&str, &str) = ("extraheaders", "extraHeaders");
const SECRET_EXTRA_HEADERS: (&str, &str) = ("secretextraheaders", "secretExtraHeaders");

/// Adds the DataVolumes and their volumes. The deprecated flags come first, each value before those already there.
pub(super) fn imports(parts: &mut Parts, options: &Options) -> Result<(), Error> {
    let mut imports = options.volume_import.clone();
    for (flag, kind, values) in [
        ("volume-datasource", "ds", &options.volume_datasource),
        ("volume-clone-pvc", "pvc", &options.volume_clone_pvc),
        ("volume-blank", "blank", &options.volume_blank),
    ] {
        if !values.is_empty() {
            eprintln!("Flag --{flag} has been deprecated, use flag --{FLAG} instead");
        }
        for value in values {
            if value.is_empty() {
                return Err(invalid(FLAG, "params may not be empty"));
            }
            imports.insert(0, format!("type:{kind},{value}"));
        }
    }
    imports.iter().try_for_each(|value| import(parts, value))
}

fn import(parts: &mut Parts, value: &str) -> Result<(), Error> {
    let params = Params::split(FLAG, value)?;
    let kind = params.required("type")?;
    let (field, source) = source(kind, &params)?;
    let size = match params.get("size") {
        "" if ["pvc", "snapshot", "ds"].contains(&kind) => None,
        _ => Some(params::quantity(params.required("size")?).map_err(|why| invalid(FLAG, why))?),
    };
    let generated;
    let name = match params.get("name") {
        "" => {
            generated = random_name("imported-volume-", 5);
            &generated
        }
        name => name,
    };
    check_label(FLAG, name)?;
    let resources = size.map_or_else(|| json!({}), |size| json!({"requests": {"storage": size}}));
    parts.add(FLAG, name, json!({"dataVolume": {"name": name}}), params.boot_order())?;
    parts.templates.push(json!({
        "metadata": {"name": name}, "spec": {field: source, "storage": {"resources": resources}},
    }));
    Ok(())
}

/// Returns the field of the DataVolume's spec and its value.
fn source(kind: &str, params: &Params) -> Result<(&'static str, Value), Error> {
    match kind {
        "blank" => {
            params.check(&COMMON)?;
            Ok(("source", json!({"blank": {}})))
        }
        "pvc" | "snapshot" => {
            params.check(&["type", "size", "name", "bootorder", "src"])?;
            let (namespace, name) = params.source()?;
            if namespace.is_empty() {
                return Err(invalid(FLAG, format_args!("namespace of {kind} \"{name}\" must be specified")));
            }
            Ok(("source", json!({kind: {"namespace": namespace, "name": name}})))
        }
        "ds" => {
            params.check(&["type", "size", "name", "bootorder", "src"])?;
            let (namespace, name) = params.source()?;
            let fields = [("kind", json!("DataSource")), ("name", json!(name)), ("namespace", json!(namespace))];
            Ok(("sourceRef", object(fields)))
        }
        _ => {
            let Some(source) = SOURCES.iter().find(|source| source.kind == kind) else {
                let why = format!("invalid volume import type \"{kind}\", see help for supported values");
                return Err(invalid(FLAG, why));
            };
            Ok(("source", json!({source.field: from_url(source, params)?})))
        }
    }
}

/// Returns a source with a URL.
fn from_url(source: &Source, params: &Params) -> Result<Value, Error> {
    let known = source.params.iter().map(|(name, _)| *name).chain(COMMON).collect::<Vec<_>>();
    params.check(&known)?;
    if let Some(missing) = source.required.iter().find(|name| params.get(name).is_empty()) {
        let which = match source.kind {
            "imageio" => "url and diskid are both required".to_owned(),
            _ => format!("{missing} is required"),
        };
        return Err(invalid(FLAG, format_args!("{which} with {} volume source", source.kind)));
    }
    if source.kind == "registry" {
        if !["", "pod", "node"].contains(&params.get("pullmethod")) {
            return Err(invalid(FLAG, "pullmethod must be set to pod or node"));
        }
        if params.get("url").is_empty() == params.get("imagestream").is_empty() {
            return Err(invalid(FLAG, "exactly one of url or imagestream must be defined"));
        }
    }
    let given = source.params.iter().filter(|(name, _)| !params.get(name).is_empty());
    let field = |(name, field): &(&str, &str)| {
        let value = params.get(name);
        // Headers are lists.
        let list = || json!(value.split(';').collect::<Vec<_>>());
        ((*field).to_owned(), if name.ends_with("extraheaders") { list() } else { json!(value) })
    };
    Ok(Value::Object(given.map(field).collect()))
}
