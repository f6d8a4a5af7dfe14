//! Panics of futures as errors.

use std::{any::Any, panic::AssertUnwindSafe};

use futures::FutureExt;

/// A panic that was caught. Displays the message of the panic.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Panic(String);

/// Runs a future and catches its panic.
///
/// State that the future shares with others may be half changed after a panic: locks must not be relied on to be
/// poisoned, and callers must read such state anew.
pub async fn catch<T>(future: impl Future<Output = T>) -> Result<T, Panic> {
    AssertUnwindSafe(future).catch_unwind().await.map_err(|payload| Panic(message(&*payload)))
}

/// Returns the message of a panic. Payloads other than text have none.
fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "panic without a message".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn result_is_passed_on() {
        assert_eq!(catch(async { 7 }).await, Ok(7));
    }

    #[tokio::test]
    async fn message_of_a_panic_is_kept() {
        let number = 7;
        assert_eq!(catch(async { panic!("fixed") }).await, Err::<(), _>(Panic("fixed".to_owned())));
        assert_eq!(catch(async { panic!("number {number}") }).await, Err::<(), _>(Panic("number 7".to_owned())));
        let other = catch(async { std::panic::panic_any(number) }).await;
        assert_eq!(other, Err::<(), _>(Panic("panic without a message".to_owned())));
    }
}
