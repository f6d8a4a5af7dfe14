//! References of a VM to its instance type and preference, and the source of their specs.

use thiserror::Error;

use crate::{
    VirtualMachine,
    vm::{
        spec::{InstancetypeMatcher, PreferenceMatcher},
        status::{ControllerRevisionRef, InstancetypeStatusRef},
    },
};

/// Kinds that a VM may refer to.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum MatchedKind {
    /// VirtualMachineInstancetype.
    Instancetype,
    /// VirtualMachineClusterInstancetype.
    ClusterInstancetype,
    /// VirtualMachinePreference.
    Preference,
    /// VirtualMachineClusterPreference.
    ClusterPreference,
}

impl MatchedKind {
    /// All kinds.
    pub const ALL: [Self; 4] =
        [Self::Instancetype, Self::ClusterInstancetype, Self::Preference, Self::ClusterPreference];

    /// Returns the `kind` of the objects.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Instancetype => "VirtualMachineInstancetype",
            Self::ClusterInstancetype => "VirtualMachineClusterInstancetype",
            Self::Preference => "VirtualMachinePreference",
            Self::ClusterPreference => "VirtualMachineClusterPreference",
        }
    }

    /// Returns the plural resource name.
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Instancetype => "virtualmachineinstancetypes",
            Self::ClusterInstancetype => "virtualmachineclusterinstancetypes",
            Self::Preference => "virtualmachinepreferences",
            Self::ClusterPreference => "virtualmachineclusterpreferences",
        }
    }

    /// Returns true for cluster-scoped kinds.
    pub const fn is_cluster_wide(self) -> bool {
        matches!(self, Self::ClusterInstancetype | Self::ClusterPreference)
    }

    /// Returns true for the two kinds of instance types.
    pub const fn is_instancetype(self) -> bool {
        matches!(self, Self::Instancetype | Self::ClusterInstancetype)
    }

    fn is_named(self, name: &str) -> bool {
        // The singular name is the lower-case kind.
        name.eq_ignore_ascii_case(self.kind()) || name.eq_ignore_ascii_case(self.plural())
    }
}

/// Role of a reference.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// The instance type.
    Instancetype,
    /// The preference.
    Preference,
}

impl Role {
    /// Both roles.
    pub const ALL: [Self; 2] = [Self::Instancetype, Self::Preference];

    /// Returns the field in the VM's spec.
    pub const fn field(self) -> &'static str {
        match self {
            Self::Instancetype => "instancetype",
            Self::Preference => "preference",
        }
    }

    /// Returns the type name of the field.
    pub const fn matcher(self) -> &'static str {
        match self {
            Self::Instancetype => "InstancetypeMatcher",
            Self::Preference => "PreferenceMatcher",
        }
    }

    /// Parses a kind; an empty one stands for the cluster-wide kind.
    pub fn kind(self, given: &str) -> Result<MatchedKind, UnexpectedKind> {
        let [cluster, namespaced] = match self {
            Self::Instancetype => [MatchedKind::ClusterInstancetype, MatchedKind::Instancetype],
            Self::Preference => [MatchedKind::ClusterPreference, MatchedKind::Preference],
        };
        if given.is_empty() {
            return Ok(cluster);
        }
        [cluster, namespaced]
            .into_iter()
            .find(|kind| kind.is_named(given))
            .ok_or_else(|| UnexpectedKind { matcher: self.matcher(), kind: given.to_owned() })
    }
}

/// The kind in a matcher does not fit its role.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("got unexpected kind in {matcher}: {kind}")]
pub struct UnexpectedKind {
    matcher: &'static str,
    kind: String,
}

/// Reference of a VM to its instance type or preference. Both have the same form.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Matcher {
    /// Kind; default: the cluster-wide one.
    pub kind: String,
    /// Name of the object.
    pub name: String,
    /// ControllerRevision that is used instead.
    pub revision_name: String,
    /// Volume whose labels contain the name.
    pub infer_from_volume: String,
    /// `Reject` or `Ignore`, for a volume without these labels.
    pub infer_from_volume_failure_policy: String,
}

impl From<&InstancetypeMatcher> for Matcher {
    fn from(matcher: &InstancetypeMatcher) -> Self {
        let text = |field: &Option<String>| field.clone().unwrap_or_default();
        Self {
            kind: text(&matcher.kind),
            name: text(&matcher.name),
            revision_name: text(&matcher.revision_name),
            infer_from_volume: text(&matcher.infer_from_volume),
            infer_from_volume_failure_policy: text(&matcher.infer_from_volume_failure_policy),
        }
    }
}

