//! Requests for the guest agent: its report, and freezing of file systems.

use std::time::Duration;

use api::{
    duration,
    subresources::{
        FreezeUnfreezeTimeout, GuestAgentCommandInfo, GuestAgentInfo, GuestFileSystem, GuestFileSystemDisk,
        GuestFileSystemInfo, GuestFileSystemList, GuestUser, GuestUserList,
    },
    vmi::status::VirtualMachineInstanceGuestOsInfo,
};
use axum::{
    Json,
    body::Bytes,
    extract::{Path, State, rejection::BytesRejection},
    http::StatusCode,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use protocol::{
    FileSystemsRequest, FreezeRequest, GuestInfo, GuestReportReply, GuestReportRequest, Unary, UnfreezeRequest,
    UsersRequest,
};

use super::{Failure, Served, failed_call};
use crate::{
    launcher::{CALL_TIMEOUT, GUEST_TIMEOUT, Reply},
    vmi::{Event, Refusal},
};

/// Limit of a freeze: the guest writes its caches first. Longer than that of the launcher (45 s), shorter than that of virt-api
/// (55 s).
const FREEZE_TIMEOUT: Duration = Duration::from_secs(50);

type VmiPath = Path<(String, String)>;

/// Calls the launcher of a VMI.
async fn call<R: Unary<Reply: Reply>>(
    State(served): State<Served>,
    Path((namespace, name)): VmiPath,
    request: R,
) -> Result<R::Reply, Failure> {
    let handle = served.handle(&namespace, &name)?;
    let _slot = served.call_slot(&namespace)?;
    Ok(handle.launcher()?.call(request, GUEST_TIMEOUT).await.map_err(Refusal::from)?)
}

pub(super) async fn os_info(served: State<Served>, vmi: VmiPath) -> Result<Json<GuestAgentInfo>, Failure> {
    let report = call(served, vmi, GuestReportRequest {}).await?;
    Ok(Json(agent_info(report)))
}

pub(super) async fn users(served: State<Served>, vmi: VmiPath) -> Result<Json<GuestUserList>, Failure> {
    let reply = call(served, vmi, UsersRequest {}).await?;
    Ok(Json(GuestUserList { items: reply.users.into_iter().map(user).collect(), metadata: ListMeta::default() }))
}

pub(super) async fn file_systems(served: State<Served>, vmi: VmiPath) -> Result<Json<GuestFileSystemList>, Failure> {
    let reply = call(served, vmi, FileSystemsRequest {}).await?;
    Ok(Json(GuestFileSystemList {
        items: reply.file_systems.into_iter().map(file_system).collect(),
        metadata: ListMeta::default(),
    }))
}

pub(super) async fn freeze(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    body: Result<Bytes, BytesRejection>,
) -> Result<StatusCode, Failure> {
    let handle = served.handle(&namespace, &name)?;
    let body = body.map_err(|_| TimeoutError::Unavailable)?;
    let timeout = unfreeze_timeout(&body)?;
    let _slot = served.call_slot(&namespace)?;
    let request = FreezeRequest { unfreeze_timeout_seconds: timeout };
    if let Err(error) = handle.launcher()?.call(request, FREEZE_TIMEOUT).await {
        let text = failed_call(&error);
        served.vmis.publish(&handle, Event::warning("FreezeError", format!("Failed to freeze VMI: {text}")));
        return Err(Failure(StatusCode::BAD_REQUEST, text));
    }
    Ok(StatusCode::ACCEPTED)
}

pub(super) async fn unfreeze(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
) -> Result<StatusCode, Failure> {
    let handle = served.handle(&namespace, &name)?;
    let _slot = served.call_slot(&namespace)?;
    let unfrozen = handle.launcher()?.call(UnfreezeRequest {}, CALL_TIMEOUT).await;
    unfrozen.map_err(|error| Failure(StatusCode::BAD_REQUEST, failed_call(&error)))?;
    Ok(StatusCode::ACCEPTED)
}

/// Reason why a freeze request has no timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum TimeoutError {
    #[error("failed to retrieve unfreeze timeout")]
    Unavailable,
    #[error("failed to unmarshal unfreeze timeout")]
    Invalid,
    #[error("Unfreeze timeout in freeze request is not set")]
    Missing,
}

