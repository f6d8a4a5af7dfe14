//! Writes to the cluster that a decision requires. Rules return them; virt-api carries them out.

use std::fmt;

use json_patch::Patch;

use super::{Failure, resource_path::collection_path};

/// A JSON patch of an object, applied before the response is sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Effect {
    /// API group; empty for the core group.
    pub group: &'static str,
    /// Version.
    pub version: &'static str,
    /// Plural, as in paths.
    pub plural: &'static str,
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// The change.
    pub patch: Patch,
    /// True if nothing may be stored, because the request itself is a dry run.
    pub dry_run: bool,
    /// Failure of the request if the write fails; its message continues with the error. `None`: the request passes with a warning.
    pub on_failure: Option<Failure>,
}

impl Effect {
    /// Returns the path of the collection; `None` if a name is not a path segment, so that no such object exists.
    pub fn collection(&self) -> Option<String> {
        collection_path(self.group, self.version, self.plural, Some(&self.namespace), Some(&self.name))
    }

    /// Returns the failure of the request after `error`, if the request depends on the write.
    pub(crate) fn failure(&self, error: &str) -> Option<Failure> {
        let Failure { code, message } = self.on_failure.as_ref()?;
        Some(Failure::new(*code, format!("{message}: {error}")))
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, plural, namespace, name, .. } = self;
        let dot = if group.is_empty() { "" } else { "." };
        write!(out, "patch {plural}{dot}{group} \"{namespace}/{name}\"")
    }
}
