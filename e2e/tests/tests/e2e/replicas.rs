//! Replica sets of VMIs.

use std::time::Duration;

use anyhow::ensure;
use ferrovirt_e2e_tests::story;
use kube::api::{Patch, PatchParams};
use serde_json::json;

#[test]
fn replica_set_is_scaled_up_and_down() {
    story("replicas", async |s| {
        s.apply(
            "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstanceReplicaSet
metadata: {name: pool}
spec:
  replicas: 1
  selector: {matchLabels: {app: pool}}
  template:
    metadata: {labels: {app: pool}}
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        memory: {guest: 128Mi}
        firmware:
          kernelBoot:
            kernelArgs: console=ttyS0 quiet
            container: {image: 'ferrovirt.io/guests/tiny-kernel:devel', kernelPath: /boot/vmlinuz, initrdPath: /boot/initrd}
        devices: {}
",
        )
        .await?;
        let minutes = Duration::from_secs(240);
        s.wait("vmirs", "pool", "have one ready", minutes, |set| set["status"]["readyReplicas"] == 1).await?;
        let scale = json!({"spec": {"replicas": 2}});
        s.api("vmirs").patch_scale("pool", &PatchParams::default(), &Patch::Merge(&scale)).await?;
        s.wait("vmirs", "pool", "have two ready", minutes, |set| set["status"]["readyReplicas"] == 2).await?;
        let scale = json!({"spec": {"replicas": 0}});
        s.api("vmirs").patch_scale("pool", &PatchParams::default(), &Patch::Merge(&scale)).await?;
        s.wait("vmirs", "pool", "have none", minutes, |set| set["status"].get("replicas").is_none_or(|n| n == 0))
            .await?;
        let deadline = tokio::time::Instant::now() + minutes;
        while !s.list("vmi", "app=pool").await?.is_empty() {
            ensure!(tokio::time::Instant::now() < deadline, "VMIs remain");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        Ok(())
    });
}
