//! Pure renderers: command lines and configuration files of every process, from the plan alone.

pub mod control;
pub mod kubeconfig;
pub mod manifests;
pub mod node;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A process that an init keeps running.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    /// Its name in messages.
    pub name: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Where standard output and error go.
    pub log: PathBuf,
    /// It is started once this accepts connections.
    #[serde(default)]
    pub after: Option<After>,
}

/// What a service needs to be there before it starts. Starting earlier would only cost its own retry delays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum After {
    /// A TCP address that accepts connections.
    Tcp(std::net::SocketAddr),
    /// A Unix socket that accepts connections.
    Unix(PathBuf),
    /// A command that succeeds.
    Command(Vec<String>),
}

/// What the first process of a node or of the control plane does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Init {
    /// The host name to set in the own UTS namespace.
    pub hostname: String,
    /// Whether `/run` gets a fresh, empty filesystem.
    pub own_run: bool,
    /// Folders to lie over others: (own, seen at).
    pub binds: Vec<(PathBuf, PathBuf)>,
    /// Network settings of the own network namespace: (path below /proc/sys, value).
    pub sysctls: Vec<(String, String)>,
    /// The cgroup to move to, relative to each hierarchy's root.
    pub cgroup: String,
    /// What is put before the inherited PATH.
    pub path: PathBuf,
    /// The processes to run.
    pub services: Vec<Service>,
}

fn flags(program: PathBuf, flags: &[(&str, String)]) -> Vec<String> {
    std::iter::once(text(&program)).chain(flags.iter().map(|(name, value)| format!("--{name}={value}"))).collect()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn yaml(value: &serde_json::Value) -> String {
    // A tree of strings, numbers and lists always has a YAML form.
    serde_yaml::to_string(value).unwrap_or_default()
}
