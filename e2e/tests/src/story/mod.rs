//! A story: the steps of one user in a namespace of their own on the cluster under test.
//!
//! [`story`] creates the namespace, prints a diagnosis after a failure and removes the namespace. The other files add methods to
//! [`Story`] by subject.

mod calls;
mod diagnosis;
mod kinds;
mod metrics;
mod node;
mod objects;
mod plugin;
mod pods;
mod streams;

use std::{
    collections::BTreeMap,
    io::Write,
    num::NonZero,
    sync::{
        LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, anyhow, bail};
use ferrovirt_e2e_cluster::places::{Places, Taken};
use futures::FutureExt;
use kube::{
    Client,
    api::{DeleteParams, ListParams},
};
use serde_json::json;

pub use self::{
    node::{Node, signal},
    streams::OpenStreams,
};
use crate::environment::{TIMEOUT, connect, patient, repository};

/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Time limit for the removal of the VMs of a namespace.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(240);

/// A user's access to the cluster: a client and a namespace of their own.
pub struct Story {
    /// The client, with the administrator's rights.
    pub client: Client,
    /// The namespace.
    pub namespace: String,
    /// A failure was explained.
    explained: AtomicBool,
}

/// Runs `body` in a new namespace, prints a diagnosis if it fails, and removes the namespace. Other stories run meanwhile, as
/// many as there are places.
///
/// # Panics
/// Panics if the body fails or the VMIs of the namespace cannot be removed, which fails the test.
pub fn story<F>(name: &str, body: F)
where
    F: AsyncFnOnce(&Story) -> Result<()>,
{
    let place = PLACES.take(1, known_part());
    run(name, &place, body);
}

/// Runs as [`story`] and takes two places, for stories whose guests need minutes of a core.
///
/// # Panics
/// Panics as [`story`].
pub fn story_large<F>(name: &str, body: F)
where
    F: AsyncFnOnce(&Story) -> Result<()>,
{
    let places = PLACES.take(2, known_part());
    run(name, &places, body);
}

/// Runs as [`story`] while no other story runs, for stories that disturb the whole cluster, and waits until its components are ready
/// for the next one.
///
/// # Panics
/// Panics as [`story`].
pub fn story_alone<F>(name: &str, body: F)
where
    F: AsyncFnOnce(&Story) -> Result<()>,
{
    let places = PLACES.take_all();
    run(name, &places, async |story: &Story| {
        body(story).await?;
        story.components_are_ready().await
    });
}

/// Places for stories: two for each core, since stories wait half of their time, or `STORIES`.
static PLACES: LazyLock<Places> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let named = std::env::var("STORIES").ok().and_then(|text| text.parse().ok());
    Places::new(named.unwrap_or(2 * cores).max(1))
});

/// Known parts of stories of the duration of a run, by the names of their tests. Without the file all stories are alike.
static KNOWN_PARTS: LazyLock<BTreeMap<String, f64>> = LazyLock::new(|| {
    let text = std::fs::read_to_string(repository().join("e2e/story-times.tsv")).unwrap_or_default();
    let row = |line: &str| {
        let (name, seconds) = line.split_once('\t')?;
        Some((name.to_owned(), seconds.parse().ok()?))
    };
    text.lines().filter_map(row).collect()
});

/// Returns the known part of the story of this thread, which has the name of its test. An unknown story may be a long one.
fn known_part() -> f64 {
    let known = std::thread::current().name().and_then(|test| KNOWN_PARTS.get(test).copied());
    known.unwrap_or(f64::INFINITY)
}

