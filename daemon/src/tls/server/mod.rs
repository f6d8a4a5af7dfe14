//! Servers over TLS: bounded connections, bounded handshakes, graceful end.
//!
//! `http` and `streams` serve the connections of `accept`. `connections` decides which connection gives way to a new one,
//! `handshake` and `limits` bound one, `write_timeout` and `repoll` wrap it, `probes` and `trusted` hold addresses with
//! connections of their own.

mod accept;
mod callers;
mod connections;
mod handshake;
mod http;
mod limits;
mod listen;
mod path;
mod probes;
mod repoll;
mod streams;
mod trusted;
mod write_timeout;

pub use callers::Callers;
pub use http::serve;
pub use limits::Limits;
pub use listen::{listen, listen_at_loopback, listen_everywhere};
pub use probes::ProbeAddresses;
pub use streams::{Accepted, Kept, serve_streams};
pub use trusted::TrustedAddresses;
