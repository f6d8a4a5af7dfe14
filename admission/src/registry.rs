//! The roof of the crate: the table of webhooks, and the evaluation of a review.
//!
//! A webhook is one line in [`WEBHOOKS`]: its path, its resource, its operations, and a function of the
//! [`Context`] in the module of its kind.

use std::sync::OnceLock;

use api::{config::ClusterConfig, traceparent::TraceParent};
use k8s_openapi::jiff::Timestamp;

use crate::{
    context::{
        AdmissionRequest, AdmissionReview, Context, Decision, DenialForm, Effect, Failure, Generated, Interrupt,
        LookupError, Lookups, ObjectQuery, Operation, Outcome, ReviewTrace, TrustedUsers, request, trace,
    },
    kinds::{
        backup, clone, data_volume, deletion, eviction, export, instancetype, kubevirt, migration, plugin, policy,
        pool, preset, replica_set, restore, snapshot, status, vm, vmi,
    },
};

/// A webhook.
pub struct Webhook {
    /// Path.
    pub path: &'static str,
    /// Group and plural of its resource; a request for another fails. `None`: the webhook checks the resource itself,
    /// because its message differs or it has many resources.
    pub resource: Resource,
    /// Operations that it checks; others are allowed.
    operations: &'static [Operation],
    /// The rules.
    evaluate: Rules,
}

