//! Persistent volume claims, and the volumes that name them.

use std::collections::BTreeMap;

use api::{
    cdi::{DataVolume, annotation, label::OWNED_BY},
    constants::annotation::{HAND_OVER_TO, LAST_RESTORE, OWNED_BY_VM, REPLACED_BY, RESTORE},
    hotplug::dump_claim,
    owner,
    persistent_state::{LABEL, MIGRATION_LABEL},
    quantity,
    vmi::{status::Amounts, volumes::Volume},
};
use k8s_openapi::{
    api::core::v1::PersistentVolumeClaim,
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
};

use super::{
    declaration::Declaration,
    metadata::{keep, slim},
};
use crate::{
    cache::{Cached, Key},
    runtime::Kind,
};

/// Name of a size among amounts of resources.
const STORAGE: &str = "storage";
/// Access mode of claims that several nodes can mount.
pub(crate) const SHARED: &str = "ReadWriteMany";
/// Annotation of claims that neither CDI nor we fill.
const EXTERNAL_POPULATION: &str = "cdi.kubevirt.io/externalPopulation";
/// Annotation of claims with the node on which their volume is made.
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// Prefix of the labels by which VMs infer instance types and preferences.
const INFERENCE: &str = "instancetype.kubevirt.io/default-";
/// Names of these labels.
const INFERRED: [&str; 4] = ["instancetype", "instancetype-kind", "preference", "preference-kind"];
/// Label of claims whose guest takes credentials while it runs.
const DYNAMIC_CREDENTIALS: &str = "kubevirt.io/dynamic-credentials-support";

/// Returns true for a label that VMs infer from, or that goes with the content of a claim.
pub(crate) fn is_inference(key: &str) -> bool {
    key == DYNAMIC_CREDENTIALS || key.strip_prefix(INFERENCE).is_some_and(|name| INFERRED.contains(&name))
}

/// Returns the claim that holds a volume's data itself, as opposed to a claim beneath an ephemeral overlay.
pub(crate) fn claim_name(volume: &Volume) -> Option<&str> {
    let claim = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
    claim.or_else(|| volume.data_volume.as_ref().map(|source| source.name.as_str())).or(dump_claim(volume))
}

/// Returns the claim that a volume mounts, and true if it is mounted read-only.
pub(crate) fn mounted_claim(volume: &Volume) -> Option<(&str, bool)> {
    if let Some(claim) = &volume.persistent_volume_claim {
        return Some((&claim.claim_name, claim.read_only));
    }
    if let Some(source) = &volume.data_volume {
        return Some((&source.name, false));
    }
    if let Some(claim) = dump_claim(volume) {
        return Some((claim, false));
    }
    let claim = volume.ephemeral.as_ref()?.persistent_volume_claim.as_ref()?;
    Some((&claim.claim_name, claim.read_only.unwrap_or(false)))
}

/// Indices of claims.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ClaimIndex {
    /// The VMI with the state in the claim: its namespace and the value of the label.
    State(Key),
    /// Storage class of a bound claim whose file system several nodes can mount.
    SharedFileSystem(String),
}

/// A persistent volume claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedClaim {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// The volume is a block device.
    pub block: bool,
    /// How it may be attached.
    pub access_modes: Vec<String>,
    /// `Pending`, `Bound` or `Lost`.
    pub phase: String,
    /// Requested size.
    pub requests: Option<Quantity>,
    /// Size of the volume.
    pub capacity: Option<Quantity>,
    /// An importer is still writing to it.
    pub populating: bool,
    /// Its blocks are allocated ahead.
    pub preallocated: bool,
    /// Name of its storage class.
    pub storage_class: Option<String>,
    /// Name of its volume.
    pub volume: Option<String>,
    /// A pod that uses it has a node, where its volume is made.
    pub has_node: bool,
    /// Kind and name of the object that its volume is made from.
    pub data_source: Option<(String, String)>,
    /// Name of the DataVolume for which it was filled.
    pub populated_for: Option<String>,
    /// Value of the label with the VMI whose state it has.
    pub state_of: Option<String>,
    /// Value of the label with the migration that moves the state of a VMI to it.
    pub moved_by: Option<String>,
    /// Labels from which VMs infer instance types and preferences.
    pub inference: BTreeMap<String, String>,
}

impl CachedClaim {
    /// Returns the requested size in bytes.
    #[must_use]
    pub(crate) fn requested_bytes(&self) -> Option<i64> {
        quantity::units(self.requests.as_ref()?).ok()
    }

    /// Returns the size of the volume in bytes.
    #[must_use]
    pub(crate) fn capacity_bytes(&self) -> Option<i64> {
        quantity::units(self.capacity.as_ref()?).ok()
    }

    /// Returns true if an importer has filled the claim.
    #[must_use]
    pub(crate) fn is_filled(&self) -> bool {
        let annotations = self.metadata.annotations.as_ref();
        annotations
            .and_then(|annotations| annotations.get(annotation::POD_PHASE))
            .is_some_and(|phase| phase == "Succeeded")
    }

    /// Returns true if the claim was filled for a DataVolume of this name.
    #[must_use]
    pub(crate) fn is_filled_for(&self, volume: &str) -> bool {
        self.populated_for.as_deref() == Some(volume)
    }

