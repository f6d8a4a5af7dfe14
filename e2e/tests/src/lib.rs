//! Kit of the end-to-end tests: a [`Story`] is one user in a namespace of their own on a real cluster.
//!
//! A story applies manifests as a user does, waits with time limits, uses guests through `kubectl virt console`, and removes
//! everything that it created. After a failure it prints events, objects and pod logs.
//!
//! ```text
//! environment  answer  plugin   the cluster under test, HTTP answers, commands of the plugin
//! socket  webhook               WebSockets, webhooks of virt-api
//! story                         namespace and methods of a story
//! storage                       directories and devices of a node for claims
//! conditions                    conditions of an object
//! flood                         an attack on the installation
//! collector  external_metric    receives traces, serves a metric
//! metrics_server                serves the load of pods
//! device_plugin                 offers devices to kubelet
//! browser                       pages in Chromium
//! ```

mod answer;
mod browser;
mod collector;
mod conditions;
mod device_plugin;
mod environment;
mod external_metric;
mod flood;
mod metrics_server;
mod plugin;
mod socket;
pub mod storage;
mod story;
pub mod webhook;

pub use answer::Answer;
pub use browser::{Browser, Tab};
pub use collector::{CollectedSpan, Collector};
pub use conditions::{condition, is_true};
pub use device_plugin::DevicePlugin;
pub use environment::{
    TIMEOUT, audit_log, connect, connect_without_retries, kubeconfig, kubectl_virt, own_cluster, registry, repository,
    skip,
};
pub use external_metric::ExternalMetric;
pub use flood::{Extent, Flood};
pub use metrics_server::MetricsServer;
pub use plugin::{Console, Ended, Served, echo, ends};
pub use socket::Socket;
pub use story::{Node, OpenStreams, Story, signal, story, story_alone, story_large};
