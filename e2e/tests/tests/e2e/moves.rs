//! Steps of stories that migrate VMs.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Story, skip};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{installation::in_force, manifests};

/// Time for a migration under emulation.
pub(crate) const MINUTES: Duration = Duration::from_secs(300);
/// Phases of a migration that succeeds.
const PHASES: [&str; 7] =
    ["Pending", "Scheduling", "Scheduled", "PreparingTarget", "TargetReady", "Running", "Succeeded"];
/// Label of a VMI with its node, and that of the target of its migration.
const NODE: &str = "kubevirt.io/nodeName";
const TARGET: &str = "kubevirt.io/migrationTargetNodeName";

/// Returns true if the tables of kills run in full, and long stories with them.
pub(crate) fn is_long() -> bool {
    std::env::var("KILLS").is_ok_and(|kills| kills == "all")
}

/// Changes 16 MiB of memory again and again, which no migration of the story can follow.
pub(crate) const CHANGE_MEMORY: &str = "head -c 16777216 /dev/urandom >/source; \
     { while :; do cat /source >/changing; done >/dev/null 2>&1 & }";

/// A limit of the bandwidth below the rate of the changes, with a time limit of this many seconds.
pub(crate) fn slow(seconds: u64, further: Value) -> Value {
    let mut settings = json!({"bandwidthPerMigration": "4Mi", "completionTimeoutPerGiB": seconds});
    if let (Some(settings), Some(further)) = (settings.as_object_mut(), further.as_object()) {
        settings.extend(further.clone());
    }
    settings
}

/// Returns two nodes that take VMIs, or `None` after a skip.
pub(crate) async fn two_nodes(s: &Story) -> Result<Option<[String; 2]>> {
    let mut nodes = s.takers().await?.into_iter().map(|(name, _)| name);
    match (nodes.next(), nodes.next()) {
        (Some(one), Some(other)) => Ok(Some([one, other])),
        _ => skip("two nodes").map(|()| None),
    }
}

/// Returns a VM without disks that can migrate.
pub(crate) fn vm(name: &str, run_strategy: &str) -> String {
    with_networks(name, run_strategy, "", "")
}

/// Returns the VM of [`vm`] with an interface `lan` on the network of that name.
pub(crate) fn vm_with_lan(name: &str, run_strategy: &str) -> String {
    with_networks(name, run_strategy, ", {name: lan, bridge: {}}", ", {name: lan, multus: {networkName: lan}}")
}

fn with_networks(name: &str, run_strategy: &str, interface: &str, network: &str) -> String {
    let devices = format!(
        "        devices: {{interfaces: [{{name: default, masquerade: {{}}}}{interface}]}}\n      \
         networks: [{{name: default, pod: {{}}}}{network}]\n"
    );
    manifests::kernel_vm(name, run_strategy).replace("        devices: {}\n", &devices)
}

/// Adds disks of claims to the VM of [`vm`]. Each has the name of its claim.
pub(crate) fn with_claims(vm: &str, claims: &[&str]) -> String {
    let disks: Vec<String> = claims.iter().map(|claim| format!("{{name: {claim}, disk: {{bus: virtio}}}}")).collect();
    let volumes: Vec<String> = claims
        .iter()
        .map(|claim| format!("{{name: {claim}, persistentVolumeClaim: {{claimName: {claim}}}}}"))
        .collect();
    vm.replace("devices: {interfaces", &format!("devices: {{disks: [{}], interfaces", disks.join(", ")))
        .replace("      networks: ", &format!("      volumes: [{}]\n      networks: ", volumes.join(", ")))
}

/// Sets a field of the template's spec of a VM manifest.
pub(crate) fn with_spec(vm: &str, field: &str) -> String {
    vm.replace("      terminationGracePeriodSeconds:", &format!("      {field}\n      terminationGracePeriodSeconds:"))
}

/// Opens the console of a guest of [`vm`].
pub(crate) async fn console(s: &Story, vmi: &str) -> Result<Console> {
    s.reopen_console(vmi, "root", "ferrovirt").await
}

/// Creates a migration and returns its name.
pub(crate) async fn begin(s: &Story, vmi: &str) -> Result<String> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("{vmi}-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let migration = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration", "metadata": {"name": name},
        "spec": {"vmiName": vmi},
    });
    s.apply(&migration.to_string()).await?;
    Ok(name)
}

/// Returns true if a migration has ended.
pub(crate) fn has_ended(migration: &Value) -> bool {
    migration["status"]["phase"] == "Succeeded" || migration["status"]["phase"] == "Failed"
}

/// Waits until a migration has ended, and returns it.
pub(crate) async fn ended(s: &Story, migration: &str) -> Result<Value> {
    s.wait("vmim", migration, "end", MINUTES, has_ended).await
}

/// Migrates a VMI, checks its objects, and returns it.
pub(crate) async fn migrate(s: &Story, vmi: &str) -> Result<Value> {
    let before = s.get("vmi", vmi).await?;
    let migration = begin(s, vmi).await?;
    arrived(s, &before, &migration).await
}

