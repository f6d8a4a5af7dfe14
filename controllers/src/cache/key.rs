//! Names of objects.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    /// Namespace, empty for cluster-wide objects.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl Key {
    /// Creates a key.
    pub(crate) fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// Creates the key of a cluster-wide object.
    pub(crate) fn cluster_wide(name: impl Into<String>) -> Self {
        Self::new("", name)
    }

    /// Returns the key of the object with this metadata.
    #[must_use]
    pub(crate) fn of(meta: &ObjectMeta) -> Self {
        Self::beside(meta, meta.name.clone().unwrap_or_default())
    }

    /// Returns the key of an object in the namespace of the one with this metadata.
    pub(crate) fn beside(meta: &ObjectMeta, name: impl Into<String>) -> Self {
        Self::new(meta.namespace.clone().unwrap_or_default(), name)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            formatter.write_str(&self.name)
        } else {
            write!(formatter, "{}/{}", self.namespace, self.name)
        }
    }
}
