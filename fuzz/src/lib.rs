//! What must hold of whatever is sent to admission.
//!
//! Each module has one function `check`, which panics when it does not hold, and says whether the input was one of
//! its kind. `targets/` makes fuzz targets of them; the tests here feed them the seeds and variations of these, so that
//! they are compiled and run with all other tests.

#![allow(clippy::expect_used, clippy::panic, reason = "a panic is how a fuzz target tells what it has found")]

pub mod bodies;
pub mod objects;
pub mod patches;
pub mod specs;

mod asking;

#[cfg(test)]
mod tests;
