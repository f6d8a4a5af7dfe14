//! `virtualmachines/expand-spec`: a stored VM with its instance type and preference applied.

use axum::response::Response;
use http::StatusCode;

use super::common::{
    call::Call,
    expansion, schema,
    specification::{Answer, Specification, VMS},
};
use crate::requests::error::{ApiError, json_response};

pub(super) static SPECIFICATION: Specification = Specification {
    operation: "vm-ExpandSpec",
    description: "Get the VirtualMachine with instance type and preference applied",
    ..Specification::get(VMS, "expand-spec", Answer::Document(schema::vm), |call, _| Box::pin(serve(call)))
};

async fn serve(call: Call<'_>) -> Result<Response, ApiError> {
    let vm = call.vm().await?;
    let expanded = expansion::expanded(call, &vm).await.map_err(|error| ApiError::Internal(error.to_string()))?;
    Ok(json_response(StatusCode::OK, &expanded))
}
