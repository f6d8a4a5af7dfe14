//! Measures imports of DataVolumes against pods that do the same with a claim of their own: `qemu-img convert` of the Debian
//! container disk, and `wget` of a file of 512 MiB. A VM whose disk is cloned is measured against a VM with a claim that exists.
//!
//! Both sides of a ratio begin with the creation of a claim of the default class, and end when the claim is filled.

use std::{
    cell::Cell,
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Node, Story, TIMEOUT, is_true};
use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::{
    Figures, add_medians,
    start::{is_running, out_of_phase, wait},
};

/// Rounds of an import, which writes hundreds of megabytes.
const ROUNDS: usize = 3;
/// Container disk of the registry import: a qcow2 image of 310 MB.
const IMAGE: &str = "ferrovirt.io/guests/debian:devel";
/// Size of its claims.
const IMAGE_SIZE: &str = "3Gi";
/// Container disk of the VMs.
const TINY: &str = "ferrovirt.io/guests/tiny:devel";
/// Prints the KiB of all processes of import pods. One pod runs at a time.
const SUM: &str = "sum=0; for p in /proc/[0-9]*; do \
     case \"$(cat $p/comm 2>/dev/null)\" in virt-importer|qemu-img) ;; *) continue ;; esac; \
     rss=$(grep VmRSS $p/status 2>/dev/null | tr -cd 0-9); sum=$((sum + ${rss:-0})); done; echo $sum";
/// Pause between readings of the memory.
const PAUSE: Duration = Duration::from_millis(300);

/// Measures all and reports the medians.
pub(crate) async fn measure(story: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    let measured = measure_all(story, rounds.min(ROUNDS), figures).await;
    for kind in ["vm", "DataVolume", "PersistentVolumeClaim", "Pod"] {
        story.api(kind).delete_collection(&Default::default(), &Default::default()).await?;
    }
    measured
}

async fn measure_all(story: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    serve(story).await?;
    let image = format!("registry: {{url: 'docker://{IMAGE}'}}");
    let convert = ["qemu-img", "convert", "-O", "raw", "/image/disk/disk.qcow2", "/claim/disk.img"];
    let url = "http://source:8080/random";
    let fetch = ["wget", "-q", "-O", "/claim/disk.img", url];
    let http = format!("http: {{url: '{url}'}}");
    let mut times = BTreeMap::<&str, Vec<f64>>::new();
    let mut note = |name, value: f64| times.entry(name).or_default().push(value);
    for round in 0..rounds {
        let name = |what: &str| format!("{what}-{round}");
        note("convert_s", by_pod(story, &name("convert"), "virt-launcher", &convert, IMAGE_SIZE).await?);
        note("import_registry_s", import(story, &name("registry"), &image, IMAGE_SIZE).await?);
        note("wget_s", by_pod(story, &name("wget"), "toolbox", &fetch, "1Gi").await?);
        note("import_http_s", import(story, &name("http"), &http, "1Gi").await?);
    }
    // A download as it is, and an image that qemu-img converts.
    let memories =
        [memory(story, "download", &http, "1Gi").await?, memory(story, "conversion", &image, IMAGE_SIZE).await?];
    note("import_pod_rss_mib", memories[0].max(memories[1]));
    // The original of the clones, and a claim that is ready.
    let tiny = format!("registry: {{url: 'docker://{TINY}'}}");
    for name in ["golden", "ready"] {
        by_data_volume(story, name, &tiny, "128Mi").await?;
    }
    for round in 0..rounds {
        note("vm_with_claim_running_s", start(story, &format!("claim-{round}"), "ready", "").await?);
        let name = format!("clone-{round}");
        let source = format!("pvc: {{namespace: {}, name: golden}}", story.namespace);
        let template = format!(
            "  dataVolumeTemplates: [{{metadata: {{name: {name}}}, spec: {{source: {{{source}}}, storage: {{}}}}}}]\n"
        );
        note("vm_with_clone_running_s", start(story, &name, &name, &template).await?);
    }
    add_medians(figures, times)
}

fn restricted() -> Value {
    json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}})
}

fn user_107() -> Value {
    json!({"runAsNonRoot": true, "runAsUser": 107, "runAsGroup": 107, "fsGroup": 107,
        "seccompProfile": {"type": "RuntimeDefault"}})
}

/// Starts a server of a file of 512 MiB that cannot be compressed.
async fn serve(story: &Story) -> Result<()> {
    let command = "dd if=/dev/urandom of=/files/random bs=1M count=512 2>/dev/null && exec image-server /files";
    let labels = json!({"name": "source", "labels": {"app": "source"}});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": labels,
        "spec": {
            "securityContext": user_107(), "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
            "volumes": [{"name": "files", "emptyDir": {}}],
            "containers": [{
                "name": "server", "image": "ferrovirt.io/toolbox:devel", "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-ec", command], "securityContext": restricted(),
                "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
                "volumeMounts": [{"name": "files", "mountPath": "/files"}],
            }],
        },
    });
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": labels,
        "spec": {"selector": {"app": "source"}, "ports": [{"port": 8080}]}});
    story.apply(&pod.to_string()).await?;
    story.apply(&service.to_string()).await?;
    story.wait("Pod", "source", "be ready", TIMEOUT, |pod| is_true(pod, "Ready")).await.map(drop)
}

