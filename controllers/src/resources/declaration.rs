//! The declaration of a resource, from which its cache, its watches, and the handling of answers to writes derive.

use std::{fmt::Debug, sync::Arc};

use api::FeatureGate;
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Caches, Resource};
use crate::{
    cache::{Cache, Cached, Presence, Watch},
    runtime::Kind,
};

/// A resource: its names, how it is watched, and the parts of its objects that are kept. Indices are those of [`Cached`].
pub(crate) trait Declaration: 'static {
    /// The object as the API server sends it, with group, version and plural name.
    type Wire: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static;
    /// The object as it is kept.
    type Kept: Cached + From<Self::Wire>;
    /// How the resource comes into a cluster.
    const PRESENCE: Presence = Presence::Required;
    /// The objects that are watched.
    const SELECTION: Selection = Selection::All;
    /// The resource is watched from the time on at which this feature gate is off.
    const UNLESS: Option<FeatureGate> = None;
    /// Kind of the writes whose answers the cache stores.
    const WRITTEN: Option<Kind> = None;

    /// Returns what is kept of an object. `None`: nothing.
    fn keep(object: Self::Wire) -> Option<Self::Kept> {
        Some(object.into())
    }

    /// Returns the client of the scope that is watched: the cluster, or the install namespace.
    fn api(client: Client, _install_namespace: &str) -> Api<Self::Wire> {
        Api::all(client)
    }

    /// Adjusts the watch.
    fn adjust(watch: Watch<Self::Wire, Self::Kept>, _caches: &Caches) -> Watch<Self::Wire, Self::Kept> {
        watch
    }
}

/// The objects of a resource that are watched.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Selection {
    /// All of them.
    All,
    /// Those with these names, each by a watch of its own, as RBAC requires.
    Names(&'static [&'static str]),
    /// Those with this label.
    HasLabel(&'static str),
    /// Those with this value of a label.
    Label(&'static str, &'static str),
    /// Those with this value of a field.
    Field(&'static str, &'static str),
}

impl Selection {
    /// Returns the watches of the selected objects.
    pub(super) fn watches<W, K>(self, watch: impl Fn() -> Watch<W, K>) -> Vec<Watch<W, K>>
    where
        W: kube::Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
        K: Cached,
    {
        match self {
            Self::All => vec![watch()],
            Self::Names(names) => names.iter().map(|name| watch().named(name)).collect(),
            Self::HasLabel(key) => vec![watch().labels(key)],
            Self::Label(key, value) => vec![watch().labels(&format!("{key}={value}"))],
            Self::Field(path, value) => vec![watch().fields(&format!("{path}={value}"))],
        }
    }

    /// Returns true if an object that was written is selected. Its fields are not compared.
    pub(super) fn selects(self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        match self {
            Self::All | Self::Field(..) => true,
            Self::Names(names) => metadata["name"].as_str().is_some_and(|name| names.contains(&name)),
            Self::HasLabel(key) => metadata["labels"].get(key).is_some(),
            Self::Label(key, value) => metadata["labels"][key] == value,
        }
    }
}

/// Does something with each declaration and its cache.
pub(super) trait Visitor {
    /// Visits one resource.
    fn visit<D: Declaration>(&mut self, resource: Resource, cache: &Arc<Cache<D::Kept>>);
}
