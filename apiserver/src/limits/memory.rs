//! Memory that requests may hold at a time.
//!
//! Bytes are counted as they arrive, so a client cannot take memory by announcing a size; only API servers can, for reviews. A
//! [`Reservation`] grows with the body that it stands for and returns its bytes to the budget when it is dropped.

use std::{slice, sync::Arc};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Least weight of a JSON value in bytes: some take two bytes as text and a kilobyte as a value.
pub(crate) const VALUE: usize = 160;

/// The budget has not enough bytes left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory budget is exhausted")]
pub(crate) struct Exhausted;

/// A number of bytes that requests share. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct MemoryBudget {
    bytes: Arc<Semaphore>,
}

/// Bytes of a budget, returned to it on drop.
#[derive(Debug, Default)]
pub(crate) struct Reservation {
    permit: Option<OwnedSemaphorePermit>,
}

impl MemoryBudget {
    /// Returns a budget of `bytes`.
    pub(crate) fn new(bytes: usize) -> Self {
        Self { bytes: Arc::new(Semaphore::new(bytes)) }
    }

    /// Returns the bytes that are not reserved.
    #[cfg(test)]
    pub(crate) fn available(&self) -> usize {
        self.bytes.available_permits()
    }

    /// Adds `more` bytes to a reservation, or fails at once.
    pub(crate) fn try_reserve(&self, reservation: &mut Reservation, more: usize) -> Result<(), Exhausted> {
        let permit = self.bytes.clone().try_acquire_many_owned(permits(more)).map_err(|_| Exhausted)?;
        reservation.add(permit);
        Ok(())
    }

    /// Adds `more` bytes to a reservation, after a wait for bytes that other requests hold.
    pub(crate) async fn reserve(&self, reservation: &mut Reservation, more: usize) {
        // The semaphore is never closed.
        if let Ok(permit) = self.bytes.clone().acquire_many_owned(permits(more)).await {
            reservation.add(permit);
        }
    }
}

impl Reservation {
    /// Returns the reserved bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }

    /// Adds another reservation of the same budget.
    pub(crate) fn merge(&mut self, other: Self) {
        if let Some(permit) = other.permit {
            self.add(permit);
        }
    }

    fn add(&mut self, more: OwnedSemaphorePermit) {
        match &mut self.permit {
            Some(permit) => permit.merge(more),
            permit @ None => *permit = Some(more),
        }
    }
}

fn permits(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Returns the approximate number of values of a JSON text: each but the first follows a bracket or a comma outside of
/// strings.
pub(crate) fn values(json: &[u8]) -> usize {
    let mut count = 0;
    let mut bytes = json.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'{' | b'[' | b',' => count += 1,
            b'"' => skip_string(&mut bytes),
            _ => {}
        }
    }
    count
}

/// Skips the rest of a string. Most of a review is strings, hence a loop of their own.
fn skip_string(bytes: &mut slice::Iter<'_, u8>) {
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => return,
            b'\\' => {
                bytes.next();
            }
            _ => {}
        }
    }
}

/// Returns the bytes that a JSON text counts for.
pub(crate) fn weight(json: &[u8]) -> usize {
    values(json).saturating_mul(VALUE).max(json.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_reservation_returns_its_bytes() {
        let budget = MemoryBudget::new(10);
        let mut first = Reservation::default();
        budget.try_reserve(&mut first, 4).unwrap();
        budget.try_reserve(&mut first, 3).unwrap();
        let mut second = Reservation::default();
        assert_eq!(budget.try_reserve(&mut second, 4), Err(Exhausted));
        assert_eq!((first.bytes(), second.bytes(), budget.available()), (7, 0, 3));
        drop(first);
        assert_eq!(budget.available(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn reservation_waits_for_bytes_of_other_requests() {
        let budget = MemoryBudget::new(10);
        let mut first = Reservation::default();
        budget.reserve(&mut first, 10).await;
        let mut second = Reservation::default();
        let release = async {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            drop(first);
        };
        futures::join!(budget.reserve(&mut second, 5), release);
        assert_eq!((second.bytes(), budget.available()), (5, 5));
    }

    #[test]
    fn values_are_counted_without_parsing() {
        for (json, count) in [
            ("", 0),
            ("1", 0),
            ("{}", 1),
            ("[{},{},{}]", 6),
            (r#"{"a":1,"b":[true,null]}"#, 4),
            (r#"{"a":"{[,\"{[,"}"#, 1),
            (r#"{"a":"\\","b":2}"#, 2),
        ] {
            assert_eq!(values(json.as_bytes()), count, "{json}");
        }
        let tolerations = format!("[{}]", vec!["{}"; 100_000].join(","));
        assert!(values(tolerations.as_bytes()) > 32 << 10 && weight(tolerations.as_bytes()) > 9 << 20);
        let text = format!(r#"{{"userData":"{}"}}"#, ",{[".repeat(100_000));
        assert_eq!(weight(text.as_bytes()), text.len());
    }
}