impl From<&PreferenceMatcher> for Matcher {
    fn from(matcher: &PreferenceMatcher) -> Self {
        let text = |field: &Option<String>| field.clone().unwrap_or_default();
        Self {
            kind: text(&matcher.kind),
            name: text(&matcher.name),
            revision_name: text(&matcher.revision_name),
            infer_from_volume: text(&matcher.infer_from_volume),
            infer_from_volume_failure_policy: text(&matcher.infer_from_volume_failure_policy),
        }
    }
}

impl Matcher {
    /// Returns the reference in a VM's spec, if any.
    pub fn of(vm: &VirtualMachine, role: Role) -> Option<Self> {
        match role {
            Role::Instancetype => vm.spec.instancetype.as_ref().map(Self::from),
            Role::Preference => vm.spec.preference.as_ref().map(Self::from),
        }
    }

    /// Returns true if the status refers to the same object. As in the reference, an empty field is no difference.
    fn is_that_of(&self, known: &InstancetypeStatusRef) -> bool {
        let same = |text: &str, field: &Option<String>| text.is_empty() || field.as_deref() == Some(text);
        same(&self.kind, &known.kind)
            && same(&self.name, &known.name)
            && same(&self.infer_from_volume, &known.infer_from_volume)
    }

    /// Returns the reference for the VM's status. Keeps the known revision if it is that of the spec, or is stored for the same
    /// object, and with it fields that the matcher lacks.
    pub fn status(&self, known: Option<&InstancetypeStatusRef>) -> InstancetypeStatusRef {
        let text = |field: &str| (!field.is_empty()).then(|| field.to_owned());
        let stored = known.filter(|known| known.controller_revision_ref.is_some() && self.is_that_of(known));
        let or_stored = |field: &str, known: Option<&String>| text(field).or_else(|| known.cloned());
        let given = text(&self.revision_name).map(|name| ControllerRevisionRef { name: Some(name) });
        InstancetypeStatusRef {
            name: or_stored(&self.name, stored.and_then(|known| known.name.as_ref())),
            kind: or_stored(&self.kind, stored.and_then(|known| known.kind.as_ref())),
            infer_from_volume: or_stored(
                &self.infer_from_volume,
                stored.and_then(|known| known.infer_from_volume.as_ref()),
            ),
            infer_from_volume_failure_policy: text(&self.infer_from_volume_failure_policy),
            controller_revision_ref: given.or_else(|| stored.and_then(|known| known.controller_revision_ref.clone())),
        }
    }

    /// Returns the kind of the object. That of a stored copy, if the matcher names none.
    pub fn matched_kind(
        &self,
        role: Role,
        known: Option<&InstancetypeStatusRef>,
    ) -> Result<MatchedKind, UnexpectedKind> {
        role.kind(self.status(known).kind.as_deref().unwrap_or_default())
    }
}

/// Returns the reference in a VM's status.
pub fn status_ref(vm: &VirtualMachine, role: Role) -> Option<&InstancetypeStatusRef> {
    let status = vm.status.as_ref()?;
    match role {
        Role::Instancetype => status.instancetype_ref.as_ref(),
        Role::Preference => status.preference_ref.as_ref(),
    }
}

/// Source of a spec.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Source {
    /// A ControllerRevision in the VM's namespace.
    Revision(String),
    /// An object, in the VM's namespace unless its kind is cluster-wide.
    Object(MatchedKind, String),
}

