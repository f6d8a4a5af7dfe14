use std::collections::BTreeMap;

use api::webhook_path::PATHS;
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use serde_json::{Value, json};

use super::*;

/// The objects that the segment is kept in, with the effects applied as the API server would.
struct Cluster {
    secret: Option<Secret>,
    mutating: Value,
    validating: Value,
    ready: bool,
    missed: Option<Timestamp>,
    now: Timestamp,
}

impl Cluster {
    /// As Helm makes it.
    fn new() -> Self {
        let webhook = |name: &str| json!({"name": name, "clientConfig": {"service": {"name": "virt-api", "namespace": "kubevirt"}}});
        let object = |webhooks: &[(&str, &str)]| {
            let paths: BTreeMap<&str, &str> = webhooks.iter().copied().collect();
            json!({
                "metadata": {"name": "w", "resourceVersion": "1", "annotations": {PATHS: json!(paths).to_string()}},
                "webhooks": webhooks.iter().map(|(name, _)| webhook(name)).collect::<Vec<_>>(),
            })
        };
        Self {
            secret: None,
            mutating: object(&[("m.kubevirt.io", "/mutate")]),
            validating: object(&[("b.kubevirt.io", "/validate-b"), ("a.kubevirt.io", "/validate-a")]),
            ready: true,
            missed: None,
            now: "2030-01-01T00:00:00Z".parse().unwrap(),
        }
    }

    /// A cluster in which nothing is left to do.
    fn settled() -> Self {
        let mut cluster = Self::new();
        cluster.settle();
        cluster
    }

    fn configurations(&self) -> [Configuration; 2] {
        let mutating: MutatingWebhookConfiguration = serde_json::from_value(self.mutating.clone()).unwrap();
        let validating: ValidatingWebhookConfiguration = serde_json::from_value(self.validating.clone()).unwrap();
        [(Kind::MutatingWebhooks, Arc::new(mutating.into())), (Kind::ValidatingWebhooks, Arc::new(validating.into()))]
    }

    fn with<T>(&self, ask: impl FnOnce(&Observed) -> T) -> T {
        ask(&Observed {
            namespace: "kubevirt".into(),
            secret: self.secret.clone().map(Arc::new),
            configurations: self.configurations().to_vec(),
            ready: self.ready,
            missed: self.missed,
            now: self.now,
        })
    }

    fn step(&self) -> Option<Step> {
        self.with(|observed| plan(observed).0)
    }

