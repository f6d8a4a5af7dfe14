//! Disks that are imported and cloned by DataVolumes.
//!
//! Stories of this module use VMs, those of `import_table` and `import_faults` DataVolumes alone, with the steps below.

mod cdi;
mod clones;
mod definitions;
mod shapes;
mod vms;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use ferrovirt_e2e_tests::{Story, own_cluster, skip, storage::delete_vmis_after};
use kube::api::PostParams;
use serde_json::{Value, json};

pub(crate) const MINUTES: Duration = Duration::from_secs(300);
/// Size of the disk of [`server`] in bytes, and its SHA-256.
pub(crate) const SIZE: u64 = 16 << 20;
pub(crate) const SHA256: &str = "a9861c6de4711ea52609ecbda2f8103a3788c38a59285f1a96b58dd7f9a232bb";
/// Labels of import pods.
pub(crate) const IMPORT_PODS: &str = "cdi.kubevirt.io=importer";
/// The container disk that boots by itself.
pub(crate) const TINY: &str = "registry: {url: 'docker://ferrovirt.io/guests/tiny:devel'}";
/// MiB for that disk.
const TINY_SIZE: u32 = 96;

/// Makes the disk of [`SIZE`]: a text at each MiB.
const MAKE_DISK: &str =
    "for i in $(seq -w 0 15); do yes \"block $i\" | head -c 4096; head -c 1044480 /dev/zero; done >disk.raw";

/// Images that `qemu-img` makes from the disk: name, and arguments of `convert`.
const CONVERTED: [(&str, &[&str]); 6] = [
    ("disk.qcow2", &["-O", "qcow2"]),
    ("compressed.qcow2", &["-c", "-O", "qcow2"]),
    ("zstd.qcow2", &["-c", "-O", "qcow2", "-o", "compression_type=zstd"]),
    ("disk.vmdk", &["-O", "vmdk"]),
    ("disk.vhdx", &["-O", "vhdx"]),
    ("disk.vdi", &["-O", "vdi"]),
];

/// Images without content: one that refers to a file that does not exist, and one of 1 GiB.
const EMPTY: [&[&str]; 2] = [
    &["create", "-f", "qcow2", "-u", "-b", "nothing.raw", "-F", "raw", "backed.qcow2", "16M"],
    &["create", "-f", "qcow2", "large.qcow2", "1G"],
];

/// Runs the body of a story on a cluster with the test cluster's storage driver. Removes the DataVolumes, claims and volumes.
pub(crate) async fn with_driver(s: &Story, body: impl AsyncFnOnce(&Story) -> Result<()>) -> Result<()> {
    if own_cluster()?.is_none() {
        return skip("the test cluster's storage driver");
    }
    let result = body(s).await;
    let gone = delete_vmis_after(s, &result).await;
    let removed = remove(s).await;
    result.and(gone).and(removed)
}

/// Deletes DataVolumes, snapshots and claims, and waits until the driver has deleted their volumes.
pub(crate) async fn remove(s: &Story) -> Result<()> {
    let claims = s.list("PersistentVolumeClaim", "").await?;
    for kind in ["DataVolume", "DataSource", "VolumeSnapshot", "PersistentVolumeClaim"] {
        for object in s.list(kind, "").await? {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            match s.api(kind).delete(name, &Default::default()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                outcome => drop(outcome.with_context(|| format!("delete {kind} {name}"))?),
            }
        }
    }
    wait_nothing_left(s).await?;
    let volumes = s.cluster_api("PersistentVolume");
    let deadline = Instant::now() + MINUTES;
    for claim in claims {
        let Some(name) = claim["spec"]["volumeName"].as_str() else { continue };
        while let Some(volume) = volumes.get_opt(name).await? {
            ensure!(Instant::now() < deadline, "volume {name} is left: {}", volume.data);
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }
    Ok(())
}

/// Waits until the namespace has neither DataVolumes nor claims nor import pods.
pub(crate) async fn wait_nothing_left(s: &Story) -> Result<()> {
    for (kind, labels) in [("DataVolume", ""), ("PersistentVolumeClaim", ""), ("Pod", IMPORT_PODS)] {
        for object in s.list(kind, labels).await? {
            s.wait_gone(kind, object["metadata"]["name"].as_str().unwrap_or_default(), MINUTES).await?;
        }
    }
    Ok(())
}

/// Returns the field `storage` of a DataVolume.
pub(crate) fn storage(class: &str, mode: &str, mebibytes: u32) -> String {
    format!(
        "{{storageClassName: {class}, volumeMode: {mode}, accessModes: [ReadWriteOnce], \
         resources: {{requests: {{storage: {mebibytes}Mi}}}}}}"
    )
}

/// Returns a DataVolume. `fields` are those of its spec.
pub(crate) fn data_volume(name: &str, fields: &str) -> String {
    format!(
        "{{apiVersion: cdi.kubevirt.io/v1beta1, kind: DataVolume, metadata: {{name: {name}}}, spec: {{{fields}}}}}\n---\n"
    )
}

/// Returns the source that a file of [`server`] is. `more` are further fields of it.
pub(crate) fn http(file: &str, more: &str) -> String {
    format!("source: {{http: {{url: 'http://images:8080/{file}'{more}}}}}")
}

/// Returns a VM whose root disk is the DataVolume `NAME-root` of its template. `fields` are those of the DataVolume's spec.
pub(crate) fn vm(name: &str, run_strategy: &str, fields: &str) -> String {
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: {name}}}
spec:
  runStrategy: {run_strategy}
  dataVolumeTemplates:
  - metadata: {{name: {name}-root}}
    spec: {{{fields}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      terminationGracePeriodSeconds: 30
      domain:
        memory: {{guest: 128Mi}}
        devices:
          disks:
          - {{name: root, bootOrder: 1, disk: {{bus: virtio}}}}
          - {{name: seed, disk: {{bus: virtio}}}}
      volumes:
      - {{name: root, dataVolume: {{name: {name}-root}}}}
      - name: seed
        cloudInitNoCloud:
          userData: |
            #cloud-config
            hostname: {name}-guest
            password: story
"
    )
}

