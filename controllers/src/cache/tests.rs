//! Tests of caches: versions, deletions, indices.

use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::*;

#[derive(Clone, Debug)]
struct Thing(ObjectMeta);
impl Cached for Thing {
    type Index = String;

    fn meta(&self) -> &ObjectMeta {
        &self.0
    }
}

fn thing(uid: &str, resource_version: &str) -> Thing {
    Thing(ObjectMeta {
        name: Some("a".to_owned()),
        namespace: Some("n".to_owned()),
        uid: Some(uid.to_owned()),
        resource_version: Some(resource_version.to_owned()),
        ..ObjectMeta::default()
    })
}

fn known(cache: &Cache<Thing>) -> Option<String> {
    cache.get(&Key::new("n", "a")).and_then(|object| object.0.resource_version.clone())
}

#[test]
fn older_answer_does_not_replace_a_newer_version() {
    let cache = Cache::default();
    cache.apply(thing("u", "10"), false);
    cache.observe(thing("u", "9"));
    assert_eq!(known(&cache).as_deref(), Some("10"));
    cache.observe(thing("u", "11"));
    assert_eq!(known(&cache).as_deref(), Some("11"));
}

#[test]
fn own_write_coming_back_is_no_change() {
    let cache = Cache::default();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    cache.listen(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    cache.observe(thing("u", "5"));
    cache.apply(thing("u", "5"), false);
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

#[test]
fn late_answer_does_not_bring_back_a_deleted_object() {
    let cache = Cache::default();
    cache.apply(thing("u", "5"), false);
    cache.observe_deleted(&Key::new("n", "a"), Some("u"));
    cache.observe(thing("u", "4"));
    assert_eq!(known(&cache), None);
}

#[test]
fn late_answer_to_a_deletion_does_not_bring_back_one_of_thousands_of_objects() {
    let cache = Cache::default();
    let mut deleting = thing("u", "6");
    deleting.0.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
    cache.apply(thing("u", "5"), false);
    cache.observe(deleting.clone());
    assert_eq!(known(&cache).as_deref(), Some("6"));
    cache.observe_deleted(&Key::new("n", "a"), Some("u"));
    for index in 0..5000 {
        cache.observe_deleted(&Key::new("n", "other"), Some(&format!("uid-{index}")));
    }
    cache.observe(deleting.clone());
    assert_eq!(known(&cache), None, "the watch does not report its end a second time");
    // The watch is right.
    cache.apply(deleting, false);
    assert_eq!(known(&cache).as_deref(), Some("6"));
}

/// With less memory, the searches for the pods of VMIs that end together would repeat for ever.
#[test]
fn thousands_of_deletions_are_remembered_and_the_oldest_forgotten() {
    let cache: Cache<Thing> = Cache::default();
    let gone = |index: usize| format!("uid-{index}");
    let limit = 1 << 16;
    for index in 0..=limit {
        cache.observe_deleted(&Key::new("n", ""), Some(&gone(index)));
        cache.observe_deleted(&Key::new("n", ""), Some(&gone(index)));
    }
    assert!(!cache.is_gone(&gone(0)));
    assert!((1..=limit).all(|index| cache.is_gone(&gone(index))));
}

#[derive(Clone, Debug)]
struct Doubtful(Thing, bool);
impl Cached for Doubtful {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.0.0
    }
    fn unseen(&self) -> Option<Self> {
        self.meta().deletion_timestamp.is_none().then(|| Self(self.0.clone(), true))
    }
    fn is_unseen(&self) -> bool {
        self.1
    }
}

#[test]
fn object_whose_end_was_not_seen_stays_while_it_is_needed() {
    let key = Key::new("n", "a");
    let doubtful = || Doubtful(thing("u", "5"), false);
    let ended = || {
        let mut ended = doubtful();
        ended.0.0.deletion_timestamp = serde_json::from_value(serde_json::json!("2030-01-01T00:00:00Z")).unwrap();
        ended
    };
    for (uid, last, wanted, kept) in [
        (Some("u"), Some(doubtful()), true, true),
        (None, None, true, true),
        (Some("u"), Some(ended()), true, false),
        (Some("u"), Some(doubtful()), false, false),
    ] {
        let cache = Cache::default();
        cache.apply(doubtful(), false);
        cache.lose(&key, uid, last, |_| wanted);
        assert_eq!(cache.get(&key).is_some_and(|object| object.is_unseen()), kept);
        assert_eq!((cache.get(&key).is_some(), cache.is_gone("u")), (kept, !kept));
    }
    // The end of a former object of the name.
    let cache = Cache::default();
    cache.apply(doubtful(), false);
    cache.lose(&key, Some("old"), None, |_| true);
    assert!(cache.get(&key).is_some_and(|object| !object.is_unseen()) && cache.is_gone("old"));
}

#[test]
fn deletion_of_a_former_object_of_the_name_is_ignored() {
    let cache = Cache::default();
    cache.apply(thing("new", "5"), false);
    cache.observe_deleted(&Key::new("n", "a"), Some("old"));
    assert_eq!(known(&cache).as_deref(), Some("5"));
}
