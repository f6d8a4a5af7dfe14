//! The open streams of a machine: one console, one display; a new one ends the former.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use process::CancellationToken;

/// The open streams of one machine.
#[derive(Default)]
pub struct Sessions {
    /// The serial console.
    pub console: Slot,
    /// The display.
    pub vnc: Slot,
}

impl Sessions {
    /// Ends all streams: the machine has gone.
    pub fn end_all(&self) {
        self.console.end();
        self.vnc.end();
    }
}

/// Place for one stream.
#[derive(Clone, Default)]
pub struct Slot {
    current: Arc<Mutex<Option<CancellationToken>>>,
}

/// A stream that holds its place. Gives it up when dropped.
pub struct Session {
    slot: Slot,
    ended: CancellationToken,
}

impl Slot {
    /// Takes the place. A stream that has it is ended, unless it is to be preserved: then there is no place.
    pub fn claim(&self, preserve: bool) -> Option<Session> {
        let mut current = self.lock();
        if let Some(former) = current.as_ref() {
            if preserve {
                return None;
            }
            former.cancel();
        }
        let ended = CancellationToken::new();
        *current = Some(ended.clone());
        drop(current);
        Some(Session { slot: self.clone(), ended })
    }

    fn end(&self) {
        if let Some(session) = self.lock().take() {
            session.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<CancellationToken>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// Resolves when the stream has to end because another one took its place or the machine went.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let mut current = self.slot.lock();
        // A place that was taken over is a cancelled one; it belongs to the next.
        if !self.ended.is_cancelled() {
            *current = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_stream_ends_the_former_and_the_former_does_not_free_the_place() {
        let slot = Slot::default();
        let first = slot.claim(false).unwrap();
        let second = slot.claim(false).unwrap();
        assert!(first.ended.is_cancelled());
        drop(first);
        assert!(slot.claim(true).is_none(), "the second still has the place");
        drop(second);
        assert!(slot.claim(true).is_some());
    }

    #[test]
    fn a_stream_is_preserved_when_asked_for() {
        let slot = Slot::default();
        let first = slot.claim(true).unwrap();
        assert!(slot.claim(true).is_none());
        assert!(!first.ended.is_cancelled());
    }

    #[test]
    fn all_end_with_the_machine() {
        let sessions = Sessions::default();
        let (console, vnc) = (sessions.console.claim(false).unwrap(), sessions.vnc.claim(false).unwrap());
        sessions.end_all();
        assert!(console.ended.is_cancelled() && vnc.ended.is_cancelled());
        drop((console, vnc));
        assert!(sessions.vnc.claim(true).is_some());
    }
}
