//! `memory-dump`: dumps the memory of a running VM to a claim, which it can create.

use clap::{Args, ValueEnum};
use http::Method;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};

use crate::{Connection, Error, failed_while, guest::read, lifecycle::body, object_name};

/// Bytes of a dump in addition to the memory, as virt-api requires.
const DUMP_OVERHEAD: i64 = 100 << 20;
/// CDI's configuration.
const CDI_CONFIG: &str = "/apis/cdi.kubevirt.io/v1beta1/cdiconfigs/config";
/// Part of a claim that the file system uses without CDI's configuration.
const DEFAULT_OVERHEAD: f64 = 0.055;
/// The same, by CDI's default.
const CDI_OVERHEAD: f64 = 0.06;
/// Largest claim in bytes, to which numbers with a fraction are exact.
const MAX_CLAIM: f64 = 9_007_199_254_740_992.0;

/// Actions on memory dumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Action {
    /// Dump the memory to a claim
    Get,
    /// Download the last dump
    Download,
    /// Remove the association with the claim of the last dump
    Remove,
}

/// Options of `memory-dump`.
#[derive(Args)]
pub(crate) struct Options {
    /// Action
    #[arg(value_enum)]
    action: Action,
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// PersistentVolumeClaim for the dump; default: that of the last dump
    #[arg(long, value_name = "NAME")]
    claim_name: Option<String>,
    /// Create the claim, with room for the memory of the VM
    #[arg(long, requires = "claim_name")]
    create_claim: bool,
    /// Storage class of the created claim; default: that of the cluster
    #[arg(long, value_name = "NAME", requires = "create_claim")]
    storage_class: Option<String>,
    /// Access mode of the created claim
    #[arg(long, value_parser = ["ReadWriteOnce", "ReadWriteMany"], default_value = "ReadWriteOnce")]
    access_mode: String,
}

pub(crate) async fn run(connection: &Connection, options: &Options) -> Result<(), Error> {
    let vm = object_name(&options.vm)?;
    match options.action {
        Action::Get => {
            let created = match options.claim_name.as_deref().filter(|_| options.create_claim) {
                Some(name) => {
                    let created = create_claim(connection, vm, name, options).await;
                    Some(created.map_err(failed_while("creating the claim"))?)
                }
                None => None,
            };
            let request = body(&[("claimName", options.claim_name.as_ref().map(|name| json!(name)))], false);
            let path = connection.path("virtualmachines", vm, "memorydump");
            if let Err(error) = connection.call(Method::PUT, &path, request).await {
                let error = failed_while("dumping vm memory")(error);
                return Err(match created {
                    Some(created) => without_claim(connection, vm, &created, error).await,
                    None => error,
                });
            }
            say!("Successfully submitted memory dump request of VM {vm}")?;
        }
        Action::Remove => {
            let path = connection.path("virtualmachines", vm, "removememorydump");
            let removed = connection.call(Method::PUT, &path, Vec::new()).await;
            removed.map_err(failed_while("removing memory dump association"))?;
            say!("Successfully submitted remove memory dump association of VM {vm}")?;
        }
        Action::Download => {
            return Err(Error::Usage(
                "memory dumps cannot be downloaded yet: this requires exports, which are not available".into(),
            ));
        }
    }
    Ok(())
}

/// A claim that this command has created.
struct Created {
    namespace: String,
    name: String,
    uid: String,
}

