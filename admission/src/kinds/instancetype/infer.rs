//! Inference of instance type and preference from the labels of a volume's source.

use api::{
    VirtualMachine,
    cdi::DataVolumeSpec,
    instancetype::matcher::{Matcher, Role},
    vm::spec::{InstancetypeMatcher, PreferenceMatcher},
};
use serde::Deserialize;
use serde_json::Value;

use crate::context::{Interrupt, LookupError, LookupResult, Lookups, ObjectQuery};

/// Data sources to which a data source refers. CDI follows as many.
const MAX_DEPTH: usize = 1;

/// Reason why nothing was inferred.
enum Failure {
    /// The volume names nothing; policy `Ignore` accepts that.
    Nothing(String),
    /// The VM is invalid, or a required object does not exist.
    Fatal(String),
    /// Lookups are missing or failed.
    LookupError(LookupError),
}

impl From<LookupError> for Failure {
    fn from(needs: LookupError) -> Self {
        Self::LookupError(needs)
    }
}

/// Inferred name and kind.
type Found = Result<(String, Option<String>), Failure>;

/// Sets the matchers that infer from a volume.
pub(super) fn infer(vm: &mut VirtualMachine, namespace: &str, lookups: &Lookups) -> Result<(), Interrupt> {
    for role in Role::ALL {
        let Some(matcher) = Matcher::of(vm, role).filter(|matcher| !matcher.infer_from_volume.is_empty()) else {
            continue;
        };
        let ignores = matcher.infer_from_volume_failure_policy == "Ignore";
        let labels = Labels::of(role);
        let inference = Inference { vm, namespace, lookups, labels };
        match inference.volume(&matcher.infer_from_volume) {
            Ok((name, kind)) => {
                set(vm, role, Some((name, kind)));
                if ignores
                    && role == Role::Instancetype
                    && let Some(spec) = &mut vm.spec.template.spec
                {
                    // The guest memory is the fallback if nothing is inferred; it would conflict with the instance type.
                    spec.domain.memory = None;
                }
            }
            Err(Failure::Nothing(_)) if ignores => set(vm, role, None),
            Err(Failure::Nothing(message) | Failure::Fatal(message)) => return Err(Interrupt::failed(400, message)),
            Err(Failure::LookupError(needs)) => return Err(needs.into()),
        }
    }
    Ok(())
}

fn set(vm: &mut VirtualMachine, role: Role, found: Option<(String, Option<String>)>) {
    match role {
        Role::Instancetype => {
            vm.spec.instancetype = found.map(|(name, kind)| InstancetypeMatcher {
                name: Some(name),
                kind,
                ..InstancetypeMatcher::default()
            });
        }
        Role::Preference => {
            vm.spec.preference =
                found.map(|(name, kind)| PreferenceMatcher { name: Some(name), kind, ..PreferenceMatcher::default() });
        }
    }
}

/// Labels with the name and kind of an object.
#[derive(Clone, Copy)]
struct Labels {
    name: &'static str,
    kind: &'static str,
}

impl Labels {
    fn of(role: Role) -> Self {
        match role {
            Role::Instancetype => Self {
                name: "instancetype.kubevirt.io/default-instancetype",
                kind: "instancetype.kubevirt.io/default-instancetype-kind",
            },
            Role::Preference => Self {
                name: "instancetype.kubevirt.io/default-preference",
                kind: "instancetype.kubevirt.io/default-preference-kind",
            },
        }
    }

    fn find(self, object: &Value) -> Found {
        let labels = object.pointer("/metadata/labels");
        let label = |key: &str| labels.and_then(|labels| labels.get(key)?.as_str()).map(str::to_owned);
        match label(self.name) {
            Some(name) => Ok((name, label(self.kind).filter(|kind| !kind.is_empty()))),
            None => Err(Failure::Nothing(format!("unable to find required {} label on the volume", self.name))),
        }
    }
}

struct Inference<'a> {
    vm: &'a VirtualMachine,
    namespace: &'a str,
    lookups: &'a Lookups,
    labels: Labels,
}

