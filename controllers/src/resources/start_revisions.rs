//! ControllerRevisions that record the VM spec at its last start, reduced to digests of its template.
//!
//! Digests live in memory only: both sides of a comparison are read and hashed by the same version of this program, so that
//! an upgrade does not show as a change.

use api::{
    VirtualMachineInstanceSpec, VirtualMachineSpec,
    constants::annotation::PCI_TOPOLOGY,
    hotplug::is_hotpluggable,
    quantity,
    vmi::{
        spec::VirtualMachineInstanceTemplateSpec,
        volumes::{PersistentVolumeClaimVolumeSource, Volume},
    },
};
use k8s_openapi::{
    api::apps::v1::ControllerRevision,
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
};
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::{
    declaration::{Declaration, Selection},
    metadata::slim,
};
use crate::{cache::Cached, runtime::Kind};

/// Label of these revisions.
pub(crate) const LABEL: &str = "ferrovirt.io/start-revision";
/// Field of the data: the VM spec as written.
pub(crate) const SPEC: &str = "spec";
/// Field of the data: the template's spec with instance type and preference applied, if the VM names any.
pub(crate) const EXPANDED: &str = "expandedTemplateSpec";
/// Number of groups.
const GROUPS: usize = 13;
/// Bytes of a digest that are kept.
const DIGEST_BYTES: usize = 12;

/// A part of a VMI spec whose change is handled in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    /// Node selector, affinity and tolerations.
    Placement,
    /// Sockets.
    Sockets,
    /// Sockets to which the VMI can grow.
    MaxSockets,
    /// Other settings of vCPUs.
    Cpu,
    /// CPU resources.
    CpuResources,
    /// Guest memory.
    Guest,
    /// Guest memory to which the VMI can grow.
    MaxGuest,
    /// Other settings of memory.
    Memory,
    /// Memory resources.
    MemoryResources,
    /// Networks and interfaces.
    Networks,
    /// Volumes, disks and file systems, except hot-pluggable volumes and their disks, and the claims of the others.
    Volumes,
    /// Claims of volumes that are not hot-pluggable.
    Claims,
    /// Everything else.
    Rest,
}

impl Group {
    const ALL: [Self; GROUPS] = [
        Self::Placement,
        Self::Sockets,
        Self::MaxSockets,
        Self::Cpu,
        Self::CpuResources,
        Self::Guest,
        Self::MaxGuest,
        Self::Memory,
        Self::MemoryResources,
        Self::Networks,
        Self::Volumes,
        Self::Claims,
        Self::Rest,
    ];
}

/// The beginning of a SHA-256 digest.
pub(super) type Digest = [u8; DIGEST_BYTES];

/// Returns the digest of an object as JSON.
pub(super) fn digest(part: &impl Serialize) -> Digest {
    let json = serde_json::to_vec(part).unwrap_or_default();
    let mut digest = Digest::default();
    for (to, from) in digest.iter_mut().zip(Sha256::digest(&json)) {
        *to = from;
    }
    digest
}

/// Returns the amount in thousandths, which clients can write in several ways; the text if it is malformed.
fn amount(quantity: Option<Quantity>) -> Option<Result<i64, String>> {
    quantity.map(|quantity| quantity::milli(&quantity).map_err(|_| quantity.0))
}

/// Takes the name of the claim from a volume. Volumes that name it in either way are equal then.
fn take_claim(volume: &mut Volume) -> Option<String> {
    if let Some(source) = volume.data_volume.take() {
        volume.persistent_volume_claim = Some(PersistentVolumeClaimVolumeSource::default());
        return Some(source.name);
    }
    volume.persistent_volume_claim.as_mut().map(|claim| std::mem::take(&mut claim.claim_name))
}

/// Digests of a VMI spec by group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SpecDigests([Digest; GROUPS]);