/// Creates the claim for a dump of a running VM.
async fn create_claim(connection: &Connection, vm: &str, name: &str, options: &Options) -> Result<Created, Error> {
    let name = object_name(name)?;
    let namespace = &connection.namespace;
    let path = connection.object_path("virtualmachines", vm);
    check_unassociated(&read(&connection.call(Method::GET, &path, Vec::new()).await?)?)?;
    let vmi = connection.find(&connection.object_path("virtualmachineinstances", vm)).await?;
    let vmi = vmi.ok_or_else(|| Error::Usage(format!("VM {vm} does not run: its memory cannot be dumped")))?;
    let overhead = overhead(connection, options.storage_class.as_deref()).await?;
    let unknown = || Error::Usage(format!("VMI {vm} does not tell the size of its memory"));
    let size = size(&vmi, overhead).ok_or_else(unknown)?;
    let claim = claim(name, size, options).to_string().into_bytes();
    let created = read(&connection.call(Method::POST, &claims_path(namespace), claim).await?)?;
    say!("PVC {namespace}/{name} created")?;
    let uid = created["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
    Ok(Created { namespace: namespace.clone(), name: name.to_owned(), uid })
}

fn claims_path(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims")
}

/// Refuses a VM whose dumps go to another claim already.
fn check_unassociated(vm: &Value) -> Result<(), Error> {
    if vm["status"]["memoryDumpRequest"].is_null() {
        return Ok(());
    }
    Err(Error::Usage(
        "please remove current memory dump association before creating a new claim for a new memory dump".to_owned(),
    ))
}

/// Deletes the claim of a dump that was refused, and adds to the error what became of the claim.
async fn without_claim(connection: &Connection, vm: &str, claim: &Created, error: Error) -> Error {
    let vm = connection.find(&connection.object_path("virtualmachines", vm)).await;
    // After a lost answer, or one to a repeated request, the dump may use the claim.
    let is_unused = match (&error, vm) {
        (Error::Refused { code: 400..500, .. }, Ok(vm)) => vm.is_none_or(|vm| !is_associated(&vm, &claim.name)),
        _ => false,
    };
    let is_deleted = is_unused && {
        let path = format!("{}/{}", claims_path(&claim.namespace), claim.name);
        let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": claim.uid}});
        connection.call(Method::DELETE, &path, options.to_string().into_bytes()).await.is_ok()
    };
    with_end(error, claim, if is_deleted { "was deleted" } else { "remains" })
}

fn is_associated(vm: &Value, claim: &str) -> bool {
    vm["status"]["memoryDumpRequest"]["claimName"] == claim
}

fn with_end(error: Error, claim: &Created, end: &str) -> Error {
    let added = |message: String| format!("{message}\nPVC {}/{}, created for it, {end}", claim.namespace, claim.name);
    match error {
        Error::Refused { code, message } => Error::Refused { code, message: added(message) },
        Error::Transport(message) => Error::Transport(added(message)),
        other => other,
    }
}

/// Returns the part of a claim that the file system of this storage class uses.
async fn overhead(connection: &Connection, class: Option<&str>) -> Result<f64, Error> {
    match connection.find(CDI_CONFIG).await {
        Ok(Some(config)) => Ok(configured_overhead(&config, class)),
        Ok(None) => Ok(DEFAULT_OVERHEAD),
        Err(Error::Refused { code: 403, .. }) => Ok(CDI_OVERHEAD),
        Err(error) => Err(error),
    }
}

/// Returns the overhead of a class in CDI's configuration, or the largest one if the cluster chooses the class.
fn configured_overhead(config: &Value, class: Option<&str>) -> f64 {
    let overheads = &config["status"]["filesystemOverhead"];
    let read = |value: &Value| value.as_str().and_then(|text| text.parse::<f64>().ok());
    let of = |class: &Value| {
        let part = read(class).or_else(|| read(&overheads["global"]));
        part.filter(|part| (0.0..1.0).contains(part)).unwrap_or(DEFAULT_OVERHEAD)
    };
    let classes = &overheads["storageClass"];
    match class {
        Some(class) => of(&classes[class]),
        None => {
            let classes = classes.as_object().into_iter().flat_map(|classes| classes.values());
            classes.map(of).fold(of(&Value::Null), f64::max)
        }
    }
}

/// Returns the claim. CDI makes it larger if its storage class has a smallest size.
fn claim(name: &str, size: i64, options: &Options) -> Value {
    let mut claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "labels": {"cdi.kubevirt.io/applyStorageProfile": "true"}},
        "spec": {
            "accessModes": [options.access_mode],
            "resources": {"requests": {"storage": api::quantity::bytes(size).0}},
        },
    });
    if let Some(class) = &options.storage_class {
        claim["spec"]["storageClassName"] = json!(class);
    }
    claim
}

