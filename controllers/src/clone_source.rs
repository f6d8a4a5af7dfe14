//! Sources of DataVolumes in other namespaces, and the right to clone them.

use api::cdi::{
    DataSource, DataVolume, GROUP,
    data_volume::{DataVolumeImportSource, DataVolumeSourcePvc, DataVolumeSourceSnapshot},
};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};

/// A service account for which a source is cloned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requester<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub service_account: &'a str,
}

impl Requester<'_> {
    fn user(self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.service_account)
    }

    /// Returns the question if it has a right.
    pub(crate) fn review(self, right: ResourceAttributes) -> SubjectAccessReview {
        let of_namespace = format!("system:serviceaccounts:{}", self.namespace);
        let groups = ["system:serviceaccounts".to_owned(), of_namespace, "system:authenticated".to_owned()];
        SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(self.user()),
                groups: Some(groups.into()),
                resource_attributes: Some(right),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        }
    }
}

/// Returns the claim or snapshot that a DataSource names. `None`: it names none yet.
pub(crate) fn concrete(data_source: &DataSource) -> Option<DataVolumeImportSource> {
    let spec = &data_source.spec.source;
    let source = match &spec.data_source {
        // A reference to another DataSource is resolved by its controller.
        Some(_) => &data_source.status.as_ref()?.source,
        None => spec,
    };
    let own = data_source.metadata.namespace.clone().unwrap_or_default();
    let or_own = |namespace: &String| if namespace.is_empty() { own.clone() } else { namespace.clone() };
    if let Some(pvc) = &source.pvc {
        let pvc = DataVolumeSourcePvc { namespace: or_own(&pvc.namespace), ..pvc.clone() };
        return Some(DataVolumeImportSource { pvc: Some(pvc), ..DataVolumeImportSource::default() });
    }
    let snapshot = source.snapshot.as_ref()?;
    let snapshot = DataVolumeSourceSnapshot { namespace: or_own(&snapshot.namespace), ..snapshot.clone() };
    Some(DataVolumeImportSource { snapshot: Some(snapshot), ..DataVolumeImportSource::default() })
}

/// Returns the cause why a DataSource names no source.
pub(crate) fn unready(data_source: &DataSource) -> String {
    let conditions = data_source.status.iter().flat_map(|status| &status.conditions);
    let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready");
    let message = ready.and_then(|ready| ready.message.clone()).filter(|message| !message.is_empty());
    message.unwrap_or_else(|| "it has no condition Ready".to_owned())
}

/// A claim or snapshot that is cloned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CloneSource {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// It is a snapshot.
    pub is_snapshot: bool,
}

impl CloneSource {
    /// Returns the source of a DataVolume that is a clone.
    pub(crate) fn of(data_volume: &DataVolume) -> Option<Self> {
        let source = data_volume.spec.source.as_ref()?;
        let (namespace, name, is_snapshot) = match (&source.pvc, &source.snapshot) {
            (Some(pvc), _) => (&pvc.namespace, &pvc.name, false),
            (None, Some(snapshot)) => (&snapshot.namespace, &snapshot.name, true),
            (None, None) => return None,
        };
        let own = data_volume.metadata.namespace.as_ref();
        let namespace = Some(namespace).filter(|name| !name.is_empty()).or(own).cloned().unwrap_or_default();
        Some(Self { namespace, name: name.clone(), is_snapshot })
    }

    /// Returns the rights that permit the clone: one of the sets. Pods can read any claim of their namespace, and with a claim
    /// any snapshot. Roles written for CDI name claims `pvcs`, which it asks for.
    pub(crate) fn rights(&self) -> Vec<Vec<ResourceAttributes>> {
        let create = |group: &str, resource: &str| ResourceAttributes {
            group: Some(group.to_owned()),
            namespace: Some(self.namespace.clone()),
            resource: Some(resource.to_owned()),
            verb: Some("create".to_owned()),
            ..ResourceAttributes::default()
        };
        let explicit = ResourceAttributes {
            subresource: Some("source".to_owned()),
            name: Some(self.name.clone()),
            ..create(GROUP, "datavolumes")
        };
        let pods = || create("", "pods");
        if self.is_snapshot {
            let with = |claims: &str| vec![pods(), create("", claims)];
            vec![vec![explicit], with("persistentvolumeclaims"), with("pvcs")]
        } else {
            vec![vec![explicit], vec![pods()]]
        }
    }

    /// Returns the message of a denial.
    pub(crate) fn denial(&self, requester: Requester<'_>) -> String {
        let (user, Self { namespace, name, .. }) = (requester.user(), self);
        format!(
            "User {user} has insufficient permissions in clone source namespace {namespace}: this service account needs the right \
             to create datavolumes/source \"{name}\" of API group {GROUP} in namespace {namespace}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_set_of_rights_permits_a_clone() {
        for (is_snapshot, expected) in [
            (false, &["datavolumes/source images/gold", "pods images/"][..]),
            (
                true,
                &[
                    "datavolumes/source images/gold",
                    "pods images/, persistentvolumeclaims images/",
                    "pods images/, pvcs images/",
                ],
            ),
        ] {
            let source = CloneSource { namespace: "images".to_owned(), name: "gold".to_owned(), is_snapshot };
            let shown = |right: &ResourceAttributes| {
                assert_eq!(right.verb.as_deref(), Some("create"));
                let text = |text: &Option<String>| text.clone().unwrap_or_default();
                let subresource = right.subresource.as_ref().map(|name| format!("/{name}")).unwrap_or_default();
                format!("{}{subresource} {}/{}", text(&right.resource), text(&right.namespace), text(&right.name))
            };
            let sets = source.rights();
            let sets: Vec<_> = sets.iter().map(|set| set.iter().map(shown).collect::<Vec<_>>().join(", ")).collect();
            assert_eq!(sets, expected);
        }
    }
}
