//! Prints progress with timestamps.

use std::time::Instant;

/// Prints steps with the time since the start of the program.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    started: Instant,
    to_stderr: bool,
}

impl Progress {
    /// Starts the clock.
    #[must_use]
    pub fn start() -> Self {
        Self { started: Instant::now(), to_stderr: false }
    }

    /// Prints to standard error, for commands whose standard output is a result.
    #[must_use]
    pub fn to_stderr(self) -> Self {
        Self { to_stderr: true, ..self }
    }

    /// Prints one line.
    pub fn step(&self, text: impl std::fmt::Display) {
        let line = format!("[{:6.1}s] {text}", self.started.elapsed().as_secs_f64());
        if self.to_stderr {
            eprintln!("{line}");
        } else {
            println!("{line}");
        }
    }

    /// Returns the seconds since the start.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }
}