impl SpecDigests {
    /// Computes the digests of a spec.
    pub(crate) fn of(mut spec: VirtualMachineInstanceSpec) -> Self {
        let domain = &mut spec.domain;
        let devices = &mut domain.devices;
        let placement = digest(&(
            std::mem::take(&mut spec.node_selector),
            spec.affinity.take(),
            std::mem::take(&mut spec.tolerations),
        ));
        let resources = &mut domain.resources;
        let mut of = |name: &str| digest(&[resources.requests.remove(name), resources.limits.remove(name)].map(amount));
        let (cpu_resources, memory_resources) = (of("cpu"), of("memory"));
        let (mut cpu, mut memory) = (domain.cpu.take().unwrap_or_default(), domain.memory.take().unwrap_or_default());
        let (sockets, max_sockets) = (digest(&cpu.sockets.take()), digest(&cpu.max_sockets.take()));
        let (guest, max_guest) = (digest(&amount(memory.guest.take())), digest(&amount(memory.max_guest.take())));
        let (cpu, memory) = (digest(&cpu), digest(&memory));
        let networks = digest(&(std::mem::take(&mut spec.networks), std::mem::take(&mut devices.interfaces)));
        let (mut volumes, mut disks) = (std::mem::take(&mut spec.volumes), std::mem::take(&mut devices.disks));
        // A running VMI follows the volumes that can be plugged and their disks, but no drives.
        disks.retain(|disk| {
            disk.cdrom.is_some() || !volumes.iter().any(|volume| volume.name == disk.name && is_hotpluggable(volume))
        });
        volumes.retain(|volume| !is_hotpluggable(volume) && volume.memory_dump.is_none());
        let claims: Vec<(String, String)> =
            volumes.iter_mut().filter_map(|volume| Some((volume.name.clone(), take_claim(volume)?))).collect();
        let volumes = digest(&(volumes, disks, std::mem::take(&mut devices.filesystems)));
        let (claims, rest) = (digest(&claims), digest(&spec));
        Self([
            placement,
            sockets,
            max_sockets,
            cpu,
            cpu_resources,
            guest,
            max_guest,
            memory,
            memory_resources,
            networks,
            volumes,
            claims,
            rest,
        ])
    }

    /// Returns the groups that differ.
    pub(crate) fn differences(&self, other: &Self) -> Vec<Group> {
        let pairs = Group::ALL.into_iter().zip(self.0.iter().zip(&other.0));
        pairs.filter(|(_, (left, right))| left != right).map(|(group, _)| group).collect()
    }
}

/// Digests of a VM's template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TemplateDigests {
    /// Labels, annotations and name.
    metadata: Digest,
    /// The spec as written.
    written: Digest,
    /// Names of the copies of instance type and preference that are applied.
    copies: [Option<String>; 2],
    /// The spec with instance type and preference applied, by group. `None`: it cannot be computed.
    pub(crate) expanded: Option<SpecDigests>,
}

impl TemplateDigests {
    /// Computes the digests of a template and of its expanded spec. `copies` are the names of the copies of instance type and
    /// preference.
    pub(crate) fn of(
        template: &VirtualMachineInstanceTemplateSpec,
        copies: [Option<String>; 2],
        expanded: Option<VirtualMachineInstanceSpec>,
    ) -> Self {
        let mut metadata = template.metadata.clone();
        // This program copies them from the VMI.
        if let Some(annotations) = &mut metadata.annotations {
            annotations.retain(|key, _| !PCI_TOPOLOGY.contains(&key.as_str()));
        }
        metadata.annotations = metadata.annotations.filter(|annotations| !annotations.is_empty());
        Self {
            metadata: digest(&metadata),
            written: digest(&template.spec),
            copies,
            expanded: expanded.map(SpecDigests::of),
        }
    }

    /// Returns true when users wrote both specs alike and both have the same instance type and preference. Versions of this
    /// program may expand them differently.
    pub(crate) fn is_written_alike(&self, other: &Self) -> bool {
        self.written == other.written && self.copies == other.copies
    }

    /// Returns true when both templates result in the same VMI.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let is_equal = |left: &SpecDigests, right: &SpecDigests| left == right;
        let same_spec = self.written == other.written
            || self.expanded.as_ref().zip(other.expanded.as_ref()).is_some_and(|(left, right)| is_equal(left, right));
        self.metadata == other.metadata && same_spec
    }
}

/// The record of a start of a VM.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StartRevision {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// The template at that start, if the record can be read.
    pub template: Option<TemplateDigests>,
    /// Names of the DataVolumes of the VM at that start.
    pub data_volumes: Vec<String>,
}

