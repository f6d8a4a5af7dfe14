//! What machines depend on.

use api::subresources::ObjectGraphOptions;
use axum::{body::Body, response::Response};
use http::{Request, StatusCode};

use super::{Object, Server};
use crate::{
    address,
    error::{ApiError, json_response},
    graph,
};

impl Server {
    fn check_graph_gate(&self) -> Result<(), ApiError> {
        if self.config.current().enabled("ObjectGraph") {
            return Ok(());
        }
        Err(ApiError::BadRequest("ObjectGraph feature gate not enabled: Unable to return object graph.".to_owned()))
    }

    pub(super) async fn graph_of_vm(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        self.check_graph_gate()?;
        let options: ObjectGraphOptions = self.options(request).await?;
        let vm = self.vm(object).await?;
        let pod = match self.vmi_opt(object).await? {
            Some(vmi) => address::launcher(&vmi, &self.pods(&vmi).await?).and_then(|pod| pod.metadata.name.clone()),
            None => None,
        };
        Ok(json_response(StatusCode::OK, &graph::of_machine(&vm, pod.as_deref(), &options)))
    }

    pub(super) async fn graph_of_vmi(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        self.check_graph_gate()?;
        let options: ObjectGraphOptions = self.options(request).await?;
        let vmi = self.vmi(object).await?;
        let pods = self.pods(&vmi).await?;
        let pod = address::launcher(&vmi, &pods).and_then(|pod| pod.metadata.name.as_deref());
        Ok(json_response(StatusCode::OK, &graph::of_instance(&vmi, pod, &options)))
    }
}
