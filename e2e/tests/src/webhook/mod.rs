//! Calls of admission webhooks as kube-apiserver makes them: HTTP/1.1 over TLS, one review at a time on a connection.

mod connection;
mod endpoint;
mod tls;

pub use connection::{Answer, Connection};
pub use endpoint::{Direct, Endpoint, is_ready};
pub(crate) use tls::tls;
