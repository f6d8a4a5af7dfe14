//! The webhooks: which path asks for which rules.
//!
//! A webhook is a line in [`WEBHOOKS`]: its path, the resources it is registered for, and a function of the
//! [`Context`]. The functions live with their kinds.

use std::sync::OnceLock;

use api::{config::ClusterConfig, constants::component};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use uuid::Uuid;

use crate::{
    backup,
    causes::Causes,
    clone,
    defaults::Fresh,
    eviction, export, instancetype, kubevirt, migration,
    neighbours::{Needs, Neighbours, Wanted},
    patch, plugin, policy, pool, preset, read, replica_set, restore,
    review::{self, AdmissionReview, Operation, Request, Resource, UserInfo},
    snapshot, status, vm, vmi,
};

/// Service accounts of the components, who may write what users may not.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TrustedUsers {
    prefix: String,
}

impl TrustedUsers {
    /// The accounts of an installation in `namespace`.
    pub fn new(namespace: &str) -> Self {
        Self { prefix: format!("system:serviceaccount:{namespace}:") }
    }

    /// Whether the user is one of the components.
    pub fn contains(&self, user: &UserInfo) -> bool {
        user.username.strip_prefix(&self.prefix).is_some_and(|account| {
            [
                component::API_SERVICE_ACCOUNT,
                component::CONTROLLER_SERVICE_ACCOUNT,
                component::HANDLER_SERVICE_ACCOUNT,
                component::SYNCHRONIZATION_SERVICE_ACCOUNT,
            ]
            .contains(&account)
        })
    }

    /// Whether the user is the component with this service account.
    pub fn is(&self, user: &UserInfo, account: &str) -> bool {
        user.username.strip_prefix(&self.prefix) == Some(account)
    }

    /// Whether the user is the agent of a node.
    pub fn is_handler(&self, user: &UserInfo) -> bool {
        self.is(user, component::HANDLER_SERVICE_ACCOUNT)
    }
}

/// What an answer depends on.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The question.
    pub request: &'a Request,
    /// The cluster's configuration.
    pub config: &'a ClusterConfig,
    /// Namespace of the installation.
    pub install_namespace: &'a str,
    /// Who is a component.
    pub trusted: &'a TrustedUsers,
    /// Random and temporal values for new objects, once they were asked for.
    pub made_up: &'a OnceLock<Fresh>,
    /// Other objects of the cluster.
    pub neighbours: &'a Neighbours,
}

impl<'a> Context<'a> {
    /// Random and temporal values for new objects. Only who makes something up needs them.
    pub fn fresh(&self) -> &'a Fresh {
        self.made_up.get_or_init(|| Fresh::of(self.request))
    }

    /// Whether the request is a creation.
    pub fn is_create(&self) -> bool {
        self.request.operation == Operation::Create
    }

    /// Whether a component asks.
    pub fn is_component(&self) -> bool {
        self.trusted.contains(&self.request.user_info)
    }

    /// The object as its type.
    pub fn object<T: DeserializeOwned>(&self) -> Result<T, Stop> {
        Ok(read::object(&self.request.object)?)
    }

    /// The stored object as its type; `None` on creation. It passed admission once, so unknown fields of other
    /// versions are let pass.
    pub fn old_object<T: DeserializeOwned>(&self) -> Result<Option<T>, Stop> {
        if self.request.operation == Operation::Create {
            return Ok(None);
        }
        read::stored(&self.request.old_object).map(Some).map_err(|error| {
            let mut causes = Causes::new();
            causes.shape(format!("cannot read the stored object: {error}"));
            Stop::Causes(causes)
        })
    }

    /// Lets the object through as it is.
    pub fn allowed(&self) -> AdmissionReview {
        AdmissionReview::allowed(&self.request.uid, vec![])
    }

    /// The answer to a list of causes: through when it is empty.
    pub fn verdict(&self, causes: &Causes, warnings: Vec<String>) -> AdmissionReview {
        AdmissionReview::verdict(&self.request.uid, causes, warnings)
    }

    /// The same with all causes, however many.
    pub fn verdict_in_full(&self, causes: &Causes, warnings: Vec<String>) -> AdmissionReview {
        if causes.is_empty() {
            return AdmissionReview::allowed(&self.request.uid, warnings);
        }
        AdmissionReview::invalid_in_full(&self.request.uid, causes, warnings)
    }

    /// Changes the object in its typed form and answers with the difference.
    pub fn patched<T: DeserializeOwned + Serialize>(
        &self,
        change: impl FnOnce(&mut T) -> Result<Vec<String>, Stop>,
    ) -> Result<AdmissionReview, Stop> {
        let mut object: T = self.object()?;
        // Written before the change, so that no copy of the object is needed.
        let before = written(&object)?;
        let warnings = change(&mut object)?;
        let patch = patch::between(&self.request.object, &before, &written(&object)?);
        Ok(AdmissionReview::patched(&self.request.uid, &patch, warnings))
    }
}