/// Group and plural of a resource.
type Resource = Option<(&'static str, &'static str)>;
/// The rules of a webhook.
type Rules = fn(&Context<'_>) -> Result<Decision, Interrupt>;

/// For webhooks that reject operations they are not registered for.
const ANY: &[Operation] = &[Operation::Create, Operation::Update, Operation::Delete, Operation::Connect];
const WRITES: &[Operation] = &[Operation::Create, Operation::Update];
const CREATES: &[Operation] = &[Operation::Create];
const UPDATES: &[Operation] = &[Operation::Update];
const DELETES: &[Operation] = &[Operation::Delete];

const VMS: Resource = Some((api::constants::GROUP, "virtualmachines"));
const VMIS: Resource = Some((api::constants::GROUP, "virtualmachineinstances"));
const MIGRATIONS: Resource = Some((api::constants::GROUP, "virtualmachineinstancemigrations"));
const PRESETS: Resource = Some((api::constants::GROUP, "virtualmachineinstancepresets"));
const INSTANCETYPES: Resource = Some((api::instancetype::GROUP, "virtualmachineinstancetypes"));
const CLUSTER_INSTANCETYPES: Resource = Some((api::instancetype::GROUP, "virtualmachineclusterinstancetypes"));
const PREFERENCES: Resource = Some((api::instancetype::GROUP, "virtualmachinepreferences"));
const CLUSTER_PREFERENCES: Resource = Some((api::instancetype::GROUP, "virtualmachineclusterpreferences"));
const CLONES: Resource = Some((clone::GROUP, clone::PLURAL));
const DATA_VOLUMES: Resource = Some((api::cdi::GROUP, data_volume::PLURAL));
const REPLICA_SETS: Resource = Some((api::constants::GROUP, "virtualmachineinstancereplicasets"));

/// All webhooks. The webhook configurations in the chart register them.
pub const WEBHOOKS: &[Webhook] = &[
    webhook("/virtualmachines-mutate", VMS, WRITES, vm::mutate),
    webhook("/virtualmachines-validate", VMS, WRITES, vm::validate),
    webhook("/virtualmachineinstances-mutate", VMIS, WRITES, vmi::mutate),
    webhook("/virtualmachineinstances-validate-create", VMIS, CREATES, vmi::validate_create),
    webhook("/virtualmachineinstances-validate-update", VMIS, UPDATES, vmi::validate_update),
    webhook("/virtualmachinereplicaset-validate", REPLICA_SETS, WRITES, replica_set::validate),
    webhook("/virtualmachineinstancetypes-validate", INSTANCETYPES, WRITES, instancetype::validate_instancetype),
    webhook(
        "/virtualmachineclusterinstancetypes-validate",
        CLUSTER_INSTANCETYPES,
        WRITES,
        instancetype::validate_instancetype,
    ),
    webhook("/virtualmachinepreferences-validate", PREFERENCES, WRITES, instancetype::validate_preference),
    webhook(
        "/virtualmachineclusterpreferences-validate",
        CLUSTER_PREFERENCES,
        WRITES,
        instancetype::validate_preference,
    ),
    webhook("/vmipreset-validate", PRESETS, WRITES, preset::validate),
    webhook("/virtualmachinepool-validate", None, WRITES, pool::validate),
    webhook("/migration-mutate-create", MIGRATIONS, CREATES, migration::mutate),
    webhook("/migration-validate-create", None, CREATES, migration::validate_create),
    webhook("/migration-validate-update", None, UPDATES, migration::validate_update),
    webhook("/migration-policy-validate-create", None, WRITES, policy::validate),
    webhook("/deletion-validate", None, DELETES, deletion::validate),
    webhook("/pod-eviction-validate", None, CREATES, eviction::validate),
    webhook("/virtualmachinesnapshots-validate", None, ANY, snapshot::validate),
    webhook("/virtualmachinerestores-validate", None, ANY, restore::validate),
    webhook("/virtualmachineexports-validate", None, ANY, export::validate),
    webhook("/virtualmachinebackups-validate", None, ANY, backup::validate),
    webhook("/virtualmachinebackuptrackers-validate", None, ANY, backup::validate_tracker),
    webhook("/vm-clone-mutate-create", CLONES, CREATES, clone::mutate),
    webhook("/vm-clone-validate-create", None, WRITES, clone::validate),
    webhook("/datavolumes-mutate", DATA_VOLUMES, WRITES, data_volume::mutate),
    webhook("/datavolumes-validate", DATA_VOLUMES, WRITES, data_volume::validate),
    webhook("/plugin-validate", None, WRITES, plugin::validate),
    webhook("/status-validate", None, WRITES, status::validate),
    webhook("/kubevirt-validate-create", None, CREATES, kubevirt::validate_create),
    webhook("/kubevirt-validate-update", None, UPDATES, kubevirt::validate_update),
    webhook("/kubevirt-validate-delete", None, DELETES, kubevirt::validate_delete),
];

const fn webhook(path: &'static str, resource: Resource, operations: &'static [Operation], evaluate: Rules) -> Webhook {
    Webhook { path, resource, operations, evaluate }
}

impl Webhook {
    /// Returns the webhook at a path.
    pub fn at(path: &str) -> Option<&'static Self> {
        WEBHOOKS.iter().find(|webhook| webhook.path == path)
    }

    fn decide(&self, context: &Context<'_>) -> Result<Decision, Interrupt> {
        let AdmissionRequest { resource, operation, .. } = context.request;
        if let Some((group, plural)) = self.resource
            && !(resource.group == group && resource.resource == plural && request::is_served(resource))
        {
            return Err(Interrupt::failed(400, format!("expect resource to be '{plural}'")));
        }
        if self.operations.contains(operation) { (self.evaluate)(context) } else { Ok(context.allowed()) }
    }
}

/// The response to a review, and the writes to carry out before it is sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The response.
    pub review: AdmissionReview,
    /// The writes.
    pub effects: Vec<Effect>,
}

/// A parsed review for a webhook.
pub struct Review {
    webhook: &'static Webhook,
    request: AdmissionRequest,
    generated: OnceLock<Generated>,
    trace: Option<TraceParent>,
}

impl Review {
    /// Parses a review sent to `path`. The error is the response to a body that cannot be parsed.
    pub fn parse(path: &str, body: &[u8]) -> Result<Self, Box<AdmissionReview>> {
        let request = request::parse(body).map_err(|error| {
            AdmissionReview::failed(&request::uid(body), 400, format!("cannot read the admission review: {error}"))
        })?;
        match Webhook::at(path) {
            Some(webhook) => Ok(Self { webhook, request, generated: OnceLock::new(), trace: None }),
            None => {
                let message = format!("there is no webhook at {path}");
                Err(Box::new(AdmissionReview::failed(&request.uid, 404, message)))
            }
        }
    }

    /// Returns the request.
    pub fn request(&self) -> &AdmissionRequest {
        &self.request
    }

