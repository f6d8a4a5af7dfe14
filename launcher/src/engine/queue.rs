//! Requests to the engine, checked before they are queued against the domain's state and the queued requests.

use std::collections::VecDeque;

use api::VirtualMachineInstance;
use protocol::Lifecycle;
use tokio::sync::oneshot;

use super::RequestError;
use crate::domain::unsupported::Unsupported;

/// Limit of queued requests.
const QUEUE_LIMIT: usize = 16;

/// Sender of a request's result.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, RequestError>>;

/// A request to the state driver.
#[derive(Debug)]
pub(crate) enum Request {
    /// virt-handler's Hello with the node's capabilities.
    Hello {
        /// Files of libvirt's cache.
        cache: Vec<protocol::CacheFile>,
        /// Software emulation is allowed.
        allow_emulation: bool,
        /// Sender of the result.
        reply: Reply<()>,
    },
    /// The wanted VMI; the result is true if this started the domain.
    Sync {
        /// The VMI.
        vmi: Box<VirtualMachineInstance>,
        /// Its fields that no component carries out.
        unsupported: Box<Unsupported>,
        /// Options from virt-handler.
        options: protocol::MachineOptions,
        /// Sender of the result.
        reply: Reply<bool>,
    },
    /// An action without further data.
    Act {
        /// The action.
        action: Action,
        /// Sender of the result.
        reply: Reply<()>,
    },
}

/// Actions on the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Request a shutdown, destroy the domain after the grace period.
    Shutdown {
        /// Grace period in seconds.
        grace: u64,
    },
    /// The pod terminates: as `Shutdown`, then the launcher exits.
    Terminate {
        /// Grace period in seconds.
        grace: u64,
    },
    /// Destroy the domain.
    Kill,
    /// Pause the guest's CPUs.
    Pause,
    /// Resume the guest's CPUs.
    Unpause,
    /// Press the reset button.
    Reset,
    /// Request a reboot of the guest.
    SoftReboot,
    /// virt-handler has recorded the final state.
    Finish,
}

/// Queued requests, and the state to check new ones against.
#[derive(Debug)]
pub(crate) struct RequestQueue {
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
    /// Sets the state to check requests against.
    pub(crate) fn set_domain_state(&mut self, lifecycle: Lifecycle, ended: bool) {
        self.lifecycle = lifecycle;
        self.ended = ended;
    }

    /// Queues a request.
    ///
    /// # Errors
    /// When the request is rejected.
    pub(crate) fn push(&mut self, request: Request) -> Result<(), RequestError> {
        self.judge(&request)?;
        self.waiting.push_back(request);
        Ok(())
    }

    /// Returns the next request. Requests that end the domain come first.
    pub(crate) fn pop(&mut self) -> Option<Request> {
        let ending = self.waiting.iter().position(|request| {
            matches!(request, Request::Act { action: Action::Kill | Action::Terminate { .. } | Action::Finish, .. })
        });
        self.waiting.remove(ending.unwrap_or(0))
    }

    /// Reports a queued request that makes a start pointless.
    pub(crate) fn has_end_request(&self) -> bool {
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
            Request::Sync { .. } if self.has_end_request() => Err(RequestError::Ending),
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
            unsupported: Box::default(),
            options: protocol::MachineOptions::default(),
            reply: oneshot::channel().0,
        }
    }

    fn refused(queue: &mut RequestQueue, request: Request) -> Option<RequestError> {
        queue.push(request).err()
    }

    #[test]
    fn a_missing_domain_cannot_be_paused_but_a_starting_one_can() {
        let mut queue = RequestQueue::default();
        assert!(matches!(refused(&mut queue, act(Action::Pause)), Some(RequestError::NoDomain)));
        assert!(refused(&mut queue, sync()).is_none());
        assert!(refused(&mut queue, act(Action::Pause)).is_none());
    }

    #[test]
    fn nothing_starts_after_a_request_to_end() {
        let mut queue = RequestQueue::default();
        assert!(refused(&mut queue, act(Action::Kill)).is_none());
        assert!(matches!(refused(&mut queue, sync()), Some(RequestError::Ending)));
        queue.set_domain_state(Lifecycle::Shutoff, true);
        assert!(matches!(refused(&mut queue, sync()), Some(RequestError::Ended)));
    }

    #[test]
    fn finish_needs_an_ended_domain() {
        let mut queue = RequestQueue::default();
        assert!(matches!(refused(&mut queue, act(Action::Finish)), Some(RequestError::NotEnded)));
        queue.set_domain_state(Lifecycle::Shutoff, true);
        assert!(refused(&mut queue, act(Action::Finish)).is_none());
    }

    #[test]
    fn the_queue_is_bounded_and_a_kill_still_fits_and_goes_first() {
        let mut queue = RequestQueue::default();
        queue.set_domain_state(Lifecycle::Running, false);
        for _ in 0..QUEUE_LIMIT {
            assert!(refused(&mut queue, act(Action::Pause)).is_none());
        }
        assert!(matches!(refused(&mut queue, act(Action::Pause)), Some(RequestError::Busy)));
        assert!(refused(&mut queue, act(Action::Kill)).is_none());
        assert!(matches!(queue.pop(), Some(Request::Act { action: Action::Kill, .. })));
    }
}
