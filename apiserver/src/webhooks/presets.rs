//! VMI presets, followed by a watch, so that a new VMI waits for no list of them.
//!
//! The store keeps each preset as text, which is parsed for a review. Its memory is bounded: a preset that exceeds the bound is
//! kept without its text. A namespace with such a preset, or with too many, has no answer here, and no namespace has one while
//! the watch is interrupted; the webhooks then read the API server.

use std::{
    borrow::Cow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use admission::{LookupResult, ObjectQuery, Selection, context::lookups::MAX_LIST};
use api::{VirtualMachineInstancePreset, constants};
use daemon::{backoff, tasks::Spawner};
use futures::StreamExt;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DynamicObject},
    runtime::{
        reflector::{
            Lookup, ObjectRef,
            store::{Store, Writer},
        },
        watcher::{self, Event},
    },
};
use serde_json::{Value, json};
use tokio::sync::watch;

/// Most bytes of presets in the store.
const MAX_BYTES: usize = 4 << 20;
/// Largest answer in bytes; as values it takes about twenty times as much. Larger ones are read from the API server, within
/// the bounds of lookups.
const MAX_ANSWER: usize = 256 << 10;
/// Objects on a page of the first list, which is in memory at a time.
const PAGE: u32 = 16;
/// First and longest pause after an interrupted watch.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The presets of all namespaces. Cheap to clone.
#[derive(Clone)]
pub struct Presets {
    store: Store<Preset>,
    /// True from the end of a list to the next interruption.
    synced: Arc<AtomicBool>,
    listed: watch::Receiver<bool>,
}

impl Presets {
    /// Returns an empty store without a watch: every answer is read from the API server (for tests and tools).
    #[must_use]
    pub fn unknown() -> Self {
        // The sender is dropped: a receiver keeps the last value.
        Self { store: Writer::new(()).as_reader(), synced: Arc::default(), listed: watch::channel(true).1 }
    }

    /// Follows the presets of the cluster in a task of its own.
    #[must_use]
    pub fn follow(client: Client, tasks: &Spawner) -> Self {
        let (sender, listed) = watch::channel(false);
        let writer = BoundedWriter::default();
        let presets = Self { store: writer.store.as_reader(), synced: writer.synced.clone(), listed };
        tasks.spawn("presets", follow(client, writer, sender));
        presets
    }

    /// Waits until the presets were listed once.
    pub async fn ready(&mut self) {
        if self.listed.wait_for(|listed| *listed).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns the API server's answer to a query for the presets of a namespace, or `None` if it has to be read.
    #[must_use]
    pub(super) fn answer(&self, query: &ObjectQuery) -> Option<LookupResult> {
        let of_presets = query.group == constants::GROUP
            && query.version == constants::VERSION
            && query.plural == <VirtualMachineInstancePreset as Resource>::plural(&());
        let all = matches!(&query.selection, Selection::List { labels, limit: None, .. } if labels.is_empty());
        let namespace = query.namespace.as_deref().filter(|_| of_presets && all)?;
        self.list(namespace).map(LookupResult::List)
    }

    fn list(&self, namespace: &str) -> Option<Vec<Value>> {
        if !self.synced.load(Ordering::Acquire) {
            return None;
        }
        let mut presets = self.store.state();
        presets.retain(|preset| preset.namespace == namespace);
        let bytes: usize = presets.iter().map(|preset| preset.bytes()).sum();
        if presets.len() > MAX_LIST as usize || bytes > MAX_ANSWER {
            return None;
        }
        presets.sort_by(|left, right| left.name.cmp(&right.name));
        presets.iter().map(|preset| serde_json::from_str(preset.text.as_deref()?).ok()).collect()
    }
}

/// A preset in the store.
#[derive(Clone, Debug)]
struct Preset {
    namespace: String,
    name: String,
    /// Namespace, name and spec as JSON; `None` if it exceeds the bound.
    text: Option<Box<str>>,
}

impl Preset {
    /// Returns the preset, or `None` for one without a spec, which has no effect.
    fn new(object: &DynamicObject) -> Option<Self> {
        let (namespace, name) = (object.metadata.namespace.clone().unwrap_or_default(), object.name_any());
        let spec = object.data.get("spec")?;
        let text = json!({"metadata": {"namespace": namespace, "name": name}, "spec": spec}).to_string();
        Some(Self { namespace, name, text: Some(text.into_boxed_str()) })
    }

    /// Returns a key of the store.
    fn removed(object: &DynamicObject) -> Self {
        Self { namespace: object.metadata.namespace.clone().unwrap_or_default(), name: object.name_any(), text: None }
    }

