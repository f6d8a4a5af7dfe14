//! What may be asked of the machine, judged before it is queued: by what is known of the machine and what waits already.

use std::collections::VecDeque;

use api::VirtualMachineInstance;
use protocol::Lifecycle;
use tokio::sync::oneshot;

use super::RequestError;
use crate::domain::unsupported::Unsupported;

/// Most requests that wait.
const QUEUE_LIMIT: usize = 16;

/// How a request is answered.
pub type Reply<T> = oneshot::Sender<Result<T, RequestError>>;

/// A request to the state driver.
#[derive(Debug)]
pub enum Request {
    /// The agent says hello and hands over what the node knows.
    Hello {
        /// Files of libvirt's cache.
        cache: Vec<protocol::CacheFile>,
        /// Software emulation may be used.
        allow_emulation: bool,
        /// Answer.
        reply: Reply<()>,
    },
    /// The machine as it should be; answered with whether this started it.
    Sync {
        /// The machine.
        vmi: Box<VirtualMachineInstance>,
        /// Its fields that nobody carries out.
        unsupported: Unsupported,
        /// What the agent knows.
        options: protocol::MachineOptions,
        /// Answer.
        reply: Reply<bool>,
    },
    /// An action without further data.
    Act {
        /// The action.
        action: Action,
        /// Answer.
        reply: Reply<()>,
    },
}

/// Actions on a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the guest to power off, force it after so many seconds.
    Shutdown {
        /// Seconds.
        grace: u64,
    },
    /// The pod is being ended: as `Shutdown`, and the launcher ends after it.
    Terminate {
        /// Seconds.
        grace: u64,
    },
    /// Stop at once.
    Kill,
    /// Stop the processors.
    Pause,
    /// Let the processors run.
    Unpause,
    /// Press the reset button.
    Reset,
    /// Ask the guest to reboot.
    SoftReboot,
    /// The agent has recorded the final state.
    Finish,
}

/// Requests that wait, and what is known to judge new ones by.
#[derive(Debug)]
pub struct RequestQueue {
    waiting: VecDeque<Request>,
    lifecycle: Lifecycle,
    ended: bool,
}

impl Default for RequestQueue {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), lifecycle: Lifecycle::NoDomain, ended: false }
    }
}

impl RequestQueue {
    /// Tells what the driver knows now.
    pub fn set_known(&mut self, lifecycle: Lifecycle, ended: bool) {
        self.lifecycle = lifecycle;
        self.ended = ended;
    }

    /// Queues a request.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn push(&mut self, request: Request) -> Result<(), RequestError> {
        self.judge(&request)?;
        self.waiting.push_back(request);
        Ok(())
    }

    /// The next request. What ends the machine comes first.
    pub fn pop(&mut self) -> Option<Request> {
        let ending = self.waiting.iter().position(|request| {
            matches!(request, Request::Act { action: Action::Kill | Action::Terminate { .. } | Action::Finish, .. })
        });
        self.waiting.remove(ending.unwrap_or(0))
    }

    /// Whether a request waits that makes a start pointless.
    pub fn wants_end(&self) -> bool {
        self.waiting.iter().any(|request| {
            matches!(
                request,
                Request::Act { action: Action::Kill | Action::Terminate { .. } | Action::Shutdown { .. }, .. }
            )
        })
    }

    fn judge(&self, request: &Request) -> Result<(), RequestError> {
        let ending =
            matches!(request, Request::Act { action: Action::Terminate { .. } | Action::Kill | Action::Finish, .. });
        if self.waiting.len() >= QUEUE_LIMIT && !(ending && self.waiting.len() < QUEUE_LIMIT * 2) {
            return Err(RequestError::Busy);
        }
        let start_waits = self.waiting.iter().any(|request| matches!(request, Request::Sync { .. }));
        match request {
            Request::Hello { .. } => Ok(()),
            Request::Sync { .. } if self.ended => Err(RequestError::Ended),
            Request::Sync { .. } if self.wants_end() => Err(RequestError::Ending),
            Request::Sync { .. } => Ok(()),
            Request::Act { action, .. } => match action {
                Action::Shutdown { .. } | Action::Terminate { .. } | Action::Kill => Ok(()),
                Action::Finish if self.ended => Ok(()),
                Action::Finish => Err(RequestError::NotEnded),
                Action::Pause | Action::Unpause | Action::Reset | Action::SoftReboot => match self.lifecycle {
                    Lifecycle::Running | Lifecycle::Paused | Lifecycle::PmSuspended | Lifecycle::ShuttingDown => Ok(()),
                    _ if start_waits => Ok(()),
                    _ => Err(RequestError::NoDomain),
                },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn act(action: Action) -> Request {
        Request::Act { action, reply: oneshot::channel().0 }
    }

    fn sync() -> Request {
        Request::Sync {
            vmi: Box::default(),
            unsupported: Unsupported::default(),
            options: protocol::MachineOptions::default(),
            reply: oneshot::channel().0,
        }
    }

    fn refused(queue: &mut RequestQueue, request: Request) -> Option<RequestError> {
        queue.push(request).err()
    }

    #[test]
    fn a_machine_that_is_not_there_cannot_be_paused_but_one_that_is_about_to_start_can() {
        let mut queue = RequestQueue::default();
        assert!(matches!(refused(&mut queue, act(Action::Pause)), Some(RequestError::NoDomain)));
        assert!(refused(&mut queue, sync()).is_none());
        assert!(refused(&mut queue, act(Action::Pause)).is_none());
    }

    #[test]
    fn nothing_starts_after_the_end_was_asked_for() {
        let mut queue = RequestQueue::default();
        assert!(refused(&mut queue, act(Action::Kill)).is_none());
        assert!(matches!(refused(&mut queue, sync()), Some(RequestError::Ending)));
        queue.set_known(Lifecycle::Shutoff, true);
        assert!(matches!(refused(&mut queue, sync()), Some(RequestError::Ended)));
    }

    #[test]
    fn finish_is_for_machines_that_have_ended() {
        let mut queue = RequestQueue::default();
        assert!(matches!(refused(&mut queue, act(Action::Finish)), Some(RequestError::NotEnded)));
        queue.set_known(Lifecycle::Shutoff, true);
        assert!(refused(&mut queue, act(Action::Finish)).is_none());
    }

    #[test]
    fn the_queue_is_bounded_and_a_kill_still_fits_and_goes_first() {
        let mut queue = RequestQueue::default();
        queue.set_known(Lifecycle::Running, false);
        for _ in 0..QUEUE_LIMIT {
            assert!(refused(&mut queue, act(Action::Pause)).is_none());
        }
        assert!(matches!(refused(&mut queue, act(Action::Pause)), Some(RequestError::Busy)));
        assert!(refused(&mut queue, act(Action::Kill)).is_none());
        assert!(matches!(queue.pop(), Some(Request::Act { action: Action::Kill, .. })));
    }
}
