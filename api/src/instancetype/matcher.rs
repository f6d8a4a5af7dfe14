//! What a VM names as its instance type and preference, and where that is kept.

use thiserror::Error;

use crate::{
    VirtualMachine,
    vm::{
        spec::{InstancetypeMatcher, PreferenceMatcher},
        status::{ControllerRevisionRef, InstancetypeStatusRef},
    },
};

/// Kinds a VM may name.
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

    /// `kind` of its objects.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Instancetype => "VirtualMachineInstancetype",
            Self::ClusterInstancetype => "VirtualMachineClusterInstancetype",
            Self::Preference => "VirtualMachinePreference",
            Self::ClusterPreference => "VirtualMachineClusterPreference",
        }
    }

    /// Name of its resource.
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Instancetype => "virtualmachineinstancetypes",
            Self::ClusterInstancetype => "virtualmachineclusterinstancetypes",
            Self::Preference => "virtualmachinepreferences",
            Self::ClusterPreference => "virtualmachineclusterpreferences",
        }
    }

    /// Whether its objects belong to no namespace.
    pub const fn is_cluster_wide(self) -> bool {
        matches!(self, Self::ClusterInstancetype | Self::ClusterPreference)
    }

    /// Whether it is one of the two kinds of instance types.
    pub const fn is_instancetype(self) -> bool {
        matches!(self, Self::Instancetype | Self::ClusterInstancetype)
    }

    fn is_named(self, name: &str) -> bool {
        // The singular name is the kind in small letters.
        name.eq_ignore_ascii_case(self.kind()) || name.eq_ignore_ascii_case(self.plural())
    }
}

/// Which of the two things a VM names.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// Its instance type.
    Instancetype,
    /// Its preference.
    Preference,
}

impl Role {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Instancetype, Self::Preference];

    /// Field of the VM's spec.
    pub const fn field(self) -> &'static str {
        match self {
            Self::Instancetype => "instancetype",
            Self::Preference => "preference",
        }
    }

    /// Name of the field's type.
    pub const fn matcher(self) -> &'static str {
        match self {
            Self::Instancetype => "InstancetypeMatcher",
            Self::Preference => "PreferenceMatcher",
        }
    }

    /// The kind that `given` names; the cluster-wide one when it is empty.
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

/// A matcher names a kind that is none of the two it may.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("got unexpected kind in {matcher}: {kind}")]
pub struct UnexpectedKind {
    matcher: &'static str,
    kind: String,
}

/// What a VM says about its instance type or preference; the two have the same form.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Matcher {
    /// Kind; the cluster-wide one when empty.
    pub kind: String,
    /// Name of the object.
    pub name: String,
    /// ControllerRevision to use instead.
    pub revision_name: String,
    /// Volume whose labels name it.
    pub infer_from_volume: String,
    /// `Reject` or `Ignore`, when the volume names none.
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
    /// What a VM says, if it says anything.
    pub fn of(vm: &VirtualMachine, role: Role) -> Option<Self> {
        match role {
            Role::Instancetype => vm.spec.instancetype.as_ref().map(Self::from),
            Role::Preference => vm.spec.preference.as_ref().map(Self::from),
        }
    }

    /// Whether a VM's status speaks of the same.
    fn is_that_of(&self, known: &InstancetypeStatusRef) -> bool {
        let same = |field: &Option<String>, text: &str| field.as_deref().unwrap_or_default() == text;
        same(&known.kind, &self.kind)
            && same(&known.name, &self.name)
            && same(&known.infer_from_volume, &self.infer_from_volume)
    }

    /// What the VM's status is to say, the revision it knows kept if it still is the one: that of the spec, or the
    /// one stored for the same object.
    pub fn status(&self, known: Option<&InstancetypeStatusRef>) -> InstancetypeStatusRef {
        let text = |field: &str| (!field.is_empty()).then(|| field.to_owned());
        let stored =
            known.filter(|known| self.is_that_of(known)).and_then(|known| known.controller_revision_ref.clone());
        let given = text(&self.revision_name).map(|name| ControllerRevisionRef { name: Some(name) });
        InstancetypeStatusRef {
            name: text(&self.name),
            kind: text(&self.kind),
            infer_from_volume: text(&self.infer_from_volume),
            infer_from_volume_failure_policy: text(&self.infer_from_volume_failure_policy),
            controller_revision_ref: given.or(stored),
        }
    }
}

/// What a VM's status says about its instance type or preference.
pub fn status_ref(vm: &VirtualMachine, role: Role) -> Option<&InstancetypeStatusRef> {
    let status = vm.status.as_ref()?;
    match role {
        Role::Instancetype => status.instancetype_ref.as_ref(),
        Role::Preference => status.preference_ref.as_ref(),
    }
}

/// Where what a VM names is read.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Source {
    /// A ControllerRevision of the VM's namespace.
    Revision(String),
    /// An object, of the VM's namespace unless its kind is cluster-wide.
    Object(MatchedKind, String),
}

/// Where a VM's instance type or preference is read; `None` when it has none. A copy that was stored for it comes
/// before the object, which may have changed since.
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
        ] {
            assert_eq!(source(&vm(matcher.clone(), status), Role::Instancetype), Some(Ok(want)), "{matcher}");
        }
        assert_eq!(source(&vm(Value::Null, Value::Null), Role::Instancetype), None);
        assert_eq!(source(&vm(json!({"name": "a"}), Value::Null), Role::Preference), None);
    }
}
