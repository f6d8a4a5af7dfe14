//! Measures what the admission policies of the chart cost a plain pod: the time of its creation and of a write to its status as
//! kubelet's, with the bindings of the policies and without, in turns.
//!
//! The pods have a scheduling gate, so that nobody else writes to them. Bindings that are removed are kept in a file: a run after an
//! interrupted one creates them again.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, own_cluster, repository};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding;
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::time::sleep;

use crate::{Figures, exposition::sum, percentile};

/// Turns with the bindings and without.
const TURNS: usize = 3;
/// Time in which the API server notices changes of bindings: it looks once a second.
const NOTICE: Duration = Duration::from_secs(3);
/// Label of the objects of the chart.
const OWN: &str = "app.kubernetes.io/part-of=ferrovirt";
/// Evaluations of match conditions that exclude a write, by policy and operation. The API server does not count others.
const EVALUATIONS: &str = "apiserver_admission_match_condition_evaluation_seconds";

/// Measures `count` pods with the policies and as many without. Does nothing on other clusters than the test cluster, which the policies
/// protect.
pub(crate) async fn measure(story: &Story, count: usize, figures: &mut Figures) -> Result<()> {
    if own_cluster()?.is_none() {
        println!("policies are lifted on the test cluster alone: their cost is not measured");
        return Ok(());
    }
    let bindings = Bindings::of(story);
    bindings.restore().await?;
    let (mut with, mut without) = (PodWrites::new(story), PodWrites::new(story));
    let per_turn = count.div_ceil(TURNS);
    let (mut evaluations, mut lifted) = (Evaluations::default(), Evaluations::default());
    for _ in 0..TURNS {
        let before = Evaluations::read(story).await?;
        with.repeat(per_turn).await?;
        evaluations.add(&before, &Evaluations::read(story).await?);
        let turn = async {
            bindings.lift().await?;
            let before = Evaluations::read(story).await?;
            without.repeat(per_turn).await?;
            lifted.add(&before, &Evaluations::read(story).await?);
            Ok::<_, anyhow::Error>(())
        };
        let turn = turn.await;
        bindings.restore().await?;
        turn?;
    }
    with.report("", figures)?;
    without.report("_without_policies", figures)?;
    // Controllers and kubelets write to pods as well.
    ensure!(lifted.create < evaluations.create / 2.0, "policies remain without their bindings: {lifted:?}");
    let pods = (per_turn * TURNS) as f64;
    figures.insert("policy_evaluations_per_pod_create".into(), evaluations.create / pods);
    figures.insert("policy_evaluations_per_pod_status_patch".into(), evaluations.update / pods);
    let mean_ms = |seconds: f64, count: f64| seconds * 1000.0 / count.max(1.0);
    figures.insert("policy_evaluation_create_ms".into(), mean_ms(evaluations.create_seconds, evaluations.create));
    figures.insert("policy_evaluation_update_ms".into(), mean_ms(evaluations.update_seconds, evaluations.update));
    Ok(())
}

/// Evaluations of match conditions by operation, and the time that they took.
#[derive(Debug, Default)]
struct Evaluations {
    create: f64,
    create_seconds: f64,
    update: f64,
    update_seconds: f64,
}

impl Evaluations {
    async fn read(story: &Story) -> Result<Self> {
        let text = story.client.request_text(http::Request::get("/metrics").body(Vec::new())?).await?;
        let of = |end: &str, operation: &str| {
            sum(
                text.lines(),
                &format!("{EVALUATIONS}_{end}"),
                &["kind=\"policy\"", &format!("operation=\"{operation}\"")],
            )
        };
        Ok(Self {
            create: of("count", "CREATE"),
            create_seconds: of("sum", "CREATE"),
            update: of("count", "UPDATE"),
            update_seconds: of("sum", "UPDATE"),
        })
    }

    fn add(&mut self, before: &Self, after: &Self) {
        self.create += after.create - before.create;
        self.create_seconds += after.create_seconds - before.create_seconds;
        self.update += after.update - before.update;
        self.update_seconds += after.update_seconds - before.update_seconds;
    }
}

/// The bindings of the policies of the chart.
struct Bindings {
    api: Api<ValidatingAdmissionPolicyBinding>,
    kept: PathBuf,
}

impl Bindings {
    fn of(story: &Story) -> Self {
        Self { api: Api::all(story.client.clone()), kept: repository().join("build/lifted-policy-bindings.json") }
    }

    /// Removes the bindings.
    async fn lift(&self) -> Result<()> {
        let bindings = self.api.list(&ListParams::default().labels(OWN)).await?.items;
        ensure!(!bindings.is_empty(), "the installation has no policies");
        let bindings: Vec<_> = bindings.into_iter().map(renewed).collect();
        let shown = self.kept.display();
        std::fs::write(&self.kept, serde_json::to_vec(&bindings)?).with_context(|| format!("cannot write {shown}"))?;
        for binding in &bindings {
            let name = binding.metadata.name.as_deref().context("binding without name")?;
            self.api.delete(name, &DeleteParams::default()).await.with_context(|| format!("delete {name}"))?;
        }
        sleep(NOTICE).await;
        Ok(())
    }

