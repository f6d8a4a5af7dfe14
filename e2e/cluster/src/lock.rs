//! Lock of a cluster against changes by other commands.

use std::{fs, fs::File};

use crate::{
    error::{FileContext, Result},
    plan::Plan,
    progress::Progress,
};

/// Locks this cluster against changes by other commands until dropped.
///
/// # Errors
/// Fails if the lock file cannot be created.
pub fn lock(plan: &Plan, progress: &Progress) -> Result<File> {
    let path = plan.lock();
    fs::create_dir_all(plan.build()).at("create", plan.build())?;
    let file = File::create(&path).at("create", &path)?;
    if file.try_lock().is_err() {
        progress.step(format!("waiting for another command that holds {}", path.display()));
        file.lock().at("lock", &path)?;
    }
    Ok(file)
}
