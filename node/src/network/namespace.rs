//! Runs work in another network namespace, on a thread of its own that ends with the work.

use std::{
    future::Future,
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::thread::ThreadNameSpaceType;

use super::{DEADLINE, Error};
use crate::safe_dir::Peer;

/// A network namespace other than the node's.
#[derive(Debug)]
pub(crate) struct NetworkNamespace(Holder);

#[derive(Debug)]
enum Holder {
    /// The namespace of a process, by its descriptor, so that it cannot become another process.
    Process(Peer),
    /// A descriptor of the namespace itself.
    #[cfg_attr(not(test), allow(dead_code, reason = "tests make namespaces without a process"))]
    Descriptor(OwnedFd),
}

impl NetworkNamespace {
    /// Returns the namespace of a process. virt-handler's own and the node's are rejected.
    pub(crate) fn of(peer: &Peer) -> Result<Self, Error> {
        let of_peer = identity(&format!("/proc/{}/ns/net", peer.pid())).map_err(Error::Namespace)?;
        let own = identity("/proc/self/ns/net").map_err(Error::Namespace)?;
        // Process 1 can be inaccessible. Without the node's process ids it has no meaning.
        let node = identity("/proc/1/ns/net").ok();
        if of_peer == own || Some(of_peer) == node {
            return Err(Error::HostNetwork);
        }
        if !peer.is_alive() {
            return Err(crate::safe_dir::Error::PeerGone(peer.pid()).into());
        }
        Ok(Self(Holder::Process(peer.clone())))
    }

    /// Returns the namespace of a descriptor.
    #[cfg(test)]
    pub(crate) fn descriptor(namespace: OwnedFd) -> Self {
        Self(Holder::Descriptor(namespace))
    }

    /// Runs `work` on a new thread inside the namespace.
    pub(crate) async fn run<F, W, T>(self, work: F) -> Result<T, Error>
    where
        F: FnOnce() -> W + Send + 'static,
        W: Future<Output = Result<T, Error>>,
        T: Send + 'static,
    {
        let (answer, outcome) = tokio::sync::oneshot::channel();
        std::thread::Builder::new()
            .name("pod-network".to_owned())
            .spawn(move || {
                let done = self.enter().and_then(|()| {
                    let runtime =
                        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Namespace)?;
                    // The deadline also ends the thread if the caller is gone.
                    runtime
                        .block_on(async { tokio::time::timeout(DEADLINE, work()).await.map_err(|_| Error::Timeout)? })
                });
                // The caller may be gone; the next setup observes the result.
                let _ = answer.send(done);
            })
            .map_err(Error::Namespace)?;
        outcome.await.map_err(|_| Error::Namespace(io::Error::other("the thread ended early")))?
    }

    fn enter(&self) -> Result<(), Error> {
        let descriptor = match &self.0 {
            Holder::Process(peer) => peer.pidfd(),
            Holder::Descriptor(namespace) => namespace.as_fd(),
        };
        rustix::thread::move_into_thread_name_spaces(descriptor, ThreadNameSpaceType::NETWORK)
            .map_err(|errno| Error::Namespace(errno.into()))
    }
}

/// Identifies a namespace.
fn identity(path: &str) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::stat(path)?;
    #[allow(clippy::unnecessary_cast, reason = "the widths differ between architectures")]
    Ok((stat.st_dev as u64, stat.st_ino as u64))
}
