//! The threads of the channels.

use std::{io, num::NonZero, thread::available_parallelism};

use tokio::runtime::{Builder, EnterGuard, Runtime};

/// Most threads that relay channels. One encrypts more than 10 Gbit/s.
const MOST: usize = 4;

/// The runtime of the channels. Bulk data keeps it busy for seconds, so that the VMIs of the node have another one: neither waits for
/// the other. Dropping it ends the channels.
pub(crate) struct Threads {
    runtime: Option<Runtime>,
}

impl Threads {
    /// Starts the threads.
    pub(crate) fn start() -> io::Result<Self> {
        let threads = available_parallelism().map_or(1, NonZero::get).min(MOST);
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(threads).thread_name("migration").enable_all();
        Ok(Self { runtime: Some(builder.build()?) })
    }

    /// Makes the runtime that of the calling thread while the guard exists: for new tasks, sockets and [`super::Channels`].
    pub(crate) fn enter(&self) -> Option<EnterGuard<'_>> {
        self.runtime.as_ref().map(Runtime::enter)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // A runtime that is dropped in a task of another one panics, because it waits for its threads.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
