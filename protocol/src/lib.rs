//! The protocol between the node agent and a launcher, generated from `proto/launcher.proto`.
#![allow(missing_docs, reason = "generated from the proto file, which holds the documentation")]
#![allow(clippy::doc_markdown, clippy::all, reason = "generated code")]

tonic::include_proto!("ferrovirt.launcher.v1");

/// Largest message either side accepts, in bytes. A VirtualMachineInstance is bounded by etcd's 1.5 MiB; the
/// capabilities cache of a node is a few hundred KiB.
pub const MAX_MESSAGE_SIZE: usize = 8 * 1024 * 1024;
/// Largest chunk of a stream, in bytes.
pub const MAX_CHUNK: usize = 32 * 1024;
