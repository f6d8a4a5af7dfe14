//! Metrics of the node and of the domain for the guest, in the form of vhostmd.
//!
//! A guest reads them from a small disk or asks for them through a virtio channel (`channel`). `document` renders them, `host`
//! reads those of the node from `/proc`, which a container shares with its node.

mod channel;
mod document;
mod host;

use std::{path::PathBuf, process::Stdio, sync::Arc, time::Duration};

use api::VirtualMachineInstance;
use protocol::StatsReply;
use tokio::{
    process::Command,
    sync::{OnceCell, watch},
    task::AbortHandle,
    time::{MissedTickBehavior, interval, timeout},
};

use self::document::Metrics;
use crate::{hypervisor::Domain, paths::Paths, storage, tasks::Tasks};

/// Interval in which the disk is written.
const INTERVAL: Duration = Duration::from_secs(5);
/// Program whose version the guest reads.
const QEMU: &str = "qemu-system-x86_64";
/// Version of a QEMU that does not tell it.
const UNKNOWN_VERSION: &str = "qemu-unknown";
/// Time limit of QEMU's answer.
const VERSION_DEADLINE: Duration = Duration::from_secs(5);
/// Longest version that is passed on.
const MAX_VERSION: usize = 128;

/// Ways in which a guest reads metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Readers {
    /// File of the disk.
    disk: Option<PathBuf>,
    /// Socket of the channel.
    channel: Option<PathBuf>,
}

impl Readers {
    /// Returns the ways that a VMI has.
    pub(crate) fn of(vmi: &VirtualMachineInstance, paths: &Paths, uid: &str) -> Self {
        let disks = &vmi.spec.domain.devices.disks;
        let is_shown = |name: &str| disks.iter().any(|disk| disk.name == name);
        let has_disk =
            vmi.spec.volumes.iter().any(|volume| volume.downward_metrics.is_some() && is_shown(&volume.name));
        Self {
            disk: has_disk.then(|| paths.metrics_disk()),
            channel: vmi.spec.domain.devices.downward_metrics.is_some().then(|| paths.metrics_socket(uid)),
        }
    }
}

/// The current connection to the domain, if any.
type CurrentDomain = Option<Arc<dyn Domain>>;

/// Collects the metrics. Cheap to clone.
#[derive(Clone)]
struct Collector {
    domain: watch::Receiver<CurrentDomain>,
    /// Name of the node, which changes with a migration.
    node: watch::Receiver<String>,
    /// Version of QEMU, once it is known.
    version: Arc<OnceCell<String>>,
}

impl Collector {
    /// Collects the metrics of now. Those that cannot be read are left out.
    async fn collect(&self) -> Metrics {
        let stats = self.domain.borrow().as_ref().map(|domain| domain.stats());
        let stats: Option<StatsReply> = match stats {
            Some(stats) => stats.await.inspect_err(|error| tracing::debug!(%error, "no statistics of the domain")).ok(),
            None => None,
        };
        let host = tokio::task::spawn_blocking(host::read).await.unwrap_or_default();
        let version = self.version.get_or_init(qemu_version).await.clone();
        let node = self.node.borrow().clone();
        Metrics { node, version, stats: stats.unwrap_or_default(), host }
    }
}

/// Serves the metrics to a guest. Returns the tasks: none for a guest that reads no metrics.
pub(crate) fn serve(
    readers: Readers,
    domain: watch::Receiver<CurrentDomain>,
    node: watch::Receiver<String>,
    tasks: &Tasks,
) -> Vec<AbortHandle> {
    let collector = Collector { domain, node, version: Arc::default() };
    let disk = readers.disk.map(|path| tasks.keep("metrics disk", update_disk(path, collector.clone())));
    let channel = readers.channel.map(|path| tasks.keep("metrics channel", channel::serve(path, collector)));
    disk.into_iter().chain(channel).collect()
}

/// Writes new metrics to the disk from time to time.
async fn update_disk(path: PathBuf, collector: Collector) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (path, document) = (path.clone(), collector.collect().await.document());
        let written = tokio::task::spawn_blocking(move || storage::write_metrics(&path, &document)).await;
        if let Err(error) = written.map_err(std::io::Error::other).flatten() {
            tracing::warn!(%error, "cannot write the disk with metrics");
        }
    }
}

/// Returns the version of the image's QEMU.
async fn qemu_version() -> String {
    let command = Command::new(QEMU).arg("--version").stdin(Stdio::null()).kill_on_drop(true).output();
    let Ok(Ok(output)) = timeout(VERSION_DEADLINE, command).await else { return UNKNOWN_VERSION.to_owned() };
    version_in(&String::from_utf8_lossy(&output.stdout)).unwrap_or(UNKNOWN_VERSION).to_owned()
}

/// Returns the version in the output of QEMU: its first line.
fn version_in(output: &str) -> Option<&str> {
    let line = output.lines().next()?.trim();
    (!line.is_empty() && line.len() <= MAX_VERSION && line.chars().all(|c| !c.is_control())).then_some(line)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_guest_reads_metrics_in_the_ways_of_its_vmi() {
        let paths = Paths::default();
        for (devices, volumes, disk, channel) in [
            (json!({}), json!([]), false, false),
            (json!({"downwardMetrics": {}}), json!([]), false, true),
            (json!({}), json!([{"name": "m", "downwardMetrics": {}}]), false, false),
            (
                json!({"disks": [{"name": "m", "disk": {"bus": "virtio"}}]}),
                json!([{"name": "m", "downwardMetrics": {}}]),
                true,
                false,
            ),
        ] {
            let spec = json!({"domain": {"devices": devices}, "volumes": volumes});
            let vmi: VirtualMachineInstance =
                serde_json::from_value(json!({"metadata": {"name": "m"}, "spec": spec})).unwrap();
            let readers = Readers::of(&vmi, &paths, "u");
            assert_eq!((readers.disk.is_some(), readers.channel.is_some()), (disk, channel), "{vmi:?}");
        }
    }

    #[test]
    fn the_version_is_one_short_line() {
        let qemu = "QEMU emulator version 10.0.2 (Debian 1:10.0.2)";
        assert_eq!(version_in(&format!("{qemu}\nCopyright")), Some(qemu));
        for output in ["", "\n", &"x".repeat(200), "a\u{1}b"] {
            assert_eq!(version_in(output), None, "{output:?}");
        }
    }
}
