//! The kit of the end-to-end tests: a [`Story`] is one user in a namespace of their own on a real cluster.
//!
//! A story applies manifests as a user would, waits with deadlines, looks inside guests through `kubectl virt console`,
//! and leaves nothing behind. When it fails it prints what a developer would ask for first: events, objects, pod logs.

mod api;
mod console;
mod diagnosis;
mod flood;
mod metrics;
mod node;
mod plugin;
mod socket;
mod story;
pub mod webhook;

use std::path::PathBuf;

pub use api::Answer;
pub use console::Console;
pub use flood::{Extent, Flood};
pub use plugin::{Ended, OpenStreams, Served, echo, ends};
pub use socket::Socket;
pub use story::{PATIENCE, Story, connect, connect_without_retries, story, story_alone};

/// The root of the repository.
#[must_use]
pub fn repository() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).map_or(here.clone(), PathBuf::from)
}

/// The kubeconfig of the cluster under test: `KUBECONFIG`, else the test cluster's.
#[must_use]
pub fn kubeconfig() -> PathBuf {
    std::env::var_os("KUBECONFIG").map_or_else(|| repository().join("build/kubeconfig"), PathBuf::from)
}

/// The audit log of the test cluster; a cluster of somebody else has none there.
#[must_use]
pub fn audit_log() -> PathBuf {
    ferrovirt_e2e_cluster::audit::log(&kubeconfig())
}

/// The plugin under test: `KUBECTL_VIRT`, else `build/bin/kubectl-virt`.
#[must_use]
pub fn kubectl_virt() -> PathBuf {
    std::env::var_os("KUBECTL_VIRT").map_or_else(|| repository().join("build/bin/kubectl-virt"), PathBuf::from)
}

/// Where the images of processes and guests come from: `REGISTRY`, as for `make push` and `make up`, else the name under
/// which the test cluster's nodes have them.
#[must_use]
pub fn registry() -> String {
    std::env::var("REGISTRY").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| OWN_REGISTRY.to_owned())
}

/// The prefix of images in manifests.
const OWN_REGISTRY: &str = "ferrovirt.io";

/// The manifest with the images of the registry in use.
fn with_images(manifest: &str) -> String {
    ["guests/", "toolbox:"].into_iter().fold(manifest.to_owned(), |text, image| {
        text.replace(&format!("{OWN_REGISTRY}/{image}"), &format!("{}/{image}", registry()))
    })
}