    /// Returns name and UID of the DataVolume that controls the claim.
    #[must_use]
    pub(crate) fn data_volume(&self) -> Option<(&str, &str)> {
        let owner = owner::controller_of_kind::<DataVolume>(&self.metadata)?;
        Some((&owner.name, &owner.uid))
    }

    /// Returns true if both claims differ in nothing that VMIs depend on.
    #[must_use]
    pub(crate) fn is_equivalent(&self, other: &Self) -> bool {
        let facts = |claim: &Self| Self { metadata: ObjectMeta::default(), ..claim.clone() };
        facts(self) == facts(other) && self.data_volume() == other.data_volume()
    }
}

/// Returns a size as amounts of resources.
pub(crate) fn amounts(size: Option<&Quantity>) -> Amounts {
    let amounts: BTreeMap<String, Quantity> = size.map(|size| (STORAGE.to_owned(), size.clone())).into_iter().collect();
    amounts.into()
}

/// Returns the claim of a change, unless nothing that controllers depend on has changed.
pub(crate) fn changed<'a>(
    former: Option<&'a CachedClaim>,
    present: Option<&'a CachedClaim>,
) -> Option<&'a CachedClaim> {
    let is_equivalent = former.zip(present).is_some_and(|(former, present)| former.is_equivalent(present));
    present.or(former).filter(|_| !is_equivalent)
}

impl Cached for CachedClaim {
    type Index = ClaimIndex;
    reduced!();

    fn indices(&self) -> Vec<ClaimIndex> {
        let namespace = || self.metadata.namespace.clone().unwrap_or_default();
        let state = self.state_of.as_ref().map(|vmi| ClaimIndex::State(Key::new(namespace(), vmi.as_str())));
        let is_shared = !self.block && self.phase == "Bound" && self.access_modes.iter().any(|mode| mode == SHARED);
        let shared = self.storage_class.clone().filter(|_| is_shared).map(ClaimIndex::SharedFileSystem);
        state.into_iter().chain(shared).collect()
    }
}

impl Declaration for CachedClaim {
    type Wire = PersistentVolumeClaim;
    type Kept = Self;
    const WRITTEN: Option<Kind> = Some(Kind::Claim);
}

/// Returns true if an importer has still to fill the claim with these annotations. One that is filled through another claim is bound
/// when it is complete; any other shows the phase of the pod that fills it, once there is one.
fn is_populating(annotations: &BTreeMap<String, String>) -> bool {
    let value = |key: &str| annotations.get(key).map(String::as_str);
    match value(annotation::POD_PHASE) {
        Some(phase) => phase != "Succeeded",
        None => {
            value(annotation::CREATED_FOR).is_some()
                && value(annotation::USE_POPULATOR) == Some("false")
                && value(annotation::POPULATED_FOR).is_none()
                && value(EXTERNAL_POPULATION).is_none()
        }
    }
}

impl From<PersistentVolumeClaim> for CachedClaim {
    fn from(claim: PersistentVolumeClaim) -> Self {
        let spec = claim.spec.unwrap_or_default();
        let status = claim.status.unwrap_or_default();
        // Annotations of importers, whose prefixes differ.
        let preallocated = claim.metadata.annotations.iter().flatten().any(|(key, value)| {
            value == "true" && (key.ends_with("/storage.preallocation") || key.ends_with("/storage.thick-provisioned"))
        });
        let annotations = claim.metadata.annotations.as_ref();
        let populating = annotations.is_some_and(is_populating);
        let has_node = annotations.is_some_and(|all| all.contains_key(SELECTED_NODE));
        let populated_for = annotations.and_then(|all| all.get(annotation::POPULATED_FOR)).cloned();
        let label = |key: &str| claim.metadata.labels.as_ref().and_then(|labels| labels.get(key)).cloned();
        let inference = claim.metadata.labels.iter().flatten().filter(|(key, _)| is_inference(key));
        let mut access_modes = spec.access_modes.unwrap_or_default();
        access_modes.shrink_to_fit();
        Self {
            state_of: label(LABEL),
            moved_by: label(MIGRATION_LABEL),
            populated_for,
            inference: inference.map(|(key, value)| (key.clone(), value.clone())).collect(),
            populating,
            metadata: ObjectMeta {
                labels: keep(claim.metadata.labels.as_ref(), &[OWNED_BY]),
                annotations: keep(
                    claim.metadata.annotations.as_ref(),
                    &[
                        HAND_OVER_TO,
                        annotation::POD_PHASE,
                        annotation::CREATED_FOR,
                        RESTORE,
                        LAST_RESTORE,
                        OWNED_BY_VM,
                        REPLACED_BY,
                    ],
                ),
                ..slim(claim.metadata)
            },
            has_node,
            volume: spec.volume_name.filter(|name| !name.is_empty()),
            data_source: spec.data_source.map(|source| (source.kind, source.name)),
            block: spec.volume_mode.as_deref() == Some("Block"),
            access_modes,
            storage_class: spec.storage_class_name,
            phase: status.phase.unwrap_or_default(),
            requests: spec.resources.and_then(|resources| resources.requests?.remove(STORAGE)),
            capacity: status.capacity.and_then(|mut amounts| amounts.remove(STORAGE)),
            preallocated,
        }
    }
}
