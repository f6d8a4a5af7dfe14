//! Carries effects out: the one place that writes to the API server.
//!
//! Each write is checked against leadership, bounded in time, and counted; its answer goes into the caches. `restore.rs`
//! searches for pods that no watch shows, `existing.rs` reads a pod whose name is taken, `image_volumes.rs` refuses pods that would
//! lose image volumes, `errors.rs` sorts the errors of writes, `labels.rs` names effects, `warnings.rs` reads events,
//! `data_volumes.rs` checks the right to clone, `snapshots.rs` reads the content of snapshots and freezes guests, `users.rs` finds
//! the pods that use a claim.

mod data_volumes;
mod errors;
mod existing;
mod image_volumes;
mod labels;
mod restore;
mod snapshots;
mod users;
mod warnings;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::Duration,
};

use daemon::{
    lock,
    telemetry::{OpenSpan, Traces},
};
use k8s_openapi::api::core::v1::Event as PodEvent;
use kube::{
    Client,
    api::{DeleteParams, ObjectList, Patch, PatchParams, PostParams, Preconditions},
    core::Request,
};
use serde_json::{Value, json};

pub(crate) use self::users::ClaimUser;
use self::{
    errors::{WriteError, classify, exists, not_created, without_generated_name},
    existing::Existing,
    labels::{label, parts},
};
use super::{
    DataVolumeCreation, Effect, Event, Kind, RevisionCopy, SnapshotContentCreation, WriteOptions, lease::Leadership,
    metrics::Metrics, recorder::Recorder,
};

/// Longest time for one write, which ends with the lease at the latest.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for [`Effect::Restore`] and [`Effect::ReadUsers`], which list a namespace.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time for [`Effect::Quiesce`]: that of kube-apiserver for a request (60 s) and of the way to it. Without leadership it does no
/// harm: the guest thaws itself.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(75);
/// Field manager of all writes.
const FIELD_MANAGER: &str = "virt-controller";

/// Receives the answers to writes.
pub(crate) trait Answers: Send + Sync {
    /// Returns true if a namespace is being deleted: nothing can be created in it.
    fn is_terminating(&self, namespace: &str) -> bool;
    /// Stores an object as it is after a write.
    fn written(&self, kind: Kind, object: Value);
    /// Removes an object that is gone.
    fn deleted(&self, kind: Kind, namespace: Option<&str>, name: &str, uid: Option<&str>);
    /// Stores the warnings among the events of a pod.
    fn warned(&self, namespace: &str, pod: &str, uid: &str, events: &ObjectList<PodEvent>);
    /// Stores the newest warning among the events of a claim.
    fn warned_of_claim(&self, namespace: &str, claim: &str, uid: &str, events: &ObjectList<PodEvent>);
    /// Stores the pods that use a claim, and the version of their list.
    fn users(&self, namespace: &str, claim: &str, uid: &str, users: Vec<ClaimUser>, version: Option<String>);
}

/// The result of carrying out a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All effects were carried out.
    Done {
        /// Failure reasons of the effects that succeeded.
        succeeded: Vec<&'static str>,
    },
    /// The API server refused an effect.
    Refused {
        /// Failure reason of the effect.
        reason: Option<&'static str>,
        /// Message of the API server.
        message: String,
        /// Failure reasons of the effects before it, which succeeded.
        succeeded: Vec<&'static str>,
    },
    /// The object has changed. The watch delivers a newer version.
    Stale,
    /// The API server did not answer or is overloaded.
    Unreachable,
    /// This replica does not lead.
    NotLeading,
}

/// Carries out effects.
pub(crate) struct Executor {
    client: Client,
    leadership: Leadership,
    recorder: Recorder,
    metrics: Metrics,
    answers: Arc<dyn Answers>,
    traces: Traces,
    /// The API server has kept the image volumes of a pod.
    keeps_image_volumes: AtomicBool,
    /// Request builders by collection. They are immutable.
    requests: Mutex<HashMap<(Kind, Option<String>), Request>>,
}

/// Request builders that are kept at most.
const KEPT_REQUESTS: usize = 256;

impl Executor {
    /// Creates an executor that writes while `leadership` holds.
    #[must_use]
    pub(crate) fn new(
        client: Client,
        leadership: Leadership,
        recorder: Recorder,
        metrics: Metrics,
        answers: Arc<dyn Answers>,
        traces: Traces,
    ) -> Arc<Self> {
        Arc::new(Self {
            client,
            leadership,
            recorder,
            metrics,
            answers,
            traces,
            keeps_image_volumes: AtomicBool::default(),
            requests: Mutex::default(),
        })
    }

