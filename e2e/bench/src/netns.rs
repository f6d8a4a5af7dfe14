//! Work in the network namespace of another process.

use std::{fs::File, os::fd::AsFd, path::PathBuf, thread};

use anyhow::{Context, Result, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Does `work` in a network namespace, on a thread of its own, which cannot leave it. Sockets and interfaces of the work stay there.
pub(crate) fn within<T: Send + 'static>(
    namespace: PathBuf,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let working = thread::spawn(move || {
        let file = File::open(&namespace).with_context(|| namespace.display().to_string())?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .with_context(|| format!("cannot enter {}", namespace.display()))?;
        work()
    });
    match working.join() {
        Ok(result) => result,
        Err(_) => bail!("the thread in the network namespace has ended by a panic"),
    }
}
