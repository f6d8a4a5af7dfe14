//! The open streams of a machine: one console, one display, where a new one ends the former; the channels for USB
//! redirection, each of one client; and connections to ports of the guest, any number.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Channels of a machine for USB redirection.
const USB_CHANNELS: usize = 4;

/// The open streams of one machine.
#[derive(Default)]
pub struct Sessions {
    /// The serial console.
    pub console: Slot,
    /// The display.
    pub vnc: Slot,
    /// The channels for USB redirection.
    usb: [Slot; USB_CHANNELS],
    /// Streams without a place of their own.
    others: watch::Sender<Option<Ending>>,
}

/// Why a stream has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Another client has taken its place.
    Replaced,
    /// The machine has left this node.
    MachineGone,
    /// This agent stops.
    AgentStops,
}

impl Sessions {
    /// Ends all streams.
    pub fn end_all(&self, why: Ending) {
        self.console.end(why);
        self.vnc.end(why);
        for slot in &self.usb {
            slot.end(why);
        }
        self.others.send_replace(Some(why));
    }

    /// One more stream, which takes no place.
    pub fn join(&self) -> Session {
        Session { slot: None, ended: self.others.subscribe() }
    }

    /// The first channel for USB redirection that nobody uses.
    pub fn claim_usb(&self) -> Option<(u32, Session)> {
        (0..).zip(&self.usb).find_map(|(channel, slot)| Some((channel, slot.claim(true)?)))
    }
}

/// Place for one stream.
#[derive(Clone, Default)]
pub struct Slot {
    current: Arc<Mutex<Option<watch::Sender<Option<Ending>>>>>,
}

/// A stream that holds its place, if it has one. Gives it up when dropped.
pub struct Session {
    slot: Option<Slot>,
    ended: watch::Receiver<Option<Ending>>,
}

impl Slot {
    /// Takes the place. A stream that has it is ended, unless it is to be preserved: then there is no place.
    pub fn claim(&self, preserve: bool) -> Option<Session> {
        let mut current = self.lock();
        if let Some(former) = current.as_ref() {
            if preserve {
                return None;
            }
            former.send_replace(Some(Ending::Replaced));
        }
        let (end, ended) = watch::channel(None);
        *current = Some(end);
        drop(current);
        Some(Session { slot: Some(self.clone()), ended })
    }

    fn end(&self, why: Ending) {
        if let Some(session) = self.lock().take() {
            session.send_replace(Some(why));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<watch::Sender<Option<Ending>>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// Resolves when the stream has to end, and says why.
    pub async fn ended(&self) -> Ending {
        let mut ended = self.ended.clone();
        // Who drops the other end has told before.
        ended.wait_for(Option::is_some).await.ok().and_then(|why| *why).unwrap_or(Ending::MachineGone)
    }

    fn has_ended(&self) -> bool {
        self.ended.borrow().is_some()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(slot) = &self.slot else { return };
        let mut current = slot.lock();
        // The place of a stream that was ended belongs to another one, or to nobody.
        if !self.has_ended() {
            *current = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_new_stream_ends_the_former_and_the_former_does_not_free_the_place() {
        let slot = Slot::default();
        let first = slot.claim(false).unwrap();
        let second = slot.claim(false).unwrap();
        assert_eq!(first.ended().await, Ending::Replaced);
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
        assert!(!first.has_ended());
    }

    #[tokio::test]
    async fn all_end_with_the_machine() {
        let sessions = Sessions::default();
        let (console, vnc) = (sessions.console.claim(false).unwrap(), sessions.vnc.claim(false).unwrap());
        let (_, usb) = sessions.claim_usb().unwrap();
        let (first, second) = (sessions.join(), sessions.join());
        sessions.end_all(Ending::AgentStops);
        for session in [&console, &vnc, &usb, &first, &second] {
            assert_eq!(session.ended().await, Ending::AgentStops);
        }
        drop((console, vnc));
        assert!(sessions.vnc.claim(true).is_some());
    }

    #[test]
    fn usb_channels_are_taken_in_order_and_not_taken_over() {
        let sessions = Sessions::default();
        let mut held: Vec<_> = (0..4).map(|_| sessions.claim_usb().unwrap()).collect();
        assert_eq!(held.iter().map(|(channel, _)| *channel).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(sessions.claim_usb().is_none());
        drop(held.remove(1));
        assert_eq!(sessions.claim_usb().unwrap().0, 1);
    }
}