impl From<ControllerRevision> for StartRevision {
    fn from(revision: ControllerRevision) -> Self {
        let data = revision.data.map(|data| data.0).unwrap_or_default();
        let templates = data[SPEC]["dataVolumeTemplates"].as_array();
        let name = |template: &Value| template["metadata"]["name"].as_str().map(str::to_owned);
        let data_volumes = templates.into_iter().flatten().filter_map(name).collect();
        Self { metadata: slim(revision.metadata), template: read(data), data_volumes }
    }
}

fn read(mut data: Value) -> Option<TemplateDigests> {
    let spec: VirtualMachineSpec = serde_json::from_value(data.get_mut(SPEC)?.take()).ok()?;
    let expanded = match data.get_mut(EXPANDED) {
        Some(expanded) => serde_json::from_value(expanded.take()).ok(),
        None if spec.instancetype.is_some() || spec.preference.is_some() => None,
        None => spec.template.spec.clone(),
    };
    let copies = [
        spec.instancetype.as_ref().and_then(|matcher| matcher.revision_name.clone()),
        spec.preference.as_ref().and_then(|matcher| matcher.revision_name.clone()),
    ];
    Some(TemplateDigests::of(&spec.template, copies, expanded))
}

/// Indices of start revisions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StartRevisionIndex {
    /// UID of the VM.
    Vm(String),
}

impl Cached for StartRevision {
    type Index = StartRevisionIndex;
    reduced!();

    fn indices(&self) -> Vec<StartRevisionIndex> {
        let controller = api::owner::controller(&self.metadata);
        controller.map(|owner| StartRevisionIndex::Vm(owner.uid.clone())).into_iter().collect()
    }
}

impl Declaration for StartRevision {
    type Wire = ControllerRevision;
    type Kept = Self;
    const SELECTION: Selection = Selection::HasLabel(LABEL);
    const WRITTEN: Option<Kind> = Some(Kind::ControllerRevision);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn change_is_attributed_to_its_group() {
        let spec = |change: &Value| {
            let mut spec = json!({
                "domain": {
                    "cpu": {"cores": 1}, "memory": {"guest": "1Gi"}, "devices": {},
                    "resources": {"requests": {"cpu": "1", "memory": "1Gi", "example.com/x": "1"}},
                },
            });
            json_patch::merge(&mut spec, change);
            SpecDigests::of(serde_json::from_value(spec).unwrap())
        };
        for (change, groups) in [
            (json!({}), vec![]),
            (json!({"nodeSelector": {"a": "b"}}), vec![Group::Placement]),
            (json!({"tolerations": [{"key": "a"}]}), vec![Group::Placement]),
            (json!({"domain": {"cpu": {"cores": 2}}}), vec![Group::Cpu]),
            (json!({"domain": {"cpu": {"sockets": 2}}}), vec![Group::Sockets]),
            (json!({"domain": {"cpu": {"sockets": 2, "maxSockets": 4}}}), vec![Group::Sockets, Group::MaxSockets]),
            (json!({"domain": {"memory": {"maxGuest": "4Gi"}}}), vec![Group::MaxGuest]),
            (json!({"domain": {"memory": {"hugepages": {"pageSize": "2Mi"}}}}), vec![Group::Memory]),
            (json!({"domain": {"resources": {"requests": {"cpu": "2"}}}}), vec![Group::CpuResources]),
            (json!({"domain": {"memory": {"guest": "2Gi"}}}), vec![Group::Guest]),
            (json!({"domain": {"memory": {"guest": "1024Mi"}}}), vec![]),
            (json!({"domain": {"memory": {"guest": "no amount"}}}), vec![Group::Guest]),
            (json!({"domain": {"resources": {"limits": {"memory": "2Gi"}}}}), vec![Group::MemoryResources]),
            (json!({"domain": {"resources": {"requests": {"cpu": "1000m", "memory": "1073741824"}}}}), vec![]),
            (json!({"networks": [{"name": "default", "pod": {}}]}), vec![Group::Networks]),
            (json!({"domain": {"devices": {"disks": [{"name": "a"}]}}}), vec![Group::Volumes]),
            (
                json!({
                    "volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}}],
                    "domain": {"devices": {"disks": [{"name": "a", "disk": {"bus": "scsi"}}]}},
                }),
                vec![],
            ),
            (
                json!({
                    "volumes": [{"name": "a", "dataVolume": {"name": "c", "hotpluggable": true}}],
                    "domain": {"devices": {"disks": [{"name": "a", "cdrom": {"bus": "sata"}}]}},
                }),
                vec![Group::Volumes],
            ),
            (
                json!({
                    "volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "c"}}],
                    "domain": {"devices": {"disks": [{"name": "a", "disk": {"bus": "scsi"}}]}},
                }),
                vec![Group::Volumes, Group::Claims],
            ),
            (json!({"domain": {"resources": {"requests": {"example.com/x": "2"}}}}), vec![Group::Rest]),
            (
                json!({"hostname": "a", "volumes": [{"name": "a", "containerDisk": {"image": "i"}}]}),
                vec![Group::Volumes, Group::Rest],
            ),
        ] {
            assert_eq!(spec(&json!({})).differences(&spec(&change)), groups, "{change}");
        }
    }