    /// Returns the place of the review in the trace of a start; `None` if it belongs to none.
    pub fn trace(&self, namespace: &str, now: Timestamp) -> Option<ReviewTrace> {
        let is_start = [VMS, VMIS].contains(&self.webhook.resource) && self.request.dry_run != Some(true);
        let mutates = self.webhook.path.ends_with("-mutate");
        is_start.then(|| trace::of(&self.request, mutates, &TrustedUsers::new(namespace), now)).flatten()
    }

    /// Sets the trace context that the object gets if it is new.
    #[must_use]
    pub fn with_trace(self, context: Option<TraceParent>) -> Self {
        Self { trace: context, ..self }
    }

    /// Evaluates the review for an installation in `namespace`. The error lists queries whose results are missing. The same
    /// lookups give the same result.
    pub fn evaluate(
        &self,
        config: &ClusterConfig,
        namespace: &str,
        lookups: &Lookups,
    ) -> Result<Evaluation, Vec<ObjectQuery>> {
        let decision = self.webhook.decide(&Context {
            request: &self.request,
            config,
            trusted: &TrustedUsers::new(namespace),
            generated: &self.generated,
            lookups,
            trace: self.trace,
        });
        let Decision { outcome, effects } = match decision {
            Ok(decision) => decision,
            Err(Interrupt::Denied(errors)) => {
                Outcome::Denied { errors, warnings: vec![], form: DenialForm::Abbreviated }.into()
            }
            Err(Interrupt::Failed(failure)) => Outcome::Failed(failure).into(),
            Err(Interrupt::Lookup(LookupError::Failed(message))) => {
                Outcome::Failed(Failure { code: 500, message }).into()
            }
            Err(Interrupt::Lookup(LookupError::Missing(queries))) => return Err(queries),
        };
        Ok(Evaluation { review: AdmissionReview::new(&self.request.uid, outcome), effects })
    }

    /// Returns the response after an internal error of the server.
    pub fn failed(&self, message: impl Into<String>) -> AdmissionReview {
        AdmissionReview::failed(&self.request.uid, 500, message)
    }

    /// Returns the response after a write of [`Evaluation::effects`] failed. `review`: the response without the failure.
    pub fn effect_failed(&self, effect: &Effect, error: &str, mut review: AdmissionReview) -> AdmissionReview {
        match effect.failure(error) {
            Some(failure) => AdmissionReview::new(&self.request.uid, Outcome::Failed(failure)),
            None => {
                review.response.warnings.push(format!("cannot {effect}: {error}"));
                review
            }
        }
    }
}

/// Evaluates the body of a review sent to `path` of an installation in `namespace`. The error lists queries whose results
/// are missing. Every body gets a well-formed response.
pub fn handle(
    path: &str,
    body: &[u8],
    config: &ClusterConfig,
    namespace: &str,
    lookups: &Lookups,
) -> Result<Evaluation, Vec<ObjectQuery>> {
    match Review::parse(path, body) {
        Ok(review) => review.evaluate(config, namespace, lookups),
        Err(review) => Ok(Evaluation { review: *review, effects: vec![] }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unparsed(body: &[u8]) -> AdmissionReview {
        *Review::parse("/virtualmachines-validate", body).err().unwrap()
    }

    #[test]
    fn unreadable_review_is_refused_with_its_uid() {
        let review = unparsed(br#"{"request": {"uid": "u1", "operation": "DANCE"}}"#);
        assert_eq!(review.response.uid, "u1");
        assert!(!review.response.allowed);
        assert_eq!(review.response.status.as_ref().unwrap().code, 400);
        let request = r#""request": {"uid": "u", "operation": "CREATE", "resource": {"group": "", "version": "", "resource": ""}}"#;
        for (field, message) in [
            (r#""apiVersion": "admission.k8s.io/v1beta1""#, "v1beta1"),
            (r#""kind": "Pod""#, "Pod is no AdmissionReview"),
        ] {
            let response = unparsed(format!("{{{field}, {request}}}").as_bytes()).response;
            assert_eq!(response.uid, "u");
            assert!(response.status.unwrap().message.contains(message));
        }
        for body in [&b""[..], b"{", b"[]", b"\xff\xfe", b"null", br#"{"request": null}"#] {
            assert!(!unparsed(body).response.allowed);
        }
    }
}
