//! Limits of a server.

use std::time::Duration;

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// Connections at a time of all addresses without a proof together.
    pub others: usize,
    /// Connections at a time of one address without a proof.
    pub share: usize,
    /// Connections at a time of addresses without a proof from which no request has come yet.
    pub silent: usize,
    /// Connections at a time of [`super::ProbeAddresses`] that do not count for any of the above.
    pub probes: usize,
    /// A handshake proves the address of the client, because the server requires a certificate.
    pub handshake_proves: bool,
    /// Longest TLS handshake.
    pub handshake: Duration,
    /// Longest time from the handshake to the head of the first request.
    pub request_head: Duration,
    /// Longest time from an answer to the head of the next request.
    pub idle: Duration,
    /// Longest time for an answer, or a large part of it, to be taken.
    pub answer: Duration,
    /// Most header lines in a request of a client with a certificate; others send a hundred at most.
    pub header_lines: usize,
    /// Longest time for open connections to end after the stop.
    pub drain: Duration,
}

impl Limits {
    /// Limits of a server for metrics and health.
    pub const DEFAULT: Self = Self {
        connections: 128,
        others: 64,
        share: 32,
        silent: 48,
        probes: 16,
        handshake_proves: false,
        handshake: Duration::from_secs(5),
        request_head: Duration::from_secs(10),
        idle: Duration::from_secs(30),
        answer: Duration::from_secs(60),
        header_lines: 100,
        drain: Duration::from_secs(10),
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
