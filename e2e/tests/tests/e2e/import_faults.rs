//! Imports that cannot succeed, and imports whose processes are killed.

use std::fmt::{self, Display};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, signal, story, story_alone};
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use crate::{
    data_volumes::{
        IMPORT_PODS, MINUTES, condition, data_volume, ensure_disk, http, release, remove, server, storage,
        wait_nothing_left, wait_phase, wait_served, with_driver,
    },
    kills::{kill_leader, uid},
    rows::chosen,
};

/// An import that does not succeed.
struct Fault {
    name: &'static str,
    /// Fields of the spec of the DataVolume.
    fields: String,
    /// Phases in which it ends or waits.
    phases: &'static [&'static str],
    /// Condition with the cause, and texts in its reason and message.
    condition: &'static str,
    texts: &'static [&'static str],
}

const WORKING: &[&str] = &["ImportScheduled", "ImportInProgress"];

/// Returns the faults. Classes of the storage are made by the story: `PREFIX-full` and `PREFIX-refused`.
fn faults(prefix: &str) -> Vec<Fault> {
    let file = |size| storage("csi", "Filesystem", size);
    let of = |file: &str, more: &str, storage: String| format!("{}, storage: {storage}", http(file, more));
    let fault = |name, fields, phases, condition, texts| Fault { name, fields, phases, condition, texts };
    vec![
        fault("gone", of("missing.raw", "", file(32)), WORKING, "Running", &["Error", "404"]),
        fault(
            "no-server",
            format!("source: {{http: {{url: 'http://nowhere:8080/disk.raw'}}}}, storage: {}", file(32)),
            WORKING,
            "Running",
            &["Error", "nowhere"],
        ),
        fault("unauthorized", of("disk.raw?basic=eDp5", "", file(32)), WORKING, "Running", &["Error", "401"]),
        fault(
            "checksum",
            of("disk.raw", &format!(", checksum: 'sha256:{}'", "0".repeat(64)), file(32)),
            &["Failed"],
            "Running",
            &["ChecksumError"],
        ),
        fault("loop", of("loop", "", file(32)), WORKING, "Running", &["Error", "redirect"]),
        fault("backed", of("backed.qcow2", "", file(32)), &["Failed"], "Running", &["refers to another file"]),
        fault(
            "large",
            of("large.qcow2", "", file(32)),
            &["ImportScheduled", "ImportInProgress", "Failed"],
            "Running",
            &["DataVolume too small to contain image", "1073741824"],
        ),
        fault(
            "large-device",
            of("large.qcow2", "", storage("csi", "Block", 32)),
            &["ImportScheduled", "ImportInProgress", "Failed"],
            "Running",
            &["DataVolume too small to contain image", "1073741824", "33554432"],
        ),
        fault(
            "no-space",
            http("disk.raw", "")
                + ", preallocation: true, pvc: {storageClassName: csi-ext4, accessModes: [ReadWriteOnce], \
                   resources: {requests: {storage: 16Mi}}}",
            &["ImportScheduled", "ImportInProgress", "Failed"],
            "Running",
            &["DataVolume too small to contain image"],
        ),
        fault(
            "never",
            of("disk.raw", "", storage("nowhere", "Filesystem", 32)),
            &["Pending"],
            "Bound",
            &["PVC never Pending: ", "nowhere"],
        ),
        fault(
            "full",
            of("disk.raw", "", storage(&format!("{prefix}-full"), "Filesystem", 32)),
            &["Pending"],
            "Bound",
            &["PVC full Pending: ", "no space left"],
        ),
        fault(
            "refused",
            of("disk.raw", "", storage(&format!("{prefix}-refused"), "Filesystem", 32)),
            &["Pending"],
            "Bound",
            &["PVC refused Pending: ", "refused: Create"],
        ),
        fault(
            "no-image",
            format!(
                "source: {{registry: {{url: 'docker://ferrovirt.io/guests/nothing:devel'}}}}, storage: {}",
                file(32)
            ),
            WORKING,
            "Running",
            &["ImagePull", "guests/nothing"],
        ),
    ]
}