    /// Creates the bindings again that were removed.
    async fn restore(&self) -> Result<()> {
        if !self.kept.exists() {
            return Ok(());
        }
        let bindings: Vec<ValidatingAdmissionPolicyBinding> = serde_json::from_slice(&std::fs::read(&self.kept)?)?;
        for binding in &bindings {
            let name = binding.metadata.name.as_deref().context("binding without name")?;
            if self.api.get_opt(name).await?.is_none() {
                let created = self.api.create(&PostParams::default(), binding).await;
                created.with_context(|| format!("create {name}, which is in {}", self.kept.display()))?;
            }
        }
        std::fs::remove_file(&self.kept)?;
        sleep(NOTICE).await;
        Ok(())
    }
}

/// Returns the binding as a user would create it.
fn renewed(binding: ValidatingAdmissionPolicyBinding) -> ValidatingAdmissionPolicyBinding {
    let old = binding.metadata;
    let metadata =
        ObjectMeta { name: old.name, labels: old.labels, annotations: old.annotations, ..ObjectMeta::default() };
    ValidatingAdmissionPolicyBinding { metadata, spec: binding.spec }
}

/// Times of writes to plain pods, in milliseconds.
pub(crate) struct PodWrites {
    api: Api<DynamicObject>,
    creations: Vec<f64>,
    patches: Vec<f64>,
}

impl PodWrites {
    pub(crate) fn new(story: &Story) -> Self {
        Self { api: story.api("Pod"), creations: Vec::new(), patches: Vec::new() }
    }

    /// Measures this number of pods.
    async fn repeat(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            self.once().await?;
        }
        Ok(())
    }

    /// Measures one pod after the other until the future ends, and returns its result.
    pub(crate) async fn during<T>(&mut self, load: impl Future<Output = Result<T>>) -> Result<T> {
        let mut load = std::pin::pin!(load);
        loop {
            tokio::select! {
                result = &mut load => return result,
                written = self.once() => written?,
            }
        }
    }

    async fn once(&mut self) -> Result<()> {
        let pod = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "plain-"},
            "spec": {
                "schedulingGates": [{"name": "ferrovirt.io/bench"}],
                "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{
                    "name": "toolbox", "image": "ferrovirt.io/toolbox:devel",
                    "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
                }],
            },
        }))?;
        let status = json!({"status": {"conditions": [{"type": "ferrovirt.io/bench", "status": "True"}]}});
        let began = Instant::now();
        let pod = self.api.create(&PostParams::default(), &pod).await.context("create a plain pod")?;
        let created = began.elapsed();
        let name = pod.metadata.name.as_deref().context("pod without name")?;
        let began = Instant::now();
        self.api
            .patch_status(name, &PatchParams::default(), &Patch::Strategic(&status))
            .await
            .context("patch a pod")?;
        let patched = began.elapsed();
        self.api.delete(name, &DeleteParams::default().grace_period(0)).await.context("delete a plain pod")?;
        self.creations.push(created.as_secs_f64() * 1000.0);
        self.patches.push(patched.as_secs_f64() * 1000.0);
        Ok(())
    }

    /// Adds median and 99th percentile of both kinds of writes.
    pub(crate) fn report(&self, suffix: &str, figures: &mut Figures) -> Result<()> {
        for (name, values) in [("pod_create", &self.creations), ("pod_status_patch", &self.patches)] {
            for (percent, unit) in [(50, "ms"), (99, "p99_ms")] {
                let value = percentile(values, percent).context("no plain pod was written")?;
                figures.insert(format!("{name}{suffix}_{unit}"), value);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binding_is_created_again_without_what_the_server_added() {
        let stored = json!({
            "metadata": {"name": "a", "labels": {"b": "c"}, "annotations": {"d": "e"}, "uid": "f",
                "resourceVersion": "1", "creationTimestamp": "2026-01-02T03:04:05Z"},
            "spec": {"policyName": "a", "validationActions": ["Deny"]},
        });
        let again = serde_json::to_value(renewed(serde_json::from_value(stored).unwrap())).unwrap();
        let expected = json!({"name": "a", "labels": {"b": "c"}, "annotations": {"d": "e"}});
        assert_eq!(again["metadata"], expected);
        assert_eq!(again["spec"]["policyName"], "a");
    }

    #[test]
    fn growth_of_evaluations_is_added() {
        let of = |create, create_seconds, update, update_seconds| Evaluations {
            create,
            create_seconds,
            update,
            update_seconds,
        };
        let mut all = of(1.0, 0.5, 2.0, 0.25);
        all.add(&of(10.0, 1.0, 20.0, 2.0), &of(15.0, 3.0, 20.0, 2.0));
        assert_eq!((all.create, all.create_seconds, all.update, all.update_seconds), (6.0, 2.5, 2.0, 0.25));
    }
}
