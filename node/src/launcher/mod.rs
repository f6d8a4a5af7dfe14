//! The agent's side of a launcher: finding its socket, connecting to it, calling it, following its state.
//!
//! Which machine a launcher serves is known from the socket, that is from the pod whose directory it lies in and whose
//! process answers on it; nothing that arrives over the connection can change that.

mod client;
mod locate;
mod paced;
mod watch;

pub(crate) use client::bounded;
pub use client::{CALL_TIMEOUT, Launcher, LauncherError, SYNC_TIMEOUT, with_causes};
pub use locate::{Candidates, candidates};
pub use watch::{Report, follow};