fn written<T: Serialize>(object: &T) -> Result<Value, Stop> {
    serde_json::to_value(object).map_err(|_| Stop::refused(500, "the object cannot be written"))
}

/// Why evaluation ends early.
#[derive(Clone, Debug, PartialEq)]
pub enum Stop {
    /// The object breaks rules.
    Causes(Causes),
    /// The request as such is refused.
    Refused {
        /// HTTP status.
        code: u16,
        /// Sentence for people.
        message: String,
    },
    /// Other objects have to be read, or cannot be.
    Needs(Needs),
}

impl Stop {
    /// Refuses the request as such; 400 is what the reference answers to most of what is no rule.
    pub fn refused(code: u16, message: impl Into<String>) -> Self {
        Self::Refused { code, message: message.into() }
    }
}

impl From<Causes> for Stop {
    fn from(causes: Causes) -> Self {
        Self::Causes(causes)
    }
}

impl From<Needs> for Stop {
    fn from(needs: Needs) -> Self {
        Self::Needs(needs)
    }
}

/// A webhook.
pub struct Webhook {
    /// Path it is served at.
    pub path: &'static str,
    /// Group and plural of the resources it is for; a request for another is refused. Empty: it checks that itself,
    /// because it has its own words or many resources.
    pub resources: &'static [(&'static str, &'static str)],
    /// Operations it is for; other ones are let through.
    pub operations: &'static [Operation],
    /// Answers.
    pub answer: fn(&Context<'_>) -> Result<AdmissionReview, Stop>,
}

/// For webhooks that refuse what they are not registered for.
const ANY: &[Operation] = &[Operation::Create, Operation::Update, Operation::Delete, Operation::Connect];
const WRITES: &[Operation] = &[Operation::Create, Operation::Update];
const CREATES: &[Operation] = &[Operation::Create];
const UPDATES: &[Operation] = &[Operation::Update];
const DELETES: &[Operation] = &[Operation::Delete];

/// Versions the first group is served in.
const VERSIONS: [&str; 2] = [api::constants::VERSION, "v1alpha3"];

const VMS: &[(&str, &str)] = &[(api::constants::GROUP, "virtualmachines")];
const MACHINES: &[(&str, &str)] = &[(api::constants::GROUP, "virtualmachineinstances")];
const MIGRATIONS: &[(&str, &str)] = &[(api::constants::GROUP, "virtualmachineinstancemigrations")];
const PRESETS: &[(&str, &str)] = &[(api::constants::GROUP, "virtualmachineinstancepresets")];
const INSTANCETYPES: &[(&str, &str)] = &[(api::instancetype::GROUP, "virtualmachineinstancetypes")];
const CLUSTER_INSTANCETYPES: &[(&str, &str)] = &[(api::instancetype::GROUP, "virtualmachineclusterinstancetypes")];
const PREFERENCES: &[(&str, &str)] = &[(api::instancetype::GROUP, "virtualmachinepreferences")];
const CLUSTER_PREFERENCES: &[(&str, &str)] = &[(api::instancetype::GROUP, "virtualmachineclusterpreferences")];
const CLONES: &[(&str, &str)] = &[(clone::GROUP, clone::PLURAL)];
const REPLICA_SETS: &[(&str, &str)] = &[(api::constants::GROUP, "virtualmachineinstancereplicasets")];

/// All webhooks served. The configurations in the chart register them.
pub const WEBHOOKS: &[Webhook] = &[
    Webhook { path: "/virtualmachines-mutate", resources: VMS, operations: WRITES, answer: vm::mutate },
    Webhook { path: "/virtualmachines-validate", resources: VMS, operations: WRITES, answer: vm::validate },
    Webhook { path: "/virtualmachineinstances-mutate", resources: MACHINES, operations: WRITES, answer: vmi::mutate },
    Webhook {
        path: "/virtualmachineinstances-validate-create",
        resources: MACHINES,
        operations: CREATES,
        answer: vmi::validate_create,
    },
    Webhook {
        path: "/virtualmachineinstances-validate-update",
        resources: MACHINES,
        operations: UPDATES,
        answer: vmi::validate_update,
    },
    Webhook {
        path: "/virtualmachinereplicaset-validate",
        resources: REPLICA_SETS,
        operations: WRITES,
        answer: replica_set::validate,
    },
    Webhook {
        path: "/virtualmachineinstancetypes-validate",
        resources: INSTANCETYPES,
        operations: WRITES,
        answer: instancetype::validate_instancetype,
    },
    Webhook {
        path: "/virtualmachineclusterinstancetypes-validate",
        resources: CLUSTER_INSTANCETYPES,
        operations: WRITES,
        answer: instancetype::validate_instancetype,
    },
    Webhook {
        path: "/virtualmachinepreferences-validate",
        resources: PREFERENCES,
        operations: WRITES,
        answer: instancetype::validate_preference,
    },
    Webhook {
        path: "/virtualmachineclusterpreferences-validate",
        resources: CLUSTER_PREFERENCES,
        operations: WRITES,
        answer: instancetype::validate_preference,
    },
    Webhook { path: "/vmipreset-validate", resources: PRESETS, operations: WRITES, answer: preset::validate },
    Webhook { path: "/virtualmachinepool-validate", resources: &[], operations: WRITES, answer: pool::validate },
    Webhook { path: "/migration-mutate-create", resources: MIGRATIONS, operations: CREATES, answer: migration::mutate },
    Webhook {
        path: "/migration-validate-create",
        resources: &[],
        operations: CREATES,
        answer: migration::validate_create,
    },
    Webhook {
        path: "/migration-validate-update",
        resources: &[],
        operations: UPDATES,
        answer: migration::validate_update,
    },
    Webhook { path: "/migration-policy-validate-create", resources: &[], operations: WRITES, answer: policy::validate },
    Webhook { path: "/pod-eviction-validate", resources: &[], operations: CREATES, answer: eviction::validate },
    Webhook { path: "/virtualmachinesnapshots-validate", resources: &[], operations: ANY, answer: snapshot::validate },
    Webhook { path: "/virtualmachinerestores-validate", resources: &[], operations: ANY, answer: restore::validate },
    Webhook { path: "/virtualmachineexports-validate", resources: &[], operations: ANY, answer: export::validate },
    Webhook { path: "/virtualmachinebackups-validate", resources: &[], operations: ANY, answer: backup::validate },
    Webhook {
        path: "/virtualmachinebackuptrackers-validate",
        resources: &[],
        operations: ANY,
        answer: backup::validate_tracker,
    },
    Webhook { path: "/vm-clone-mutate-create", resources: CLONES, operations: CREATES, answer: clone::mutate },
    Webhook { path: "/vm-clone-validate-create", resources: &[], operations: WRITES, answer: clone::validate },
    Webhook { path: "/plugin-validate", resources: &[], operations: WRITES, answer: plugin::validate },
    Webhook { path: "/status-validate", resources: &[], operations: WRITES, answer: status::validate },
    Webhook {
        path: "/kubevirt-validate-create",
        resources: &[],
        operations: CREATES,
        answer: kubevirt::validate_create,
    },
    Webhook {
        path: "/kubevirt-validate-update",
        resources: &[],
        operations: UPDATES,
        answer: kubevirt::validate_update,
    },
    Webhook {
        path: "/kubevirt-validate-delete",
        resources: &[],
        operations: DELETES,
        answer: kubevirt::validate_delete,
    },
];

/// Whether an object of that group can come in that version; the other groups leave that to their webhooks.
pub(crate) fn is_served(resource: &Resource) -> bool {
    resource.group != api::constants::GROUP || VERSIONS.contains(&resource.version.as_str())
}

impl Webhook {
    /// The webhook at a path.
    pub fn at(path: &str) -> Option<&'static Self> {
        WEBHOOKS.iter().find(|webhook| webhook.path == path)
    }