    #[test]
    fn other_claim_of_a_volume_is_a_group_of_its_own() {
        let spec = |volume: Value| {
            let spec = json!({"domain": {"devices": {}}, "volumes": [volume]});
            SpecDigests::of(serde_json::from_value(spec).unwrap())
        };
        let present = spec(json!({"name": "a", "persistentVolumeClaim": {"claimName": "c"}}));
        for (volume, groups) in [
            (json!({"name": "a", "dataVolume": {"name": "c"}}), vec![]),
            (json!({"name": "a", "persistentVolumeClaim": {"claimName": "d"}}), vec![Group::Claims]),
            (json!({"name": "a", "dataVolume": {"name": "d"}}), vec![Group::Claims]),
            (json!({"name": "a", "persistentVolumeClaim": {"claimName": "c", "readOnly": true}}), vec![Group::Volumes]),
            (json!({"name": "b", "persistentVolumeClaim": {"claimName": "c"}}), vec![Group::Volumes, Group::Claims]),
        ] {
            assert_eq!(present.differences(&spec(volume.clone())), groups, "{volume}");
        }
    }

    #[test]
    fn record_names_the_data_volumes_of_the_start() {
        for (templates, names) in [
            (json!([{"metadata": {"name": "root"}}, {"metadata": {}}, 7]), vec!["root"]),
            (json!(null), vec![]),
            (json!("root"), vec![]),
        ] {
            let revision = json!({
                "metadata": {"name": "r"}, "revision": 1, "data": {"spec": {"dataVolumeTemplates": templates}},
            });
            let record = StartRevision::from(serde_json::from_value::<ControllerRevision>(revision).unwrap());
            assert_eq!(record.data_volumes, names, "{templates}");
        }
    }

    #[test]
    fn record_holds_the_template_with_its_instance_type() {
        let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"domain": {"devices": {}}}});
        let expanded = json!({"domain": {"cpu": {"sockets": 2}, "devices": {}}});
        let read = |data: Value| {
            let revision = json!({"metadata": {"name": "r"}, "revision": 1, "data": data});
            StartRevision::from(serde_json::from_value::<ControllerRevision>(revision).unwrap()).template
        };
        let written: VirtualMachineInstanceTemplateSpec = serde_json::from_value(template.clone()).unwrap();
        let plain = TemplateDigests::of(&written, [None, None], written.spec.clone());
        assert_eq!(read(json!({"spec": {"template": template}})), Some(plain.clone()));
        let named = json!({"template": template, "instancetype": {"name": "c"}});
        let of_type = read(json!({"spec": named, "expandedTemplateSpec": expanded})).unwrap();
        assert_eq!(of_type.expanded, Some(SpecDigests::of(serde_json::from_value(expanded).unwrap())));
        // An older record without the expanded template proves nothing.
        assert_eq!(read(json!({"spec": named})).unwrap().expanded, None);
        assert_eq!(read(json!({"spec": 7})), None);
        assert!(of_type.is_same(&plain));
    }
}
