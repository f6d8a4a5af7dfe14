//! Instance types and preferences.

use std::sync::Arc;

use api::instancetype::{
    MatchedKind, VirtualMachineClusterInstancetype, VirtualMachineClusterPreference, VirtualMachineInstancetype,
    VirtualMachinePreference,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::Serialize;

use super::{declaration::Declaration, metadata::slim};
use crate::{cache::trim_meta, runtime::Kind};

/// Label of instance types and preferences that come from a vendor.
const VENDOR_LABEL: &str = "instancetype.kubevirt.io/vendor";
/// Vendors whose names metrics may show: there are few, and they are public.
const VENDORS: [&str; 2] = ["kubevirt.io", "redhat.com"];

/// An instance type or preference.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CachedInstancetype {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Its kind.
    pub kind: MatchedKind,
    /// It comes from a vendor whose names metrics may show.
    pub is_vendors: bool,
    /// The whole object as JSON. It is parsed only when a VMI is started from it.
    pub object: Arc<str>,
}

impl CachedInstancetype {
    /// Reduces an object of a kind.
    #[must_use]
    pub(crate) fn new<K: Resource + Serialize>(kind: MatchedKind, mut object: K) -> Self {
        trim_meta(object.meta_mut());
        let vendor = object.meta().labels.as_ref().and_then(|labels| labels.get(VENDOR_LABEL));
        let is_vendors = vendor.is_some_and(|vendor| VENDORS.contains(&vendor.as_str()));
        let json = serde_json::to_string(&object).unwrap_or_default();
        Self { metadata: slim(std::mem::take(object.meta_mut())), kind, is_vendors, object: json.into() }
    }
}

unindexed!(CachedInstancetype);

/// Declares the resource of a kind.
macro_rules! declare {
    ($($kind:ident: $wire:ident as $name:ident $(written as $written:ident)?,)+) => {$(
        #[doc = concat!("Objects of kind ", stringify!($wire), ".")]
        pub(crate) enum $name {}

        impl Declaration for $name {
            type Wire = $wire;
            type Kept = CachedInstancetype;
            $(const WRITTEN: Option<Kind> = Some(Kind::$written);)?
        }

        impl From<$wire> for CachedInstancetype {
            fn from(object: $wire) -> Self {
                Self::new(MatchedKind::$kind, object)
            }
        }
    )+};
}

declare! {
    Instancetype: VirtualMachineInstancetype as Instancetypes,
    ClusterInstancetype: VirtualMachineClusterInstancetype as ClusterInstancetypes written as ClusterInstancetype,
    Preference: VirtualMachinePreference as Preferences,
    ClusterPreference: VirtualMachineClusterPreference as ClusterPreferences written as ClusterPreference,
}
