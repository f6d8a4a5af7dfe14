//! Pods as they are watched: read as far as a VMI controls them.
//!
//! Every user may give pods the label of launchers, with a specification and annotations of a megabyte. Such a pod is parsed up to its
//! metadata and not kept.

use std::{borrow::Cow, fmt};

use api::{
    VirtualMachineInstance,
    constants::{component, label},
    owner,
};
use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{Pod, PodSpec, PodStatus},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::Resource;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

use super::{
    Caches,
    declaration::{Declaration, Selection},
    pods::{CachedPod, PodIndex},
};
use crate::{cache::Watch, runtime::Kind};

/// A pod with the label of launchers.
#[derive(Clone, Debug, Default)]
pub(crate) struct WatchedPod {
    /// Name, namespace, UID and version.
    metadata: ObjectMeta,
    /// The pod, if a VMI controls it.
    pod: Option<Box<CachedPod>>,
}

impl WatchedPod {
    /// Returns the pod if a VMI controls it.
    pub(crate) fn into_pod(self) -> Option<CachedPod> {
        self.pod.map(|pod| *pod)
    }
}

impl From<WatchedPod> for CachedPod {
    fn from(watched: WatchedPod) -> Self {
        watched.pod.map_or_else(|| Self { metadata: watched.metadata, ..Self::default() }, |pod| *pod)
    }
}

impl Declaration for CachedPod {
    type Wire = WatchedPod;
    type Kept = Self;
    const SELECTION: Selection = Selection::Label(label::APP, component::VIRT_LAUNCHER);
    const WRITTEN: Option<Kind> = Some(Kind::Pod);

    fn keep(object: WatchedPod) -> Option<CachedPod> {
        object.into_pod()
    }

    fn adjust(watch: Watch<WatchedPod, Self>, caches: &Caches) -> Watch<WatchedPod, Self> {
        let (vmis, pods) = (caches.vmis.clone(), caches.pods.clone());
        caches.vmis.listen(move |(former, present)| {
            // Pods that no watch shows are kept for their VMI only.
            let Some(former) = former.and_then(|former| former.metadata.uid.as_deref()) else { return };
            if present.and_then(|present| present.metadata.uid.as_deref()) != Some(former) {
                pods.forget_unseen(&PodIndex::Controller(former.to_owned()));
            }
        });
        let is_of_vmi = move |pod: &CachedPod| {
            let vmi = pod.vmi().and_then(|key| vmis.get(&key));
            vmi.is_some_and(|vmi| owner::is_controlled_by(&pod.metadata, &*vmi))
        };
        let is_controlled = |metadata: &_| owner::controller_of_kind::<VirtualMachineInstance>(metadata).is_some();
        watch.selecting(is_controlled).keeping_unseen(is_of_vmi)
    }
}

impl Resource for WatchedPod {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        Pod::kind(&())
    }
    fn group((): &()) -> Cow<'_, str> {
        Pod::group(&())
    }
    fn version((): &()) -> Cow<'_, str> {
        Pod::version(&())
    }
    fn plural((): &()) -> Cow<'_, str> {
        Pod::plural(&())
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "camelCase")]
enum Field {
    Metadata,
    Spec,
    Status,
    #[serde(other)]
    Other,
}

/// The API server writes metadata first. In any other order the rest is read before its owner is known.
fn is_read(metadata: Option<&ObjectMeta>) -> bool {
    metadata.is_none_or(|metadata| owner::controller_of_kind::<VirtualMachineInstance>(metadata).is_some())
}

struct PodVisitor;

impl<'de> Visitor<'de> for PodVisitor {
    type Value = WatchedPod;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a Pod")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WatchedPod, A::Error> {
        let mut metadata: Option<ObjectMeta> = None;
        let mut spec: Option<PodSpec> = None;
        let mut status: Option<PodStatus> = None;
        while let Some(field) = map.next_key()? {
            match field {
                Field::Metadata => metadata = map.next_value()?,
                Field::Spec if is_read(metadata.as_ref()) => spec = map.next_value()?,
                Field::Status if is_read(metadata.as_ref()) => status = map.next_value()?,
                Field::Spec | Field::Status | Field::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let metadata = metadata.unwrap_or_default();
        let named = ObjectMeta {
            name: metadata.name.clone(),
            namespace: metadata.namespace.clone(),
            uid: metadata.uid.clone(),
            resource_version: metadata.resource_version.clone(),
            ..ObjectMeta::default()
        };
        let pod = is_read(Some(&metadata)).then(|| Box::new(CachedPod::from(Pod { metadata, spec, status })));
        Ok(WatchedPod { metadata: named, pod })
    }
}

impl<'de> Deserialize<'de> for WatchedPod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PodVisitor)
    }
}

