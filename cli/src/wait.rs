//! Waits for a state of objects: the progress on standard error, the result on standard output.

use std::time::Duration;

use clap::Args;
use tokio::time::{Instant, timeout_at};

use crate::Error;

/// Pause between looks at the objects.
const POLL: Duration = Duration::from_millis(500);

/// Options of commands that can wait for their result.
#[derive(Args)]
pub(crate) struct WaitOptions {
    /// Wait for the result, print the progress, and fail with the reason if there is none
    #[arg(long, conflicts_with = "dry_run")]
    pub wait: bool,
    /// Longest wait in seconds; 0: no limit
    #[arg(long, value_name = "SECONDS", default_value_t = 300, requires = "wait")]
    pub timeout: u64,
}

/// How far an action is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// It is complete, with this result.
    Done(String),
    /// It cannot be completed, for this reason.
    Failed(String),
    /// This is outstanding. Causes that can go away by themselves are waited for.
    Waiting(String),
}

/// Looks at the objects until the action has ended. `late` describes what is outstanding after `timeout` seconds.
pub(crate) async fn follow(
    timeout: u64,
    late: impl Fn(&str) -> String,
    mut look: impl AsyncFnMut() -> Result<Progress, Error>,
) -> Result<(), Error> {
    let end = (timeout > 0).then(|| Instant::now().checked_add(Duration::from_secs(timeout))).flatten();
    let mut shown = String::new();
    loop {
        let looked = match end {
            Some(end) => timeout_at(end, look()).await,
            None => Ok(look().await),
        };
        let Ok(looked) = looked else {
            let shown = if shown.is_empty() { "the API server does not answer" } else { &shown };
            return Err(Error::Usage(late(shown)));
        };
        match looked? {
            Progress::Done(text) => return say!("{text}"),
            Progress::Failed(text) => return Err(Error::Usage(text)),
            Progress::Waiting(text) if text != shown => {
                eprintln!("{text}");
                shown = text;
            }
            Progress::Waiting(_) => {}
        }
        if end.is_some_and(|end| Instant::now() >= end) {
            return Err(Error::Usage(late(&shown)));
        }
        tokio::time::sleep(POLL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn api_server_without_answer_does_not_prolong_the_wait() {
        let look = async || std::future::pending::<Result<Progress, Error>>().await;
        let ended = follow(5, |shown| format!("late: {shown}"), look).await;
        assert_eq!(ended.unwrap_err().to_string(), "late: the API server does not answer");
    }

    #[tokio::test(start_paused = true)]
    async fn wait_ends_with_the_result_or_with_what_is_outstanding() {
        let waiting = || Progress::Waiting("the pod has no node".to_owned());
        for (timeout, looks, expected) in [
            (0, vec![Progress::Done("done".to_owned()), waiting(), waiting()], None),
            (5, vec![Progress::Done("done".to_owned()), waiting()], None),
            (5, vec![Progress::Failed("broken".to_owned()), waiting()], Some("broken")),
            (1, vec![], Some("late: the pod has no node")),
            (u64::MAX, vec![Progress::Done("done".to_owned())], None),
        ] {
            let mut looks = looks;
            let look = async || Ok(looks.pop().unwrap_or_else(waiting));
            let ended = follow(timeout, |shown| format!("late: {shown}"), look).await;
            assert_eq!(ended.err().map(|error| error.to_string()).as_deref(), expected, "{timeout}");
        }
    }
}
