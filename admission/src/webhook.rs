//! The webhooks: which path asks for which rules.

use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceReplicaSet, config::ClusterConfig,
    constants::component,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use uuid::Uuid;

use crate::{
    causes::Causes,
    defaults::Fresh,
    patch, read, replica_set,
    review::{self, AdmissionReview, Operation, Request, UserInfo},
    vm, vmi,
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

    /// Whether the user is the agent of a node.
    pub fn is_handler(&self, user: &UserInfo) -> bool {
        user.username.strip_prefix(&self.prefix) == Some(component::HANDLER_SERVICE_ACCOUNT)
    }
}

/// The webhooks served.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Webhook {
    /// Defaults of VMs.
    MutateVirtualMachine,
    /// Defaults of machines, and protection of their status.
    MutateMachine,
    /// Rules of VMs.
    ValidateVirtualMachine,
    /// Rules of new machines.
    ValidateMachineCreate,
    /// Rules of changed machines.
    ValidateMachineUpdate,
    /// Rules of replica sets.
    ValidateReplicaSet,
    /// Rules of status writes.
    ValidateStatus,
}

impl Webhook {
    /// All webhooks.
    pub const ALL: [Self; 7] = [
        Self::MutateVirtualMachine,
        Self::MutateMachine,
        Self::ValidateVirtualMachine,
        Self::ValidateMachineCreate,
        Self::ValidateMachineUpdate,
        Self::ValidateReplicaSet,
        Self::ValidateStatus,
    ];

    /// Path the webhook is served at.
    pub const fn path(self) -> &'static str {
        match self {
            Self::MutateVirtualMachine => "/virtualmachines-mutate",
            Self::MutateMachine => "/virtualmachineinstances-mutate",
            Self::ValidateVirtualMachine => "/virtualmachines-validate",
            Self::ValidateMachineCreate => "/virtualmachineinstances-validate-create",
            Self::ValidateMachineUpdate => "/virtualmachineinstances-validate-update",
            Self::ValidateReplicaSet => "/virtualmachinereplicaset-validate",
            Self::ValidateStatus => "/status-validate",
        }
    }

    /// The webhook at a path.
    pub fn at(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|webhook| webhook.path() == path)
    }

    fn plural(self) -> Option<&'static str> {
        match self {
            Self::MutateVirtualMachine | Self::ValidateVirtualMachine => Some("virtualmachines"),
            Self::MutateMachine | Self::ValidateMachineCreate | Self::ValidateMachineUpdate => {
                Some("virtualmachineinstances")
            }
            Self::ValidateReplicaSet => Some("virtualmachineinstancereplicasets"),
            Self::ValidateStatus => None,
        }
    }
}

/// Paths of all webhooks.
pub const PATHS: [&str; 7] = [
    Webhook::MutateVirtualMachine.path(),
    Webhook::MutateMachine.path(),
    Webhook::ValidateVirtualMachine.path(),
    Webhook::ValidateMachineCreate.path(),
    Webhook::ValidateMachineUpdate.path(),
    Webhook::ValidateReplicaSet.path(),
    Webhook::ValidateStatus.path(),
];

/// Answers an admission review sent to `path` of an installation in `namespace`, as JSON. `None` when the answer
/// cannot be written, which the API server takes for a refusal.
pub fn handle(path: &str, body: &[u8], config: &ClusterConfig, namespace: &str) -> Option<Vec<u8>> {
    serde_json::to_vec(&review(path, body, config, &TrustedUsers::new(namespace))).ok()
}

/// Answers an admission review sent to `path`.
pub fn review(path: &str, body: &[u8], config: &ClusterConfig, trusted: &TrustedUsers) -> AdmissionReview {
    let request = match review::read(body) {
        Ok(request) => request,
        Err(refusal) => return *refusal,
    };
    let Some(webhook) = Webhook::at(path) else {
        return AdmissionReview::refused(&request.uid, 404, format!("there is no webhook at {path}"));
    };
    answer(webhook, &request, config, trusted, &Fresh::now())
}

/// Answers a request; pure but for `fresh`.
pub fn answer(
    webhook: Webhook,
    request: &Request,
    config: &ClusterConfig,
    trusted: &TrustedUsers,
    fresh: &Fresh,
) -> AdmissionReview {
    let uid = &request.uid;
    if let Some(plural) = webhook.plural()
        && (request.resource.resource != plural || request.resource.group != api::constants::GROUP)
    {
        return AdmissionReview::refused(uid, 400, format!("expect resource to be '{plural}'"));
    }
    if !matches!(request.operation, Operation::Create | Operation::Update) {
        return AdmissionReview::allowed(uid, vec![]);
    }
    let result = match webhook {
        Webhook::MutateVirtualMachine => mutate_vm(request, config, fresh),
        Webhook::MutateMachine => mutate_machine(request, config, trusted, fresh),
        Webhook::ValidateVirtualMachine => validate_vm(request, config, trusted),
        Webhook::ValidateMachineCreate => read::object::<VirtualMachineInstance>(&request.object).map(|machine| {
            let causes = vmi::create_causes(&machine, config, trusted.contains(&request.user_info));
            AdmissionReview::verdict(uid, &causes, vec![])
        }),
        Webhook::ValidateMachineUpdate => validate_machine_update(request, config, trusted),
        Webhook::ValidateReplicaSet => read::object::<VirtualMachineInstanceReplicaSet>(&request.object).map(|set| {
            let created = request.operation == Operation::Create;
            AdmissionReview::verdict(uid, &replica_set::causes(&set, config, created), vec![])
        }),
        Webhook::ValidateStatus => validate_status(request),
    };
    result.unwrap_or_else(|causes| AdmissionReview::invalid(uid, &causes))
}

