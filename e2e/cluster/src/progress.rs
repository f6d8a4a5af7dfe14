//! Progress on standard output: what is being done, and when it was.

use std::time::Instant;

/// Prints steps with the time since the start.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    started: Instant,
}

impl Progress {
    /// Starts the clock.
    #[must_use]
    pub fn start() -> Self {
        Self { started: Instant::now() }
    }

    /// Prints one line.
    pub fn step(&self, text: impl std::fmt::Display) {
        println!("[{:6.1}s] {text}", self.started.elapsed().as_secs_f64());
    }

    /// Seconds since the start.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }
}
