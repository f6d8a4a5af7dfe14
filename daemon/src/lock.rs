//! Locks of values that a panic does not leave half changed.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a value. A panic of another holder does not matter.
pub fn lock<T: ?Sized>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}
