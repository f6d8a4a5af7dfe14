//! Work inside another network namespace, on a thread of its own that ends with the work.

use std::{
    future::Future,
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::thread::ThreadNameSpaceType;

use super::{DEADLINE, Error};
use crate::safe_dir::Peer;

/// A network namespace that is not the node's own.
#[derive(Debug)]
pub struct NetworkNamespace(Holder);

#[derive(Debug)]
enum Holder {
    /// That of a process, by its descriptor: it cannot turn into that of another process.
    Process(Peer),
    /// A descriptor of the namespace itself.
    #[cfg_attr(not(test), allow(dead_code, reason = "tests make namespaces without a process"))]
    Descriptor(OwnedFd),
}

impl NetworkNamespace {
    /// That of a process; refused if it is the agent's own or the node's.
    pub fn of(peer: &Peer) -> Result<Self, Error> {
        let theirs = identity(&format!("/proc/{}/ns/net", peer.pid())).map_err(Error::Namespace)?;
        let own = identity("/proc/self/ns/net").map_err(Error::Namespace)?;
        // Process 1 may be out of reach; where the agent does not share the node's process ids it is nothing to go by.
        let node = identity("/proc/1/ns/net").ok();
        if theirs == own || Some(theirs) == node {
            return Err(Error::HostNetwork);
        }
        if !peer.is_alive() {
            return Err(crate::safe_dir::Error::PeerGone(peer.pid()).into());
        }
        Ok(Self(Holder::Process(peer.clone())))
    }

    /// The namespace behind a descriptor.
    #[cfg(test)]
    pub(crate) fn descriptor(namespace: OwnedFd) -> Self {
        Self(Holder::Descriptor(namespace))
    }

    /// Runs `work` on a new thread inside the namespace.
    pub async fn run<F, W, T>(self, work: F) -> Result<T, Error>
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
                    // A deadline here as well: the thread ends even if nobody waits for it any more.
                    runtime
                        .block_on(async { tokio::time::timeout(DEADLINE, work()).await.map_err(|_| Error::Timeout)? })
                });
                // Nobody waits any more: the next set-up looks at what was done.
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

/// What tells one namespace from another.
fn identity(path: &str) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::stat(path)?;
    #[allow(clippy::unnecessary_cast, reason = "the widths differ between architectures")]
    Ok((stat.st_dev as u64, stat.st_ino as u64))
}
