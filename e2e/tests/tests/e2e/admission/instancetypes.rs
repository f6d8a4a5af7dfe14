//! VMs with instance types.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::story;
use serde_json::{Value, json};

use super::plain;

#[test]
fn instance_type_sizes_a_vm() {
    story("instancetype", async |s| {
        s.apply(
            "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineInstancetype
metadata: {name: small}
spec: {cpu: {guest: 2}, memory: {guest: 256Mi}}
",
        )
        .await?;
        let sized = |name: &str, domain: Value| -> Result<String> {
            let mut vm = plain();
            vm["metadata"]["name"] = json!(name);
            vm["spec"]["instancetype"] = json!({"kind": "VirtualMachineInstancetype", "name": "small"});
            let template = &mut vm["spec"]["template"]["spec"];
            template["domain"].as_object_mut().context("no domain")?.remove("memory");
            json_patch::merge(template, &json!({"domain": domain}));
            Ok(vm.to_string())
        };
        s.apply(&sized("sized", json!({}))?).await?;
        let stored = s.get("vm", "sized").await?;
        ensure!(stored["spec"]["instancetype"]["name"] == "small", "{}", stored["spec"]);
        // The same field in both.
        for (domain, field) in [
            (json!({"memory": {"guest": "1Gi"}}), "spec.template.spec.domain.memory"),
            (json!({"cpu": {"cores": 2}}), "spec.template.spec.domain.cpu"),
        ] {
            let message = s.refused(&sized("torn", domain.clone())?).await?;
            ensure!(message.contains(field), "{domain} is refused without naming {field}: {message}");
        }
        Ok(())
    });
}