    fn bytes(&self) -> usize {
        self.text.as_ref().map_or(0, |text| text.len())
    }

    fn key(&self) -> ObjectRef<Self> {
        self.to_object_ref(())
    }
}

impl Lookup for Preset {
    type DynamicType = ();

    fn kind((): &()) -> Cow<'_, str> {
        <VirtualMachineInstancePreset as Resource>::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        constants::GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        constants::VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        <VirtualMachineInstancePreset as Resource>::plural(&())
    }

    fn name(&self) -> Option<Cow<'_, str>> {
        Some(self.name.as_str().into())
    }

    fn namespace(&self) -> Option<Cow<'_, str>> {
        Some(self.namespace.as_str().into())
    }

    fn resource_version(&self) -> Option<Cow<'_, str>> {
        None
    }

    fn uid(&self) -> Option<Cow<'_, str>> {
        None
    }
}

/// Writes events into the store within the bound.
#[derive(Default)]
struct BoundedWriter {
    store: Writer<Preset>,
    synced: Arc<AtomicBool>,
    /// Bytes in the store, or in a list that will replace it.
    bytes: usize,
}

impl BoundedWriter {
    fn apply(&mut self, event: Event<DynamicObject>) {
        match event {
            Event::Init => {
                self.interrupted();
                self.bytes = 0;
                self.store.apply_watcher_event(&Event::Init);
            }
            Event::InitApply(object) => {
                if let Some(preset) = Preset::new(&object) {
                    let preset = self.bounded(preset);
                    self.store.apply_watcher_event(&Event::InitApply(preset));
                }
            }
            Event::InitDone => {
                self.store.apply_watcher_event(&Event::InitDone);
                self.synced.store(true, Ordering::Release);
            }
            Event::Apply(object) => match Preset::new(&object) {
                Some(preset) => {
                    self.forget(&preset);
                    let preset = self.bounded(preset);
                    self.store.apply_watcher_event(&Event::Apply(preset));
                }
                None => self.remove(&object),
            },
            Event::Delete(object) => self.remove(&object),
        }
    }

    /// Marks the contents as outdated until the next list.
    fn interrupted(&self) {
        self.synced.store(false, Ordering::Release);
    }

    fn remove(&mut self, object: &DynamicObject) {
        let preset = Preset::removed(object);
        self.forget(&preset);
        self.store.apply_watcher_event(&Event::Delete(preset));
    }

    fn forget(&mut self, preset: &Preset) {
        self.bytes -= self.store.as_reader().get(&preset.key()).map_or(0, |known| known.bytes());
    }

    fn bounded(&mut self, mut preset: Preset) -> Preset {
        if self.bytes + preset.bytes() > MAX_BYTES {
            preset.text = None;
        }
        self.bytes += preset.bytes();
        preset
    }
}

