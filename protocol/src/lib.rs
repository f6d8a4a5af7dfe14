//! The protocol between virt-handler and virt-launcher, generated from `proto/launcher.proto`.
#![allow(missing_docs, reason = "generated from the proto file, which holds the documentation")]
#![allow(clippy::doc_markdown, clippy::all, reason = "generated code")]

pub mod channels;
mod codec;
pub mod features;
pub mod holder;
mod messages;
mod unary;
mod wire;

pub use messages::*;
pub use unary::{Client, Unary};
pub use wire::{MAX_CHUNK, MAX_MESSAGE_SIZE, PATH_NOT_MOUNTED, TRACEPARENT};