/// Returns a VM that boots a kernel and has the DataVolume `NAME-root` of its template as disk `DATA`.
pub(crate) fn kernel_vm(name: &str, run_strategy: &str, fields: &str) -> String {
    let template =
        format!("  dataVolumeTemplates: [{{metadata: {{name: {name}-root}}, spec: {{{fields}}}}}]\n  template:\n");
    let disks = "devices: {disks: [{name: data, serial: DATA, disk: {bus: virtio}}]}\n";
    let volumes = format!("Seconds: 0\n      volumes: [{{name: data, dataVolume: {{name: {name}-root}}}}]\n");
    crate::manifests::kernel_vm(name, run_strategy)
        .replace("  template:\n", &template)
        .replace("devices: {}\n", disks)
        .replace("Seconds: 0\n", &volumes)
}

/// Waits until a DataVolume is in a phase.
pub(crate) async fn wait_phase(s: &Story, name: &str, phase: &str) -> Result<Value> {
    let is_in_phase = |volume: &Value| volume["status"]["phase"] == phase;
    s.wait("DataVolume", name, &format!("be in phase {phase}"), MINUTES, is_in_phase).await
}

/// Returns a condition of an object.
pub(crate) fn condition<'a>(object: &'a Value, kind: &str) -> &'a Value {
    let mut conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    conditions.find(|condition| condition["type"] == kind).unwrap_or(&Value::Null)
}

/// Starts pod and Service `images`, which serve a disk of [`SIZE`] in all formats, and the tiny container disk (`tiny.qcow2`).
pub(crate) async fn server(s: &Story) -> Result<()> {
    let restricted = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    let container = |name: &str, image: &str, command: &[&str]| {
        json!({
            "name": name, "image": format!("ferrovirt.io/{image}:devel"), "imagePullPolicy": "IfNotPresent",
            "command": command, "workingDir": "/images", "securityContext": restricted,
            "volumeMounts": [{"name": "images", "mountPath": "/images"}, {"name": "packed", "mountPath": "/packed"},
                {"name": "tiny", "mountPath": "/tiny"}],
        })
    };
    let made = format!("{MAKE_DISK} && cp /packed/* . && gzip -k disk.raw && cp /tiny/disk/disk.qcow2 tiny.qcow2");
    let mut before = vec![container("raw", "toolbox", &["sh", "-ec", &made])];
    for (number, (name, arguments)) in CONVERTED.iter().enumerate() {
        let command = [&["qemu-img", "convert", "-f", "raw"], *arguments, &["disk.raw", name]].concat();
        before.push(container(&format!("converted-{number}"), "virt-launcher", &command));
    }
    for (number, arguments) in EMPTY.iter().enumerate() {
        before.push(container(&format!("empty-{number}"), "virt-launcher", &[&["qemu-img"], *arguments].concat()));
    }
    let pack = "gzip -k disk.qcow2 && exec image-server /images";
    let mut serves = container("server", "toolbox", &["sh", "-ec", pack]);
    serves["readinessProbe"] = json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1});
    let packed = json!({
        "disk.raw.xz": BASE64_STANDARD.encode(include_bytes!("../../../data/disk.xz")),
        "disk.raw.zst": BASE64_STANDARD.encode(include_bytes!("../../../data/disk.zst")),
    });
    let metadata = json!({"name": "images", "labels": {"app": "images"}});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": metadata,
        "spec": {
            "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
            "securityContext": user_107(), "initContainers": before, "containers": [serves],
            "volumes": [{"name": "images", "emptyDir": {}}, {"name": "packed", "configMap": {"name": "images"}},
                {"name": "tiny", "image": {"reference": "ferrovirt.io/guests/tiny:devel", "pullPolicy": "IfNotPresent"}}],
        },
    });
    for object in [
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": packed}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": {"selector": {"app": "images"}, "ports": [{"port": 8080}]}}),
        pod,
    ] {
        s.apply(&object.to_string()).await?;
    }
    let is_ready = |pod: &Value| condition(pod, "Ready")["status"] == "True";
    s.wait("Pod", "images", "be ready", MINUTES, is_ready).await.map(drop)
}