    pub(super) fn traces(&self) -> &Traces {
        &self.traces
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Carries out effects in order. The first that fails ends the rest. `trace`: the span of the reconcile, if it is traced.
    pub(crate) async fn carry_out(
        &self,
        controller: &'static str,
        effects: Vec<Effect>,
        trace: Option<&OpenSpan>,
    ) -> Outcome {
        let mut succeeded = Vec::new();
        // A second patch of an object follows the version that the first one made.
        let mut versions: HashMap<(Kind, Option<String>, String), String> = HashMap::new();
        let mut effects = effects.into_iter();
        while let Some(effect) = effects.next() {
            if let Effect::Event(note) = effect {
                self.recorder.emit(controller, note, None, None);
                continue;
            }
            if !self.leadership.holds() {
                tracing::warn!("not leading; nothing is written");
                return Outcome::NotLeading;
            }
            let (verb, resource) = label(&effect);
            let lists = matches!(effect, Effect::Restore { .. } | Effect::ReadUsers { .. });
            let limit = match effect {
                Effect::Quiesce { .. } => QUIESCE_TIMEOUT,
                _ if lists => RESTORE_TIMEOUT,
                _ => WRITE_TIMEOUT.min(self.leadership.time_left()),
            };
            let span = trace.and_then(|parent| self.traces.child(verb, parent.context()));
            let mut span = span.map(|span| span.with("resource", resource));
            let result = tokio::time::timeout(limit, self.write(&effect, &mut versions)).await;
            let (options, regarding_name) = parts(&effect);
            let late = "no answer in time".to_owned();
            let result = result.unwrap_or(match effect {
                Effect::Quiesce { .. } => Err(WriteError::Refused(late)),
                _ => Err(WriteError::Unreachable(late)),
            });
            if let (Some(span), Err(error)) = (&mut span, &result) {
                span.fail(format!("{error:?}"));
            }
            drop(span);
            match result {
                // A disruption budget that refuses one eviction may allow the next.
                Err(error) if options.independent || effect.is_read() || matches!(effect, Effect::Evict { .. }) => {
                    self.metrics.wrote(controller, verb, resource, "refused");
                    if let WriteError::Refused(message) | WriteError::Unreachable(message) = error {
                        tracing::info!(verb, resource, object = regarding_name, error = %message, "not carried out");
                        if let Some(note) = options.refusal(&message) {
                            self.recorder.emit(controller, note, None, Some(&message));
                        }
                    }
                }
                Ok(answer) => {
                    self.metrics.wrote(controller, verb, resource, "succeeded");
                    tracing::debug!(verb, resource, object = regarding_name, "written");
                    if let Some(note) = &options.success {
                        self.recorder.emit(controller, note.clone(), answer.as_ref(), None);
                    }
                    succeeded.extend(options.failure_reason);
                }
                Err(WriteError::Stale) => {
                    self.metrics.wrote(controller, verb, resource, "stale");
                    tracing::debug!(verb, resource, object = regarding_name, "object has changed");
                    return Outcome::Stale;
                }
                // The object to be changed is gone, or the namespace is going. The watch reports it. Writes that follow may depend on the
                // object: they are decided anew.
                Err(WriteError::Gone) => {
                    self.metrics.wrote(controller, verb, resource, "gone");
                    let is_last = !effects.as_slice().iter().any(Effect::is_write);
                    return if is_last || matches!(effect, Effect::Create { .. }) {
                        Outcome::Done { succeeded }
                    } else {
                        Outcome::Stale
                    };
                }
                Err(WriteError::NotLeading) => {
                    self.metrics.wrote(controller, verb, resource, "stopped");
                    tracing::warn!("not leading; nothing more is written");
                    return Outcome::NotLeading;
                }
                Err(WriteError::Unreachable(message)) => {
                    self.metrics.wrote(controller, verb, resource, "unreachable");
                    tracing::warn!(verb, resource, object = regarding_name, error = %message, "write failed");
                    return Outcome::Unreachable;
                }
                Err(WriteError::Refused(message)) => {
                    let message = without_generated_name(message, &effect);
                    self.metrics.wrote(controller, verb, resource, "refused");
                    tracing::warn!(verb, resource, object = regarding_name, error = %message, "write was refused");
                    if let Some(note) = options.refusal(&message) {
                        self.recorder.emit(controller, note, None, Some(&message));
                    }
                    return Outcome::Refused { reason: options.failure_reason, message, succeeded };
                }
            }
        }
        Outcome::Done { succeeded }
    }

    fn request(&self, kind: Kind, namespace: Option<&str>) -> Request {
        let mut requests = lock(&self.requests);
        if requests.len() > KEPT_REQUESTS {
            requests.clear();
        }
        requests
            .entry((kind, namespace.map(str::to_owned)))
            .or_insert_with(|| Request::new(kind.path(namespace)))
            .clone()
    }

    async fn evict(&self, namespace: Option<&str>, name: &str, uid: Option<&String>) -> Result<Value, WriteError> {
        let eviction = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        });
        let body = serde_json::to_vec(&eviction).map_err(|error| WriteError::Refused(error.to_string()))?;
        let request = self
            .request(Kind::Pod, namespace)
            .create_subresource("eviction", name, &PostParams::default(), body)
            .map_err(|error| WriteError::Refused(error.to_string()))?;
        self.client.request(request).await.map_err(|error| classify(&error, false))
    }

    async fn create(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        object: &Value,
        options: &WriteOptions,
    ) -> Result<Option<Value>, WriteError> {
        // The owner of the object is deleted with the namespace.
        if namespace.is_some_and(|namespace| self.answers.is_terminating(namespace)) {
            return Err(WriteError::Gone);
        }
        if kind == Kind::Pod {
            self.try_image_volumes(namespace, object).await?;
        }
        let body = serde_json::to_vec(object).map_err(|error| WriteError::Refused(error.to_string()))?;
        let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let request = self
            .request(kind, namespace)
            .create(&parameters, body)
            .map_err(|error| WriteError::Refused(error.to_string()))?;
        let answer: Value = match self.client.request(request).await {
            Err(error) if options.existing_will_do && exists(&error) => return Ok(None),
            answer => answer.map_err(|error| not_created(&error, options))?,
        };
        if kind == Kind::Pod {
            self.refuse_without_image_volumes(namespace, object, &answer).await?;
        }
        Ok(Some(self.store(kind, answer)))
    }

    /// Stores an answer in the caches. Returns it with its metadata only.
    fn store(&self, kind: Kind, mut answer: Value) -> Value {
        // A large part of many objects, which nobody reads.
        if let Some(metadata) = answer.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
        let metadata = answer["metadata"].clone();
        self.answers.written(kind, answer);
        json!({"metadata": metadata})
    }

    /// Creates a pod under the first of its names that no pod of another controller has.
    async fn create_pod(
        &self,
        namespace: Option<&str>,
        pod: &Value,
        options: &WriteOptions,
    ) -> Result<Option<Value>, WriteError> {
        let mut pod = pod.clone();
        for name in &options.names {
            pod["metadata"]["name"] = json!(name);
            match self.create_prepared(Kind::Pod, namespace, &pod, options).await {
                Err(WriteError::Stale) => match self.existing(namespace, name, &pod).await? {
                    Existing::Own(existing) => {
                        self.answers.written(Kind::Pod, existing.clone());
                        return Ok(Some(existing));
                    }
                    Existing::Foreign => {}
                    Existing::Nothing => return Err(WriteError::Stale),
                },
                result => return result,
            }
        }
        Err(WriteError::Refused(format!("pods of others have the names {}", options.names.join(", "))))
    }

    /// Creates an object after others were read for it, unless leadership was lost meanwhile.
    async fn create_prepared(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        object: &Value,
        options: &WriteOptions,
    ) -> Result<Option<Value>, WriteError> {
        if !self.leadership.holds() {
            return Err(WriteError::NotLeading);
        }
        self.create(kind, namespace, object, options).await
    }

    async fn create_data_volume(
        &self,
        creation: &DataVolumeCreation,
        options: &WriteOptions,
    ) -> Result<Option<Value>, WriteError> {
        let object = self.prepare_data_volume(creation).await?;
        let namespace = creation.data_volume.metadata.namespace.as_deref();
        let answer = self.create_prepared(Kind::DataVolume, namespace, &object, options).await;
        self.created_data_volume(creation, answer)
    }

    async fn write(
        &self,
        effect: &Effect,
        versions: &mut HashMap<(Kind, Option<String>, String), String>,
    ) -> Result<Option<Value>, WriteError> {
        match effect {
            Effect::Event(_) => Ok(None),
            Effect::Evict { namespace, name, uid, .. } => {
                self.evict(namespace.as_deref(), name, uid.as_ref()).await.map(Some)
            }
            Effect::Restore { namespace, name, uids, labels, owner } => {
                self.restore(namespace.as_deref(), name.as_deref(), uids, labels, owner).await.map(|()| None)
            }
            Effect::ReadWarnings { namespace, pod, uid } => {
                self.read_warnings(namespace, pod, uid).await.map(|()| None)
            }
            Effect::ReadClaimWarning { namespace, claim, uid } => {
                self.read_claim_warning(namespace, claim, uid).await.map(|()| None)
            }
            Effect::ReadUsers { namespace, claims } => self.read_users(namespace, claims).await.map(|()| None),
            Effect::Create { namespace, object, options, .. } if !options.names.is_empty() => {
                self.create_pod(namespace.as_deref(), object, options).await
            }
            Effect::Create { kind, namespace, object, options } => {
                self.create(*kind, namespace.as_deref(), object, options).await
            }
            Effect::CreateDataVolume { creation, options } => self.create_data_volume(creation, options).await,
            Effect::CreateSnapshotContent { creation, options } => {
                let object = self.snapshot_content(creation).await?;
                let namespace = creation.content.metadata.namespace.as_deref();
                self.create_prepared(Kind::VmSnapshotContent, namespace, &object, options).await
            }
            Effect::CopyRevision { copy, options } => {
                let object = self.copied_revision(copy).await?;
                let options = WriteOptions { existing_will_do: true, ..options.clone() };
                self.create_prepared(Kind::ControllerRevision, Some(&copy.namespace), &object, &options).await
            }
            Effect::Quiesce { namespace, name, freeze, .. } => {
                self.quiesce(namespace, name, *freeze).await.map(|()| None)
            }
            Effect::RequireTaken { namespace, name, uid, content, .. } => {
                self.require_taken(namespace, name, uid, content).await.map(|()| None)
            }
            Effect::Patch { kind, namespace, name, resource_version, subresource, strategic, patch, .. } => {
                if patch.as_object().is_some_and(serde_json::Map::is_empty) {
                    return Ok(None);
                }
                let key = (*kind, namespace.clone(), name.clone());
                let mut patch = patch.clone();
                if let Some(version) = resource_version.as_ref().map(|version| versions.get(&key).unwrap_or(version)) {
                    patch["metadata"]["resourceVersion"] = json!(version);
                }
                let parameters =
                    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
                let request = self.request(*kind, namespace.as_deref());
                let patch = if *strategic { Patch::Strategic(&patch) } else { Patch::Merge(&patch) };
                let request = match subresource {
                    Some(subresource) => request.patch_subresource(subresource, name, &parameters, &patch),
                    None => request.patch(name, &parameters, &patch),
                }
                .map_err(|error| WriteError::Refused(error.to_string()))?;
                // A cluster that cannot resize pods lacks the subresource: that is a refusal.
                let is_optional = *subresource == Some("resize");
                let answer: Value =
                    self.client.request(request).await.map_err(|error| classify(&error, is_optional))?;
                if let Some(version) = answer["metadata"]["resourceVersion"].as_str() {
                    versions.insert(key, version.to_owned());
                }
                Ok(Some(self.store(*kind, answer)))
            }
            Effect::Delete { kind, namespace, name, uid, grace_seconds, options } => {
                let propagation =
                    if options.in_foreground { DeleteParams::foreground() } else { DeleteParams::background() };
                let parameters = DeleteParams {
                    grace_period_seconds: *grace_seconds,
                    preconditions: Some(Preconditions { resource_version: None, uid: uid.clone() }),
                    ..propagation
                };
                let request = self
                    .request(*kind, namespace.as_deref())
                    .delete(name, &parameters)
                    .map_err(|error| WriteError::Refused(error.to_string()))?;
                match self.client.request::<Value>(request).await {
                    Ok(answer) => {
                        // A deletion in steps is answered with the object. A finished one is answered with a Status, or for
                        // pods with the removed object.
                        if *grace_seconds != Some(0) && answer["metadata"]["deletionTimestamp"].is_string() {
                            return Ok(Some(self.store(*kind, answer)));
                        }
                        self.answers.deleted(*kind, namespace.as_deref(), name, uid.as_deref());
                        Ok(Some(answer))
                    }
                    Err(error) => match classify(&error, false) {
                        // Gone, or another object has the name now: in either case this one is deleted.
                        WriteError::Gone | WriteError::Stale => {
                            self.answers.deleted(*kind, namespace.as_deref(), name, uid.as_deref());
                            Ok(None)
                        }
                        other => Err(other),
                    },
                }
            }
        }
    }
}
