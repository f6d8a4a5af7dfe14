//! `create instancetype`.

use api::instancetype::API_VERSION;
use clap::Args;
use serde_json::{Value, json};

use super::{
    metadata, name_or, object,
    params::{self, Params, invalid},
};
use crate::Error;

/// Options of `create instancetype`.
#[derive(Args)]
pub(crate) struct Options {
    /// Name; default: generated
    #[arg(long)]
    name: Option<String>,
    /// Number of vCPUs
    #[arg(long)]
    cpu: u32,
    /// Size of the memory, such as 2Gi
    #[arg(long)]
    memory: String,
    /// Device of kind GPU as name:NAME,devicename:RESOURCE; can be repeated
    #[arg(long, value_name = "PARAMS")]
    gpu: Vec<String>,
    /// Host device as name:NAME,devicename:RESOURCE; can be repeated
    #[arg(long, value_name = "PARAMS")]
    hostdevice: Vec<String>,
    /// Policy of IO threads
    #[arg(long, value_parser = ["auto", "shared"])]
    iothreadspolicy: Option<String>,
    /// Make an instance type of a namespace; the default with --namespace
    #[arg(long)]
    namespaced: bool,
}

/// Returns the devices of a flag.
fn devices(flag: &'static str, values: &[String]) -> Result<Value, Error> {
    let device = |text: &String| {
        let params = Params::parse(flag, text, &["name", "devicename"])?;
        let name = params.required("name")?;
        match params.get("devicename") {
            "" => Err(invalid(flag, "deviceName must be specified")),
            device => Ok(json!({"name": name, "deviceName": device})),
        }
    };
    values.iter().map(device).collect()
}

/// Returns the manifest.
pub(super) fn manifest(options: &Options, namespace: Option<&str>) -> Result<Value, Error> {
    let memory = params::quantity(&options.memory).map_err(|why| Error::Usage(why.to_owned()))?;
    if options.cpu == 0 {
        return Err(Error::Usage("cpu value must be greater than zero".to_owned()));
    }
    let (kind, prefix) = match options.namespaced || namespace.is_some() {
        true => ("VirtualMachineInstancetype", "instancetype-"),
        false => ("VirtualMachineClusterInstancetype", "clusterinstancetype-"),
    };
    Ok(json!({
        "apiVersion": API_VERSION, "kind": kind,
        "metadata": metadata(&name_or(options.name.as_deref(), prefix), namespace),
        "spec": object([
            ("cpu", json!({"guest": options.cpu})),
            ("memory", json!({"guest": memory})),
            ("gpus", devices("gpu", &options.gpu)?),
            ("hostDevices", devices("hostdevice", &options.hostdevice)?),
            ("ioThreadsPolicy", json!(options.iothreadspolicy)),
        ]),
    }))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{check, check_errors};

    #[test]
    fn instancetypes_equal_those_of_virtctl() {
        check(&[
            (
                &["instancetype", "--name=i", "--cpu=2", "--memory=256Mi"],
                "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineClusterInstancetype
metadata: {name: i}
spec: {cpu: {guest: 2}, memory: {guest: 256Mi}}
",
            ),
            (
                &[
                    "instancetype",
                    "--name=i",
                    "-n",
                    "ns",
                    "--cpu=1",
                    "--memory=1024Mi",
                    "--gpu=name:g,devicename:example.com/gpu",
                    "--hostdevice=name:h,devicename:example.com/nic",
                    "--iothreadspolicy=auto",
                ],
                "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineInstancetype
metadata: {name: i, namespace: ns}
spec:
  cpu: {guest: 1}
  memory: {guest: 1Gi}
  gpus: [{name: g, deviceName: example.com/gpu}]
  hostDevices: [{name: h, deviceName: example.com/nic}]
  ioThreadsPolicy: auto
",
            ),
        ]);
        check_errors(&[
            (&["instancetype", "--cpu=0", "--memory=1Gi"], "cpu value must be greater than zero"),
            (&["instancetype", "--cpu=1", "--memory=big"], "quantities must match the regular expression"),
            (&["instancetype", "--cpu=1"], "--memory"),
            (&["instancetype", "--cpu=1", "--memory=1Gi", "--gpu=devicename:a"], "name must be specified"),
            (&["instancetype", "--cpu=1", "--memory=1Gi", "--gpu=name:a"], "deviceName must be specified"),
            (&["instancetype", "--cpu=1", "--memory=1Gi", "--iothreadspolicy=x"], "auto"),
        ]);
    }
}