    /// Carries one decision out; true when there was something to do.
    fn work(&mut self) -> bool {
        let effects = self.with(|observed| decide(observed).unwrap().effects);
        let worked = !effects.is_empty();
        for effect in effects {
            match effect {
                Effect::Create { kind: Kind::Secret, object, .. } => {
                    self.secret = Some(serde_json::from_value(object).unwrap());
                }
                Effect::Patch { kind: Kind::Secret, patch, .. } => {
                    let mut object = serde_json::to_value(&self.secret).unwrap();
                    json_patch::merge(&mut object, &patch);
                    self.secret = Some(serde_json::from_value(object).unwrap());
                }
                Effect::Patch { kind, strategic: true, patch, .. } => {
                    let object = if kind == Kind::MutatingWebhooks { &mut self.mutating } else { &mut self.validating };
                    let names = |object: &Value| -> Vec<Value> {
                        object["webhooks"].as_array().unwrap().iter().map(|webhook| webhook["name"].clone()).collect()
                    };
                    // The order of the patch becomes the object's.
                    assert_eq!(names(&patch), names(object));
                    for change in patch["webhooks"].as_array().unwrap() {
                        let webhooks = object["webhooks"].as_array_mut().unwrap();
                        let known = webhooks.iter_mut().find(|webhook| webhook["name"] == change["name"]).unwrap();
                        json_patch::merge(known, change);
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        worked
    }

    fn settle(&mut self) {
        for _ in 0..10 {
            if !self.work() {
                return;
            }
        }
        panic!("the segment never settles");
    }

    fn segment(&self, key: &str) -> Option<String> {
        let data = self.secret.as_ref()?.data.as_ref()?;
        Some(String::from_utf8(data.get(key)?.0.clone()).unwrap())
    }

    fn current(&self) -> String {
        self.segment(CURRENT_KEY).unwrap()
    }

    /// Paths in the configurations.
    fn paths(&self) -> Vec<Option<String>> {
        let configurations = self.configurations();
        configurations.iter().flat_map(|(_, object)| &object.webhooks).map(|webhook| webhook.path.clone()).collect()
    }

    /// Paths of all webhooks behind a segment.
    fn behind(segment: &str) -> Vec<Option<String>> {
        ["/mutate", "/validate-b", "/validate-a"].map(|path| Some(join(segment, path))).to_vec()
    }

    fn in_place(&self) -> bool {
        in_place(self.secret.as_ref(), &self.configurations())
    }

    fn pass(&mut self, time: SignedDuration) {
        self.now = self.now.checked_add(time).unwrap();
    }

    fn annotate(&mut self, name: &str, value: Option<String>) {
        let annotations = self.secret.as_mut().unwrap().metadata.annotations.get_or_insert_default();
        match value {
            Some(value) => annotations.insert(name.to_owned(), value),
            None => annotations.remove(name),
        };
    }
}

const SECOND: SignedDuration = SignedDuration::from_secs(1);

#[test]
fn first_segment_is_known_to_virt_api_before_it_is_used() {
    let mut cluster = Cluster::new();
    cluster.ready = false;
    assert_eq!(cluster.step(), Some(Step::Make { adopted: None }));
    cluster.settle();
    // virt-api waits for the Secret; the paths wait for virt-api.
    assert!(is_segment(&cluster.current()) && !cluster.in_place());
    assert_eq!(cluster.paths(), [None, None, None]);
    assert_eq!(cluster.secret.as_ref().unwrap().metadata.labels, Some(owned_labels()));
    cluster.ready = true;
    assert!(cluster.work());
    assert_eq!(cluster.paths(), Cluster::behind(&cluster.current()));
    assert_eq!(cluster.step(), Some(Step::MarkPlaced));
    cluster.settle();
    assert!(cluster.in_place());
    // Nothing was shown before: no rotation, and no writes.
    cluster.pass(SETTLE_EXPOSED);
    assert_eq!(cluster.step(), None);
}

#[test]
fn segment_rotates_hourly_with_overlap() {
    let mut cluster = Cluster::settled();
    let first = cluster.current();
    cluster.pass(ROTATION - SECOND);
    assert_eq!(cluster.with(plan), (None, Duration::from_secs(1)));
    cluster.pass(SECOND);
    assert_eq!(cluster.step(), Some(Step::Stage));
    cluster.settle();
    // Published, and not used yet.
    let next = cluster.segment(NEXT_KEY).unwrap();
    assert!(is_segment(&next) && next != first);
    assert_eq!((cluster.current(), cluster.paths()), (first.clone(), Cluster::behind(&first)));
    cluster.pass(SETTLE - SECOND);
    assert_eq!(cluster.with(plan), (None, Duration::from_secs(1)));
    cluster.pass(SECOND);
    assert_eq!(cluster.step(), Some(Step::Promote));
    assert!(cluster.work());
    // Both are accepted while the configurations change.
    assert_eq!(cluster.segment(PREVIOUS_KEY), Some(first.clone()));
    assert!(cluster.in_place());
    assert!(cluster.work());
    assert_eq!((cluster.current(), cluster.paths()), (next.clone(), Cluster::behind(&next)));
    assert!(cluster.in_place());
    // The overlap begins when all configurations are changed, however long that took.
    cluster.pass(OVERLAP);
    assert_eq!(cluster.step(), Some(Step::MarkPlaced));
    cluster.settle();
    cluster.pass(OVERLAP - SECOND);
    assert_eq!(cluster.with(plan), (None, Duration::from_secs(1)));
    cluster.pass(SECOND);
    assert_eq!(cluster.step(), Some(Step::Drop));
    cluster.settle();
    assert_eq!((cluster.segment(PREVIOUS_KEY), cluster.segment(NEXT_KEY)), (None, None));
    assert!(cluster.in_place());
}

#[test]
fn exposed_segment_is_replaced_as_soon_as_virt_api_is_back() {
    let mut cluster = Cluster::settled();
    let first = cluster.current();
    cluster.ready = false;
    assert_eq!(cluster.step(), Some(Step::MarkExposed { current: true, previous: false }));
    cluster.settle();
    // A new segment would be shown as well.
    cluster.pass(SignedDuration::from_hours(3));
    assert_eq!((cluster.step(), cluster.paths()), (None, Cluster::behind(&first)));
    cluster.ready = true;
    assert_eq!(cluster.step(), Some(Step::Stage));
    cluster.settle();
    cluster.pass(SETTLE_EXPOSED);
    assert_eq!(cluster.step(), Some(Step::Promote));
    cluster.settle();
    assert_eq!(cluster.segment(PREVIOUS_KEY), Some(first.clone()));
    cluster.pass(OVERLAP_EXPOSED - SECOND);
    assert_eq!(cluster.step(), None);
    cluster.pass(SECOND);
    assert_eq!(cluster.step(), Some(Step::Drop));
    cluster.settle();
    let second = cluster.current();
    assert!(second != first && cluster.paths() == Cluster::behind(&second));
    // The new one was not exposed.
    cluster.pass(ROTATION - OVERLAP_EXPOSED - SECOND);
    assert_eq!(cluster.step(), None);
}

#[test]
fn exposure_in_the_middle_of_a_rotation_is_not_forgotten() {
    // Before the next segment is used: it is replaced once virt-api is back.
    let mut cluster = Cluster::settled();
    cluster.pass(ROTATION);
    cluster.settle();
    let (first, staged) = (cluster.current(), cluster.segment(NEXT_KEY));
    cluster.ready = false;
    cluster.settle();
    assert_eq!((cluster.segment(NEXT_KEY), cluster.current()), (None, first.clone()));
    cluster.ready = true;
    cluster.settle();
    assert_ne!(cluster.segment(NEXT_KEY), staged);
    cluster.pass(SETTLE_EXPOSED);
    cluster.settle();
    assert_eq!(cluster.segment(PREVIOUS_KEY), Some(first));

    // While the configurations still carry the former one.
    let mut cluster = Cluster::settled();
    cluster.pass(ROTATION);
    cluster.settle();
    cluster.pass(SETTLE);
    assert!(cluster.work());
    cluster.ready = false;
    assert_eq!(cluster.step(), Some(Step::MarkExposed { current: false, previous: true }));
    cluster.settle();
    assert_eq!(cluster.step(), None);
    cluster.ready = true;
    cluster.settle();
    cluster.pass(OVERLAP_EXPOSED);
    assert_eq!(cluster.step(), Some(Step::Drop));

    // While the former one is accepted: the new one is exposed and replaced as well.
    let mut cluster = Cluster::settled();
    cluster.pass(ROTATION);
    cluster.settle();
    cluster.pass(SETTLE);
    cluster.settle();
    let second = cluster.current();
    cluster.ready = false;
    cluster.settle();
    cluster.ready = true;
    cluster.settle();
    cluster.pass(SETTLE_EXPOSED);
    cluster.settle();
    assert_eq!(cluster.segment(PREVIOUS_KEY), Some(second));
    cluster.pass(OVERLAP_EXPOSED);
    cluster.settle();
    assert_eq!(cluster.segment(PREVIOUS_KEY), None);
}

#[test]
fn unseen_exposure_is_followed_by_one_rotation() {
    let mut cluster = Cluster::settled();
    let before = cluster.now;
    cluster.pass(SignedDuration::from_mins(5));
    for (changed, step) in
        [(before, None), (cluster.now, Some(Step::Stage)), (cluster.now + SignedDuration::from_mins(5), None)]
    {
        cluster.missed = Some(changed);
        assert_eq!(cluster.step(), step, "{changed}");
    }
    cluster.missed = Some(cluster.now);
    cluster.settle();
    cluster.pass(SETTLE);
    cluster.settle();
    cluster.pass(OVERLAP);
    cluster.settle();
    assert_eq!((cluster.step(), cluster.segment(NEXT_KEY)), (None, None));
}

#[test]
fn lost_secret_is_created_again_with_the_segment_in_use() {
    let mut cluster = Cluster::settled();
    let first = cluster.current();
    cluster.secret = None;
    assert_eq!(cluster.step(), Some(Step::Make { adopted: Some(first.clone()) }));
    assert!(!cluster.in_place());
    cluster.settle();
    assert_eq!((cluster.current(), cluster.in_place()), (first.clone(), true));
    assert!(cluster.segment(NEXT_KEY).is_some());
    cluster.pass(SETTLE);
    cluster.settle();
    assert_eq!(cluster.segment(PREVIOUS_KEY), Some(first));
    cluster.pass(OVERLAP);
    cluster.settle();
    assert_eq!(cluster.segment(PREVIOUS_KEY), None);
}

#[test]
fn unusable_secret_is_replaced() {
    for text in ["", "x", "../../virtualmachines"] {
        let mut cluster = Cluster::settled();
        let first = cluster.current();
        let data = cluster.secret.as_mut().unwrap().data.as_mut().unwrap();
        data.insert(CURRENT_KEY.to_owned(), ByteString(text.as_bytes().to_vec()));
        cluster.settle();
        assert_eq!((cluster.current(), cluster.in_place()), (first, true), "{text}");
    }
}

#[test]
fn paths_that_others_remove_or_change_are_put_back() {
    for path in [Value::Null, json!("/validate-a"), json!("/admission/0/validate-a"), json!("/")] {
        let mut cluster = Cluster::settled();
        cluster.validating["webhooks"][0]["clientConfig"]["service"]["path"] = path;
        assert!(!cluster.in_place());
        // Not while the path would only be shown.
        cluster.ready = false;
        cluster.settle();
        assert!(!cluster.in_place());
        cluster.ready = true;
        assert!(cluster.work() && cluster.work());
        assert!(cluster.in_place() || cluster.segment(NEXT_KEY).is_some());
        assert_eq!(cluster.paths(), Cluster::behind(&cluster.current()));
    }
}

#[test]
fn webhook_that_the_annotation_does_not_name_is_left_alone_and_not_in_place() {
    let mut cluster = Cluster::new();
    cluster.validating["metadata"]["annotations"][PATHS] = json!(r#"{"b.kubevirt.io": "/validate-b"}"#);
    cluster.validating["webhooks"][1]["clientConfig"]["service"]["path"] = json!("/own");
    cluster.settle();
    assert_eq!(cluster.paths()[2].as_deref(), Some("/own"));
    assert!(!cluster.in_place());
    for unusable in ["", "[]", "null", r#"{"a.kubevirt.io": "validate-a"}"#] {
        let mut cluster = Cluster::new();
        cluster.validating["metadata"]["annotations"][PATHS] = json!(unusable);
        cluster.settle();
        assert_eq!(cluster.paths()[1], None, "{unusable}");
    }
}

#[test]
fn clock_that_jumps_neither_stops_rotation_nor_hurries_it() {
    // Back by a day: what was written then counts from now on.
    let mut cluster = Cluster::settled();
    cluster.pass(-SignedDuration::from_hours(24));
    assert_eq!(cluster.step(), Some(Step::MarkPlaced));
    cluster.settle();
    cluster.pass(ROTATION);
    assert_eq!(cluster.step(), Some(Step::Stage));
    cluster.settle();
    cluster.pass(-SignedDuration::from_hours(24));
    cluster.settle();
    cluster.pass(SETTLE);
    assert_eq!(cluster.step(), Some(Step::Promote));
    cluster.settle();
    cluster.pass(-SignedDuration::from_hours(24));
    cluster.settle();
    cluster.pass(OVERLAP);
    assert_eq!(cluster.step(), Some(Step::Drop));
    cluster.settle();
    // A little back, as another replica's clock may be.
    cluster.pass(-SignedDuration::from_secs(50));
    assert_eq!(cluster.step(), None);
    // Ahead by a day: one rotation, not many.
    cluster.pass(SignedDuration::from_hours(24));
    assert_eq!(cluster.step(), Some(Step::Stage));
    cluster.settle();
    assert_eq!(cluster.step(), None);
}

#[test]
fn times_that_cannot_be_read_are_written_anew() {
    let mut cluster = Cluster::settled();
    cluster.annotate(PLACED_AT, Some("soon".to_owned()));
    assert_eq!(cluster.step(), Some(Step::MarkPlaced));
    cluster.settle();
    cluster.pass(ROTATION);
    cluster.settle();
    cluster.annotate(NEXT_SINCE, None);
    let staged = cluster.segment(NEXT_KEY);
    assert_eq!(cluster.step(), Some(Step::Stage));
    cluster.settle();
    assert_ne!(cluster.segment(NEXT_KEY), staged);
}
