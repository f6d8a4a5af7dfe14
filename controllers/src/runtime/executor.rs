//! The one place that writes to the API server.
//!
//! Each write is checked against leadership, bounded in time, counted, and its answer put into the caches.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::OwnerReference};
use kube::{
    Client,
    api::{DeleteParams, ListParams, ObjectList, PartialObjectMeta, Patch, PatchParams, PostParams, Preconditions},
    core::Request,
};
use serde_json::{Value, json};

use super::{Effect, Kind, Note, effect::Notes, lease::Leadership, metrics::Metrics, recorder::Recorder};

/// Longest time for one write. Shorter than the time leadership outlasts a lost connection, see [`super::lease`].
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for [`Effect::Restore`], which lists a namespace.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(30);
/// Pods on a page of such a list. Their metadata can have 256 KiB each.
const RESTORE_PAGE: u32 = 100;
/// Name under which fields are recorded as ours.
const FIELD_MANAGER: &str = "virt-controller";

/// Takes the answers to writes.
pub trait Answers: Send + Sync {
    /// An object was written; this is what it is now.
    fn written(&self, kind: Kind, object: Value);
    /// An object is gone.
    fn deleted(&self, kind: Kind, namespace: Option<&str>, name: &str, uid: Option<&str>);
}

/// How the effects of a decision went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All were made. Names the remembered reasons of those that succeeded.
    Done {
        /// Failure reasons of the effects made.
        succeeded: Vec<&'static str>,
    },
    /// One was refused by the API server.
    Refused {
        /// The reason the effect gives for this.
        reason: Option<&'static str>,
        /// What the API server said.
        message: String,
    },
    /// The object had changed meanwhile; a newer observation will come.
    Stale,
    /// The API server did not answer, or only that it is overloaded.
    Unreachable,
    /// This replica does not lead any more.
    NotLeading,
}

enum WriteError {
    Refused(String),
    Stale,
    Gone,
    Unreachable(String),
}

/// Carries out effects.
pub struct Executor {
    client: Client,
    leadership: Leadership,
    recorder: Recorder,
    metrics: Metrics,
    answers: Arc<dyn Answers>,
    /// One request kept per address, since they are immutable.
    requests: Mutex<HashMap<(Kind, Option<String>), Request>>,
}

/// Namespaces whose request builders are kept; more than this many start over.
const KEPT_REQUESTS: usize = 256;

