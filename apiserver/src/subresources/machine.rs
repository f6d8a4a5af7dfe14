//! Starting, stopping and moving VMs, and expanding their specs.

use api::{
    VirtualMachine,
    instancetype::{
        self,
        matcher::{self, Role, Source},
        revision::{self, ContentError},
    },
    subresources::{MigrateOptions, RestartOptions, StartOptions, StopOptions},
};
use axum::{body::Body, response::Response};
use http::{Request, StatusCode};
use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
};
use serde_json::Value;

use super::{Object, Server, TEST_FAILED, message};
use crate::{
    error::{ApiError, Kind, empty_response, json_response},
    expansion, instance,
    lifecycle::{self, MachinePatch, Observed, Plan},
};

impl Server {
    pub(super) async fn start(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let (vm, vmi) = (self.vm(object).await?, self.vmi_opt(object).await?);
        let observed = Observed { vm: &vm, vmi: vmi.as_ref() };
        lifecycle::check_start(observed)?;
        let (options, dry_run): (StartOptions, bool) = self.trial(request).await?;
        self.write(object, lifecycle::start(observed, &options)?, dry_run).await
    }

    pub(super) async fn stop(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let (options, dry_run): (StopOptions, bool) = self.trial(request).await?;
        let (vm, vmi) = (self.vm(object).await?, self.vmi_opt(object).await?);
        let plan = lifecycle::stop(Observed { vm: &vm, vmi: vmi.as_ref() }, &options)?;
        self.write(object, plan, dry_run).await
    }

    pub(super) async fn restart(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let (options, dry_run): (RestartOptions, bool) = self.trial(request).await?;
        lifecycle::check_restart_options(&options)?;
        let (vm, vmi) = (self.vm(object).await?, self.vmi_opt(object).await?);
        let plan = lifecycle::restart(Observed { vm: &vm, vmi: vmi.as_ref() }, &options)?;
        self.write(object, plan, dry_run).await
    }

    async fn write(&self, object: &Object, plan: Plan, dry_run: bool) -> Result<Response, ApiError> {
        let params = PatchParams { dry_run, ..PatchParams::default() };
        let name = object.name.as_str();
        let mut undo = None;
        if let Some(patch) = plan.instance {
            let vmis = self.vmis(object);
            vmis.patch(name, &params, &Patch::Json::<()>(patch.apply))
                .await
                .map_err(|error| ApiError::Internal(message(&error)))?;
            undo = patch.undo;
        }
        let result = match plan.machine {
            None => Ok(()),
            Some(MachinePatch::Spec(patch)) => {
                self.vms(object).patch(name, &params, &Patch::Json::<()>(patch)).await.map(drop)
            }
            Some(MachinePatch::Status(patch)) => {
                self.vms(object).patch_status(name, &params, &Patch::Json::<()>(patch)).await.map(drop)
            }
        };
        match result {
            Ok(()) => Ok(empty_response(StatusCode::ACCEPTED)),
            Err(error) => {
                if let Some(undo) = undo
                    && let Err(error) = self.vmis(object).patch(name, &params, &Patch::Json::<()>(undo)).await
                {
                    tracing::warn!(
                        namespace = object.namespace,
                        name,
                        error = message(&error),
                        "grace period was not put back"
                    );
                }
                let text = message(&error);
                if text.contains(TEST_FAILED) {
                    Err(ApiError::conflict(Kind::VirtualMachine, name, text))
                } else if matches!(&error, kube::Error::Api(status) if status.code == 404) {
                    Err(ApiError::not_found(Kind::VirtualMachine, name))
                } else {
                    Err(ApiError::Internal(text))
                }
            }
        }
    }

    pub(super) async fn migrate(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let _: (MigrateOptions, bool) = self.trial(request).await?;
        self.vm(object).await?;
        instance::check_migrate(&object.name, &self.vmi(object).await?)?;
        Err(ApiError::NotAvailable("live migration"))
    }

    pub(super) async fn expand_spec(&self, object: &Object) -> Result<Response, ApiError> {
        let vm = self.vm(object).await?;
        let expanded = self.expanded(&vm, &object.namespace).await.map_err(ApiError::Internal)?;
        Ok(json_response(StatusCode::OK, &expanded))
    }

    pub(super) async fn expand_vm_spec(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let mut body = self.bodies.read(request.into_body(), expansion::MAX_VM).await?;
        self.bodies.weigh(&mut body)?;
        let vm = expansion::read(&body.bytes, &object.namespace)?;
        let expanded = self.expanded(&vm, &object.namespace).await.map_err(ApiError::BadRequest)?;
        Ok(body.answer(json_response(StatusCode::OK, &expanded)))
    }

    /// The VM with its instance type and preference applied; why not, otherwise.
    async fn expanded(&self, vm: &VirtualMachine, namespace: &str) -> Result<VirtualMachine, String> {
        let (instancetype, preference) = futures::future::try_join(
            self.named(vm, Role::Instancetype, namespace),
            self.named(vm, Role::Preference, namespace),
        )
        .await?;
        let unusable = |role: Role| move |error: ContentError| format!("{} cannot be used: {error}", role.field());
        let instancetype =
            instancetype.as_ref().map(revision::instancetype).transpose().map_err(unusable(Role::Instancetype))?;
        let preference =
            preference.as_ref().map(revision::preference).transpose().map_err(unusable(Role::Preference))?;
        admission::instancetype::expanded(vm, instancetype.as_ref(), preference.as_ref(), &self.config.current())
            .map_err(|error| error.to_string())
    }

    /// What a VM names as instance type or preference: the object, or the copy of it that was kept for the VM.
    async fn named(&self, vm: &VirtualMachine, role: Role, namespace: &str) -> Result<Option<Value>, String> {
        let failed = |error: kube::Error| message(&error);
        match matcher::source(vm, role).transpose().map_err(|error| error.to_string())? {
            None => Ok(None),
            Some(Source::Revision(name)) => {
                let revision = Api::<ControllerRevision>::namespaced(self.client.clone(), namespace)
                    .get(&name)
                    .await
                    .map_err(failed)?;
                Ok(Some(revision.data.map_or(Value::Null, |data| data.0)))
            }
            Some(Source::Object(_, name)) if name.is_empty() => Err(format!("spec.{} names nothing", role.field())),
            Some(Source::Object(kind, name)) => {
                let resource = ApiResource {
                    group: instancetype::GROUP.to_owned(),
                    version: instancetype::VERSION.to_owned(),
                    api_version: instancetype::API_VERSION.to_owned(),
                    kind: kind.kind().to_owned(),
                    plural: kind.plural().to_owned(),
                };
                let objects: Api<DynamicObject> = if kind.is_cluster_wide() {
                    Api::all_with(self.client.clone(), &resource)
                } else {
                    Api::namespaced_with(self.client.clone(), namespace, &resource)
                };
                let object = objects.get(&name).await.map_err(failed)?;
                serde_json::to_value(object).map(Some).map_err(|error| error.to_string())
            }
        }
    }
}