#[test]
fn imports_that_cannot_succeed_say_why_and_leave_nothing() {
    story("import-faults", async |s| {
        let mut classes = Vec::new();
        let result = with_driver(s, async |s| {
            server(s).await?;
            for (name, faults) in [("full", "create=full"), ("refused", "create=refused")] {
                let class = format!("{}-{name}", s.namespace);
                make_class(s, &class, json!({"faults": faults})).await?;
                classes.push(class);
            }
            failed(s).await
        });
        let result = result.await;
        for class in classes {
            s.cluster_api("StorageClass").delete(&class, &DeleteParams::background()).await?;
        }
        result
    });
}

/// Makes a class of the test cluster's storage driver.
async fn make_class(s: &Story, name: &str, parameters: Value) -> Result<()> {
    let object = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
        "provisioner": "csi.test.ferrovirt.io", "parameters": parameters,
    });
    let class = serde_json::from_value(object)?;
    let created = s.cluster_api("StorageClass").create(&PostParams::default(), &class).await;
    created.map(drop).with_context(|| format!("create storage class {name}"))
}

async fn failed(s: &Story) -> Result<()> {
    let faults = faults(&s.namespace);
    let manifest: String = faults.iter().map(|fault| data_volume(fault.name, &fault.fields)).collect();
    s.apply(manifest.trim_end_matches("---\n")).await?;
    let mut wrong = Vec::new();
    for fault in &faults {
        let has_cause = |volume: &Value| {
            let (phase, cause) = (&volume["status"]["phase"], condition(volume, fault.condition).to_string());
            fault.phases.iter().any(|wanted| phase == wanted) && fault.texts.iter().all(|text| cause.contains(text))
        };
        if let Err(error) = s.wait("DataVolume", fault.name, "say why", MINUTES, has_cause).await {
            wrong.push(format!("{} needs {:?} and {:?}: {error:#}", fault.name, fault.phases, fault.texts));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    over_quota(s).await?;
    for fault in &faults {
        s.delete("DataVolume", fault.name).await?;
    }
    wait_nothing_left(s).await
}

/// A quota refuses the claim.
async fn over_quota(s: &Story) -> Result<()> {
    s.apply("{apiVersion: v1, kind: ResourceQuota, metadata: {name: little}, spec: {hard: {requests.storage: 1Mi}}}")
        .await?;
    let is_in_force = |quota: &Value| quota["status"]["hard"].is_object();
    s.wait("ResourceQuota", "little", "be in force", MINUTES, is_in_force).await?;
    let fields = format!("source: {{blank: {{}}}}, storage: {}", storage("csi", "Filesystem", 32));
    s.apply(&data_volume("quota", &fields)).await?;
    let is_refused = |volume: &Value| condition(volume, "Bound")["reason"] == "ErrExceededQuota";
    s.wait("DataVolume", "quota", "exceed the quota", MINUTES, is_refused).await?;
    s.delete("ResourceQuota", "little").await?;
    wait_phase(s, "quota", "Succeeded").await?;
    s.delete("DataVolume", "quota").await
}

/// A phase in which an import is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No class makes a volume for the claim.
    Pending,
    /// Nobody uses the claim.
    WaitForFirstConsumer,
    /// A quota refuses the import pod.
    ImportScheduled,
    /// The server holds the rest of the image.
    At(u8),
}

/// A victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    /// The program of the import pod.
    Program,
    /// The import pod, which is deleted.
    Pod,
    /// The leading virt-controller.
    Leader,
    /// The DataVolume, which its user deletes and creates again.
    DataVolume,
}

#[derive(Clone, Copy)]
struct Row {
    phase: Phase,
    victim: Victim,
}

