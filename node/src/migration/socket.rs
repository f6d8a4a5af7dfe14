//! The migration socket of a launcher on this node.

use std::{io, time::Duration};

use async_trait::async_trait;
use tokio::net::UnixStream;

use super::LauncherSocket;
use crate::{
    launcher::with_causes,
    safe_dir::{SafeDir, connect_migration},
};

/// Longest wait for the socket.
const LIMIT: Duration = Duration::from_secs(5);

/// The migration socket of the launcher in a pod.
pub(crate) struct PodSocket {
    pods: SafeDir,
    pod: String,
}

impl PodSocket {
    /// Names the socket of the pod `pod` beneath kubelet's directory of pods.
    pub(crate) fn new(pods: SafeDir, pod: String) -> Self {
        Self { pods, pod }
    }
}

#[async_trait]
impl LauncherSocket for PodSocket {
    async fn open(&self) -> io::Result<UnixStream> {
        let connected = connect_migration(&self.pods, &self.pod, LIMIT).await;
        connected.map(|(stream, _)| stream).map_err(|error| io::Error::other(with_causes(&error)))
    }
}