/// Returns the bytes that a claim must have for the memory of a VMI, in whole MiB. `overhead`: the part for the file system.
///
/// virt-api adds this part of the dump to it, as KubeVirt does. That is less than this part of the claim, and too little for guests of
/// many GiB.
#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "MAX_CLAIM is exact")]
fn size(vmi: &Value, overhead: f64) -> Option<i64> {
    let bytes = |value: &Value| api::quantity::units(&Quantity(value.as_str()?.to_owned())).ok();
    let (status, domain) = (&vmi["status"]["memory"], &vmi["spec"]["domain"]);
    let sizes = [
        &status["guestCurrent"],
        &status["guestRequested"],
        &domain["memory"]["guest"],
        &domain["resources"]["requests"]["memory"],
    ];
    let memory = sizes.into_iter().filter_map(bytes).max().filter(|bytes| *bytes > 0)?;
    let inflated = memory.checked_add(DUMP_OVERHEAD)? as f64 / (1.0 - overhead);
    (inflated < MAX_CLAIM).then(|| (inflated as i64 / (1 << 20) + 1) << 20)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::command_line::{Cli, Command};

    fn options(words: &[&str]) -> Result<Options, clap::Error> {
        let cli = Cli::try_parse_from([&["kubectl-virt", "memory-dump"], words].concat())?;
        let Command::MemoryDump(options) = cli.command else { panic!("another command") };
        Ok(options)
    }

    #[test]
    fn wrong_arguments_are_rejected_before_any_request() {
        for words in [
            &["vm"][..],
            &["put", "vm"],
            &["get", "vm", "--create-claim"],
            &["get", "vm", "--claim-name=a", "--storage-class=fast"],
            &["get", "vm", "--claim-name=a", "--create-claim", "--access-mode=ReadOnlyMany"],
        ] {
            assert!(options(words).is_err(), "{words:?}");
        }
        for words in [
            &["get", "vm"][..],
            &["get", "vm", "--claim-name=a"],
            &["get", "vm", "--claim-name=a", "--create-claim", "--storage-class=fast", "--access-mode=ReadWriteMany"],
            &["remove", "vm"],
        ] {
            assert!(options(words).is_ok(), "{words:?}");
        }
    }

    #[test]
    fn claim_is_created_for_a_vm_without_another() {
        assert!(check_unassociated(&json!({"status": {"created": true}})).is_ok());
        assert!(check_unassociated(&json!({})).is_ok());
        let associated = json!({"status": {"memoryDumpRequest": {"claimName": "a", "phase": "Completed"}}});
        let refusal = check_unassociated(&associated).unwrap_err().to_string();
        assert!(refusal.starts_with("please remove current memory dump association before creating a new claim"));
        assert!(is_associated(&associated, "a") && !is_associated(&associated, "b") && !is_associated(&json!({}), "a"));
    }

    #[test]
    fn error_tells_what_became_of_the_claim() {
        let claim = Created { namespace: "ns".into(), name: "a".into(), uid: "1".into() };
        let refused = Error::Refused { code: 409, message: "no room".into() };
        let said = with_end(refused, &claim, "was deleted").to_string();
        assert_eq!(said, "no room\nPVC ns/a, created for it, was deleted");
        let said = with_end(Error::Transport("no answer".into()), &claim, "remains").to_string();
        assert!(said.ends_with("no answer\nPVC ns/a, created for it, remains"), "{said}");
    }

    #[test]
    fn created_claim_has_room_for_the_memory() {
        let domain = json!({"memory": {"guest": "1Gi"}, "resources": {"requests": {"memory": "900Mi"}}});
        for (vmi, overhead, mebibytes) in [
            // (1024 + 100) / 0.945
            (json!({"spec": {"domain": domain}}), 0.055, Some(1190)),
            (json!({"spec": {"domain": domain}}), 0.06, Some(1196)),
            (json!({"spec": {"domain": domain}}), 0.0, Some(1125)),
            (json!({"spec": {"domain": domain}, "status": {"memory": {"guestCurrent": "2Gi"}}}), 0.055, Some(2274)),
            (json!({"spec": {"domain": {"resources": {"requests": {"memory": "900Mi"}}}}}), 0.055, Some(1059)),
            (json!({"spec": {"domain": {}}}), 0.055, None),
            (json!({"spec": {"domain": {"memory": {"guest": "9223372036854775807"}}}}), 0.055, None),
            (json!({"spec": {"domain": {"memory": {"guest": "9223372036854770000"}}}}), 0.055, None),
            (json!({"spec": {"domain": {"memory": {"guest": "8Pi"}}}}), 0.055, None),
        ] {
            assert_eq!(size(&vmi, overhead), mebibytes.map(|size| size << 20), "{vmi} {overhead}");
        }
        let chosen = options(&["get", "vm", "--claim-name=a", "--create-claim", "--storage-class=fast"]).unwrap();
        let claim = claim("a", 1190 << 20, &chosen);
        assert_eq!(
            claim["spec"],
            json!({
                "accessModes": ["ReadWriteOnce"], "storageClassName": "fast",
                "resources": {"requests": {"storage": "1190Mi"}},
            })
        );
        assert_eq!(claim["metadata"]["labels"], json!({"cdi.kubevirt.io/applyStorageProfile": "true"}));
    }

    #[test]
    fn overhead_is_that_of_the_class_or_the_largest() {
        let config = |global: &str, classes: Value| json!({"status": {"filesystemOverhead": {"global": global, "storageClass": classes}}});
        let classes = json!({"fast": "0.02", "slow": "0.3", "odd": "2"});
        for (config, class, expected) in [
            (config("0.06", classes.clone()), Some("fast"), 0.02),
            (config("0.06", classes.clone()), Some("other"), 0.06),
            (config("0.06", classes.clone()), Some("odd"), 0.055),
            (config("0.06", classes.clone()), Some(""), 0.06),
            (config("0.06", classes.clone()), None, 0.3),
            (config("0.5", classes), None, 0.5),
            (config("0.06", Value::Null), None, 0.06),
            (json!({}), None, 0.055),
        ] {
            let found = configured_overhead(&config, class);
            assert!((found - expected).abs() < 1e-9, "{config} {class:?}: {found}");
        }
    }
}
