//! The sampling process.

use std::io;

use crate::control::SAMPLE;
#[cfg(target_arch = "x86_64")]
use crate::sampler;

/// Samples the parent and returns the result if this process was started for it. Programs must call it first.
///
/// # Errors
/// Fails if the pipes to the parent fail.
pub fn sample_parent() -> Option<io::Result<()>> {
    std::env::args_os().nth(1).is_some_and(|argument| argument == SAMPLE).then(run_sampler)
}

#[cfg(target_arch = "x86_64")]
fn run_sampler() -> io::Result<()> {
    sampler::run()
}

#[cfg(not(target_arch = "x86_64"))]
fn run_sampler() -> io::Result<()> {
    io::Write::write_all(&mut io::stdout(), b"-profiling is not supported on this architecture")
}
