//! Ownership of the cluster's names on the host: two working trees may use the same names.

use std::{
    fs::{self, TryLockError},
    path::Path,
};

use super::namespaces::{namespaces, processes};
use crate::{
    error::{Error, Result},
    plan::{Plan, lock_of},
};

/// Returns the owner of this cluster's names on the host: the folder recorded in the host's link, if the link exists.
#[must_use]
pub fn owner(plan: &Plan) -> Option<String> {
    let path = Path::new("/sys/class/net").join(plan.host_link()).join("ifalias");
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Fails if a cluster of another working tree runs under this cluster's names. A cluster without processes does not count: its
/// names can be cleaned up and reused.
///
/// # Errors
/// Fails in that case.
pub fn check_owner(plan: &Plan) -> Result<()> {
    match owner(plan) {
        Some(owner) if Path::new(&owner) != plan.state() && (is_changing(&owner) || has_processes(plan)) => {
            Err(Error::Refused(format!(
                "the cluster of {owner} is running under the same names; stop it there, or choose another --instance"
            )))
        }
        _ => Ok(()),
    }
}

fn has_processes(plan: &Plan) -> bool {
    namespaces(plan).iter().any(|namespace| !processes(namespace).is_empty())
}

/// Returns true if a command holds the lock of the cluster with this state folder.
fn is_changing(state: &str) -> bool {
    let Ok(file) = fs::File::open(lock_of(Path::new(state))) else { return false };
    // A lock taken here is released with the file.
    matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_is_changing_while_its_lock_is_held() {
        let state = std::env::temp_dir().join(format!("ferrovirt-owner-{}", std::process::id()));
        let name = state.to_str().unwrap();
        assert!(!is_changing(name), "no lock file");
        let file = fs::File::create(lock_of(&state)).unwrap();
        assert!(!is_changing(name), "nobody holds it");
        file.try_lock().unwrap();
        assert!(is_changing(name));
        drop(file);
        assert!(!is_changing(name));
        fs::remove_file(lock_of(&state)).unwrap();
    }
}
