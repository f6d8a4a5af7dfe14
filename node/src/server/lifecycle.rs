//! Requests that are answered once the machine has done what they ask.

use axum::{
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};

use super::{Failure, Served};
use crate::machine::{Refusal, Request};

pub(super) async fn pause(served: State<Served>, machine: Path<(String, String)>) -> Result<StatusCode, Failure> {
    ask(served, machine, Request::Pause).await
}

pub(super) async fn unpause(served: State<Served>, machine: Path<(String, String)>) -> Result<StatusCode, Failure> {
    ask(served, machine, Request::Unpause).await
}

pub(super) async fn reset(served: State<Served>, machine: Path<(String, String)>) -> Result<StatusCode, Failure> {
    ask(served, machine, Request::Reset).await
}

pub(super) async fn soft_reboot(served: State<Served>, machine: Path<(String, String)>) -> Result<StatusCode, Failure> {
    ask(served, machine, Request::SoftReboot).await
}

async fn ask(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    request: Request,
) -> Result<StatusCode, Failure> {
    let machine = served.machine(&namespace, &name)?;
    machine.ask(request).await?;
    Ok(StatusCode::ACCEPTED)
}

pub(super) async fn screenshot(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
) -> Result<Response, Failure> {
    let machine = served.machine(&namespace, &name)?;
    let picture = machine.launcher()?.screenshot().await.map_err(Refusal::from)?;
    Ok(([(header::CONTENT_TYPE, "image/png")], picture).into_response())
}
