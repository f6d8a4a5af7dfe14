//! Constants of the connection that both sides know.

/// Metadata key of a W3C trace context. The answer to a Sync with a sampled one contains the times of the start's steps.
pub const TRACEPARENT: &str = "traceparent";
/// Part of the error of a Sync whose VMI shares a path of the container that nothing is mounted at. It has its own reason in the
/// condition `Synchronized`.
pub const PATH_NOT_MOUNTED: &str = "is in no directory that was mounted into container compute for others";
/// Largest message that either side accepts, in bytes. etcd limits a VirtualMachineInstance to 1.5 MiB. The capabilities cache
/// of a node has a few hundred KiB.
pub const MAX_MESSAGE_SIZE: usize = 8 * 1024 * 1024;
/// Largest chunk of a stream, in bytes.
pub const MAX_CHUNK: usize = 32 * 1024;
