//! Properties of admission, and of the checks of disk images, that must hold for any input.
//!
//! Each module has one function `check`, which panics if a property is violated and returns false for input of another kind.
//! `targets/` wraps them as fuzz targets. The tests here run them with the seeds and with variations, so that they are
//! compiled and run with all other tests.

#![allow(clippy::expect_used, clippy::panic, reason = "a fuzz target reports findings by a panic")]

pub mod images;
pub mod objects;
pub mod patches;
pub mod review_bytes;
pub mod specs;

mod review;

#[cfg(test)]
mod tests;