async fn follow(client: Client, mut writer: BoundedWriter, listed: watch::Sender<bool>) {
    // Untyped: the definition permits a preset without a spec, which must not hide the others.
    let api = Api::<DynamicObject>::all_with(client, &ApiResource::erase::<VirtualMachineInstancePreset>(&()));
    let mut failures = 0_u32;
    loop {
        let config = watcher::Config::default().page_size(PAGE).timeout(daemon::watch::duration());
        let mut events = std::pin::pin!(watcher::watcher(api.clone(), config));
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    let done = matches!(event, Event::InitDone);
                    writer.apply(event);
                    if done {
                        listed.send_replace(true);
                        failures = 0;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "watch of presets was interrupted");
                    break;
                }
            }
        }
        // Changes are unknown from here until the next list.
        writer.interrupted();
        failures = failures.saturating_add(1);
        tokio::time::sleep(backoff::pause(PAUSE, failures)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preset(namespace: &str, name: &str, spec: Option<Value>) -> DynamicObject {
        let mut object = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstancePreset",
            "metadata": {"namespace": namespace, "name": name, "uid": "u", "labels": {"a": "b"}},
        });
        if let Some(spec) = spec {
            object["spec"] = spec;
        }
        serde_json::from_value(object).unwrap()
    }

    fn sized(name: &str, bytes: usize) -> DynamicObject {
        preset("big", name, Some(json!({"selector": {}, "x": "x".repeat(bytes)})))
    }

    fn new() -> (BoundedWriter, Presets) {
        let writer = BoundedWriter::default();
        let presets =
            Presets { store: writer.store.as_reader(), synced: writer.synced.clone(), listed: watch::channel(true).1 };
        (writer, presets)
    }

    fn synced() -> (BoundedWriter, Presets) {
        let (mut writer, presets) = new();
        writer.apply(Event::Init);
        writer.apply(Event::InitDone);
        (writer, presets)
    }

    /// Returns the names known of a namespace.
    fn names(presets: &Presets, namespace: &str) -> Option<Vec<String>> {
        let name = |preset: &Value| preset["metadata"]["name"].as_str().unwrap().to_owned();
        Some(presets.list(namespace)?.iter().map(name).collect())
    }

    #[test]
    fn contents_of_the_watch_are_answered() {
        let (mut writer, presets) = new();
        let spec = |cores: u32| Some(json!({"selector": {}, "domain": {"cpu": {"cores": cores}}}));
        assert_eq!(presets.list("a"), None);
        writer.apply(Event::Init);
        writer.apply(Event::InitApply(preset("a", "one", spec(1))));
        writer.apply(Event::InitApply(preset("b", "other", spec(1))));
        assert_eq!(presets.list("a"), None, "not before the end of the list");
        writer.apply(Event::InitDone);
        assert_eq!(presets.list("c"), Some(vec![]));
        writer.apply(Event::Apply(preset("a", "one", spec(2))));
        writer.apply(Event::Apply(preset("a", "two", spec(3))));
        writer.apply(Event::Apply(preset("a", "empty", None)));
        assert_eq!(names(&presets, "a").unwrap(), ["one", "two"]);
        let metadata = json!({"namespace": "a", "name": "one"});
        assert_eq!(presets.list("a").unwrap()[0], json!({"metadata": metadata, "spec": spec(2).unwrap()}));
        writer.apply(Event::Delete(preset("a", "one", None)));
        writer.apply(Event::Apply(preset("a", "two", None)));
        assert_eq!((presets.list("a"), names(&presets, "b").unwrap().len()), (Some(vec![]), 1));
        writer.apply(Event::Init);
        assert_eq!((presets.list("b"), writer.bytes), (None, 0), "a new list");
        writer.apply(Event::InitDone);
        assert_eq!(presets.list("b"), Some(vec![]));
    }

    #[test]
    fn interrupted_watch_has_no_answers() {
        let (writer, presets) = synced();
        assert_eq!(presets.list("a"), Some(vec![]));
        writer.interrupted();
        assert_eq!(presets.list("a"), None);
    }

    #[test]
    fn memory_is_bounded_and_returned() {
        let (mut writer, presets) = synced();
        writer.apply(Event::Apply(sized("a", MAX_ANSWER / 2)));
        writer.apply(Event::Apply(sized("b", MAX_BYTES)));
        assert!(writer.bytes <= MAX_BYTES);
        assert_eq!(presets.list("big"), None, "one of them has no text");
        assert_eq!(presets.list("small"), Some(vec![]), "other namespaces have answers");
        writer.apply(Event::Delete(sized("b", 0)));
        assert_eq!(names(&presets, "big").unwrap(), ["a"]);
        writer.apply(Event::Apply(sized("b", MAX_ANSWER / 2)));
        assert_eq!(presets.list("big"), None, "both have texts, too long for an answer");
        writer.apply(Event::Apply(sized("a", 1)));
        assert_eq!(names(&presets, "big").unwrap(), ["a", "b"]);
        writer.apply(Event::Delete(sized("a", 0)));
        writer.apply(Event::Delete(sized("b", 0)));
        assert_eq!((writer.bytes, presets.store.len()), (0, 0));
        for number in 0..=MAX_LIST {
            writer.apply(Event::Apply(preset("many", &number.to_string(), Some(json!({})))));
        }
        assert_eq!(presets.list("many"), None, "the lookup reports that there are too many");
    }

    #[test]
    fn other_queries_are_not_answered() {
        let (mut writer, presets) = synced();
        writer.apply(Event::Apply(preset("a", "one", Some(json!({})))));
        let list = |plural: &str, namespace: Option<&str>, labels: &str| {
            presets.answer(&ObjectQuery::list("kubevirt.io", "v1", plural, namespace, labels))
        };
        let plural = "virtualmachineinstancepresets";
        assert!(matches!(list(plural, Some("a"), ""), Some(LookupResult::List(items)) if items.len() == 1));
        for other in [list("virtualmachines", Some("a"), ""), list(plural, None, ""), list(plural, Some("a"), "a=b")] {
            assert_eq!(other, None);
        }
        assert_eq!(presets.answer(&ObjectQuery::get("kubevirt.io", "v1", plural, Some("a"), "one")), None);
        assert_eq!(Presets::unknown().answer(&ObjectQuery::list("kubevirt.io", "v1", plural, Some("a"), "")), None);
    }
}
