//! Sockets for migrations in a launcher pod of this node.

use std::{io, time::Duration};

use daemon::errors;
use protocol::channels::{Channel, SOCKET};
use tokio::net::UnixStream;
use tonic::async_trait;

use super::LauncherSocket;
use crate::safe_dir::{SafeDir, connect_migration};

/// Longest wait for a socket.
const LIMIT: Duration = Duration::from_secs(5);

/// The sockets of the launcher and of QEMU in a pod.
pub(crate) struct PodSocket {
    pods: SafeDir,
    pod: String,
}

impl PodSocket {
    /// Names the sockets of the pod `pod` beneath kubelet's directory of pods.
    pub(crate) fn new(pods: SafeDir, pod: String) -> Self {
        Self { pods, pod }
    }
}

impl PodSocket {
    async fn connect(&self, name: &str) -> io::Result<UnixStream> {
        let connected = connect_migration(&self.pods, &self.pod, name, LIMIT).await;
        connected.map(|(stream, _)| stream).map_err(|error| io::Error::other(errors::chain(&error)))
    }
}

#[async_trait]
impl LauncherSocket for PodSocket {
    async fn open(&self) -> io::Result<UnixStream> {
        self.connect(SOCKET).await
    }

    async fn open_qemu(&self, channel: Channel) -> io::Result<UnixStream> {
        self.connect(&channel.socket()).await
    }
}
