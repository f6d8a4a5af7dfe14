//! Starting, stopping and moving VMs, and expanding their specs.

use api::{
    VirtualMachine,
    subresources::{MigrateOptions, RestartOptions, StartOptions, StopOptions},
};
use axum::{body::Body, response::Response};
use http::{Request, StatusCode};
use kube::api::{Patch, PatchParams};

use super::{Object, Server, TEST_FAILED, body, bytes, message};
use crate::{
    error::{ApiError, Kind, empty_response, json_response},
    expansion, instance,
    lifecycle::{self, MachinePatch, Observed, Plan},
    options,
};

impl Server {
    pub(super) async fn start(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let options: StartOptions = body(request).await?;
        let dry_run = options::is_dry_run(options.dry_run.as_ref())?;
        let (vm, vmi) = (self.vm(object).await?, self.vmi_opt(object).await?);
        let plan = lifecycle::start(Observed { vm: &vm, vmi: vmi.as_ref() }, &options)?;
        self.write(object, plan, dry_run).await
    }

    pub(super) async fn stop(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let options: StopOptions = body(request).await?;
        let dry_run = options::is_dry_run(options.dry_run.as_ref())?;
        let (vm, vmi) = (self.vm(object).await?, self.vmi_opt(object).await?);
        let plan = lifecycle::stop(Observed { vm: &vm, vmi: vmi.as_ref() }, &options)?;
        self.write(object, plan, dry_run).await
    }

    pub(super) async fn restart(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let options: RestartOptions = body(request).await?;
        lifecycle::check_restart_options(&options)?;
        let dry_run = options::is_dry_run(options.dry_run.as_ref())?;
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
        let options: MigrateOptions = body(request).await?;
        options::is_dry_run(options.dry_run.as_ref())?;
        self.vm(object).await?;
        instance::check_migrate(&object.name, &self.vmi(object).await?)?;
        Err(ApiError::NotAvailable("live migration"))
    }

    pub(super) async fn expand_spec(&self, object: &Object) -> Result<Response, ApiError> {
        let vm = self.vm(object).await?;
        Ok(json_response(StatusCode::OK, &self.expanded(vm)?))
    }

    pub(super) async fn expand_vm_spec(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let body = bytes(request, expansion::MAX_VM).await?;
        let vm = expansion::read(&body, &object.namespace)?;
        Ok(json_response(StatusCode::OK, &self.expanded(vm)?))
    }

    fn expanded(&self, vm: VirtualMachine) -> Result<VirtualMachine, ApiError> {
        if expansion::is_needed(&vm) { Err(ApiError::NotAvailable("expansion of instance types")) } else { Ok(vm) }
    }
}
