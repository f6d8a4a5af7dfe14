//! `create preference`.

use api::instancetype::API_VERSION;
use clap::Args;
use serde_json::{Value, json};

use super::{metadata, name_or, object};

/// Values of `preferredCPUTopology`, the deprecated ones last.
const TOPOLOGIES: [&str; 10] = [
    "sockets",
    "cores",
    "threads",
    "spread",
    "any",
    "preferSockets",
    "preferCores",
    "preferThreads",
    "preferSpread",
    "preferAny",
];

/// Options of `create preference`.
#[derive(Args)]
pub(crate) struct Options {
    /// Name; default: generated
    #[arg(long)]
    name: Option<String>,
    /// Preferred topology of the vCPUs
    #[arg(long, value_parser = TOPOLOGIES)]
    cpu_topology: Option<String>,
    /// Preferred machine type
    #[arg(long)]
    machine_type: Option<String>,
    /// Preferred storage class of DataVolumes
    #[arg(long, value_name = "NAME")]
    volume_storage_class: Option<String>,
    /// Make a preference of a namespace; the default with --namespace
    #[arg(long)]
    namespaced: bool,
}

/// Returns the manifest.
pub(super) fn manifest(options: &Options, namespace: Option<&str>) -> Value {
    let (kind, prefix) = match options.namespaced || namespace.is_some() {
        true => ("VirtualMachinePreference", "preference-"),
        false => ("VirtualMachineClusterPreference", "clusterpreference-"),
    };
    let group = |field: &str, value: &Option<String>| value.as_ref().map_or(Value::Null, |value| json!({field: value}));
    json!({
        "apiVersion": API_VERSION, "kind": kind,
        "metadata": metadata(&name_or(options.name.as_deref(), prefix), namespace),
        "spec": object([
            ("cpu", group("preferredCPUTopology", &options.cpu_topology)),
            ("machine", group("preferredMachineType", &options.machine_type)),
            ("volumes", group("preferredStorageClassName", &options.volume_storage_class)),
        ]),
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{check, check_errors};

    #[test]
    fn preferences_equal_those_of_virtctl() {
        check(&[
            (
                &["preference", "--name=p"],
                "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineClusterPreference
metadata: {name: p}
spec: {}
",
            ),
            (
                &[
                    "preference",
                    "--name=p",
                    "--namespaced",
                    "--cpu-topology=spread",
                    "--machine-type=q35",
                    "--volume-storage-class=fast",
                ],
                "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachinePreference
metadata: {name: p}
spec:
  cpu: {preferredCPUTopology: spread}
  machine: {preferredMachineType: q35}
  volumes: {preferredStorageClassName: fast}
",
            ),
        ]);
        check_errors(&[(&["preference", "--cpu-topology=round"], "spread")]);
    }
}