    /// Answers a request. An error lists what has to be read first.
    pub fn review(&self, context: &Context<'_>) -> Result<AdmissionReview, Vec<Wanted>> {
        let Request { uid, resource, operation, .. } = context.request;
        if let Some((_, plural)) = self.resources.first()
            && !(self.resources.contains(&(resource.group.as_str(), resource.resource.as_str())) && is_served(resource))
        {
            return Ok(AdmissionReview::refused(uid, 400, format!("expect resource to be '{plural}'")));
        }
        if !self.operations.contains(operation) {
            return Ok(context.allowed());
        }
        match (self.answer)(context) {
            Ok(review) => Ok(review),
            Err(Stop::Causes(causes)) => Ok(AdmissionReview::invalid(uid, &causes)),
            Err(Stop::Refused { code, message }) => Ok(AdmissionReview::refused(uid, code, message)),
            Err(Stop::Needs(Needs::Failed(message))) => Ok(AdmissionReview::refused(uid, 500, message)),
            Err(Stop::Needs(Needs::Reads(wanted))) => Err(wanted),
        }
    }
}

/// A review that was read and can be answered.
pub struct Question {
    webhook: &'static Webhook,
    request: Request,
    made_up: OnceLock<Fresh>,
}

impl Question {
    /// Reads a review sent to `path`; the answer to one that cannot be read.
    pub fn read(path: &str, body: &[u8]) -> Result<Self, Box<AdmissionReview>> {
        let request = review::read(body)?;
        match Webhook::at(path) {
            Some(webhook) => Ok(Self { webhook, request, made_up: OnceLock::new() }),
            None => {
                Err(Box::new(AdmissionReview::refused(&request.uid, 404, format!("there is no webhook at {path}"))))
            }
        }
    }

