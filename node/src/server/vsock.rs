//! Connections to VSOCK ports of guests.

use std::{io, sync::Arc};

use api::{VirtualMachineInstance, vsock};
use axum::{
    extract::{Path, RawQuery, State, ws::WebSocketUpgrade},
    http::{HeaderMap, StatusCode},
    response::Response,
};
use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tracing::Instrument;

use super::{
    Failure, Served,
    bridge::{Bridge, End, Input, Output},
    stream::prepared,
};
use crate::{metrics::StreamKind, vsock::Duplex};

/// Bytes that are read from a guest at a time.
const READ: usize = 16 * 1024;

/// Connects to a port of the guest.
pub(super) async fn connect(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Failure> {
    let handle = served.handle(&namespace, &name)?;
    let vmi = handle.vmi().filter(|vmi| vsock::is_attached(vmi));
    let Some(vmi) = vmi else {
        return Err(VsockError::Disabled.into());
    };
    let (port, tls) = target(query.as_deref().unwrap_or_default())?;
    let others: Vec<_> = served.vmis.all().iter().filter_map(|handle| handle.vmi()).collect();
    let cid = context_id(&vmi, &others)?;
    // Without a launcher that accepted the VMI there is no guest.
    handle.launcher()?;
    let slot = served.claim(StreamKind::Vsock, &headers)?;
    let session = handle.sessions.join();
    let guest = served.guests.connect(cid, port, tls).await.map_err(|source| VsockError::Connect { port, source })?;
    let (from_guest, to_guest) = split(guest);
    let input = ToGuest(to_guest);
    let output = FromGuest { half: from_guest, buffer: BytesMut::new() };
    let span = tracing::info_span!("vsock", %namespace, %name, port, tls);
    let bridge = Bridge { slot, session, metrics: served.metrics, kind: StreamKind::Vsock };
    Ok(prepared(upgrade)
        .on_upgrade(move |socket| served.streams.track_future(bridge.run(socket, input, output).instrument(span))))
}

/// Reason why a VSOCK port of a guest is not connected.
#[derive(Debug, thiserror::Error)]
enum VsockError {
    #[error("VM doesn't have VSOCK enabled")]
    Disabled,
    #[error("port {0:?} is not a number between 0 and {max}", max = u32::MAX)]
    Port(String),
    #[error("tls={0:?} is not a truth value")]
    Tls(String),
    #[error("VSOCK CID is nil")]
    NoCid,
    #[error("VSOCK CID {0} is not one of a guest")]
    NotAGuest(u32),
    #[error("VSOCK CID {0} is also that of another VMI")]
    Ambiguous(u32),
    #[error("cannot connect to VSOCK port {port} of the guest: {source}")]
    Connect { port: u32, source: io::Error },
}

impl From<VsockError> for Failure {
    fn from(error: VsockError) -> Self {
        let code = match error {
            VsockError::Disabled | VsockError::Port(_) | VsockError::Tls(_) => StatusCode::BAD_REQUEST,
            VsockError::NoCid | VsockError::NotAGuest(_) | VsockError::Ambiguous(_) | VsockError::Connect { .. } => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        };
        Self(code, error.to_string())
    }
}

/// Returns the context id of a VMI among the `vmis` of this node.
///
/// Others write the object, and virt-handler could connect to its own host as well: the context id must be that of a guest, and
/// of no other VMI here.
fn context_id(vmi: &VirtualMachineInstance, vmis: &[Arc<VirtualMachineInstance>]) -> Result<u32, VsockError> {
    let written = vmi.status.as_ref().and_then(|status| status.vsock_cid).ok_or(VsockError::NoCid)?;
    let cid = vsock::cid(vmi).ok_or(VsockError::NotAGuest(written))?;
    let shared = vmis
        .iter()
        .any(|other| other.metadata.uid != vmi.metadata.uid && !other.is_final() && vsock::cid(other) == Some(cid));
    if shared { Err(VsockError::Ambiguous(cid)) } else { Ok(cid) }
}

/// Parses the port, and true for TLS.
fn target(query: &str) -> Result<(u32, bool), VsockError> {
    let value = |name: &str| {
        query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
    };
    let port = value("port").unwrap_or_default();
    let port = port.parse().map_err(|_| VsockError::Port(port.to_owned()))?;
    let tls = match value("tls") {
        None | Some("" | "false" | "False" | "FALSE" | "f" | "F" | "0") => false,
        Some(value) if api::is_true(value) => true,
        Some(other) => return Err(VsockError::Tls(other.to_owned())),
    };
    Ok((port, tls))
}

/// Input of a guest.
struct ToGuest(WriteHalf<Box<dyn Duplex>>);

impl Input for ToGuest {
    async fn send(&mut self, data: Bytes) -> bool {
        // TLS buffers until it is flushed.
        self.0.write_all(&data).await.is_ok() && self.0.flush().await.is_ok()
    }

    async fn finish(mut self) {
        // The guest may be gone.
        let _ = self.0.shutdown().await;
    }
}

/// Output of a guest.
struct FromGuest {
    half: ReadHalf<Box<dyn Duplex>>,
    buffer: BytesMut,
}

impl Output for FromGuest {
    async fn next(&mut self) -> Result<Bytes, End> {
        self.buffer.reserve(READ);
        match self.half.read_buf(&mut self.buffer).await {
            Ok(0) => Err(End::Vmi),
            Ok(_) => Ok(self.buffer.split().freeze()),
            // TLS without a closing message.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(End::Vmi),
            Err(error) => Err(End::Refused(format!("the connection to the guest broke: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_port_is_a_number_and_tls_a_truth_value() {
        assert_eq!(target("port=22").unwrap(), (22, false));
        assert_eq!(target("tls=true&port=4294967295").unwrap(), (u32::MAX, true));
        for query in ["", "port=", "port=-1", "port=4294967296", "port=ssh", "port=22&tls=maybe"] {
            assert!(target(query).is_err(), "{query}");
        }
    }

    fn vmi(uid: &str, phase: &str, cid: &Value) -> Arc<VirtualMachineInstance> {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": uid, "uid": uid},
            "spec": {"domain": {"devices": {"autoattachVSOCK": true}}},
            "status": {"phase": phase, "VSOCKCID": cid},
        }))
        .map(Arc::new)
        .unwrap()
    }

    #[test]
    fn only_the_context_id_of_one_guest_is_dialled() {
        let others = [vmi("a", "Running", &json!(7)), vmi("b", "Running", &json!(8)), vmi("c", "Failed", &json!(9))];
        for (cid, expected) in [
            (json!(10), Ok(10)),
            (json!(null), Err("VSOCK CID is nil")),
            // Host, loopback, hypervisor, any.
            (json!(2), Err("VSOCK CID 2 is not one of a guest")),
            (json!(1), Err("VSOCK CID 1 is not one of a guest")),
            (json!(0), Err("VSOCK CID 0 is not one of a guest")),
            (json!(u32::MAX), Err("VSOCK CID 4294967295 is not one of a guest")),
            // Its own.
            (json!(7), Ok(7)),
            (json!(8), Err("VSOCK CID 8 is also that of another VMI")),
            (json!(9), Ok(9)),
        ] {
            let found = context_id(&vmi("a", "Running", &cid), &others);
            assert_eq!(found.map_err(|error| error.to_string()), expected.map_err(str::to_owned), "{cid}");
        }
    }
}
