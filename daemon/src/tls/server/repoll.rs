//! A waker that polls a future again at once when the future has woken itself.
//!
//! hyper reads the body of a request when the service polls it, and wakes the service when data is there; both run in one task,
//! which therefore wakes itself. The runtime queues such a task behind all others and wakes another thread to run it: an
//! admission review passed through the queue three times and moved between cores twice. With this waker it continues on its
//! thread. No published crate does this; the runtime has no option for it.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::AcqRel, Ordering::Acquire},
    },
    task::{Context, Poll, Wake, Waker},
};

use futures::task::AtomicWaker;

/// The future is not being polled. A wake-up wakes the task.
const IDLE: u8 = 0;
/// The future is being polled.
const POLLED: u8 = 1;
/// The future is to be polled: by the present poll, or by the runtime.
const WOKEN: u8 = 2;

/// Most polls in a row. A request takes three; a future that needs more yields to other tasks first.
const MOST: usize = 4;

/// The waker of the future, in front of the waker of its task.
struct Relay {
    state: AtomicU8,
    task: AtomicWaker,
}

impl Wake for Relay {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(WOKEN, AcqRel) == IDLE {
            self.task.wake();
        }
    }
}

/// Runs a future, which is polled again at once when it is woken while it is polled.
pub(super) async fn repolled<F: Future>(future: F) -> F::Output {
    let relay = Arc::new(Relay { state: AtomicU8::new(IDLE), task: AtomicWaker::new() });
    let waker = Waker::from(Arc::clone(&relay));
    let mut future = pin!(future);
    poll_fn(|context| {
        relay.task.register(context.waker());
        for _ in 0..MOST {
            relay.state.swap(POLLED, AcqRel);
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return Poll::Ready(output);
            }
            if relay.state.compare_exchange(POLLED, IDLE, AcqRel, Acquire).is_ok() {
                return Poll::Pending;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    /// Counts the wake-ups of the task.
    #[derive(Default)]
    struct Task(AtomicUsize);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    /// Creates a task and its waker.
    fn task() -> (Arc<Task>, Waker) {
        let task = Arc::new(Task::default());
        (Arc::clone(&task), Waker::from(task))
    }

    #[test]
    fn future_that_wakes_itself_continues_without_a_wake_up_of_its_task() {
        let (task, waker) = task();
        let mut polls = 0;
        let future = repolled(poll_fn(|context| {
            polls += 1;
            if polls == 3 {
                return Poll::Ready("done");
            }
            context.waker().wake_by_ref();
            Poll::Pending
        }));
        assert_eq!(pin!(future).poll(&mut Context::from_waker(&waker)), Poll::Ready("done"));
        assert_eq!(task.0.load(SeqCst), 0);
    }

    #[test]
    fn future_that_keeps_waking_itself_yields_to_other_tasks() {
        let (task, waker) = task();
        let polls = AtomicUsize::new(0);
        let mut future = pin!(repolled(poll_fn(|context| {
            polls.fetch_add(1, SeqCst);
            context.waker().wake_by_ref();
            Poll::<()>::Pending
        })));
        for turn in 1..4 {
            assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            assert_eq!((polls.load(SeqCst), task.0.load(SeqCst)), (turn * MOST, turn));
        }
    }

    #[test]
    fn task_is_woken_once_between_two_polls() {
        let (task, waker) = task();
        let (kept, wakers) = std::sync::mpsc::channel();
        let mut future = pin!(repolled(poll_fn(|context| {
            kept.send(context.waker().clone()).unwrap();
            Poll::<()>::Pending
        })));
        for turn in 1..4 {
            assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            let waker = wakers.recv().unwrap();
            waker.wake_by_ref();
            waker.wake();
            assert_eq!((task.0.load(SeqCst), wakers.try_recv().is_err()), (turn, true));
        }
    }
}
