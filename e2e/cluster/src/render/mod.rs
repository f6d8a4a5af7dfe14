//! Pure renderers of command lines and configuration files for every process of a plan.

pub(crate) mod control;
pub(crate) mod kubeconfig;
pub(crate) mod manifests;
pub(crate) mod node;
pub(crate) mod storage;
pub(crate) mod vm;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::plan::Plan;

/// A process that an init keeps running.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Service {
    /// Name in messages.
    pub name: String,
    /// Program with arguments.
    pub command: Vec<String>,
    /// Log file for standard output and error.
    pub log: PathBuf,
    /// Dependency that must be met before the start.
    #[serde(default)]
    pub after: Option<After>,
}

/// Dependency of a service. An earlier start would only add the retry delays of the service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum After {
    /// A TCP address that accepts connections.
    Tcp(std::net::SocketAddr),
    /// A Unix socket that accepts connections.
    Unix(PathBuf),
    /// A command that succeeds.
    Command(Vec<String>),
}

/// Configuration of the first process of a node or of the control plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Init {
    /// Host name in the UTS namespace.
    pub hostname: String,
    /// Mounts an empty filesystem over `/run` if true.
    pub own_run: bool,
    /// Folders to bind-mount: (source, target).
    pub binds: Vec<(PathBuf, PathBuf)>,
    /// Settings of the network namespace: (path below /proc/sys, value).
    pub sysctls: Vec<(String, String)>,
    /// The cgroup to enter, relative to the root of each hierarchy.
    pub cgroup: String,
    /// Folder prepended to the inherited PATH.
    pub path: PathBuf,
    /// The processes to run.
    pub services: Vec<Service>,
}

fn flags(program: PathBuf, flags: &[(&str, String)]) -> Vec<String> {
    std::iter::once(text(&program)).chain(flags.iter().map(|(name, value)| format!("--{name}={value}"))).collect()
}

/// Returns the flag for feature gates that differ from the defaults.
fn feature_gates(plan: &Plan) -> Option<String> {
    plan.variant.gates_flag().map(|gates| format!("--feature-gates={gates}"))
}

/// Adds the members of an object to another.
fn merge(object: &mut serde_json::Value, more: serde_json::Value) {
    if let (Some(object), serde_json::Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Renders a configuration file. JSON is valid YAML.
fn json_text(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}