/// Returns the source of a VM's instance type or preference, or `None` if it has none. A stored copy takes precedence over
/// the object, which may have changed.
pub fn source(vm: &VirtualMachine, role: Role) -> Option<Result<Source, UnexpectedKind>> {
    let matcher = Matcher::of(vm, role)?;
    let revision = matcher.status(status_ref(vm, role)).controller_revision_ref.and_then(|revision| revision.name);
    if let Some(name) = revision.filter(|name| !name.is_empty()) {
        return Some(Ok(Source::Revision(name)));
    }
    Some(role.kind(&matcher.kind).map(|kind| Source::Object(kind, matcher.name)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vm(matcher: Value, status: Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v"},
            "spec": {"instancetype": matcher, "template": {"spec": {"domain": {"devices": {}}}}},
            "status": {"instancetypeRef": status},
        }))
        .unwrap()
    }

    #[test]
    fn kinds_are_known_by_singular_and_plural_in_any_case() {
        for (given, want) in [
            ("", Some(MatchedKind::ClusterInstancetype)),
            ("VirtualMachineInstancetype", Some(MatchedKind::Instancetype)),
            ("virtualmachineinstancetypes", Some(MatchedKind::Instancetype)),
            ("VIRTUALMACHINECLUSTERINSTANCETYPE", Some(MatchedKind::ClusterInstancetype)),
            ("VirtualMachinePreference", None),
        ] {
            assert_eq!(Role::Instancetype.kind(given).ok(), want, "{given}");
        }
        assert_eq!(Role::Preference.kind("virtualmachinepreferences"), Ok(MatchedKind::Preference));
        let error = Role::Preference.kind("Pod").unwrap_err();
        assert_eq!(error.to_string(), "got unexpected kind in PreferenceMatcher: Pod");
    }

    #[test]
    fn stored_copy_comes_before_the_object_until_the_matcher_names_another() {
        let stored = json!({"name": "a", "controllerRevisionRef": {"name": "r"}});
        let with = |field: &str, value: &str| {
            let mut stored = stored.clone();
            stored[field] = json!(value);
            stored
        };
        let (namespaced, inferred) = (with("kind", "VirtualMachineInstancetype"), with("inferFromVolume", "v"));
        let object = |name: &str| Source::Object(MatchedKind::ClusterInstancetype, name.to_owned());
        let revision = |name: &str| Source::Revision(name.to_owned());
        for (matcher, status, want) in [
            (json!({"name": "a"}), Value::Null, object("a")),
            (json!({"name": "a"}), stored.clone(), revision("r")),
            (json!({"name": "b"}), stored.clone(), object("b")),
            (json!({"name": "a", "revisionName": "s"}), stored.clone(), revision("s")),
            (
                json!({"name": "a", "kind": "VirtualMachineInstancetype"}),
                stored,
                Source::Object(MatchedKind::Instancetype, "a".to_owned()),
            ),
            // A field that is not given is no difference.
            (json!({"name": "a"}), namespaced.clone(), revision("r")),
            (json!({"name": "b"}), namespaced.clone(), object("b")),
            (json!({"name": "a", "kind": "VirtualMachineClusterInstancetype"}), namespaced, object("a")),
            (json!({"name": "a"}), inferred.clone(), revision("r")),
            (json!({"name": "a", "inferFromVolume": "v"}), inferred.clone(), revision("r")),
            (json!({"name": "a", "inferFromVolume": "w"}), inferred, object("a")),
            // Without a copy, the matcher alone counts.
            (json!({"name": "a"}), json!({"name": "a", "kind": "VirtualMachineInstancetype"}), object("a")),
        ] {
            assert_eq!(source(&vm(matcher.clone(), status), Role::Instancetype), Some(Ok(want)), "{matcher}");
        }
        assert_eq!(source(&vm(Value::Null, Value::Null), Role::Instancetype), None);
        assert_eq!(source(&vm(json!({"name": "a"}), Value::Null), Role::Preference), None);
    }

    #[test]
    fn status_of_a_stored_copy_keeps_the_fields_that_the_matcher_lacks() {
        let copy = json!({"name": "r"});
        let full = json!({
            "name": "a", "kind": "VirtualMachineInstancetype", "inferFromVolume": "v", "controllerRevisionRef": copy,
        });
        let bare = json!({"name": "a", "kind": "VirtualMachineInstancetype"});
        for (matcher, known, wanted, kind) in [
            (json!({"name": "a"}), full.clone(), full.clone(), MatchedKind::Instancetype),
            (json!({"name": "b"}), full, json!({"name": "b"}), MatchedKind::ClusterInstancetype),
            (json!({"name": "a"}), bare, json!({"name": "a"}), MatchedKind::ClusterInstancetype),
        ] {
            let vm = vm(matcher, known);
            let (matcher, known) = (Matcher::of(&vm, Role::Instancetype).unwrap(), status_ref(&vm, Role::Instancetype));
            assert_eq!(serde_json::to_value(matcher.status(known)).unwrap(), wanted);
            assert_eq!(matcher.matched_kind(Role::Instancetype, known), Ok(kind));
        }
    }
}
