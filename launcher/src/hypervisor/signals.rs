//! Domain events: callbacks record *that* something changed, and the engine reads *what*, so no event is lost in a full
//! queue.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    time::SystemTime,
};

use tokio::sync::Notify;

/// States of the guest agent's connection.
const UNKNOWN: u8 = 0;
const CONNECTED: u8 = 1;
const DISCONNECTED: u8 = 2;

/// Signals from the callbacks of one connection to the engine.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    changed: Notify,
    closed: AtomicBool,
    crashed: AtomicBool,
    guest_agent: AtomicU8,
    ran_at: OnceLock<SystemTime>,
}

impl Signals {
    /// Waits for the next change. A change that happened before the call is not lost.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Reports the end of the connection.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Reports a crash of the guest's kernel since the last call.
    pub(crate) fn take_crashed(&self) -> bool {
        self.crashed.swap(false, Ordering::AcqRel)
    }

    /// Returns the state of the guest agent's connection; `None` before the first event.
    pub(crate) fn guest_agent_connected(&self) -> Option<bool> {
        match self.guest_agent.load(Ordering::Acquire) {
            CONNECTED => Some(true),
            DISCONNECTED => Some(false),
            _ => None,
        }
    }

    /// Returns when the guest first ran.
    pub(crate) fn ran_at(&self) -> Option<SystemTime> {
        self.ran_at.get().copied()
    }

    /// Records that the guest runs.
    pub(crate) fn set_running(&self) {
        self.ran_at.get_or_init(SystemTime::now);
        self.set_changed();
    }

    /// Records a change of the domain.
    pub(crate) fn set_changed(&self) {
        self.changed.notify_one();
    }

    /// Records the end of the connection.
    pub(crate) fn set_closed(&self) {
        self.closed.store(true, Ordering::Release);
        self.set_changed();
    }

    /// Records a crash of the guest's kernel.
    pub(crate) fn set_crashed(&self) {
        self.crashed.store(true, Ordering::Release);
        self.set_changed();
    }

    /// Records the state of the guest agent's connection.
    pub(crate) fn set_guest_agent_connected(&self, connected: Option<bool>) {
        let state = connected.map_or(UNKNOWN, |connected| if connected { CONNECTED } else { DISCONNECTED });
        self.guest_agent.store(state, Ordering::Release);
        self.set_changed();
    }
}
