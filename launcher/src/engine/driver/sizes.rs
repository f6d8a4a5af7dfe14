//! Reads of the claims of a running domain. Storage that does not answer holds up no other claim.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::Semaphore,
    task::{JoinSet, spawn_blocking},
    time::{Instant, timeout_at},
};

/// Limit of concurrent reads. Each holds a thread until its storage answers, and calls to libvirt need most of the threads.
const READS: usize = 2;

/// The reads of claims in progress, also those for which nothing waits any more.
#[derive(Clone, Debug)]
pub(super) struct ClaimReads {
    /// Volumes that are being read.
    volumes: Arc<Mutex<BTreeSet<String>>>,
    threads: Arc<Semaphore>,
}

impl Default for ClaimReads {
    fn default() -> Self {
        Self { volumes: Arc::default(), threads: Arc::new(Semaphore::new(READS)) }
    }
}

/// The turn to read a volume.
struct Turn {
    reads: ClaimReads,
    volume: String,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.reads.volumes.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.volume);
    }
}

impl ClaimReads {
    fn turn(&self, volume: &str) -> Option<Turn> {
        let mut volumes = self.volumes.lock().unwrap_or_else(PoisonError::into_inner);
        volumes.insert(volume.to_owned()).then(|| Turn { reads: self.clone(), volume: volume.to_owned() })
    }

    /// Reads volumes. Returns the answers, and the volumes without one in time, of which none is read again before it answers.
    pub(super) async fn each<T: Send + 'static>(
        &self,
        volumes: Vec<String>,
        deadline: Duration,
        read: impl Fn(&str) -> T + Clone + Send + 'static,
    ) -> (Vec<(String, T)>, BTreeSet<String>) {
        let mut silent: BTreeSet<String> = volumes.iter().cloned().collect();
        let mut reads = JoinSet::new();
        for volume in volumes {
            let Some(turn) = self.turn(&volume) else { continue };
            let (threads, read) = (self.threads.clone(), read.clone());
            reads.spawn(async move {
                let thread = threads.acquire_owned().await.ok()?;
                let work = move || {
                    let answer = read(&volume);
                    drop((turn, thread));
                    (volume, answer)
                };
                spawn_blocking(work).await.ok()
            });
        }
        let mut answers = Vec::new();
        let limit = Instant::now() + deadline;
        while let Ok(Some(read)) = timeout_at(limit, reads.join_next()).await {
            if let Ok(Some((volume, answer))) = read {
                silent.remove(&volume);
                answers.push((volume, answer));
            }
        }
        (answers, silent)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_silent_claim_is_named_and_holds_up_no_other() {
        let (answer, silence) = mpsc::channel::<()>();
        let silence = Arc::new(Mutex::new(silence));
        let read = move |volume: &str| {
            if volume == "silent" {
                // Until the sender is dropped.
                let _ = silence.lock().unwrap().recv();
            }
            volume.len()
        };
        let reads = ClaimReads::default();
        let expected = ("a b".to_owned(), "silent".to_owned());
        assert_eq!(each(&reads, "silent a b", 2, read.clone()).await, expected);
        assert_eq!(each(&reads, "silent a b", 600, read.clone()).await, expected, "it is not read again");
        drop(answer);
        while reads.turn("silent").is_none() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(each(&reads, "silent", 600, read).await, ("silent".to_owned(), String::new()));
    }

    /// Returns the volumes that have answered, and those that have not.
    async fn each(
        reads: &ClaimReads,
        volumes: &str,
        seconds: u64,
        read: impl Fn(&str) -> usize + Clone + Send + 'static,
    ) -> (String, String) {
        let volumes = volumes.split(' ').map(str::to_owned).collect();
        let (answers, silent) = reads.each(volumes, Duration::from_secs(seconds), read).await;
        let answers: BTreeSet<String> = answers.into_iter().map(|(volume, _)| volume).collect();
        (Vec::from_iter(answers).join(" "), Vec::from_iter(silent).join(" "))
    }
}
