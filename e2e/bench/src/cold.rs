//! Measures the first VMI on a node that has neither the image of virt-launcher nor that of the guest, against a pod with both of these
//! images there. Both are pulled from a registry on the host, whose log shows that they were.
//!
//! Only on the test cluster: the program removes the images from its first node, where nothing else may run VMs meanwhile, and imports
//! them again from `build/images`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_cluster::{
    components, images, mirror,
    plan::{Node, Plan},
};
use ferrovirt_e2e_tests::{Story, TIMEOUT, own_cluster, repository};
use serde_json::{Value, json};
use tokio::{
    net::TcpStream,
    process::{Child, Command},
    time::sleep,
};

use crate::{
    Figures, add_medians,
    start::{is_running, out_of_phase, wait},
};

/// Rounds of each kind.
const ROUNDS: usize = 2;
/// The registry of the images, by the name that manifests use.
const NAME: &str = "ferrovirt.io";
/// Images that the first start needs.
const LAUNCHER: &str = "ferrovirt.io/virt-launcher:devel";
const GUEST: &str = "ferrovirt.io/guests/tiny:devel";
/// All images that are removed if they are there, with their archives: variants have the layers of the launcher's image.
const IMAGES: [(&str, &str); 4] = [
    (LAUNCHER, "virt-launcher.tar"),
    ("ferrovirt.io/virt-launcher:devel-debug", "virt-launcher-debug.tar"),
    ("ferrovirt.io/virt-launcher:devel-arm64", "virt-launcher-arm64.tar"),
    (GUEST, "guest-tiny.tar"),
];
/// A program of the launcher's image that runs until it is ended.
const IDLE: [&str; 5] = ["qemu-system-x86_64", "-machine", "none", "-display", "none"];
/// Time limit until the registry listens.
const LISTENS: Duration = Duration::from_secs(20);
/// Time limit until kubelet has removed the containers of deleted pods.
const REMOVED: Duration = Duration::from_secs(180);
/// Largest difference of the bytes that pod and VMI pull, in MiB: that of manifests.
const DIFFERENCE: f64 = 1.0;

/// Measures both and reports the medians. `program` is the registry.
pub(crate) async fn measure(story: &Story, program: &str, figures: &mut Figures) -> Result<()> {
    let plan = own_cluster()?.context("images are removed from nodes of the test cluster alone")?;
    let cold = ColdNode::of(&plan)?;
    let registry = Registry::serve(&plan, program).await?;
    for name in [LAUNCHER, GUEST] {
        cold.push(name)?;
    }
    mirror::add(&plan, &cold.node, NAME)?;
    let measured = measure_rounds(story, &cold, &registry, figures).await;
    let restored = cold.import();
    mirror::remove(&cold.node, NAME)?;
    measured.and(restored)
}

async fn measure_rounds(story: &Story, cold: &ColdNode<'_>, registry: &Registry, figures: &mut Figures) -> Result<()> {
    let hostname = &cold.node.name;
    let (mut pods, mut vmis) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let name = format!("cold-pod-{round}");
        cold.remove().await?;
        let before = registry.pulled_mib()?;
        pods.push(start(story, "Pod", &name, &pod(&name, hostname)).await?);
        let between = registry.pulled_mib()?;
        let name = format!("cold-vmi-{round}");
        cold.remove().await?;
        vmis.push(start(story, "vmi", &name, &vmi(&name, hostname)).await?);
        let (pod, vmi) = (between - before, registry.pulled_mib()? - between);
        ensure!(pod > 0.0 && (pod - vmi).abs() < DIFFERENCE, "the pod pulled {pod:.1} MiB, the VMI {vmi:.1} MiB");
        figures.insert("cold_pulled_mib".into(), vmi);
    }
    add_medians(figures, [("cold_pod_running_s", pods), ("cold_vmi_running_s", vmis)])
}