impl From<TimeoutError> for Failure {
    fn from(error: TimeoutError) -> Self {
        Self(StatusCode::BAD_REQUEST, error.to_string())
    }
}

/// Parses the seconds until the file systems thaw automatically; 0 is never. A fraction is rounded up, so that it does not
/// become never.
fn unfreeze_timeout(body: &[u8]) -> Result<u32, TimeoutError> {
    if body.trim_ascii().is_empty() {
        return Err(TimeoutError::Missing);
    }
    let request: FreezeUnfreezeTimeout = serde_json::from_slice(body).map_err(|_| TimeoutError::Invalid)?;
    let timeout =
        duration::parse(&request.unfreeze_timeout.ok_or(TimeoutError::Missing)?).map_err(|_| TimeoutError::Invalid)?;
    let seconds = timeout.as_secs() + u64::from(timeout.subsec_nanos() > 0);
    Ok(u32::try_from(seconds).unwrap_or(u32::MAX))
}

fn agent_info(report: GuestReportReply) -> GuestAgentInfo {
    let (agent, guest) = (report.agent.unwrap_or_default(), report.guest.unwrap_or_default());
    let commands = agent.commands.into_iter();
    GuestAgentInfo {
        guest_agent_version: agent.version,
        supported_commands: commands
            .map(|command| GuestAgentCommandInfo { name: command.name, enabled: command.enabled })
            .collect(),
        hostname: guest.hostname.clone(),
        timezone: guest.timezone.clone(),
        os: system(guest),
        user_list: report.users.into_iter().map(user).collect(),
        fs_info: GuestFileSystemInfo { disks: report.file_systems.into_iter().map(file_system).collect() },
        fs_freeze_status: report.freeze,
    }
}

fn system(guest: GuestInfo) -> VirtualMachineInstanceGuestOsInfo {
    let text = |value: String| (!value.is_empty()).then_some(value);
    VirtualMachineInstanceGuestOsInfo {
        name: text(guest.name),
        kernel_release: text(guest.kernel_release),
        version: text(guest.version),
        pretty_name: text(guest.pretty_name),
        version_id: text(guest.version_id),
        kernel_version: text(guest.kernel_version),
        machine: text(guest.machine),
        id: text(guest.id),
    }
}

fn user(user: protocol::GuestUser) -> GuestUser {
    GuestUser { user_name: user.name, domain: user.domain, login_time: user.login_time }
}

fn file_system(system: protocol::GuestFileSystem) -> GuestFileSystem {
    let bytes = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    GuestFileSystem {
        disk_name: system.name,
        mount_point: system.mount_point,
        file_system_type: system.r#type,
        used_bytes: bytes(system.used_bytes),
        total_bytes: bytes(system.total_bytes),
        disk: system
            .disks
            .into_iter()
            .map(|disk| GuestFileSystemDisk { serial: disk.serial, bus_type: disk.bus_type })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfreeze_timeout_is_a_required_duration() {
        for (body, expected) in [
            (r#"{"unfreezeTimeout": "5m0s"}"#, Ok(300)),
            (r#"{"unfreezeTimeout": "0s"}"#, Ok(0)),
            (r#"{"unfreezeTimeout": "500ms"}"#, Ok(1)),
            (r#"{"unfreezeTimeout": "9000000h"}"#, Ok(u32::MAX)),
            ("", Err("Unfreeze timeout in freeze request is not set")),
            ("{}", Err("Unfreeze timeout in freeze request is not set")),
            (r#"{"unfreezeTimeout": null}"#, Err("Unfreeze timeout in freeze request is not set")),
            ("{", Err("failed to unmarshal unfreeze timeout")),
            (r#"{"unfreezeTimeout": 5}"#, Err("failed to unmarshal unfreeze timeout")),
            (r#"{"unfreezeTimeout": "-5s"}"#, Err("failed to unmarshal unfreeze timeout")),
            (r#"{"unfreezeTimeout": "soon"}"#, Err("failed to unmarshal unfreeze timeout")),
        ] {
            let timeout = unfreeze_timeout(body.as_bytes()).map_err(|error| error.to_string());
            assert_eq!(timeout, expected.map_err(str::to_owned), "{body}");
        }
    }
}
