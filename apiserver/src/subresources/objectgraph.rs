//! `virtualmachines/objectgraph` and `virtualmachineinstances/objectgraph`: the objects that a VM or VMI depends on.

use api::{
    config::ClusterConfig,
    subresources::{ObjectGraphNode, ObjectGraphOptions},
};
use axum::{body::Body, response::Response};
use http::{Request, StatusCode};

use super::common::{
    call::Call,
    object_graph, schema,
    specification::{Answer, Content, Specification, VMIS, VMS},
};
use crate::{
    clients::address,
    requests::error::{ApiError, json_response},
};

pub(super) static OF_VM: Specification = Specification {
    options: Some(schema::options::<ObjectGraphOptions>),
    content: Content::JsonOrUnlabelled,
    operation: "vm-objectgraph",
    description: "Get the objects that a VirtualMachine depends on",
    ..Specification::get(VMS, "objectgraph", ANSWER, |call, request| Box::pin(serve_of_vm(call, request)))
};

pub(super) static OF_VMI: Specification = Specification {
    options: Some(schema::options::<ObjectGraphOptions>),
    content: Content::JsonOrUnlabelled,
    operation: "vmi-objectgraph",
    description: "Get the objects that a VM or VMI depends on",
    ..Specification::get(VMIS, "objectgraph", ANSWER, |call, request| Box::pin(serve_of_vmi(call, request)))
};

const ANSWER: Answer = Answer::Document(schema::of::<ObjectGraphNode>);

/// Rejects all requests while the feature gate is off.
fn check_gate(config: &ClusterConfig) -> Result<(), ApiError> {
    if config.enabled(api::FeatureGate::ObjectGraph) {
        return Ok(());
    }
    Err(ApiError::BadRequest("ObjectGraph feature gate not enabled: Unable to return object graph.".to_owned()))
}

async fn serve_of_vm(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    check_gate(&call.context.config.current())?;
    let options: ObjectGraphOptions = call.options(request).await?;
    let vm = call.vm().await?;
    let (objects, vmi) = (&call.context.objects, call.vmi_opt().await?);
    let pod = match &vmi {
        Some(vmi) => {
            let pods = objects.launcher_pods(vmi).await?;
            address::launcher(vmi, &pods).and_then(|pod| pod.metadata.name.clone())
        }
        None => None,
    };
    let state = match vmi.as_ref().and_then(object_graph::state_claim) {
        Some(name) => Some(name.to_owned()),
        None => objects.state_claim(&vm).await?,
    };
    Ok(json_response(StatusCode::OK, &object_graph::of_vm(&vm, pod.as_deref(), state.as_deref(), &options)))
}

async fn serve_of_vmi(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    check_gate(&call.context.config.current())?;
    let options: ObjectGraphOptions = call.options(request).await?;
    let vmi = call.vmi().await?;
    let pods = call.context.objects.launcher_pods(&vmi).await?;
    let pod = address::launcher(&vmi, &pods).and_then(|pod| pod.metadata.name.as_deref());
    Ok(json_response(StatusCode::OK, &object_graph::of_vmi(&vmi, pod, &options)))
}