    /// Answers for an installation in `namespace`; an error lists what has to be read first. The same neighbours give
    /// the same answer.
    pub fn answer(
        &self,
        config: &ClusterConfig,
        namespace: &str,
        neighbours: &Neighbours,
    ) -> Result<AdmissionReview, Vec<Wanted>> {
        self.webhook.review(&Context {
            request: &self.request,
            config,
            install_namespace: namespace,
            trusted: &TrustedUsers::new(namespace),
            made_up: &self.made_up,
            neighbours,
        })
    }

    /// A refusal because of the server's own trouble.
    pub fn failed(&self, message: impl Into<String>) -> AdmissionReview {
        AdmissionReview::refused(&self.request.uid, 500, message)
    }
}

/// Answers a review sent to `path` of an installation in `namespace`, given what was read of other objects. An error
/// lists what has to be read first. Whatever the body, there is a well-formed answer.
pub fn handle(
    path: &str,
    body: &[u8],
    config: &ClusterConfig,
    namespace: &str,
    neighbours: &Neighbours,
) -> Result<AdmissionReview, Vec<Wanted>> {
    match Question::read(path, body) {
        Ok(question) => question.answer(config, namespace, neighbours),
        Err(refusal) => Ok(*refusal),
    }
}

impl Fresh {
    /// Made up for one request. The same request gives the same values, so that its answer does not change when it is
    /// asked again; the API server gives each a random identifier.
    pub fn of(request: &Request) -> Self {
        let created =
            request.object.pointer("/metadata/creationTimestamp").and_then(|time| Time::deserialize(time).ok());
        let named = |what: &str| match request.uid.as_str() {
            "" => Uuid::new_v4(),
            uid => Uuid::new_v5(&Uuid::NAMESPACE_OID, format!("{what} of request {uid}").as_bytes()),
        };
        Self {
            now: created.unwrap_or_else(|| Time(k8s_openapi::jiff::Timestamp::now())),
            uuid: named("machine").to_string(),
            serial: named("serial number").to_string(),
        }
    }
}