impl Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} killed during {:?}", self.victim, self.phase)
    }
}

/// A sample has every so many rows.
const SAMPLE: usize = 5;

fn rows() -> Vec<Row> {
    let held = [Phase::Pending, Phase::WaitForFirstConsumer, Phase::ImportScheduled];
    let early = held.iter().flat_map(|&phase| [Victim::Leader, Victim::DataVolume].map(|victim| Row { phase, victim }));
    let victims = [Victim::Program, Victim::Pod, Victim::Leader, Victim::DataVolume];
    let late = [10, 50, 99].into_iter().flat_map(|part| victims.map(|victim| Row { phase: Phase::At(part), victim }));
    early.chain(late).collect()
}

#[test]
fn imports_survive_kills_in_every_phase() {
    story_alone("import-kills", async |s| {
        let rows = chosen(rows(), SAMPLE)?;
        with_driver(s, async |s| {
            server(s).await?;
            for (number, row) in rows.into_iter().enumerate() {
                eprintln!("{row}");
                let class = format!("{}-{number}", s.namespace);
                let outcome = killed(s, row, number, &class).await.with_context(|| row.to_string());
                if row.phase == Phase::Pending {
                    s.cluster_api("StorageClass").delete(&class, &DeleteParams::background()).await.ok();
                }
                outcome?;
                remove(s).await?;
            }
            Ok(())
        })
        .await
    });
}

/// Holds an import in its phase, kills the victim, and checks the disk in the end. `later` is the name of a class for claims that
/// wait for one.
async fn killed(s: &Story, row: Row, number: usize, later: &str) -> Result<()> {
    // Of the former row.
    s.exec("images", &["rm", "-f", "/images/released"]).await?;
    let class = match row.phase {
        Phase::Pending => later,
        Phase::WaitForFirstConsumer => "csi-late",
        _ => "csi",
    };
    let part = if let Phase::At(part) = row.phase { part } else { 50 };
    let file = format!("disk.raw?hold={part}&row={number}");
    let manifest = data_volume("held", &format!("{}, storage: {}", http(&file, ""), storage(class, "Filesystem", 24)));
    hold(s, row.phase).await?;
    s.apply(manifest.trim_end_matches("---\n")).await?;
    let outcome = async {
        wait_held(s, row.phase, &file).await?;
        kill(s, row.victim, &manifest).await?;
        ensure_not_whole(s).await
    };
    let outcome = outcome.await;
    let released = let_go(s, row.phase, class).await;
    outcome?;
    released?;
    let volume = wait_phase(s, "held", "Succeeded").await?;
    let restarts = volume["status"]["restartCount"].as_u64().unwrap_or_default();
    ensure!(row.victim != Victim::Program || restarts > 0, "no restart is counted: {}", volume["status"]);
    ensure_disk(s, "held").await
}

async fn hold(s: &Story, phase: Phase) -> Result<()> {
    if phase != Phase::ImportScheduled {
        return Ok(());
    }
    // The pod of the server exists.
    s.apply("{apiVersion: v1, kind: ResourceQuota, metadata: {name: pods}, spec: {hard: {pods: 1}}}").await?;
    let is_full = |quota: &Value| quota["status"]["used"]["pods"] == "1";
    s.wait("ResourceQuota", "pods", "count the pod", MINUTES, is_full).await.map(drop)
}

async fn wait_held(s: &Story, phase: Phase, file: &str) -> Result<()> {
    match phase {
        Phase::Pending => wait_phase(s, "held", "Pending").await.map(drop),
        Phase::WaitForFirstConsumer => wait_phase(s, "held", "WaitForFirstConsumer").await.map(drop),
        // The pod is refused after the claim is bound.
        Phase::ImportScheduled => {
            let is_refused = |volume: &Value| condition(volume, "Running").to_string().contains("uota");
            s.wait("DataVolume", "held", "have no pod", MINUTES, is_refused).await.map(drop)
        }
        Phase::At(_) => {
            wait_served(s, &format!("held /{file}")).await?;
            wait_phase(s, "held", "ImportInProgress").await.map(drop)
        }
    }
}

