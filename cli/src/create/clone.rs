//! `create clone`.

use clap::Args;
use serde_json::{Map, Value, json};

use super::{metadata, name_or, object};
use crate::Error;

/// Spellings of a VM and of a snapshot as a source.
const VM: [&str; 4] = ["vm", "VM", "VirtualMachine", "virtualmachine"];
const SNAPSHOT: [&str; 4] = ["snapshot", "VirtualMachineSnapshot", "vmsnapshot", "VMSnapshot"];

/// Options of `create clone`.
#[derive(Args)]
pub(crate) struct Options {
    /// Name of the clone object; default: generated
    #[arg(long)]
    name: Option<String>,
    /// Name of the VM or snapshot that is cloned
    #[arg(long)]
    source_name: String,
    /// Kind of the source: vm or vmsnapshot
    #[arg(long, value_name = "TYPE", default_value = "vm")]
    source_type: String,
    /// Name of the new VM; default: chosen by the controller
    #[arg(long)]
    target_name: Option<String>,
    /// Kind of the target: vm
    #[arg(long, value_name = "TYPE", default_value = "vm")]
    target_type: String,
    /// Pattern of labels to copy, with "!" of those to leave out; can be repeated
    #[arg(long, value_name = "PATTERN")]
    label_filter: Vec<String>,
    /// Pattern of annotations to copy, with "!" of those to leave out; can be repeated
    #[arg(long, value_name = "PATTERN")]
    annotation_filter: Vec<String>,
    /// The same for labels of the template
    #[arg(long, value_name = "PATTERN")]
    template_label_filter: Vec<String>,
    /// The same for annotations of the template
    #[arg(long, value_name = "PATTERN")]
    template_annotation_filter: Vec<String>,
    /// New MAC address as INTERFACE:ADDRESS; can be repeated
    #[arg(long, value_name = "INTERFACE:ADDRESS")]
    new_mac_address: Vec<String>,
    /// New serial number of the SMBIOS
    #[arg(long, value_name = "SERIAL")]
    new_smbios_serial: Option<String>,
}

/// Returns a reference to a source or target.
fn reference(role: &str, kind: &str, name: &str, takes_snapshots: bool) -> Result<Value, Error> {
    if VM.contains(&kind) || kind.is_empty() {
        return Ok(json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name}));
    }
    if SNAPSHOT.contains(&kind) && takes_snapshots {
        return Ok(json!({"apiGroup": "snapshot.kubevirt.io", "kind": "VirtualMachineSnapshot", "name": name}));
    }
    let supported = if takes_snapshots { "vm, vmsnapshot" } else { "vm" };
    Err(Error::Usage(format!("{role} type {kind} is not supported. Supported types: {supported}")))
}

/// Parses new MAC addresses. virtctl expects exactly one colon; here the address may have colons, too.
pub(crate) fn mac_addresses(values: &[String]) -> Result<Value, Error> {
    let mut addresses = Map::new();
    for value in values {
        let wrong = |why: &str| Error::Usage(format!("newMacAddress parameter {value} {why}"));
        let Some((interface, address)) = value.split_once(':') else {
            return Err(wrong("is invalid: a ':' is expected. For example: 'interface0:address0'"));
        };
        match (interface, address) {
            ("", _) => return Err(wrong("has empty interface name")),
            (_, "") => return Err(wrong("has empty address name")),
            _ => addresses.insert(interface.to_owned(), json!(address)),
        };
    }
    Ok(if addresses.is_empty() { Value::Null } else { Value::Object(addresses) })
}

/// Returns the manifest.
pub(super) fn manifest(options: &Options, namespace: Option<&str>) -> Result<Value, Error> {
    if options.source_name.is_empty() {
        return Err(Error::Usage("source name must not be empty".to_owned()));
    }
    let target = options.target_name.as_deref().unwrap_or_default();
    Ok(json!({
        "apiVersion": "clone.kubevirt.io/v1beta1", "kind": "VirtualMachineClone",
        "metadata": metadata(&name_or(options.name.as_deref(), "clone-"), namespace),
        "spec": object([
            ("source", reference("source", &options.source_type, &options.source_name, true)?),
            ("target", reference("target", &options.target_type, target, false)?),
            ("labelFilters", json!(options.label_filter)),
            ("annotationFilters", json!(options.annotation_filter)),
            ("template", object([
                ("labelFilters", json!(options.template_label_filter)),
                ("annotationFilters", json!(options.template_annotation_filter)),
            ])),
            ("newMacAddresses", mac_addresses(&options.new_mac_address)?),
            ("newSMBiosSerial", json!(options.new_smbios_serial)),
        ]),
        "status": {},
    }))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{check, check_errors};

    #[test]
    fn clones_equal_those_of_virtctl() {
        check(&[
            (
                &["clone", "--name=c", "--source-name=a"],
                "
apiVersion: clone.kubevirt.io/v1beta1
kind: VirtualMachineClone
metadata: {name: c}
spec:
  source: {apiGroup: kubevirt.io, kind: VirtualMachine, name: a}
  target: {apiGroup: kubevirt.io, kind: VirtualMachine, name: ''}
  template: {}
status: {}
",
            ),
            (
                &[
                    "clone",
                    "--name=c",
                    "-n=ns",
                    "--source-name=s",
                    "--source-type=VMSnapshot",
                    "--target-name=b",
                    "--target-type=VM",
                    "--label-filter=*",
                    "--label-filter=!some/key",
                    "--annotation-filter=a",
                    "--template-label-filter=b",
                    "--template-annotation-filter=c",
                    "--new-mac-address=i:00-11-22",
                    "--new-mac-address=j:02:00:00:00:00:01",
                    "--new-smbios-serial=n",
                ],
                "
apiVersion: clone.kubevirt.io/v1beta1
kind: VirtualMachineClone
metadata: {name: c, namespace: ns}
spec:
  source: {apiGroup: snapshot.kubevirt.io, kind: VirtualMachineSnapshot, name: s}
  target: {apiGroup: kubevirt.io, kind: VirtualMachine, name: b}
  labelFilters: ['*', '!some/key']
  annotationFilters: [a]
  template: {labelFilters: [b], annotationFilters: [c]}
  newMacAddresses: {i: 00-11-22, j: '02:00:00:00:00:01'}
  newSMBiosSerial: 'n'
status: {}
",
            ),
        ]);
        check_errors(&[
            (&["clone"], "--source-name"),
            (&["clone", "--source-name="], "source name must not be empty"),
            (&["clone", "--source-name=a", "--source-type=pod"], "source type pod is not supported"),
            (&["clone", "--source-name=a", "--target-type=snapshot"], "target type snapshot is not supported"),
            (&["clone", "--source-name=a", "--new-mac-address=i"], "is invalid"),
            (&["clone", "--source-name=a", "--new-mac-address=:m"], "has empty interface name"),
            (&["clone", "--source-name=a", "--new-mac-address=i:"], "has empty address name"),
        ]);
    }
}
