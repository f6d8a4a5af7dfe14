//! `virtualmachineinstances/vnc/screenshot`: a picture of the display.

use axum::response::Response;

use super::{
    common::{
        call::{Call, read_error},
        specification::{Answer, Specification, VMIS},
        vmi_checks::node,
    },
    vnc,
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    query_parameters: &[("moveCursor", "boolean")],
    plain_errors: true,
    operation: "VNCScreenshot",
    description: "Get a picture of the display as PNG",
    ..Specification::get(VMIS, "vnc/screenshot", Answer::Picture, |call, _| Box::pin(serve(call)))
};

async fn serve(call: Call<'_>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    vnc::decide(&vmi)?;
    let node = node(&vmi)?;
    call.context.handler.screenshot(call.on(node), "vnc/screenshot").await.map_err(read_error)
}
