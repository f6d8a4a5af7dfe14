//! Sources of the node's labels: libvirt's documents, and files of kubelet and the kernel.

use std::path::Path;

use api::config::ClusterConfig;
use daemon::errors;
use serde_json::Value;

use super::labels::{self, Capabilities, NodeFacts};
use crate::safe_dir::{Error as PathError, SafeDir, Stat};

/// Largest document of libvirt; that of the host has some tens of KiB.
const MAX_DOCUMENT: usize = 4 * 1024 * 1024;
/// Largest small file of kubelet or the kernel.
const MAX_STATE: usize = 1024 * 1024;
/// libvirt's documents in the directory to which the init container writes.
const DOCUMENTS: [&str; 3] = ["capabilities.xml", "virsh_domcapabilities.xml", "supported_features.xml"];

/// Feature gate for CPU pinning.
const CPU_MANAGER_GATE: api::FeatureGate = api::FeatureGate::CPUManager;
/// Feature gate for guests of other architectures.
const CROSS_ARCHITECTURE_GATE: api::FeatureGate = api::FeatureGate::CrossArchitectureVirtualization;

/// libvirt's documents, parsed again after a change.
#[derive(Default)]
pub(super) struct Documents {
    stats: Option<[Option<Stat>; 3]>,
    capabilities: Option<Capabilities>,
}

impl Documents {
    /// Returns the capabilities that the documents in a directory describe; the last ones that could be read.
    pub(super) fn read(&mut self, directory: &Path) -> Option<&Capabilities> {
        let stats = SafeDir::trusted(directory).map(|dir| DOCUMENTS.map(|name| dir.stat(name).ok()));
        match stats {
            Ok(stats) if self.stats.as_ref() == Some(&stats) => {}
            Ok(stats) => {
                self.stats = Some(stats);
                match parse(directory) {
                    Ok(capabilities) => self.capabilities = Some(capabilities),
                    Err(error) => tracing::error!(error = errors::chain(&error), "node labels are not updated"),
                }
            }
            Err(error) => tracing::error!(%error, "node labels are not updated"),
        }
        self.capabilities.as_ref()
    }
}

/// Reason why libvirt's documents cannot be used.
#[derive(Debug, thiserror::Error)]
enum DocumentError {
    #[error("cannot read libvirt's documents")]
    Path(#[from] PathError),
    #[error("cannot use libvirt's documents")]
    Parse(#[from] labels::Error),
}

fn parse(directory: &Path) -> Result<Capabilities, DocumentError> {
    let directory = SafeDir::trusted(directory)?;
    let [host, domain, features] = DOCUMENTS;
    let features = match directory.read_text(features, MAX_DOCUMENT) {
        Ok(text) => Some(text),
        Err(error) if error.is_not_found() => None,
        Err(error) => return Err(error.into()),
    };
    let (host, domain) = (directory.read_text(host, MAX_DOCUMENT)?, directory.read_text(domain, MAX_DOCUMENT)?);
    Ok(Capabilities::parse(&host, &domain, features.as_deref())?)
}

/// Returns the properties of the node that are not in the documents.
pub(super) fn node_facts(cluster: &ClusterConfig, kubelet: &Path) -> NodeFacts {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    NodeFacts {
        architecture: architecture.to_owned(),
        obsolete_models: cluster.obsolete_cpu_models.clone(),
        realtime: realtime().unwrap_or(false),
        cpu_manager: cluster.enabled(CPU_MANAGER_GATE) && pins_cpus(kubelet).unwrap_or(false),
        cross_architecture: cluster.enabled(CROSS_ARCHITECTURE_GATE),
    }
}

/// Returns true if real-time tasks may use all of the CPU time.
fn realtime() -> Result<bool, PathError> {
    let kernel = SafeDir::trusted(Path::new("/proc/sys/kernel"))?;
    Ok(kernel.read_text("sched_rt_runtime_us", 64)?.trim() == "-1")
}

fn pins_cpus(kubelet: &Path) -> Result<bool, PathError> {
    let state = SafeDir::trusted(kubelet)?.read_bounded("cpu_manager_state", MAX_STATE)?;
    let policy = serde_json::from_slice::<Value>(&state).ok();
    Ok(policy.is_some_and(|state| state["policyName"] == "static"))
}