async fn import_pod(s: &Story) -> Result<Value> {
    let pods = s.list("Pod", IMPORT_PODS).await?;
    ensure!(pods.len() == 1, "{} import pods", pods.len());
    pods.into_iter().next().context("no import pod")
}

async fn kill(s: &Story, victim: Victim, manifest: &str) -> Result<()> {
    match victim {
        Victim::Leader => kill_leader(s).await,
        Victim::Program => {
            let pod = import_pod(s).await?;
            let node = pod["spec"]["nodeName"].as_str().context("pod without node")?;
            s.on_node(node, &signal("virt-importer", &uid(&pod)?, "KILL")).await?;
            let is_restarted = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_u64() > Some(0);
            let name = pod["metadata"]["name"].as_str().context("pod without name")?;
            s.wait("Pod", name, "be restarted", MINUTES, is_restarted).await.map(drop)
        }
        Victim::Pod => {
            let pod = import_pod(s).await?;
            let name = pod["metadata"]["name"].as_str().context("pod without name")?;
            s.api("Pod").delete(name, &DeleteParams::default().grace_period(0)).await?;
            let is_another = |new: &Value| new["metadata"]["uid"] != pod["metadata"]["uid"];
            s.wait("Pod", name, "be made anew", MINUTES, is_another).await.map(drop)
        }
        Victim::DataVolume => {
            s.delete("DataVolume", "held").await?;
            wait_nothing_left(s).await?;
            s.apply(manifest.trim_end_matches("---\n")).await
        }
    }
}

/// Checks that nothing takes the unfinished disk for a whole one.
async fn ensure_not_whole(s: &Story) -> Result<()> {
    let volume = s.get("DataVolume", "held").await?;
    ensure!(volume["status"]["phase"] != "Succeeded", "{}", volume["status"]);
    if let Some(claim) = s.api("PersistentVolumeClaim").get_opt("held").await? {
        let annotations = claim.metadata.annotations.unwrap_or_default();
        let phase = annotations.get("cdi.kubevirt.io/storage.pod.phase");
        ensure!(phase.is_none_or(|phase| phase != "Succeeded"), "{annotations:?}");
        ensure!(!annotations.contains_key("cdi.kubevirt.io/storage.populatedFor"), "{annotations:?}");
    }
    Ok(())
}

/// Ends what holds the import.
async fn let_go(s: &Story, phase: Phase, class: &str) -> Result<()> {
    release(s).await?;
    match phase {
        Phase::At(_) => Ok(()),
        Phase::ImportScheduled => s.delete("ResourceQuota", "pods").await,
        Phase::Pending => make_class(s, class, json!({})).await,
        Phase::WaitForFirstConsumer => {
            // A pod that uses the claim gives it a node, and ends.
            s.apply(
                "
apiVersion: v1
kind: Pod
metadata: {name: first}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, runAsUser: 107, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: first
    image: ferrovirt.io/toolbox:devel
    imagePullPolicy: IfNotPresent
    command: ['true']
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
    volumeMounts: [{name: claim, mountPath: /claim}]
  volumes: [{name: claim, persistentVolumeClaim: {claimName: held}}]
",
            )
            .await?;
            s.wait("Pod", "first", "end", MINUTES, |pod| pod["status"]["phase"] == "Succeeded").await?;
            s.delete("Pod", "first").await?;
            s.wait_gone("Pod", "first", MINUTES).await
        }
    }
}

#[test]
fn rows_have_every_phase_and_victim() {
    let rows = rows();
    assert_eq!(rows.len(), 18);
    let names: std::collections::BTreeSet<String> = rows.iter().map(ToString::to_string).collect();
    assert_eq!(names.len(), rows.len(), "{names:?}");
}
