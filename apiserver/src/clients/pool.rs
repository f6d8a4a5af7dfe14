//! Idle connections to components.
//!
//! A connection is found by the address and the TLS server name that its certificate was verified for, so it never serves
//! another component or node. Connections end after a short time: a rotated certificate or CA counts for all requests
//! within [`MAX_AGE`].

use std::{collections::HashMap, net::SocketAddr, sync::Mutex, time::Duration};

use axum::body::Body;
use daemon::lock;
use hyper::client::conn::http1::SendRequest;
use tokio::time::Instant;

/// Longest time without a request. Shorter than the 30 seconds after which components close idle connections.
const MAX_IDLE: Duration = Duration::from_secs(10);
/// Longest time from the handshake to the last request.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Most idle connections to one component.
const MAX_OF_ONE: usize = 4;
/// Most idle connections.
const MAX_OF_ALL: usize = 128;

/// Address and verified TLS server name of a component.
pub(super) type Identity = (SocketAddr, String);

/// A connection, and the time of its handshake.
pub(super) struct Connection {
    /// Sends requests.
    pub sender: SendRequest<Body>,
    /// Time of the handshake.
    pub since: Instant,
}

struct Idle {
    connection: Connection,
    since: Instant,
}

/// Idle connections by identity.
#[derive(Default)]
pub(super) struct Pool {
    idle: Mutex<HashMap<Identity, Vec<Idle>>>,
}

impl Pool {
    /// Removes and returns a usable connection.
    pub(super) fn take(&self, identity: &Identity) -> Option<Connection> {
        let mut idle = lock(&self.idle);
        drop_expired(&mut idle);
        let connections = idle.get_mut(identity)?;
        while let Some(idle) = connections.pop() {
            if idle.connection.sender.is_ready() {
                return Some(idle.connection);
            }
        }
        None
    }

    /// Keeps a connection after a complete answer.
    pub(super) fn put(&self, identity: Identity, connection: Connection) {
        let mut idle = lock(&self.idle);
        drop_expired(&mut idle);
        if connection.sender.is_closed() || idle.values().map(Vec::len).sum::<usize>() >= MAX_OF_ALL {
            return;
        }
        let connections = idle.entry(identity).or_default();
        if connections.len() < MAX_OF_ONE {
            connections.push(Idle { connection, since: Instant::now() });
        }
    }
}

fn drop_expired(idle: &mut HashMap<Identity, Vec<Idle>>) {
    let now = Instant::now();
    idle.retain(|_, connections| {
        connections.retain(|idle| {
            !idle.connection.sender.is_closed()
                && now.duration_since(idle.since) < MAX_IDLE
                && now.duration_since(idle.connection.since) < MAX_AGE
        });
        !connections.is_empty()
    });
}