impl Executor {
    /// An executor that writes while `leadership` holds.
    #[must_use]
    pub fn new(
        client: Client,
        leadership: Leadership,
        recorder: Recorder,
        metrics: Metrics,
        answers: Arc<dyn Answers>,
    ) -> Arc<Self> {
        Arc::new(Self { client, leadership, recorder, metrics, answers, requests: Mutex::default() })
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Carries out effects in order; the first that fails ends the rest.
    pub async fn carry_out(&self, controller: &'static str, effects: Vec<Effect>) -> Outcome {
        let mut succeeded = Vec::new();
        // A second patch of an object follows the version that the first one made.
        let mut versions: HashMap<(Kind, Option<String>, String), String> = HashMap::new();
        for effect in effects {
            if let Effect::Event(note) = effect {
                self.recorder.emit(note, None, None);
                continue;
            }
            if !self.leadership.holds() {
                tracing::warn!("not leading; nothing is written");
                return Outcome::NotLeading;
            }
            let (verb, resource) = label(&effect);
            let limit = if matches!(effect, Effect::Restore { .. }) { RESTORE_TIMEOUT } else { WRITE_TIMEOUT };
            let result = tokio::time::timeout(limit, self.write(&effect, &mut versions)).await;
            let (notes, regarding_name) = parts(&effect);
            let result = result.unwrap_or_else(|_| Err(WriteError::Unreachable("no answer in time".to_owned())));
            match result {
                // A budget that refuses one eviction says nothing about the next.
                Err(error) if matches!(effect, Effect::Evict { .. }) => {
                    self.metrics.wrote(controller, verb, resource, "refused");
                    if let WriteError::Refused(message) | WriteError::Unreachable(message) = error {
                        tracing::info!(verb, resource, object = regarding_name, error = %message, "not evicted");
                        if let Some(note) = &notes.failure {
                            self.recorder.emit(note.clone(), None, Some(&message));
                        }
                    }
                }
                Ok(answer) => {
                    self.metrics.wrote(controller, verb, resource, "succeeded");
                    tracing::debug!(verb, resource, object = regarding_name, "written");
                    if let Some(note) = &notes.success {
                        self.recorder.emit(note.clone(), answer.as_ref(), None);
                    }
                    succeeded.extend(notes.failure_reason);
                }
                Err(WriteError::Stale) => {
                    self.metrics.wrote(controller, verb, resource, "stale");
                    tracing::debug!(verb, resource, object = regarding_name, "object has changed meanwhile");
                    return Outcome::Stale;
                }
                // What is to be changed or deleted is gone: the watch will tell, there is nothing to repeat.
                Err(WriteError::Gone) => {
                    self.metrics.wrote(controller, verb, resource, "gone");
                    return Outcome::Done { succeeded };
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
                    if let Some(note) = &notes.failure {
                        self.recorder.emit(note.clone(), None, Some(&message));
                    }
                    return Outcome::Refused { reason: notes.failure_reason, message };
                }
            }
        }
        Outcome::Done { succeeded }
    }

    fn request(&self, kind: Kind, namespace: Option<&str>) -> Request {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Carries out [`Effect::Restore`].
    async fn restore(
        &self,
        namespace: Option<&str>,
        name: Option<&str>,
        uids: &[String],
        labels: &BTreeMap<String, String>,
        owner: &OwnerReference,
    ) -> Result<(), WriteError> {
        let refused = |error: kube::core::request::Error| WriteError::Refused(error.to_string());
        let mut missing: Vec<&String> = uids.iter().collect();
        let mut parameters = ListParams::default().limit(RESTORE_PAGE);
        if let Some(name) = name {
            parameters = parameters.fields(&format!("metadata.name={name}"));
        }
        loop {
            let request = self.request(Kind::Pod, namespace).list_metadata(&parameters).map_err(refused)?;
            let page: ObjectList<PartialObjectMeta<Pod>> =
                self.client.request(request).await.map_err(|error| classify(&error, true))?;
            for pod in page.items {
                let uid = pod.metadata.uid.as_ref();
                let Some(found) = missing.iter().position(|wanted| Some(*wanted) == uid) else { continue };
                missing.swap_remove(found);
                let name = pod.metadata.name.clone().unwrap_or_default();
                tracing::warn!(pod = name, "the labels or the owner of a launcher pod were removed and are restored");
                let patch = restoration(&pod, labels, owner);
                let parameters =
                    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
                let request = self
                    .request(Kind::Pod, namespace)
                    .patch(&name, &parameters, &Patch::Merge(&patch))
                    .map_err(refused)?;
                // One that is gone by now is looked for again.
                let answer: Value =
                    self.client.request(request).await.map_err(|error| match classify(&error, false) {
                        WriteError::Gone => WriteError::Stale,
                        other => other,
                    })?;
                self.answers.written(Kind::Pod, answer);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty() && !missing.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => break,
            }
        }
        for uid in missing {
            self.answers.deleted(Kind::Pod, namespace, name.unwrap_or_default(), Some(uid));
        }
        Ok(())
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
            Effect::Create { kind, namespace, object, notes } => {
                let body = serde_json::to_vec(object).map_err(|error| WriteError::Refused(error.to_string()))?;
                let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
                let request = self
                    .request(*kind, namespace.as_deref())
                    .create(&parameters, body)
                    .map_err(|error| WriteError::Refused(error.to_string()))?;
                let answer: Value = match self.client.request(request).await {
                    Err(error) if notes.existing_will_do && exists(&error) => return Ok(None),
                    answer => answer.map_err(|error| not_created(&error, notes))?,
                };
                self.answers.written(*kind, answer.clone());
                Ok(Some(answer))
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
                let answer: Value = self.client.request(request).await.map_err(|error| classify(&error, false))?;
                if let Some(version) = answer["metadata"]["resourceVersion"].as_str() {
                    versions.insert(key, version.to_owned());
                }
                self.answers.written(*kind, answer.clone());
                Ok(Some(answer))
            }
            Effect::Delete { kind, namespace, name, uid, grace_seconds, .. } => {
                let parameters = DeleteParams {
                    grace_period_seconds: *grace_seconds,
                    preconditions: Some(Preconditions { resource_version: None, uid: uid.clone() }),
                    ..DeleteParams::background()
                };
                let request = self
                    .request(*kind, namespace.as_deref())
                    .delete(name, &parameters)
                    .map_err(|error| WriteError::Refused(error.to_string()))?;
                match self.client.request::<Value>(request).await {
                    Ok(answer) => {
                        // A deletion in steps is answered with the object, a finished one with a Status.
                        if answer["metadata"]["deletionTimestamp"].is_string() {
                            self.answers.written(*kind, answer.clone());
                        } else {
                            self.answers.deleted(*kind, namespace.as_deref(), name, uid.as_deref());
                        }
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

fn label(effect: &Effect) -> (&'static str, &'static str) {
    match effect {
        Effect::Create { kind, .. } => ("create", kind.plural()),
        Effect::Patch { kind, .. } => ("patch", kind.plural()),
        Effect::Delete { kind, .. } => ("delete", kind.plural()),
        Effect::Evict { .. } => ("evict", Kind::Pod.plural()),
        Effect::Restore { .. } => ("restore", Kind::Pod.plural()),
        Effect::Event(_) => ("event", "events"),
    }
}

fn parts(effect: &Effect) -> (Notes, &str) {
    match effect {
        Effect::Create { notes, object, .. } => {
            let name = object["metadata"]["name"].as_str().or(object["metadata"]["generateName"].as_str());
            (notes.clone(), name.unwrap_or_default())
        }
        Effect::Patch { notes, name, .. } | Effect::Delete { notes, name, .. } | Effect::Evict { notes, name, .. } => {
            (notes.clone(), name)
        }
        Effect::Restore { name, .. } => (Notes::default(), name.as_deref().unwrap_or_default()),
        Effect::Event(Note { .. }) => (Notes::default(), ""),
    }
}

/// The patch that gives a pod its labels and its controller, if it is still the version that was read. Other owners stay.
fn restoration(pod: &PartialObjectMeta<Pod>, labels: &BTreeMap<String, String>, owner: &OwnerReference) -> Value {
    let mut patch = json!({"metadata": {"resourceVersion": pod.metadata.resource_version, "labels": labels}});
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    if !owners.contains(owner) {
        let others = owners.iter().filter(|other| other.uid != owner.uid && other.controller != Some(true));
        patch["metadata"]["ownerReferences"] = json!(others.chain([owner]).collect::<Vec<_>>());
    }
    patch
}

/// Length of what the API server appends to `generateName`.
const GENERATED_SUFFIX: usize = 5;

/// Takes the name that the API server made up out of a refusal: with it, each attempt would read as a new problem.
fn without_generated_name(message: String, effect: &Effect) -> String {
    let Effect::Create { object, .. } = effect else { return message };
    let Some(prefix) = object["metadata"]["generateName"].as_str().filter(|prefix| !prefix.is_empty()) else {
        return message;
    };
    let mut parts = message.split(prefix);
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let suffix = part.bytes().take(GENERATED_SUFFIX).take_while(u8::is_ascii_alphanumeric).count();
        text.push_str(prefix);
        text.push_str(if suffix == GENERATED_SUFFIX { &part[GENERATED_SUFFIX..] } else { part });
    }
    text
}

/// Whether a creation was refused because the object is there. A conflict may have other causes, such as a quota.
fn exists(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409 && status.reason == "AlreadyExists")
}

fn not_created(error: &kube::Error, notes: &Notes) -> WriteError {
    match &notes.existing_refuses {
        Some(refusal) if exists(error) => WriteError::Refused(refusal.clone()),
        _ => classify(error, true),
    }
}

/// Sorts errors into those to be told to users and those to be repeated.
fn classify(error: &kube::Error, create: bool) -> WriteError {
    let kube::Error::Api(status) = error else { return WriteError::Unreachable(error.to_string()) };
    match status.code {
        404 if !create => WriteError::Gone,
        // Creation with a fixed name: the object exists, the watch will bring it.
        409 => WriteError::Stale,
        // A webhook that is not reachable is answered with 500; the API server itself being unwell is no refusal.
        429 | 502 | 503 | 504 => WriteError::Unreachable(status.message.clone()),
        _ => WriteError::Refused(status.message.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_generated_names_read_the_same_each_time() {
        let object = json!({"metadata": {"generateName": "virt-launcher-m-"}});
        let effect = Effect::Create { kind: Kind::Pod, namespace: None, object, notes: Notes::default() };
        let told = |message: &str| without_generated_name(message.to_owned(), &effect);
        assert_eq!(told("pods \"virt-launcher-m-5v42t\" is forbidden"), "pods \"virt-launcher-m-\" is forbidden");
        assert_eq!(told("no name in it"), "no name in it");
        assert_eq!(told("virt-launcher-m-\u{fc}"), "virt-launcher-m-\u{fc}");
    }

    #[test]
    fn restored_pod_gets_its_labels_and_its_controller_and_keeps_other_owners() {
        let owner = |uid: &str, controller: bool| OwnerReference {
            api_version: "v1".to_owned(),
            kind: "ConfigMap".to_owned(),
            name: "c".to_owned(),
            uid: uid.to_owned(),
            controller: Some(controller),
            block_owner_deletion: None,
        };
        let labels = BTreeMap::from([("kubevirt.io".to_owned(), "virt-launcher".to_owned())]);
        let patch = |owners: Vec<OwnerReference>| {
            let pod = json!({"metadata": {"name": "p", "resourceVersion": "7", "ownerReferences": owners}});
            restoration(&serde_json::from_value(pod).unwrap(), &labels, &owner("u", true))["metadata"].clone()
        };
        let plain = json!({"resourceVersion": "7", "labels": {"kubevirt.io": "virt-launcher"}});
        assert_eq!(patch(vec![owner("u", true)]), plain);
        for (owners, expected) in [
            (vec![], vec![owner("u", true)]),
            (vec![owner("u", false)], vec![owner("u", true)]),
            (vec![owner("x", true)], vec![owner("u", true)]),
            (vec![owner("x", false)], vec![owner("x", false), owner("u", true)]),
        ] {
            assert_eq!(patch(owners)["ownerReferences"], json!(expected));
        }
    }

    #[test]
    fn errors_are_told_repeated_or_left_by_their_kind() {
        let error = |code: u16| {
            let status = json!({"status": "Failure", "message": "m", "reason": "r", "code": code});
            kube::Error::Api(Box::new(serde_json::from_value(status).unwrap()))
        };
        assert!(matches!(classify(&error(403), true), WriteError::Refused(_)));
        assert!(matches!(classify(&error(422), false), WriteError::Refused(_)));
        assert!(matches!(classify(&error(409), false), WriteError::Stale));
        assert!(!exists(&error(409)));
        assert!(matches!(classify(&error(404), false), WriteError::Gone));
        assert!(matches!(classify(&error(404), true), WriteError::Refused(_)));
        assert!(matches!(classify(&error(503), true), WriteError::Unreachable(_)));
    }

    #[test]
    fn name_that_is_taken_is_a_refusal_where_the_effect_says_so() {
        let error = |reason: &str| {
            let status = json!({"status": "Failure", "message": "m", "reason": reason, "code": 409});
            kube::Error::Api(Box::new(serde_json::from_value(status).unwrap()))
        };
        let notes = Notes { existing_refuses: Some("taken".to_owned()), ..Notes::default() };
        let refused = not_created(&error("AlreadyExists"), &notes);
        assert!(matches!(refused, WriteError::Refused(message) if message == "taken"));
        assert!(matches!(not_created(&error("Conflict"), &notes), WriteError::Stale));
        assert!(matches!(not_created(&error("AlreadyExists"), &Notes::default()), WriteError::Stale));
    }
}
