//! A real Kubernetes cluster on one host, for tests and new users.
//!
//! A node is a network namespace with its own containerd, kubelet and kube-proxy in separate PID and mount namespaces. The
//! control plane has another one. The README shows a picture.
//!
//! [`plan`], [`render`], [`certificates`] and [`pause`] decide and render without changing the host.
//! [`up`], [`down`] and [`init`] act.

pub mod archive;
pub mod audit;
pub mod certificates;
pub mod command;
pub mod components;
pub mod demo;
pub mod deps;
pub mod down;
pub mod error;
pub mod host;
pub mod images;
pub mod init;
pub mod install;
pub mod kubectl;
pub mod kvm;
pub mod pause;
pub mod plan;
pub mod progress;
pub mod render;
pub mod session;
pub mod status;
pub mod target;
pub mod uninstall;
pub mod up;

use std::{fs, fs::File};

use nix::fcntl::{Flock, FlockArg};

use crate::{
    error::{FileContext, Result},
    plan::Plan,
    progress::Progress,
};

/// Formats bytes as hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Locks this cluster against changes by other commands until dropped.
///
/// # Errors
/// Fails if the lock file cannot be created.
pub fn lock(plan: &Plan, progress: &Progress) -> Result<Flock<File>> {
    let path = plan.lock();
    fs::create_dir_all(plan.build()).at("create", plan.build())?;
    let open = || File::create(&path).at("create", &path);
    match Flock::lock(open()?, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((file, _)) => {
            progress.step(format!("waiting for another command that holds {}", path.display()));
            Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error.into()).at("lock", &path)
        }
    }
}
