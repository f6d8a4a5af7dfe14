//! Limits that requests share.
//!
//! - [`memory`]: the memory that bodies and answers may hold at a time ([`MemoryBudget`]), and the weight of a JSON text.
//! - [`body`]: discarding the rest of a body, within bounds of size and time.

pub(crate) mod body;
pub(crate) mod memory;

pub(crate) use memory::{MemoryBudget, Reservation};
