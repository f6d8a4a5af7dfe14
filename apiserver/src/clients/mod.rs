//! Clients of virt-api: virt-handler, the other components, and objects of the API server.
//!
//! - [`component`]: HTTP over mutual TLS to one component ([`ComponentClient`]), with a connection pool ([`pool`]).
//! - [`handler`]: the calls and streams of virt-handler; [`websocket`]: the client side of a WebSocket handshake.
//! - [`objects`]: VMs, VMIs and pods; [`patches`]: their JSON patches; [`address`]: the addresses that virt-api connects to.

pub(crate) mod address;
pub(crate) mod component;
mod dial;
pub(crate) mod error;
pub(crate) mod handler;
pub(crate) mod objects;
pub(crate) mod patches;
mod pool;
pub(crate) mod websocket;

pub(crate) use component::{Component, ComponentClient};
pub(crate) use error::ComponentError;