#[cfg(test)]
mod tests {
    use kube::core::{ObjectList, WatchEvent};
    use serde_json::{Value, json};

    use super::*;

    const OWNER: &str =
        r#"{"apiVersion":"kubevirt.io/v1","kind":"VirtualMachineInstance","name":"m","uid":"u","controller":true}"#;

    /// A pod in the order of the API server, with this owner and text in place of the specification.
    fn pod(owner: &str, spec: &str) -> String {
        format!(
            r#"{{"kind":"Pod","apiVersion":"v1","metadata":{{"name":"p","namespace":"n","uid":"x","resourceVersion":"5",
            "ownerReferences":[{owner}]}},"spec":{spec},"status":{{"phase":"Running"}}}}"#
        )
    }

    #[test]
    fn pods_of_vmis_are_read() {
        let spec = r#"{"nodeName":"node1","containers":[{"name":"compute","image":"i"}]}"#;
        let read: WatchedPod = serde_json::from_str(&pod(OWNER, spec)).unwrap();
        assert_eq!(read.meta().resource_version.as_deref(), Some("5"));
        let whole: Pod = serde_json::from_str(&pod(OWNER, spec)).unwrap();
        assert_eq!(read.into_pod(), Some(CachedPod::from(whole.clone())));
        // The order of keys means nothing in JSON.
        let value: Value = serde_json::from_str(&pod(OWNER, spec)).unwrap();
        let text =
            format!(r#"{{"status":{},"spec":{},"metadata":{}}}"#, value["status"], value["spec"], value["metadata"]);
        let read: WatchedPod = serde_json::from_str(&text).unwrap();
        assert_eq!(read.into_pod(), Some(CachedPod::from(whole)));
    }

    #[test]
    fn pods_of_others_are_read_up_to_their_metadata() {
        // A specification that no pod can have would be an error if it were parsed.
        let unread = r#"{"containers":7}"#;
        for owner in [
            "".to_owned(),
            OWNER.replace("true", "false"),
            OWNER.replace("VirtualMachineInstance", "Invented"),
            OWNER.replace("kubevirt.io/v1", "v1"),
        ] {
            let read: WatchedPod = serde_json::from_str(&pod(&owner, unread)).unwrap();
            assert_eq!(read.meta().name.as_deref(), Some("p"));
            assert!(read.into_pod().is_none(), "{owner}");
        }
        assert!(serde_json::from_str::<WatchedPod>(&pod(OWNER, unread)).is_err());
    }

    #[test]
    fn lists_and_watches_hold_such_pods() {
        let list = format!(
            r#"{{"kind":"PodList","apiVersion":"v1","metadata":{{}},"items":[{},{}]}}"#,
            pod("", "7"),
            pod(OWNER, "{\"containers\":[]}")
        );
        let list: ObjectList<WatchedPod> = serde_json::from_str(&list).unwrap();
        let kept: Vec<bool> = list.items.into_iter().map(|pod| pod.into_pod().is_some()).collect();
        assert_eq!(kept, [false, true]);
        let event = format!(r#"{{"type":"ADDED","object":{}}}"#, pod("", "7"));
        assert!(matches!(serde_json::from_str(&event).unwrap(), WatchEvent::<WatchedPod>::Added(_)));
    }

    #[test]
    fn large_annotations_are_not_kept() {
        let read = |value: &str| {
            let pod = json!({"metadata": {
                "name": "p", "namespace": "n", "ownerReferences": [serde_json::from_str::<Value>(OWNER).unwrap()],
                "annotations": {"descheduler.alpha.kubernetes.io/evict": value},
            }});
            serde_json::from_value::<WatchedPod>(pod).unwrap().into_pod().unwrap().metadata.annotations
        };
        assert_eq!(read("true").map(|annotations| annotations.len()), Some(1));
        assert_eq!(read(&"x".repeat(256 * 1024)).map(|annotations| annotations.len()), Some(0));
    }
}
