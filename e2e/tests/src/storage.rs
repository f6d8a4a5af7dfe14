//! Storage on the node for the claims of stories.

use std::time::Duration;

use anyhow::Result;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use crate::Story;

const MINUTES: Duration = Duration::from_secs(150);

/// Backend of a volume.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// A directory of the node's own file system.
    Directory,
    /// A file system of 40 MiB that a test may fill.
    Small,
    /// A device backed by a file.
    Device,
}

/// Storage of a claim on the node.
pub struct Storage {
    name: String,
    /// Name of the node.
    pub node: String,
    /// Host name of the node.
    pub hostname: String,
    /// Path on the node.
    pub directory: String,
}

impl Storage {
    /// Creates a directory on the node with a volume for the claim of that name. The claim requests less than the capacity
    /// and can be expanded.
    ///
    /// # Errors
    ///
    /// The storage was not made; nothing of it is left.
    pub async fn make(s: &Story, claim: &str, backing: Backing) -> Result<Self> {
        let name = format!("{}-{claim}", s.namespace);
        let (node, hostname) = s.one_node().await?;
        let storage = Self { directory: format!("/var/lib/kubelet/{name}"), name, node, hostname };
        let made = storage.fill(s, claim, backing).await;
        if made.is_err() {
            storage.remove(s).await?;
        }
        made.map(|()| storage)
    }

    /// Creates a directory on the node with a volume that fits a claim of this name and spec. The story creates the claim.
    ///
    /// # Errors
    ///
    /// The storage was not made; nothing of it is left.
    pub async fn for_claim(s: &Story, claim: &str, spec: &Value) -> Result<Self> {
        let name = format!("{}-{claim}", s.namespace);
        let (node, hostname) = s.one_node().await?;
        let storage = Self { directory: format!("/var/lib/kubelet/{name}"), name, node, hostname };
        let volume = json!({
            "capacity": {"storage": spec["resources"]["requests"]["storage"]}, "accessModes": spec["accessModes"],
            "volumeMode": "Filesystem", "storageClassName": spec["storageClassName"].as_str().unwrap_or_default(),
            "local": {"path": storage.directory},
        });
        let made = async {
            on_host(s, &storage.node, &format!("mkdir -p {}", storage.directory)).await?;
            storage.add_volume(s, claim, volume).await
        };
        let made = made.await;
        if made.is_err() {
            storage.remove(s).await?;
        }
        made.map(|()| storage)
    }

    /// Creates the volume for a claim on the node.
    async fn add_volume(&self, s: &Story, claim: &str, mut spec: Value) -> Result<()> {
        spec["persistentVolumeReclaimPolicy"] = json!("Retain");
        spec["claimRef"] = json!({"namespace": s.namespace, "name": claim});
        spec["nodeAffinity"] = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "kubernetes.io/hostname", "operator": "In", "values": [self.hostname]}]}]}});
        let volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": self.name}, "spec": spec,
        });
        s.cluster_api("PersistentVolume").create(&PostParams::default(), &serde_json::from_value(volume)?).await?;
        Ok(())
    }

    async fn fill(&self, s: &Story, claim: &str, backing: Backing) -> Result<()> {
        let Self { name, node, directory, .. } = self;
        let mut path = directory.clone();
        on_host(s, node, &format!("mkdir -p {directory}")).await?;
        match backing {
            Backing::Directory => {}
            Backing::Small => {
                on_host(s, node, &format!("mount -t tmpfs -o size=40m,mode=755 {name} {directory}")).await?;
            }
            Backing::Device => {
                let attach =
                    format!("truncate -s 16M {directory}/backing && losetup --find --show {directory}/backing");
                path = on_host(s, node, &attach).await?.trim().to_owned();
            }
        }
        let mode = if backing == Backing::Device { "Block" } else { "Filesystem" };
        let class = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
            "provisioner": "kubernetes.io/no-provisioner", "allowVolumeExpansion": true,
        });
        s.cluster_api("StorageClass").create(&PostParams::default(), &serde_json::from_value(class)?).await?;
        let spec = json!({
            "capacity": {"storage": "64Mi"}, "accessModes": ["ReadWriteOnce"], "volumeMode": mode,
            "storageClassName": name, "local": {"path": path},
        });
        self.add_volume(s, claim, spec).await?;
        s.apply(&format!(
            "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {claim}}}
spec:
  storageClassName: {name}
  volumeName: {name}
  volumeMode: {mode}
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: 16Mi}}}}
"
        ))
        .await
    }

    /// Removes the storage.
    ///
    /// # Errors
    ///
    /// Something of it is left.
    pub async fn remove(&self, s: &Story) -> Result<()> {
        for kind in ["PersistentVolume", "StorageClass"] {
            match s.cluster_api(kind).delete(&self.name, &DeleteParams::background()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                outcome => drop(outcome?),
            }
        }
        let directory = &self.directory;
        // kubelet and QEMU may still use it.
        let detach = format!("losetup --associated {directory}/backing | cut -d: -f1 | xargs -r losetup --detach");
        let unmount = format!("umount -l {directory} 2>/dev/null");
        on_host(s, &self.node, &format!("{detach}; {unmount}; rm -rf {directory}")).await?;
        Ok(())
    }
}

/// Runs a script on a node with the node's own programs and files.
///
/// # Errors
///
/// The script failed, or could not be run.
pub async fn on_host(s: &Story, node: &str, script: &str) -> Result<String> {
    s.on_node(node, &format!("nsenter -t 1 -m -- /bin/sh -c '{script}'")).await
}

/// Deletes the VMIs of the story, which use its storage.
///
/// # Errors
///
/// A VMI is left.
pub async fn delete_vmis(s: &Story) -> Result<()> {
    for kind in ["vm", "vmi"] {
        for object in s.list(kind, "").await? {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            match s.api(kind).delete(name, &DeleteParams::background()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                outcome => drop(outcome?),
            }
            s.wait_gone(kind, name, MINUTES).await?;
        }
    }
    Ok(())
}
