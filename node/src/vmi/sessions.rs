//! Open streams of a VMI: one console and one display, where a new stream ends the former one; channels for USB redirection, one
//! client each; and any number of connections to ports of the guest.

use std::sync::{Arc, Mutex};

use daemon::lock;
use tokio::sync::watch;

/// USB redirection channels of a VMI.
const USB_CHANNELS: usize = 4;

/// Open streams of one VMI.
#[derive(Default)]
pub(crate) struct Sessions {
    /// The serial console.
    pub console: Slot,
    /// The display.
    pub vnc: Slot,
    /// USB redirection channels.
    usb: [Slot; USB_CHANNELS],
    /// Streams without a slot.
    others: watch::Sender<Option<Ending>>,
}

/// Reason why a stream has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Another client opened the same stream.
    Replaced,
    /// The VMI has left this node.
    VmiGone,
    /// virt-handler stops.
    HandlerStops,
}

impl Sessions {
    /// Ends all streams.
    pub(crate) fn end_all(&self, why: Ending) {
        self.console.end(why);
        self.vnc.end(why);
        for slot in &self.usb {
            slot.end(why);
        }
        self.others.send_replace(Some(why));
    }

    /// Adds a stream without a slot.
    pub(crate) fn join(&self) -> Session {
        Session { slot: None, ended: self.others.subscribe() }
    }

    /// Claims the first free USB redirection channel.
    pub(crate) fn claim_usb(&self) -> Option<(u32, Session)> {
        (0..).zip(&self.usb).find_map(|(channel, slot)| Some((channel, slot.claim(true)?)))
    }
}

/// Slot for one stream.
#[derive(Clone, Default)]
pub(crate) struct Slot {
    current: Arc<Mutex<Option<watch::Sender<Option<Ending>>>>>,
}

/// An open stream. Dropping it frees its slot.
pub(crate) struct Session {
    slot: Option<Slot>,
    ended: watch::Receiver<Option<Ending>>,
}

impl Slot {
    /// Claims the slot and ends the stream that uses it. With `preserve`, a slot in use is not claimed.
    pub(crate) fn claim(&self, preserve: bool) -> Option<Session> {
        let mut current = lock(&self.current);
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
        if let Some(session) = lock(&self.current).take() {
            session.send_replace(Some(why));
        }
    }
}

impl Session {
    /// Waits until the stream has to end and returns the reason.
    pub(crate) async fn ended(&self) -> Ending {
        let mut ended = self.ended.clone();
        // The sender is dropped only after a reason was sent.
        ended.wait_for(Option::is_some).await.ok().and_then(|why| *why).unwrap_or(Ending::VmiGone)
    }

    fn has_ended(&self) -> bool {
        self.ended.borrow().is_some()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(slot) = &self.slot else { return };
        let mut current = lock(&slot.current);
        // The slot of an ended stream is free or belongs to another stream.
        if !self.has_ended() {
            *current = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_new_stream_ends_the_former_which_does_not_free_the_slot() {
        let slot = Slot::default();
        let first = slot.claim(false).unwrap();
        let second = slot.claim(false).unwrap();
        assert_eq!(first.ended().await, Ending::Replaced);
        drop(first);
        assert!(slot.claim(true).is_none(), "the second stream uses the slot");
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
    async fn all_streams_end_with_the_vmi() {
        let sessions = Sessions::default();
        let (console, vnc) = (sessions.console.claim(false).unwrap(), sessions.vnc.claim(false).unwrap());
        let (_, usb) = sessions.claim_usb().unwrap();
        let (first, second) = (sessions.join(), sessions.join());
        sessions.end_all(Ending::HandlerStops);
        for session in [&console, &vnc, &usb, &first, &second] {
            assert_eq!(session.ended().await, Ending::HandlerStops);
        }
        drop((console, vnc));
        assert!(sessions.vnc.claim(true).is_some());
    }

    #[test]
    fn usb_channels_are_claimed_in_order_and_not_shared() {
        let sessions = Sessions::default();
        let mut held: Vec<_> = (0..4).map(|_| sessions.claim_usb().unwrap()).collect();
        assert_eq!(held.iter().map(|(channel, _)| *channel).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(sessions.claim_usb().is_none());
        drop(held.remove(1));
        assert_eq!(sessions.claim_usb().unwrap().0, 1);
    }
}