fn run<F>(name: &str, places: &Taken<'_>, body: F)
where
    F: AsyncFnOnce(&Story) -> Result<()>,
{
    let began = Instant::now();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = runtime.context("cannot start the runtime").and_then(|runtime| {
        runtime.block_on(async {
            let story = Story::begin(name).await?;
            // A failed assertion must not skip the clean-up.
            let result = std::panic::AssertUnwindSafe(body(&story)).catch_unwind().await;
            let result = result.unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|t| (*t).to_owned()));
                Err(anyhow!("assertion failed: {}", text.unwrap_or_default()))
            });
            if let Err(error) = &result {
                story.explain(error).await;
            }
            let ended = story.end().await;
            result.and(ended)
        })
    });
    let recorded = record(name, began.elapsed(), places.part(), outcome.as_ref().err());
    if let Err(error) = outcome.and(recorded) {
        #[expect(clippy::panic, reason = "fails the test")]
        {
            panic!("story {name}: {error:#}");
        }
    }
}

/// Characters of a failure beside the duration of its story. The failure is also printed whole.
const FAILURE_LENGTH: usize = 600;

/// Appends the duration of a story to the file that `STORY_TIMES` names, if any, and why the story failed, if it did. `part` is the
/// part of the places that it took: multiplied with it, durations add up to that of a run. `stories renew` reads the file.
fn record(name: &str, duration: Duration, part: f64, failure: Option<&anyhow::Error>) -> Result<()> {
    let Some(path) = std::env::var_os("STORY_TIMES") else { return Ok(()) };
    // The thread of a test has its name.
    let test = std::thread::current().name().map_or_else(|| name.to_owned(), |test| format!("{test} ({name})"));
    let seconds = duration.as_secs_f64();
    let mut line = format!("{seconds:7.1} s {:7.1} s {test}", seconds * part);
    if let Some(failure) = failure {
        let text = format!("{failure:#}").replace('\n', " ");
        line.push_str(" FAILED: ");
        line.extend(text.chars().take(FAILURE_LENGTH));
    }
    line.push('\n');
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(line.as_bytes())).context("cannot write STORY_TIMES")
}

impl Story {
    async fn begin(name: &str) -> Result<Self> {
        let client = connect().await?;
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        let namespace = format!("e2e-{name}-{:05x}", nanos % 0xf_ffff);
        let story = Self::of(client, namespace);
        // Launcher pods must pass the strictest pod security there is.
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": story.namespace, "labels": {
            "ferrovirt.io/e2e": name, "pod-security.kubernetes.io/enforce": "restricted"}}});
        story.cluster_api("Namespace").create(&Default::default(), &serde_json::from_value(object)?).await?;
        story.wait("ServiceAccount", "default", "be created", TIMEOUT, |_| true).await?;
        Ok(story)
    }

    /// Deletes VMs and VMIs, waits until no VMI is left, and deletes the namespace. It ends later: Kubernetes leaves each
    /// deleted namespace alone for five seconds, and asks for its pods at long intervals. A test after all stories waits for
    /// all namespaces.
    /// Returns the access of another user, or to another namespace, which nothing creates or removes.
    #[must_use]
    pub fn of(client: Client, namespace: String) -> Self {
        Self { client, namespace, explained: AtomicBool::new(false) }
    }

    /// Prints a failure of the story and a diagnosis, once.
    pub async fn explain(&self, error: &anyhow::Error) {
        if !self.explained.swap(true, Ordering::Relaxed) {
            eprintln!("\n======== the story in namespace {} failed: {error:#}", self.namespace);
            diagnosis::print(self).await;
        }
    }

    async fn end(self) -> Result<()> {
        for kind in ["vmpool", "vm", "vmirs", "vmi"] {
            let deleted = self.api(kind).delete_collection(&DeleteParams::background(), &ListParams::default()).await;
            deleted.with_context(|| format!("cannot delete each {kind}"))?;
        }
        let deadline = Instant::now() + patient(REMOVAL_TIMEOUT);
        loop {
            let left = self.list("vmi", "").await?;
            if left.is_empty() {
                break;
            }
            if Instant::now() > deadline {
                diagnosis::print(&self).await;
                bail!("VMIs of namespace {} still exist: {}", self.namespace, serde_json::to_string(&left)?);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let namespaces = self.cluster_api("Namespace");
        namespaces.delete(&self.namespace, &DeleteParams::background()).await.context("cannot delete the namespace")?;
        Ok(())
    }
}
