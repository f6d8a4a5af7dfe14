//! Polling again at once what has woken itself.
//!
//! hyper reads the body of a request when the service asks for it, and tells the service when it is there, both by waking the
//! task in which both run. The runtime puts such a task behind all others, and wakes another thread that could take it: a
//! review went through the queue three times and between cores twice. Here it goes on where it is.

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

/// Nobody polls, and whoever wakes has to see to it that somebody does.
const IDLE: u8 = 0;
/// It is polled now.
const POLLED: u8 = 1;
/// It is to be polled, by who polls now or by the runtime that has been told.
const WOKEN: u8 = 2;

/// Most polls in a row. A request takes three; who wants more lets others have their turn first.
const MOST: usize = 4;

/// The waker of the future, between it and the one of its task.
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

/// The future, polled again at once when it is woken while it is polled.
pub(super) async fn again<F: Future>(future: F) -> F::Output {
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

    /// How often the task was woken.
    #[derive(Default)]
    struct Task(AtomicUsize);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    /// A task, and its waker.
    fn task() -> (Arc<Task>, Waker) {
        let task = Arc::new(Task::default());
        (Arc::clone(&task), Waker::from(task))
    }

    #[test]
    fn who_wakes_itself_goes_on_without_its_task_being_woken() {
        let (task, waker) = task();
        let mut polls = 0;
        let future = again(poll_fn(|context| {
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
    fn who_never_stops_waking_itself_lets_others_have_their_turn() {
        let (task, waker) = task();
        let polls = AtomicUsize::new(0);
        let mut future = pin!(again(poll_fn(|context| {
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
    fn task_is_woken_once_for_all_that_comes_between_two_polls() {
        let (task, waker) = task();
        let (kept, wakers) = std::sync::mpsc::channel();
        let mut future = pin!(again(poll_fn(|context| {
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