/// Returns the seconds from the creation of an object to phase Running, and deletes it.
async fn start(story: &Story, kind: &str, name: &str, manifest: &Value) -> Result<f64> {
    out_of_phase().await;
    let created = Instant::now();
    story.apply(&manifest.to_string()).await?;
    wait(story.api(kind), name, is_running).await.with_context(|| format!("{kind} {name} was not Running"))?;
    let seconds = created.elapsed().as_secs_f64();
    println!("  {name}: Running after {seconds:.2} s");
    story.delete(kind, name).await?;
    story.wait_gone(kind, name, TIMEOUT).await?;
    Ok(seconds)
}

fn pod(name: &str, hostname: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": hostname}, "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 107, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [{"name": "guest", "image": {"reference": GUEST, "pullPolicy": "IfNotPresent"}}],
            "containers": [{
                "name": "launcher", "image": LAUNCHER, "imagePullPolicy": "IfNotPresent", "command": IDLE,
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": "guest", "mountPath": "/guest"}],
            }],
        },
    })
}

fn vmi(name: &str, hostname: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": hostname}, "terminationGracePeriodSeconds": 0,
            "domain": {"memory": {"guest": "128Mi"}, "devices": {"disks": [{"name": "root", "disk": {"bus": "virtio"}}]}},
            "volumes": [{"name": "root", "containerDisk": {"image": GUEST, "imagePullPolicy": "IfNotPresent"}}],
        },
    })
}

/// The registry on the host. It ends with this value.
struct Registry {
    log: PathBuf,
    _process: Child,
}

impl Registry {
    /// Starts the registry and waits until it listens.
    async fn serve(plan: &Plan, program: &str) -> Result<Self> {
        let folder = repository().join("build/bench-registry");
        if folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        std::fs::create_dir_all(&folder)?;
        let (address, configuration, log) =
            (plan.registry(), folder.join("registry.json"), folder.join("registry.log"));
        let settings = json!({
            "version": 0.1, "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": folder.join("data")}}, "http": {"addr": address},
        });
        std::fs::write(&configuration, settings.to_string())?;
        let file = std::fs::File::create(&log)?;
        let mut process = Command::new(program)
            .arg("serve")
            .arg(&configuration)
            // Variables that begin with REGISTRY_ are settings.
            .env_remove("REGISTRY_AUTH_FILE")
            .env("OTEL_TRACES_EXPORTER", "none")
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start the registry ({program})"))?;
        let started = Instant::now();
        while TcpStream::connect(&address).await.is_err() {
            if let Some(status) = process.try_wait()? {
                bail!("the registry ended with {status}, see {}", log.display());
            }
            ensure!(started.elapsed() < LISTENS, "the registry does not listen at {address}");
            sleep(Duration::from_millis(100)).await;
        }
        Ok(Self { log, _process: process })
    }

    /// Returns the MiB of blobs that were pulled.
    fn pulled_mib(&self) -> Result<f64> {
        let log = std::fs::read_to_string(&self.log).with_context(|| self.log.display().to_string())?;
        Ok(pulled_bytes(&log) / f64::from(1 << 20))
    }
}

/// Returns the bytes of all blobs in a log of requests, which is in the combined format of Apache.
fn pulled_bytes(log: &str) -> f64 {
    let size = |line: &str| {
        let (_, rest) = line.split_once("\"GET ")?;
        let (request, rest) = rest.split_once('"')?;
        let mut words = rest.split_whitespace();
        let is_blob = request.contains("/blobs/") && words.next()?.starts_with('2');
        is_blob.then(|| words.next()?.parse::<f64>().ok()).flatten()
    };
    log.lines().filter_map(size).sum()
}

/// The node whose images are removed.
struct ColdNode<'a> {
    plan: &'a Plan,
    node: Node,
    pid: i32,
    bin: PathBuf,
    /// Archives of the images that were there.
    archives: Vec<PathBuf>,
}

