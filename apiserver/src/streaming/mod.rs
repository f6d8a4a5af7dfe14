//! Streams between clients and guests.
//!
//! - [`websocket`]: accepts the client's WebSocket; [`frames`]: cuts its messages into small ones.
//! - [`relay`]: copies between the client and virt-handler; [`tunnel`]: between the client and a port of a guest ([`guest`]).
//! - [`vmi_watch`]: ends forwarded ports when their VMI stops.

pub(crate) mod frames;
pub(crate) mod guest;
pub(crate) mod relay;
pub(crate) mod tunnel;
pub(crate) mod vmi_watch;
pub(crate) mod websocket;