/// Returns the seconds from the creation of a claim and a pod until the pod has filled it. The pod sees the container disk.
async fn by_pod(story: &Story, name: &str, image: &str, command: &[&str], size: &str) -> Result<f64> {
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never", "automountServiceAccountToken": false, "securityContext": user_107(),
            "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": name}},
                {"name": "image", "image": {"reference": IMAGE, "pullPolicy": "IfNotPresent"}}],
            "containers": [{
                "name": "fill", "image": format!("ferrovirt.io/{image}:devel"), "imagePullPolicy": "IfNotPresent",
                "command": command, "securityContext": restricted(),
                "volumeMounts": [{"name": "claim", "mountPath": "/claim"}, {"name": "image", "mountPath": "/image"}],
            }],
        },
    });
    out_of_phase().await;
    let created = Instant::now();
    story.apply(&claim.to_string()).await?;
    story.apply(&pod.to_string()).await?;
    let has_ended = |pod: Option<&DynamicObject>| {
        pod.is_some_and(|pod| ["Succeeded", "Failed"].iter().any(|phase| pod.data["status"]["phase"] == *phase))
    };
    wait(story.api("Pod"), name, has_ended).await.with_context(|| format!("pod {name} does not end"))?;
    let seconds = created.elapsed().as_secs_f64();
    if story.get("Pod", name).await?["status"]["phase"] == "Failed" {
        bail!("pod {name} failed: {}", story.log(name, "fill").await?);
    }
    story.delete("Pod", name).await?;
    story.delete("PersistentVolumeClaim", name).await?;
    println!("  {name}: {seconds:.2} s");
    Ok(seconds)
}

/// Returns the seconds from the creation of a DataVolume until it is filled. The caller deletes it.
async fn by_data_volume(story: &Story, name: &str, source: &str, size: &str) -> Result<f64> {
    out_of_phase().await;
    let created = Instant::now();
    story
        .apply(&format!(
            "
apiVersion: cdi.kubevirt.io/v1beta1
kind: DataVolume
metadata: {{name: {name}}}
spec:
  source: {{{source}}}
  storage: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: {size}}}}}}}
"
        ))
        .await?;
    let is_filled =
        |volume: Option<&DynamicObject>| volume.is_some_and(|volume| volume.data["status"]["phase"] == "Succeeded");
    wait(story.api("DataVolume"), name, is_filled).await.with_context(|| format!("{name} is not filled"))?;
    let seconds = created.elapsed().as_secs_f64();
    println!("  {name}: {seconds:.2} s");
    Ok(seconds)
}

/// Returns the seconds of [`by_data_volume`], and deletes the DataVolume.
async fn import(story: &Story, name: &str, source: &str, size: &str) -> Result<f64> {
    let seconds = by_data_volume(story, name, source, size).await?;
    story.delete("DataVolume", name).await?;
    story.wait_gone("DataVolume", name, TIMEOUT).await?;
    Ok(seconds)
}

/// Returns the largest resident memory in MiB of all processes of an import pod.
async fn memory(story: &Story, name: &str, source: &str, size: &str) -> Result<f64> {
    let mut nodes = Vec::new();
    for (name, _) in story.takers().await? {
        nodes.push(story.enter_node(&name).await?);
    }
    let largest = Cell::new(0.0);
    let filled = tokio::select! {
        filled = import(story, name, source, size) => filled,
        failed = watch(&nodes, &largest) => failed,
    };
    for node in nodes {
        node.leave().await?;
    }
    filled?;
    ensure!(largest.get() > 0.0, "no process of an import pod was seen");
    Ok(largest.get())
}

/// Reads the memory of import pods again and again.
async fn watch(nodes: &[Node], largest: &Cell<f64>) -> Result<f64> {
    loop {
        for node in nodes {
            let kibibytes: f64 = node.run(SUM).await?.trim().parse().context("not a size")?;
            largest.set(largest.get().max(kibibytes / 1024.0));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Returns the seconds from the creation of a VM until it runs, and deletes it. `template` are the DataVolumes that it makes.
async fn start(story: &Story, name: &str, claim: &str, template: &str) -> Result<f64> {
    let volume = match template {
        "" => format!("persistentVolumeClaim: {{claimName: {claim}}}"),
        _ => format!("dataVolume: {{name: {claim}}}"),
    };
    let manifest = format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: {name}}}
spec:
  runStrategy: Always
{template}  template:
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        memory: {{guest: 128Mi}}
        devices: {{disks: [{{name: root, disk: {{bus: virtio}}}}]}}
      volumes: [{{name: root, {volume}}}]
"
    );
    out_of_phase().await;
    let created = Instant::now();
    story.apply(&manifest).await?;
    wait(story.api("vmi"), name, is_running).await.with_context(|| format!("{name} was not Running"))?;
    let seconds = created.elapsed().as_secs_f64();
    story.delete("vm", name).await?;
    story.wait_gone("vmi", name, TIMEOUT).await?;
    println!("  {name}: {seconds:.2} s");
    Ok(seconds)
}
