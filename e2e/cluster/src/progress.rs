//! Prints progress with timestamps to standard output.

use std::time::Instant;

/// Prints steps with the time since the start of the program.
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

    /// Returns the seconds since the start.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }
}