impl<'a> ColdNode<'a> {
    fn of(plan: &'a Plan) -> Result<Self> {
        let first = plan.node(1).name;
        let running = images::running_nodes(plan).into_iter().find(|(node, _)| node.name == first);
        let (node, pid) = running.context("the first node does not run")?;
        let bin = components::bin(plan)?;
        let digests = images::digests_of(&node, pid, &bin)?;
        let present = IMAGES.iter().filter(|(name, _)| digests.contains_key(*name));
        let archives: Vec<PathBuf> = present.map(|(_, file)| repository().join("build/images").join(file)).collect();
        for file in &archives {
            ensure!(file.exists(), "no archive {} from which the image could be imported again", file.display());
        }
        Ok(Self { plan, node, pid, bin, archives })
    }

    fn command(&self, arguments: &[&str]) -> Result<String> {
        images::command(self.pid, &self.bin, arguments).with_context(|| format!("{arguments:?}"))
    }

    /// Copies an image into the registry.
    fn push(&self, image: &str) -> Result<()> {
        let remote = image.replace(NAME, &self.plan.registry());
        self.command(&["images", "push", "--local", "--plain-http", &remote, image]).map(drop)
    }

    /// Removes the images with all their names, and what only they use.
    async fn remove(&self) -> Result<()> {
        let digests = images::digests_of(&self.node, self.pid, &self.bin)?;
        let names = names_of(&digests, &IMAGES.map(|(name, _)| name));
        if names.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        // The file systems of containers keep the layers.
        while uses(&self.command(&["containers", "list"])?, &names) {
            ensure!(began.elapsed() < REMOVED, "containers on {} use {names:?}", self.node.name);
            sleep(Duration::from_secs(1)).await;
        }
        let names = names.iter().map(String::as_str);
        self.command(&["images", "remove", "--sync"].into_iter().chain(names).collect::<Vec<_>>()).map(drop)
    }

    /// Imports the images again.
    fn import(&self) -> Result<()> {
        for file in &self.archives {
            images::import(self.plan, &self.node, self.pid, &self.bin, file)?;
        }
        Ok(())
    }
}

/// Returns all names of the images that have one of the wanted names, by the digests of all names.
fn names_of(digests: &BTreeMap<String, String>, wanted: &[&str]) -> BTreeSet<String> {
    let removed: BTreeSet<&String> = wanted.iter().filter_map(|name| digests.get(*name)).collect();
    digests.iter().filter(|(_, digest)| removed.contains(digest)).map(|(name, _)| name.clone()).collect()
}

/// Returns true if a container of the table uses one of the images.
fn uses(containers: &str, names: &BTreeSet<String>) -> bool {
    containers.lines().filter_map(|line| line.split_whitespace().nth(1)).any(|image| names.contains(image))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_removed_with_all_its_names() {
        let digests = [("a:1", "x"), ("sha256:1", "x"), ("b:1", "y"), ("a:1-debug", "z")];
        let digests = digests.map(|(name, digest)| (name.to_owned(), digest.to_owned())).into();
        let names = names_of(&digests, &["a:1", "a:1-debug", "missing:1"]);
        assert_eq!(names.iter().collect::<Vec<_>>(), ["a:1", "a:1-debug", "sha256:1"]);
        let table = |image: &str| format!("CONTAINER IMAGE RUNTIME\nabc {image} io.containerd.runc.v2\n");
        assert!(uses(&table("sha256:1"), &names));
        assert!(!uses(&table("b:1"), &names));
    }

    #[test]
    fn only_downloads_of_blobs_count() {
        let line =
            |request: &str, rest: &str| format!("10.0.0.1 - - [1/Jan/2026] \"{request} HTTP/1.1\" {rest} \"\" \"a\"\n");
        let log = [
            line("GET /v2/a/blobs/sha256:1?ns=b", "200 1000"),
            line("GET /v2/a/blobs/sha256:2?ns=b", "206 24"),
            line("GET /v2/a/blobs/sha256:3", "404 70"),
            line("HEAD /v2/a/blobs/sha256:1", "200 1000"),
            line("GET /v2/a/manifests/devel", "200 500"),
            "a warning\n".to_owned(),
        ];
        assert_eq!(pulled_bytes(&log.concat()), 1024.0);
    }
}
