//! Lock of a cluster against changes by other commands.

use std::{fs, fs::File};

use nix::fcntl::{Flock, FlockArg};

use crate::{
    error::{FileContext, Result},
    plan::Plan,
    progress::Progress,
};

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