/// Lets the server send what it holds.
pub(crate) async fn release(s: &Story) -> Result<()> {
    s.exec("images", &["touch", "/images/released"]).await.map(drop)
}

/// Waits until the server has written a line.
pub(crate) async fn wait_served(s: &Story, line: &str) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let log = s.log("images", "server").await?;
        if log.contains(line) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the server has not written {line:?}: {log}");
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

fn user_107() -> Value {
    json!({"runAsNonRoot": true, "runAsUser": 107, "runAsGroup": 107, "fsGroup": 107,
        "seccompProfile": {"type": "RuntimeDefault"}})
}

/// Content of a claim.
#[derive(Debug)]
pub(crate) struct Content {
    /// SHA-256 of the first [`SIZE`] bytes.
    pub(crate) sum: String,
    /// Further bytes that are not zero.
    pub(crate) further: u64,
    /// Blocks of 512 bytes of a file. A device has 0.
    pub(crate) blocks: u64,
}

/// Checks that a claim contains the disk of [`server`] and nothing else.
pub(crate) async fn ensure_disk(s: &Story, claim: &str) -> Result<()> {
    let content = contents(s, &[claim]).await?.pop().context("nothing read")?;
    ensure!(content.sum == SHA256 && content.further == 0, "{claim} has {content:?}");
    Ok(())
}

/// Reads bound claims in a pod as user 107, also one that is in use.
pub(crate) async fn contents(s: &Story, claims: &[&str]) -> Result<Vec<Content>> {
    let mut script = String::new();
    for claim in claims {
        let is_block = s.get("PersistentVolumeClaim", claim).await?["spec"]["volumeMode"] == "Block";
        let path = if is_block { format!("/dev/{claim}") } else { format!("/claims/{claim}/disk.img") };
        script.push_str(&format!(
            "echo $(head -c {SIZE} {path} | sha256sum | cut -c 1-64) \
             $(tail -c +{} {path} | tr -d '\\000' | wc -c) $(stat -c %b {path})\n",
            SIZE + 1
        ));
    }
    let log = look(s, claims, &script).await?;
    let parse = |line: &str| {
        let mut words = line.split_whitespace();
        let sum = words.next()?.to_owned();
        Some(Content { sum, further: words.next()?.parse().ok()?, blocks: words.next()?.parse().ok()? })
    };
    log.lines().map(|line| parse(line).with_context(|| format!("not a content: {line:?}"))).collect()
}

/// Returns what a script prints in a pod of user 107 with bound claims: `/dev/CLAIM` or `/claims/CLAIM`.
pub(crate) async fn look(s: &Story, claims: &[&str], script: &str) -> Result<String> {
    let (mut mounts, mut devices) = (Vec::new(), Vec::new());
    for claim in claims {
        if s.get("PersistentVolumeClaim", claim).await?["spec"]["volumeMode"] == "Block" {
            devices.push(json!({"name": claim, "devicePath": format!("/dev/{claim}")}));
        } else {
            mounts.push(json!({"name": claim, "mountPath": format!("/claims/{claim}"), "readOnly": true}));
        }
    }
    let volumes: Vec<Value> =
        claims.iter().map(|claim| json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}})).collect();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "look"},
        "spec": {
            "restartPolicy": "Never", "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
            "securityContext": user_107(), "volumes": volumes,
            "containers": [{
                "name": "look", "image": "ferrovirt.io/toolbox:devel", "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-ec", script], "volumeMounts": mounts, "volumeDevices": devices,
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    });
    s.apply(&pod.to_string()).await?;
    let has_ended = |pod: &Value| pod["status"]["phase"] == "Succeeded" || pod["status"]["phase"] == "Failed";
    let ended = s.wait("Pod", "look", "end", MINUTES, has_ended).await?;
    let log = s.log("look", "look").await?;
    s.delete("Pod", "look").await?;
    s.wait_gone("Pod", "look", MINUTES).await?;
    ensure!(ended["status"]["phase"] == "Succeeded", "claims {claims:?} cannot be read: {log}");
    Ok(log)
}

/// Creates another namespace for a story with this label.
pub(crate) async fn new_namespace(s: &Story, namespace: String, label: &str) -> Result<Story> {
    let other = Story::of(s.client.clone(), namespace);
    let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other.namespace,
        "labels": {"ferrovirt.io/e2e": label, "pod-security.kubernetes.io/enforce": "restricted"}}});
    s.cluster_api("Namespace").create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    other.wait("ServiceAccount", "default", "be created", MINUTES, |_| true).await?;
    Ok(other)
}

/// Creates another namespace for a story, and deletes it after the body.
pub(crate) async fn with_namespace(s: &Story, name: &str, body: impl AsyncFnOnce(&Story) -> Result<()>) -> Result<()> {
    let other = new_namespace(s, format!("{}-x", s.namespace), name).await?;
    let result = body(&other).await;
    if let Err(error) = &result {
        other.explain(error).await;
    }
    let removed = remove(&other).await;
    s.cluster_api("Namespace").delete(&other.namespace, &Default::default()).await?;
    result.and(removed)
}
