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

/// Bytes that are read of a guest at a time.
const READ: usize = 16 * 1024;

/// Connects to a port of the guest.
pub(super) async fn connect(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Failure> {
    let machine = served.machine(&namespace, &name)?;
    let vmi = machine.vmi().filter(|vmi| vsock::is_attached(vmi));
    let Some(vmi) = vmi else {
        return Err(Failure(StatusCode::BAD_REQUEST, "VM doesn't have VSOCK enabled".into()));
    };
    let (port, tls) =
        target(query.as_deref().unwrap_or_default()).map_err(|message| Failure(StatusCode::BAD_REQUEST, message))?;
    let others: Vec<_> = served.machines.all().iter().filter_map(|machine| machine.vmi()).collect();
    let cid = context_id(&vmi, &others).map_err(|message| Failure(StatusCode::INTERNAL_SERVER_ERROR, message))?;
    // A machine that no launcher has accepted has no guest.
    machine.launcher()?;
    let share = served.claim(StreamKind::Vsock, &headers)?;
    let session = machine.sessions.join();
    let guest = served.guests.connect(cid, port, tls).await.map_err(|error| refused(port, &error))?;
    let (from_guest, to_guest) = split(guest);
    let input = ToGuest(to_guest);
    let output = FromGuest { half: from_guest, buffer: BytesMut::new() };
    let span = tracing::info_span!("vsock", %namespace, %name, port, tls);
    let bridge = Bridge { share, session, metrics: served.metrics, kind: StreamKind::Vsock };
    Ok(prepared(upgrade)
        .on_upgrade(move |socket| served.streams.track_future(bridge.run(socket, input, output).instrument(span))))
}

fn refused(port: u32, error: &io::Error) -> Failure {
    let message = format!("cannot connect to VSOCK port {port} of the guest: {error}");
    Failure(StatusCode::INTERNAL_SERVER_ERROR, message)
}

/// The context id at which a machine is reached, among the `machines` of this node.
///
/// It stands in an object that others write, and the agent could connect to its own host just as well: so it has to be one
/// of a guest, and of no other machine here. A wrong one leads nowhere.
fn context_id(vmi: &VirtualMachineInstance, machines: &[Arc<VirtualMachineInstance>]) -> Result<u32, String> {
    let told = vmi.status.as_ref().and_then(|status| status.vsock_cid).ok_or("VSOCK CID is nil")?;
    let cid = vsock::cid(vmi).ok_or_else(|| format!("VSOCK CID {told} is not one of a guest"))?;
    let shared = machines
        .iter()
        .any(|other| other.metadata.uid != vmi.metadata.uid && !other.is_final() && vsock::cid(other) == Some(cid));
    if shared { Err(format!("VSOCK CID {cid} is that of another machine as well")) } else { Ok(cid) }
}

/// Port and whether TLS is to be spoken.
fn target(query: &str) -> Result<(u32, bool), String> {
    let value = |wanted: &str| {
        query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == wanted).map(|(_, value)| value)
    };
    let port = value("port").unwrap_or_default();
    let port = port.parse().map_err(|_| format!("port {port:?} is not a number between 0 and {}", u32::MAX))?;
    let tls = match value("tls") {
        None | Some("" | "false" | "False" | "FALSE" | "f" | "F" | "0") => false,
        Some("true" | "True" | "TRUE" | "t" | "T" | "1") => true,
        Some(other) => return Err(format!("tls={other:?} is not a truth value")),
    };
    Ok((port, tls))
}

/// The way to a guest.
struct ToGuest(WriteHalf<Box<dyn Duplex>>);

impl Input for ToGuest {
    async fn send(&mut self, data: Bytes) -> bool {
        // TLS keeps what is not flushed.
        self.0.write_all(&data).await.is_ok() && self.0.flush().await.is_ok()
    }

    async fn finish(mut self) {
        // Who has gone already needs no word.
        let _ = self.0.shutdown().await;
    }
}

/// The way from a guest.
struct FromGuest {
    half: ReadHalf<Box<dyn Duplex>>,
    buffer: BytesMut,
}

impl Output for FromGuest {
    async fn next(&mut self) -> Result<Bytes, End> {
        self.buffer.reserve(READ);
        match self.half.read_buf(&mut self.buffer).await {
            Ok(0) => Err(End::Machine),
            Ok(_) => Ok(self.buffer.split().freeze()),
            // TLS that ends without a word.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(End::Machine),
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
        assert_eq!(target("port=22"), Ok((22, false)));
        assert_eq!(target("tls=true&port=4294967295"), Ok((u32::MAX, true)));
        for query in ["", "port=", "port=-1", "port=4294967296", "port=ssh", "port=22&tls=maybe"] {
            assert!(target(query).is_err(), "{query}");
        }
    }

    fn machine(uid: &str, phase: &str, cid: &Value) -> Arc<VirtualMachineInstance> {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": uid, "uid": uid},
            "spec": {"domain": {"devices": {"autoattachVSOCK": true}}},
            "status": {"phase": phase, "VSOCKCID": cid},
        }))
        .map(Arc::new)
        .unwrap()
    }

    #[test]
    fn only_a_guest_of_one_machine_is_dialled() {
        let others =
            [machine("a", "Running", &json!(7)), machine("b", "Running", &json!(8)), machine("c", "Failed", &json!(9))];
        for (cid, expected) in [
            (json!(10), Ok(10)),
            (json!(null), Err("VSOCK CID is nil")),
            // The host itself, the loopback, the hypervisor, any.
            (json!(2), Err("VSOCK CID 2 is not one of a guest")),
            (json!(1), Err("VSOCK CID 1 is not one of a guest")),
            (json!(0), Err("VSOCK CID 0 is not one of a guest")),
            (json!(u32::MAX), Err("VSOCK CID 4294967295 is not one of a guest")),
            // Its own, as the list shows it as well.
            (json!(7), Ok(7)),
            (json!(8), Err("VSOCK CID 8 is that of another machine as well")),
            (json!(9), Ok(9)),
        ] {
            let found = context_id(&machine("a", "Running", &cid), &others);
            assert_eq!(found.as_ref().map_err(String::as_str), expected.as_ref().map_err(|message| *message), "{cid}");
        }
    }
}
