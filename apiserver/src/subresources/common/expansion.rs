//! A VM with its instance type and preference applied.

use api::{
    VirtualMachine,
    instancetype::{
        self,
        matcher::{self, Role, Source, UnexpectedKind},
        revision::{self, ContentError},
    },
};
use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::{
    Api,
    api::{ApiResource, DynamicObject},
};
use serde_json::Value;

use super::call::Call;
use crate::clients::objects::message;

/// Errors of an expansion.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExpansionError {
    /// The VM refers to an unknown kind.
    #[error(transparent)]
    Kind(#[from] UnexpectedKind),
    /// The reference has no name.
    #[error("spec.{0} names nothing")]
    NoName(&'static str),
    /// The object, or its stored copy, cannot be read.
    #[error("{}", message(.0))]
    Read(#[from] kube::Error),
    /// The object is not JSON.
    #[error(transparent)]
    Document(#[from] serde_json::Error),
    /// The content of the object is unusable.
    #[error("{field} cannot be used: {source}")]
    Content {
        /// Field of the VM.
        field: &'static str,
        /// Error of the content.
        source: ContentError,
    },
    /// The VM conflicts with its instance type or preference.
    #[error("{0}")]
    Conflict(String),
}

/// Returns a VM with its instance type and preference applied.
pub(crate) async fn expanded(call: Call<'_>, vm: &VirtualMachine) -> Result<VirtualMachine, ExpansionError> {
    let (instancetype, preference) =
        futures::future::try_join(referenced(call, vm, Role::Instancetype), referenced(call, vm, Role::Preference))
            .await?;
    let unusable = |role: Role| move |source| ExpansionError::Content { field: role.field(), source };
    let instancetype =
        instancetype.as_ref().map(revision::instancetype).transpose().map_err(unusable(Role::Instancetype))?;
    let preference = preference.as_ref().map(revision::preference).transpose().map_err(unusable(Role::Preference))?;
    let config = call.context.config.current();
    admission::kinds::instancetype::expanded(vm, instancetype.as_ref(), preference.as_ref(), &config)
        .map_err(|error| ExpansionError::Conflict(error.to_string()))
}

/// Reads the instance type or preference of a VM, or the copy that was stored for the VM.
async fn referenced(call: Call<'_>, vm: &VirtualMachine, role: Role) -> Result<Option<Value>, ExpansionError> {
    let (client, namespace) = (call.context.objects.client.clone(), call.object.namespace.as_str());
    match matcher::source(vm, role).transpose()? {
        None => Ok(None),
        Some(Source::Revision(name)) => {
            let revision = Api::<ControllerRevision>::namespaced(client, namespace).get(&name).await?;
            Ok(Some(revision.data.map_or(Value::Null, |data| data.0)))
        }
        Some(Source::Object(_, name)) if name.is_empty() => Err(ExpansionError::NoName(role.field())),
        Some(Source::Object(kind, name)) => {
            let resource = ApiResource {
                group: instancetype::GROUP.to_owned(),
                version: instancetype::VERSION.to_owned(),
                api_version: instancetype::API_VERSION.to_owned(),
                kind: kind.kind().to_owned(),
                plural: kind.plural().to_owned(),
            };
            let objects: Api<DynamicObject> = if kind.is_cluster_wide() {
                Api::all_with(client, &resource)
            } else {
                Api::namespaced_with(client, namespace, &resource)
            };
            Ok(Some(serde_json::to_value(objects.get(&name).await?)?))
        }
    }
}
