//! Container disks and kernel images where the feature gate `ImageVolume` of Kubernetes is off.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, condition, story};
use serde_json::Value;

use crate::manifests;

/// A pod as a user could create it.
const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: probe}
spec:
  securityContext: {runAsNonRoot: true, runAsUser: 107, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: probe
    image: ferrovirt.io/toolbox:devel
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
    volumeMounts: [{name: disk, mountPath: /disk}]
  volumes:
  - {name: disk, image: {reference: 'ferrovirt.io/guests/tiny:devel'}}
";

/// A VMI that needs no image but that of its launcher: its guest is the firmware.
const FIRMWARE: &str = "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: firmware}
spec:
  terminationGracePeriodSeconds: 0
  domain: {memory: {guest: 64Mi}, devices: {}}
";

#[test]
fn container_disks_are_refused_by_name_where_image_volumes_are_off() {
    story("image-volumes", async |s| {
        let probe = s.dry_run(POD).await?;
        let required = std::env::var("IMAGE_VOLUMES").is_ok_and(|state| state == "off");
        if probe["spec"]["volumes"][0]["image"].is_object() {
            ensure!(!required, "IMAGE_VOLUMES=off, but the API server keeps image volumes");
            skips::skip("image volumes that are off");
            return Ok(());
        }

        s.apply(&manifests::vm("disk", "Always")).await?;
        s.apply(&manifests::kernel_vmi("kernel")).await?;
        for (name, volume) in [("disk", "root"), ("kernel", "kernel-boot-volume")] {
            let vmi = s.wait("vmi", name, "be refused", TIMEOUT, |vmi| refusal(vmi).is_some()).await?;
            let message = refusal(&vmi).context("no condition")?;
            ensure!(message.contains(&format!("({volume})")), "{name}: the volume is not named: {message}");
            ensure!(message.contains("feature gate ImageVolume"), "{name}: the gate is not named: {message}");
            let event = s.wait_event(name, "FailedCreate", TIMEOUT).await?;
            ensure!(event.contains(&format!("({volume})")), "{name}: {event}");
        }

        // Other VMIs run, and the refused ones had no pod at any time.
        s.apply(FIRMWARE).await?;
        s.wait_running("firmware").await?;
        for name in ["disk", "kernel"] {
            let vmi = s.get("vmi", name).await?;
            ensure!(refusal(&vmi).is_some(), "{name} is no longer refused: {}", vmi["status"]);
            let phase = vmi["status"]["phase"].as_str().unwrap_or_default();
            ensure!(["", "Pending"].contains(&phase), "{name} is {phase}");
        }
        no_pods_but_of(s, "firmware").await?;

        s.virt(&["stop", "disk"]).await?;
        s.wait_gone("vmi", "disk", TIMEOUT).await?;
        s.delete("vmi", "kernel").await?;
        s.wait_gone("vmi", "kernel", TIMEOUT).await
    });
}

/// Returns the message of a VMI whose pod is refused.
fn refusal(vmi: &Value) -> Option<&str> {
    let synchronized = condition(vmi, "Synchronized")?;
    let refused = synchronized["status"] == "False" && synchronized["reason"] == "FailedCreate";
    refused.then(|| synchronized["message"].as_str())?
}

/// Checks pods, and events about pods that are gone.
async fn no_pods_but_of(s: &Story, vmi: &str) -> Result<()> {
    let launcher = format!("virt-launcher-{vmi}-");
    for pod in s.list("Pod", "").await? {
        let name = pod["metadata"]["name"].as_str().unwrap_or_default();
        ensure!(name.starts_with(&launcher), "pod {name} was created");
    }
    for event in s.list("Event", "").await? {
        let about = event["involvedObject"]["name"].as_str().unwrap_or_default();
        let is_pod = event["involvedObject"]["kind"] == "Pod";
        ensure!(!is_pod || about.starts_with(&launcher), "pod {about} was created: {}", event["reason"]);
    }
    Ok(())
}
