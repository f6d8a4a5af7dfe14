//! Features that are not supported yet.

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::story;
use serde_json::{Value, json};

use super::plain;

#[test]
fn unsupported_fields_are_refused_by_name() {
    story("unsupported", async |s| {
        for (name, change, field) in refused() {
            let mut vm = plain();
            json_patch::merge(&mut vm["spec"]["template"]["spec"], &change);
            let message = s.refused(&vm.to_string()).await.with_context(|| name.to_owned())?;
            ensure!(message.contains(field), "{name} is refused without naming {field}: {message}");
        }
        ensure!(s.list("vm", "").await?.is_empty(), "a refused VM exists");
        Ok(())
    });
}

/// Unsupported features, each with a change of the plain VM and the field in the refusal.
fn refused() -> Vec<(&'static str, Value, &'static str)> {
    let domain = |domain: Value| json!({"domain": domain});
    let devices = |devices: Value| json!({"domain": {"devices": devices}});
    vec![
        (
            "a network card of the host",
            devices(json!({"interfaces": [{"name": "default", "sriov": {}}]})),
            "domain.devices.interfaces[0].sriov",
        ),
        (
            "a device by a claim",
            json!({
                "domain": {"devices": {"gpus": [{"name": "gpu", "claimName": "gpu", "requestName": "one"}]}},
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
            }),
            "domain.devices.gpus[0].claimName",
        ),
        (
            "a display of a virtual GPU",
            devices(json!({"gpus": [
                {"name": "gpu", "deviceName": "example.org/gpu", "virtualGPUOptions": {"display": {"enabled": true}}},
            ]})),
            "gpus[0].virtualGPUOptions.display",
        ),
        (
            "an encrypted guest",
            domain(json!({
                "launchSecurity": {"sev": {}},
                "firmware": {"bootloader": {"efi": {"secureBoot": false}}},
            })),
            "domain.launchSecurity",
        ),
    ]
}
