//! Presets.

use anyhow::ensure;
use ferrovirt_e2e_tests::{TIMEOUT, story};
use serde_json::json;

#[test]
fn presets_of_the_namespace_apply_to_vmis() {
    story("presets", async |s| {
        let preset = |name: &str, cores: u32| {
            format!(
                "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstancePreset
metadata: {{name: {name}}}
spec:
  selector: {{matchLabels: {{size: large}}}}
  domain: {{cpu: {{cores: {cores}}}, devices: {{}}}}
"
            )
        };
        let vm = |size: &str| {
            json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                "metadata": {"name": "box", "labels": {"size": size}},
                "spec": {"domain": {"memory": {"guest": "64Mi"}, "devices": {}}},
            })
            .to_string()
        };
        s.apply(&preset("large", 3)).await?;
        // The watch of virt-api is delayed.
        let applied = tokio::time::Instant::now();
        loop {
            let vmi = s.dry_run(&vm("large")).await?;
            if vmi["spec"]["domain"]["cpu"]["cores"] == 3 {
                let annotation = &vmi["metadata"]["annotations"]["virtualmachinepreset.kubevirt.io/large"];
                ensure!(annotation == "kubevirt.io/v1", "the annotation of the preset is missing: {}", vmi["metadata"]);
                break;
            }
            ensure!(applied.elapsed() < TIMEOUT, "the preset is not applied: {}", vmi["spec"]);
        }
        println!("a preset is in effect {} ms after its creation", applied.elapsed().as_millis());
        let other = s.dry_run(&vm("small")).await?;
        ensure!(other["spec"]["domain"]["cpu"]["cores"] == 1, "it is applied to others: {}", other["spec"]["domain"]);

        s.apply(&preset("larger", 4)).await?;
        loop {
            let message = match s.dry_run(&vm("large")).await {
                Ok(vmi) => format!("accepted {}", vmi["spec"]),
                Err(error) => format!("{error:#}"),
            };
            if message.contains("presets 'larger' and 'large' conflict: spec.cpu") {
                break;
            }
            ensure!(applied.elapsed() < 2 * TIMEOUT, "conflicting presets are not refused: {message}");
        }
        Ok(())
    });
}