impl Inference<'_> {
    fn volume(&self, name: &str) -> Found {
        let volumes = self.vm.spec.template.spec.as_ref().map(|spec| spec.volumes.as_slice()).unwrap_or_default();
        let Some(volume) = volumes.iter().find(|volume| volume.name == name) else {
            return Err(Failure::Fatal(format!("unable to find volume {name} to infer defaults")));
        };
        if let Some(claim) = &volume.persistent_volume_claim {
            return self.claim(self.namespace, &claim.claim_name);
        }
        if let Some(data_volume) = &volume.data_volume {
            return self.data_volume(&data_volume.name);
        }
        Err(Failure::Nothing(format!("unable to infer defaults from volume {name} as type is not supported")))
    }

    fn claim(&self, namespace: &str, name: &str) -> Found {
        self.labels.find(self.read("", "v1", "persistentvolumeclaims", namespace, name)?)
    }

    fn snapshot(&self, namespace: &str, name: &str) -> Found {
        self.labels.find(self.read("snapshot.storage.k8s.io", "v1", "volumesnapshots", namespace, name)?)
    }

    fn data_volume(&self, name: &str) -> Found {
        let templates = &self.vm.spec.data_volume_templates;
        if let Some(template) = templates.iter().find(|template| template.metadata.name.as_deref() == Some(name)) {
            return self.data_volume_spec(&template.spec);
        }
        let query = ObjectQuery::get("cdi.kubevirt.io", "v1beta1", "datavolumes", Some(self.namespace), name);
        match self.lookups.result(&query)? {
            // A finished DataVolume can be deleted; its claim has the same name.
            LookupResult::Object(None) => self.claim(self.namespace, name),
            LookupResult::Object(Some(object)) => match self.labels.find(object) {
                Err(Failure::Nothing(_)) => {
                    let spec = object.get("spec").map(DataVolumeSpec::deserialize).transpose();
                    let spec =
                        spec.map_err(|error| Failure::Fatal(format!("cannot read DataVolume {name}: {error}")))?;
                    self.data_volume_spec(&spec.unwrap_or_default())
                }
                found => found,
            },
            LookupResult::Failed { message, .. } => Err(Failure::Fatal(message.clone())),
            LookupResult::List(_) => Err(Failure::Fatal(format!("cannot {query}: a list was read"))),
        }
    }

    fn data_volume_spec(&self, spec: &DataVolumeSpec) -> Found {
        if let Some(source) = &spec.source {
            if let Some(claim) = &source.pvc {
                return self.claim(self.or_own(Some(&claim.namespace)), &claim.name);
            }
            if let Some(snapshot) = &source.snapshot {
                return self.snapshot(self.or_own(Some(&snapshot.namespace)), &snapshot.name);
            }
        }
        if let Some(reference) = &spec.source_ref {
            if reference.kind != "DataSource" {
                return Err(Failure::Nothing(format!(
                    "unable to infer defaults from DataVolumeSourceRef as Kind {} is not supported",
                    reference.kind
                )));
            }
            return self.data_source(self.or_own(reference.namespace.as_ref()), &reference.name, MAX_DEPTH);
        }
        Err(Failure::Nothing(
            "unable to infer defaults from DataVolumeSpec as DataVolumeSource is not supported".to_owned(),
        ))
    }

    fn data_source(&self, namespace: &str, name: &str, depth: usize) -> Found {
        let object = self.read("cdi.kubevirt.io", "v1beta1", "datasources", namespace, name)?;
        match self.labels.find(object) {
            Err(Failure::Nothing(_)) => {}
            found => return found,
        }
        let source = |kind: &str| {
            let source = object.pointer(&format!("/spec/source/{kind}"))?;
            let text = |field: &str| source.get(field).and_then(Value::as_str).filter(|text| !text.is_empty());
            Some((text("namespace").unwrap_or(namespace), text("name")?))
        };
        if let Some((namespace, name)) = source("pvc") {
            return self.claim(namespace, name);
        }
        if let Some((namespace, name)) = source("snapshot") {
            return self.snapshot(namespace, name);
        }
        if let (Some((namespace, name)), Some(depth)) = (source("dataSource"), depth.checked_sub(1)) {
            return self.data_source(namespace, name, depth);
        }
        Err(Failure::Nothing(
            "unable to infer defaults from DataSource that doesn't provide DataVolumeSourcePVC or DataVolumeSourceSnapshot"
                .to_owned(),
        ))
    }

    fn or_own<'a>(&'a self, namespace: Option<&'a String>) -> &'a str {
        namespace.map(String::as_str).filter(|namespace| !namespace.is_empty()).unwrap_or(self.namespace)
    }

    fn read(&self, group: &str, version: &str, plural: &str, namespace: &str, name: &str) -> Result<&Value, Failure> {
        let query = ObjectQuery::get(group, version, plural, Some(namespace), name);
        match self.lookups.result(&query)? {
            LookupResult::Object(Some(object)) => Ok(object),
            LookupResult::Object(None) => {
                let dot = if group.is_empty() { "" } else { "." };
                Err(Failure::Fatal(format!("{plural}{dot}{group} \"{name}\" not found")))
            }
            LookupResult::Failed { message, .. } => Err(Failure::Fatal(message.clone())),
            LookupResult::List(_) => Err(Failure::Fatal(format!("cannot {query}: a list was read"))),
        }
    }
}
