//! Storage on the node for the claims of stories.

use std::time::Duration;

use anyhow::Result;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use crate::{
    Story,
    environment::{own_cluster, skip},
};

const MINUTES: Duration = Duration::from_secs(300);
/// MiB that a claim requests, unless the story names another size.
const SIZE: u32 = 16;

/// Backend of a volume.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// A directory of the node's own file system.
    Directory,
    /// The same as a volume of type `hostPath`, in which kubelet changes no owners.
    HostPath,
    /// A file system of 40 MiB that a test may fill.
    Small,
    /// A device backed by a file.
    Device,
}

/// Storage of a claim. On the test cluster all nodes have it, except [`Backing::Small`]; on another cluster one node.
pub struct Storage {
    name: String,
    is_shared: bool,
    /// Name of a node that has it.
    pub node: String,
    /// Host name of that node.
    pub hostname: String,
    /// Path on the node.
    pub directory: String,
}

impl Storage {
    /// Creates a directory with a volume for the claim of that name. The claim requests less than the capacity
    /// and can be expanded.
    ///
    /// # Errors
    ///
    /// The storage was not made; nothing of it is left.
    pub async fn make(s: &Story, claim: &str, backing: Backing) -> Result<Self> {
        Self::make_as(s, claim, backing, "ReadWriteOnce", SIZE).await
    }

    /// Makes storage as [`Self::make`] whose claim requests this number of MiB. A device has this size.
    ///
    /// # Errors
    ///
    /// The storage was not made; nothing of it is left.
    pub async fn make_sized(s: &Story, claim: &str, backing: Backing, mebibytes: u32) -> Result<Self> {
        Self::make_as(s, claim, backing, "ReadWriteOnce", mebibytes).await
    }

    /// Makes storage as [`Self::make`] whose claim several nodes may use at once (ReadWriteMany). Returns `None` after a skip on
    /// clusters whose nodes share no storage.
    ///
    /// # Errors
    ///
    /// The storage was not made; nothing of it is left.
    pub async fn make_for_many(s: &Story, claim: &str, backing: Backing) -> Result<Option<Self>> {
        if own_cluster()?.is_none() {
            skip("storage that all nodes share")?;
            return Ok(None);
        }
        Self::make_as(s, claim, backing, "ReadWriteMany", SIZE).await.map(Some)
    }

    async fn make_as(s: &Story, claim: &str, backing: Backing, mode: &str, mebibytes: u32) -> Result<Self> {
        let storage = Self::place(s, claim, backing != Backing::Small).await?;
        let made = storage.fill(s, claim, backing, mode, mebibytes).await;
        if made.is_err() {
            storage.remove(s).await?;
        }
        made.map(|()| storage)
    }

    /// Returns storage that is not made yet.
    async fn place(s: &Story, claim: &str, may_be_shared: bool) -> Result<Self> {
        let name = format!("{}-{claim}", s.namespace);
        let (node, hostname) = s.one_node().await?;
        let shared = own_cluster()?.filter(|_| may_be_shared).map(|plan| plan.shared().display().to_string());
        let (is_shared, folder) = (shared.is_some(), shared.unwrap_or_else(|| "/var/lib/kubelet".to_owned()));
        Ok(Self { directory: format!("{folder}/{name}"), name, is_shared, node, hostname })
    }

    /// Creates a directory with a volume that fits a claim of this name and spec. The story creates the claim.
    ///
    /// # Errors
    ///
    /// The storage was not made; nothing of it is left.
    pub async fn for_claim(s: &Story, claim: &str, spec: &Value) -> Result<Self> {
        let storage = Self::place(s, claim, true).await?;
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

    /// Creates the volume for a claim.
    async fn add_volume(&self, s: &Story, claim: &str, mut spec: Value) -> Result<()> {
        spec["persistentVolumeReclaimPolicy"] = json!("Retain");
        spec["claimRef"] = json!({"namespace": s.namespace, "name": claim});
        let nodes = match self.is_shared {
            true => json!({"key": "kubernetes.io/hostname", "operator": "Exists"}),
            false => json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [self.hostname]}),
        };
        spec["nodeAffinity"] = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [nodes]}]}});
        let volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": self.name}, "spec": spec,
        });
        s.cluster_api("PersistentVolume").create(&PostParams::default(), &serde_json::from_value(volume)?).await?;
        Ok(())
    }

    async fn fill(&self, s: &Story, claim: &str, backing: Backing, access: &str, mebibytes: u32) -> Result<()> {
        let Self { name, node, directory, .. } = self;
        let mut path = directory.clone();
        on_host(s, node, &format!("mkdir -p {directory}")).await?;
        match backing {
            Backing::Directory | Backing::HostPath => {}
            Backing::Small => {
                on_host(s, node, &format!("mount -t tmpfs -o size=40m,mode=755 {name} {directory}")).await?;
            }
            Backing::Device => {
                let attach = format!(
                    "truncate -s {mebibytes}M {directory}/backing && losetup --find --show {directory}/backing"
                );
                path = on_host(s, node, &attach).await?.trim().to_owned();
            }
        }
        let source = if backing == Backing::HostPath { "hostPath" } else { "local" };
        let mode = if backing == Backing::Device { "Block" } else { "Filesystem" };
        let class = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
            "provisioner": "kubernetes.io/no-provisioner", "allowVolumeExpansion": true,
        });
        s.cluster_api("StorageClass").create(&PostParams::default(), &serde_json::from_value(class)?).await?;
        let spec = json!({
            "capacity": {"storage": format!("{}Mi", 4 * mebibytes)}, "accessModes": [access], "volumeMode": mode,
            "storageClassName": name, source: {"path": path},
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
  accessModes: [{access}]
  resources: {{requests: {{storage: {mebibytes}Mi}}}}
"
        ))
        .await
    }

    /// Runs a body with the storage. Deletes the VMIs of the story and the storage, also after a failure.
    ///
    /// # Errors
    ///
    /// The body failed, or something is left.
    pub async fn lend(&self, s: &Story, body: impl AsyncFnOnce(&Self) -> Result<()>) -> Result<()> {
        let outcome = body(self).await;
        let gone = delete_vmis_after(s, &outcome).await;
        self.remove(s).await?;
        outcome.and(gone)
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
    for kind in ["vmpool", "vm", "vmi"] {
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

/// Deletes the VMIs of a story before their storage. After a failure it prints the diagnosis first, which needs them.
///
/// # Errors
///
/// A VMI is left.
pub async fn delete_vmis_after<T>(s: &Story, outcome: &Result<T>) -> Result<()> {
    if let Err(error) = outcome {
        s.explain(error).await;
    }
    delete_vmis(s).await
}
