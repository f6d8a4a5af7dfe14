//! `permitted-devices`: host devices that VMIs may use, from the `KubeVirt` object.

use serde_json::Value;

use crate::{Connection, Error, migrations, output::print};

pub(crate) async fn run(connection: &Connection) -> Result<(), Error> {
    print(format_args!("{}", devices(&kubevirt(connection).await?)))
}

/// Reads the `KubeVirt` object of the cluster.
pub(crate) async fn kubevirt(connection: &Connection) -> Result<Value, Error> {
    let mut found: Vec<Value> = migrations::all(connection, "/apis/kubevirt.io/v1/kubevirts").await?;
    match (found.pop(), found.is_empty()) {
        (Some(kubevirt), true) => Ok(kubevirt),
        (None, _) => Err(Error::Usage("could not detect a KubeVirt installation".to_owned())),
        (Some(_), false) => {
            let why = "invalid kubevirt installation, more than one KubeVirt resource found";
            Err(Error::Usage(why.to_owned()))
        }
    }
}

/// Lists the devices in virtctl's form. USB devices, which it leaves out, follow if there are any.
fn devices(kubevirt: &Value) -> String {
    let permitted = &kubevirt["spec"]["configuration"]["permittedHostDevices"];
    let names = |field: &str| {
        let devices = permitted[field].as_array().map(Vec::as_slice).unwrap_or_default();
        devices.iter().filter_map(|device| device["resourceName"].as_str()).collect::<Vec<_>>().join(", ")
    };
    let usb = match names("usb") {
        names if names.is_empty() => names,
        names => format!("USB Devices: \n{names}\n"),
    };
    let (host, gpu) = (names("pciHostDevices"), names("mediatedDevices"));
    format!("Permitted Devices: \nHost Devices: \n{host} \nGPU Devices: \n{gpu}\n{usb}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn devices_are_listed_as_virtctl_does() {
        let kubevirt = json!({"spec": {"configuration": {"permittedHostDevices": {
            "pciHostDevices": [{"resourceName": "a/nic"}, {"resourceName": "a/ssd"}],
            "mediatedDevices": [{"resourceName": "a/gpu"}],
        }}}});
        let expected = "Permitted Devices: \nHost Devices: \na/nic, a/ssd \nGPU Devices: \na/gpu\n";
        assert_eq!(devices(&kubevirt), expected);
        assert_eq!(devices(&json!({})), "Permitted Devices: \nHost Devices: \n \nGPU Devices: \n\n");
        let usb = json!({"spec": {"configuration": {"permittedHostDevices": {"usb": [{"resourceName": "a/key"}]}}}});
        assert!(devices(&usb).ends_with("USB Devices: \na/key\n"));
    }
}