/// Changes an object in its typed form and answers with the difference.
fn patched<T: DeserializeOwned + Serialize + Clone>(
    request: &Request,
    change: impl FnOnce(&mut T) -> Result<(), String>,
) -> Result<AdmissionReview, Causes> {
    let uid = &request.uid;
    let before: T = read::object(&request.object)?;
    let mut after = before.clone();
    if let Err(message) = change(&mut after) {
        return Ok(AdmissionReview::refused(uid, 400, message));
    }
    match (serde_json::to_value(&before), serde_json::to_value(&after)) {
        (Ok(before), Ok(after)) => {
            Ok(AdmissionReview::patched(uid, &patch::between(&request.object, &before, &after), vec![]))
        }
        _ => Ok(AdmissionReview::refused(uid, 500, "the object cannot be written")),
    }
}

fn mutate_vm(request: &Request, config: &ClusterConfig, fresh: &Fresh) -> Result<AdmissionReview, Causes> {
    let created = request.operation == Operation::Create;
    patched::<VirtualMachine>(request, |vm| {
        if vm.metadata.deletion_timestamp.is_none() {
            vm::set_defaults(vm, config, created, fresh);
        }
        Ok(())
    })
}

fn mutate_machine(
    request: &Request,
    config: &ClusterConfig,
    trusted: &TrustedUsers,
    fresh: &Fresh,
) -> Result<AdmissionReview, Causes> {
    let is_component = trusted.contains(&request.user_info);
    if request.operation == Operation::Create {
        return patched::<VirtualMachineInstance>(request, |machine| {
            vmi::set_defaults(machine, config, is_component, fresh)
        });
    }
    Ok(AdmissionReview::patched(&request.uid, &vmi::keep_status(request, is_component), vec![]))
}

fn validate_vm(request: &Request, config: &ClusterConfig, trusted: &TrustedUsers) -> Result<AdmissionReview, Causes> {
    let vm: VirtualMachine = read::object(&request.object)?;
    if vm.metadata.deletion_timestamp.is_some() {
        return Ok(AdmissionReview::allowed(&request.uid, vec![]));
    }
    let old = match request.operation {
        Operation::Update => Some(old_object::<VirtualMachine>(&request.old_object)?),
        _ => None,
    };
    let causes = match vm::causes(&vm, old.as_ref(), config, trusted.contains(&request.user_info)) {
        Ok(causes) => causes,
        Err(message) => return Ok(AdmissionReview::refused(&request.uid, 400, message)),
    };
    Ok(AdmissionReview::verdict(&request.uid, &causes, vm::warnings(&vm)))
}

fn validate_machine_update(
    request: &Request,
    config: &ClusterConfig,
    trusted: &TrustedUsers,
) -> Result<AdmissionReview, Causes> {
    let machine: VirtualMachineInstance = read::object(&request.object)?;
    let old: VirtualMachineInstance = old_object(&request.old_object)?;
    let causes = vmi::update_causes(&machine, &old, config, trusted, &request.user_info);
    Ok(AdmissionReview::verdict(&request.uid, &causes, vec![]))
}

/// Status writes of VMs are checked against what a snapshot or restore in progress forbids; the API server has
/// checked the shape.
fn validate_status(request: &Request) -> Result<AdmissionReview, Causes> {
    let is_vm = request.resource.resource == "virtualmachines";
    if !is_vm || request.operation != Operation::Update {
        return Ok(AdmissionReview::allowed(&request.uid, vec![]));
    }
    let vm: VirtualMachine = read::object(&request.object)?;
    let old: VirtualMachine = old_object(&request.old_object)?;
    let mut causes = vm::in_progress_causes(&vm, &old);
    causes.extend(vm::volume_request_causes(&vm));
    Ok(AdmissionReview::verdict(&request.uid, &causes, vec![]))
}

/// Reads the stored object. It passed admission once, so unknown fields of other versions are let pass.
fn old_object<T: DeserializeOwned>(raw: &Value) -> Result<T, Causes> {
    T::deserialize(raw).map_err(|error| {
        let mut causes = Causes::new();
        causes.shape(format!("cannot read the stored object: {error}"));
        causes
    })
}

impl Fresh {
    /// Made up for one request.
    pub fn now() -> Self {
        Self {
            now: Time(k8s_openapi::jiff::Timestamp::now()),
            uuid: Uuid::new_v4().to_string(),
            serial: Uuid::new_v4().to_string(),
        }
    }
}