/// Waits until a migration has succeeded, checks its objects and those of its VMI, and returns the VMI.
pub(crate) async fn arrived(s: &Story, before: &Value, migration: &str) -> Result<Value> {
    let vmi = before["metadata"]["name"].as_str().context("VMI without name")?;
    let migration = ended(s, migration).await?;
    ensure!(migration["status"]["phase"] == "Succeeded", "{}", migration["status"]);
    let transitions = migration["status"]["phaseTransitionTimestamps"].as_array().context("no phases")?;
    let phases: Vec<&str> = transitions.iter().filter_map(|transition| transition["phase"].as_str()).collect();
    // A busy virt-controller can learn of the end before it has seen the copy begin.
    let due = PHASES.into_iter().filter(|phase| !["TargetReady", "Running"].contains(phase) || phases.contains(phase));
    ensure!(due.eq(phases.iter().copied()), "phases: {phases:?}");
    let times: Vec<&str> = transitions.iter().filter_map(|one| one["phaseTransitionTimestamp"].as_str()).collect();
    ensure!(times.len() == phases.len() && times.is_sorted(), "times of the phases: {times:?}");

    // The controller notices the end of the VMI's state with the success of the migration.
    let unmarked = |vmi: &Value| vmi["metadata"]["labels"][TARGET].is_null();
    let after = s.wait("vmi", vmi, "have no target any more", MINUTES, unmarked).await?;
    let (state, node) = (&after["status"]["migrationState"], &after["status"]["nodeName"]);
    ensure!(state["migrationUid"] == migration["metadata"]["uid"], "{state}");
    ensure!(state["completed"] == true && state["failed"] != true, "{state}");
    ensure!(state["sourceNode"] == before["status"]["nodeName"] && state["targetNode"] == *node, "{state}");
    ensure!(state["sourceNode"] != state["targetNode"], "{state}");
    // virt-handler sees the guest run after the launcher has noted the end.
    let mut times = vec![];
    for field in ["startTimestamp", "endTimestamp", "targetNodeDomainReadyTimestamp"] {
        times.push(state[field].as_str().with_context(|| format!("no {field}: {state}"))?);
    }
    ensure!(times.is_sorted(), "{times:?}");
    ensure!(migration["status"]["migrationState"]["migrationUid"] == state["migrationUid"], "{}", migration["status"]);
    ensure!(after["metadata"]["labels"][NODE] == *node, "{}", after["metadata"]["labels"]);
    ensure!(after["metadata"]["annotations"]["ferrovirt.io/migration-progress"].is_null(), "{}", after["metadata"]);
    for same in ["/metadata/uid", "/status/phaseTransitionTimestamps", "/status/phase"] {
        ensure!(
            after.pointer(same) == before.pointer(same),
            "{same}: {:?} {:?}",
            before.pointer(same),
            after.pointer(same)
        );
    }
    let pod = alone(s, vmi).await?;
    ensure!(pod["metadata"]["name"] == state["targetPod"] && pod["spec"]["nodeName"] == *node, "{}", pod["metadata"]);
    let uid = pod["metadata"]["uid"].as_str().context("pod without UID")?;
    ensure!(after["status"]["activePods"][uid] == *node, "active pods: {}", after["status"]["activePods"]);
    Ok(after)
}

/// Waits until all launcher pods of a VMI but one have ended, those that it has left without failure, and returns that one.
pub(crate) async fn alone(s: &Story, vmi: &str) -> Result<Value> {
    let object = s.get("vmi", vmi).await?;
    let deadline = Instant::now() + MINUTES;
    loop {
        let pods = s.launcher_pods(&object).await?;
        let live: Vec<&Value> = pods
            .iter()
            .filter(|pod| pod["status"]["phase"] != "Succeeded" && pod["status"]["phase"] != "Failed")
            .collect();
        if let [pod] = live.as_slice() {
            return Ok((*pod).clone());
        }
        let names: Vec<_> = live.iter().map(|pod| &pod["metadata"]["name"]).collect();
        ensure!(Instant::now() < deadline, "launcher pods: {names:?}");
        sleep(Duration::from_millis(250)).await;
    }
}

/// Runs a body with a migration policy of the story's namespace.
pub(crate) async fn with_policy<T>(s: &Story, spec: Value, body: impl AsyncFnOnce(&str) -> Result<T>) -> Result<T> {
    let mut spec = spec;
    spec["selectors"]["namespaceSelector"] = json!({"kubernetes.io/metadata.name": s.namespace});
    let policy = json!({
        "apiVersion": "migrations.kubevirt.io/v1alpha1", "kind": "MigrationPolicy",
        "metadata": {"name": s.namespace}, "spec": spec,
    });
    let policies = s.cluster_api("MigrationPolicy");
    policies.create(&PostParams::default(), &serde_json::from_value(policy)?).await.context("create the policy")?;
    let result = body(&s.namespace).await;
    policies.delete(&s.namespace, &DeleteParams::default()).await.context("delete the policy")?;
    result
}

/// Runs a body with settings of migrations in the configuration, and restores these.
pub(crate) async fn with_settings<T>(s: &Story, settings: Value, body: impl AsyncFnOnce() -> Result<T>) -> Result<T> {
    let installation = s.installation_api("KubeVirt");
    let before = serde_json::to_value(installation.get("kubevirt").await?)?;
    let before = before["spec"]["configuration"]["migrations"].clone();
    let set = async |migrations: &Value| {
        // A merge keeps fields that the new value lacks.
        let mut version = None;
        for migrations in [&Value::Null, migrations] {
            let patch = Patch::Merge(json!({"spec": {"configuration": {"migrations": migrations}}}));
            let object = installation.patch("kubevirt", &PatchParams::default(), &patch).await;
            version = object.context("set migrations")?.metadata.resource_version;
        }
        Ok::<_, anyhow::Error>(version.context("no version")?.parse::<u64>()?)
    };
    let version = set(&settings).await?;
    let result = match in_force(s, version).await {
        Ok(()) => body().await,
        Err(error) => Err(error),
    };
    set(&before).await?;
    result
}

/// Runs a body while a node takes no new pods.
pub(crate) async fn while_cordoned<T>(s: &Story, node: &str, body: impl AsyncFnOnce() -> Result<T>) -> Result<T> {
    s.kubectl(&["cordon", node]).await?;
    let result = body().await;
    s.kubectl(&["uncordon", node]).await?;
    result
}
