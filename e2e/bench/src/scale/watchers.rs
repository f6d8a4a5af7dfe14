//! Watches of further virt-handlers: two of VMIs each, with virt-handler's own selectors.
//!
//! kube-apiserver compares each change of a VMI with the selector of each watch, also of those that do not get it. The nodes of these
//! virt-handlers do not exist, so the watches cost nothing but that.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use api::constants::label;
use ferrovirt_e2e_tests::Story;
use futures::StreamExt;
use kube::{Api, api::DynamicObject, runtime::watcher};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, timeout_at},
};

/// Labels by which virt-handler selects the VMIs of its node.
const LABELS: [&str; 2] = [label::NODE_NAME, label::MIGRATION_TARGET_NODE_NAME];
/// Objects a page of virt-handler's lists.
const PAGE: u32 = 50;
/// Time limit for all first lists.
const TIMEOUT: Duration = Duration::from_secs(300);
/// File descriptors that the program needs besides the connections of watches.
const OTHER_FILES: u64 = 512;

/// The watches. They end with this value.
pub(super) struct Watchers {
    api: Api<DynamicObject>,
    count: usize,
    tasks: JoinSet<()>,
}

impl Watchers {
    pub(super) fn of(story: &Story) -> Self {
        Self { api: story.cluster_api("vmi"), count: 0, tasks: JoinSet::new() }
    }

    /// Adds watches until there are those of `count` virt-handlers, and waits until all have listed.
    pub(super) async fn grow(&mut self, count: usize) -> Result<()> {
        allow_files(needed_files(count))?;
        let (listed, mut lists) = mpsc::channel(1);
        let mut missing = 0;
        for selector in selectors(self.count, count) {
            self.tasks.spawn(watch(self.api.clone(), selector, listed.clone()));
            missing += 1;
        }
        self.count = self.count.max(count);
        let deadline = Instant::now() + TIMEOUT;
        while missing > 0 {
            let list = timeout_at(deadline, lists.recv()).await;
            list.with_context(|| format!("{missing} watches have not begun after {TIMEOUT:?}"))?;
            missing -= 1;
        }
        Ok(())
    }
}

/// Returns the selectors of the virt-handlers with these numbers.
fn selectors(from: usize, to: usize) -> impl Iterator<Item = String> {
    (from..to).flat_map(|number| LABELS.map(|label| format!("{label}=watching-{number:04}")))
}

/// Returns the number of file descriptors for the watches of `count` virt-handlers, each with a connection of its own.
fn needed_files(count: usize) -> u64 {
    (count * LABELS.len()) as u64 + OTHER_FILES
}

/// Raises the limit of file descriptors.
fn allow_files(count: u64) -> Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|most| most >= count) {
        return Ok(());
    }
    ensure!(limit.maximum.is_none_or(|most| most >= count), "{count} open files are not allowed: {limit:?}");
    limit.current = Some(count);
    setrlimit(Resource::Nofile, limit).context("cannot raise the limit of open files")
}

async fn watch(api: Api<DynamicObject>, selector: String, listed: mpsc::Sender<()>) {
    let config = watcher::Config::default().labels(&selector).page_size(PAGE);
    let mut events = daemon::watch::events(api, config).boxed();
    let mut listed = Some(listed);
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::InitDone) => {
                // Later lists follow interruptions.
                if let Some(listed) = listed.take() {
                    let _ = listed.send(()).await;
                }
            }
            Ok(_) => {}
            Err(error) => eprintln!("watch of {selector}: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_virt_handler_has_two_watches() {
        let found: Vec<String> = selectors(1, 3).collect();
        let expected = [
            "kubevirt.io/nodeName=watching-0001",
            "kubevirt.io/migrationTargetNodeName=watching-0001",
            "kubevirt.io/nodeName=watching-0002",
            "kubevirt.io/migrationTargetNodeName=watching-0002",
        ];
        assert_eq!(found, expected);
        assert_eq!(selectors(3, 3).count(), 0);
        assert_eq!(needed_files(2000), 4000 + OTHER_FILES);
    }
}
