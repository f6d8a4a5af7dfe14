//! A real Kubernetes cluster on one host, for tests and new users.
//!
//! A node is a network namespace with its own containerd, kubelet and kube-proxy in separate PID and mount namespaces. The
//! control plane has another one. One node can be a VM instead. The README shows a picture.
//!
//! [`plan`], [`kubernetes`], [`render`], [`certificates`] and [`pause`] decide and render without changing the host.
//! [`up`], [`down`] and [`init`] act. [`chart`] checks the chart without a cluster.

mod agent;
mod archive;
pub mod audit;
pub mod certificates;
pub mod chart;
mod command;
pub mod components;
pub mod demo;
pub mod deps;
pub mod down;
mod error;
mod hex;
pub mod host;
pub mod images;
pub mod init;
pub mod install;
mod kubectl;
pub mod kubernetes;
mod kvm;
mod kvm_result;
mod lock;
pub mod mirror;
mod network;
mod pause;
pub mod places;
pub mod plan;
pub mod progress;
mod render;
pub mod session;
pub mod status;
pub mod target;
pub mod uninstall;
pub mod up;
pub mod variant;
pub mod vm;

pub use lock::lock;
