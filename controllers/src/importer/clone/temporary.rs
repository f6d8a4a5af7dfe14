//! The temporary claim of a clone into another namespace. It is in the namespace of the source, where a driver can clone it and a
//! pod can mount both.

use std::collections::BTreeMap;

use api::{cdi::label, constants::annotation, names};
use k8s_openapi::{
    api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimSpec},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use crate::{cache::Key, resources::claims::CachedClaim};

/// Beginning of the names, by which the admission policies know the claims.
const PREFIX: &str = "tmp-pvc-";

/// Returns the name of the temporary claim of a DataVolume with this UID.
pub(super) fn name(uid: &str) -> String {
    names::object_name(PREFIX, uid)
}

/// Returns true if the claim is that of the DataVolume with this UID.
pub(super) fn is_of(claim: &CachedClaim, uid: &str) -> bool {
    claim.metadata.labels.as_ref().and_then(|labels| labels.get(label::OWNED_BY)).is_some_and(|owner| owner == uid)
}

/// Renders the claim. `spec`: that of the target, with the data source of a clone by the driver.
pub(super) fn render(
    uid: &str,
    namespace: &str,
    receiver: &Key,
    spec: PersistentVolumeClaimSpec,
) -> PersistentVolumeClaim {
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(name(uid)),
            namespace: Some(namespace.to_owned()),
            labels: Some(BTreeMap::from([(label::OWNED_BY.to_owned(), uid.to_owned())])),
            annotations: Some(BTreeMap::from([(annotation::HAND_OVER_TO.to_owned(), receiver.to_string())])),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}
