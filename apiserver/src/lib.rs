//! virt-api: the aggregated API `subresources.kubevirt.io` and the admission webhooks.
//!
//! ```text
//! kube-apiserver ──TLS──▶ server ─┬▶ webhooks ─▶ crate admission
//!                                 ├▶ discovery (documents, open to every client)
//!                                 └▶ auth ─▶ subresources ─┬▶ clients ─▶ API server, virt-handler
//!                                                          └▶ streaming ◀──▶ virt-handler, port of a guest
//! ```
//!
//! Folders import only folders below them: `server` > `webhooks`, `discovery` > `subresources` > `streaming` > `clients`, `auth` >
//! `requests` > `limits`. Start with `subresources/registry.rs` for the API, and with `webhooks/mod.rs` for admission.
//!
//! Access reviews are cached for seconds and presets are followed by a watch; other objects are read from the API server for
//! each request. VMIs are watched while their ports are forwarded.

mod auth;
mod clients;
mod discovery;
pub mod helm_hooks;
mod limits;
pub mod metrics;
mod requests;
mod server;
mod streaming;
mod subresources;
pub mod webhooks;

pub use server::run::{MAX_CONNECTIONS, MAX_HEADER_LINES, StartError, allow_open_files, run};
