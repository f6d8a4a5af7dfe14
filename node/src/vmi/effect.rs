//! An effect as a plain value: [`super::decide`] returns it, [`super::effects`] executes it.

use std::{sync::Arc, time::Duration};

use super::{
    call::AnyCall,
    desired::Desired,
    event::Event,
    migration_facts::Route,
    observed::{CONNECT, Now, Observed, RECORD},
};

/// An effect. Each kind is in progress at most once.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Effect {
    /// Waits for the socket of a pod's launcher and connects.
    Connect {
        /// UID of the pod.
        pod: String,
        /// Longest wait for the socket.
        within: Duration,
    },
    /// Calls the connected launcher.
    Call(Arc<dyn AnyCall>),
    /// Relays the connections of a migration; `None` ends that.
    Relay(Option<Route>),
    /// Writes the status, then publishes the events.
    Write(Box<Desired>),
    /// Writes the progress of a migration.
    WriteProgress(String),
    /// Reads the object.
    Read,
    Publish(Event),
    /// Ends the task: nothing is left to do.
    Retire,
}

impl Observed {
    /// Marks an effect as in progress.
    pub(super) fn begin(&mut self, effect: &Effect, now: Now) {
        match effect {
            Effect::Connect { .. } => {
                self.busy.insert(CONNECT);
            }
            Effect::Call(call) => call.begin(self, now),
            Effect::Relay(route) => self.route.clone_from(route),
            Effect::WriteProgress(_) => {
                self.busy.insert(RECORD);
                self.progress_written_at = Some(now.since_start);
            }
            Effect::Write(..) | Effect::Read => {
                self.busy.insert(RECORD);
            }
            Effect::Publish(_) | Effect::Retire => {}
        }
    }
}
