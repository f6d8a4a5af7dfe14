//! Presets, followed live: every new machine gets what those of its namespace give, and waits for no list of them.
//!
//! What a preset says is kept as text and read when a machine is made. Memory is bounded: a namespace with a preset for
//! which there is no room, or with very many, has no answer here, and neither has any while the presets are not known;
//! the reader of neighbours then asks the API server. A preset counts as soon as the watch has told of it, which takes milliseconds.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use admission::neighbours::{Ask, MAX_LIST, Outcome, Wanted};
use api::{VirtualMachineInstancePreset, constants};
use futures::StreamExt;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DynamicObject},
    runtime::watcher::{self, Event},
};
use serde_json::{Value, json};
use tokio::sync::watch;

/// Most bytes of presets kept.
const MAX_BYTES: usize = 4 << 20;
/// Most bytes of an answer, which as values takes some twenty times as much. Larger ones are read, within the bounds that
/// reading has.
const MAX_ANSWER: usize = 256 << 10;
/// Objects of a page of the first list, which is in memory at a time.
const PAGE: u32 = 16;
/// Pause after a watch that failed; doubled up to the longest each time until one succeeds.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The presets of all namespaces. Cheap to clone.
#[derive(Clone)]
pub struct Presets {
    known: Arc<RwLock<Known>>,
    listed: watch::Receiver<bool>,
}

impl Presets {
    /// None known, and none followed: every answer is read from the API server (for tests and tools).
    #[must_use]
    pub fn unknown() -> Self {
        // The sender may go: a receiver keeps the last value.
        Self { known: Arc::default(), listed: watch::channel(true).1 }
    }

    /// Follows the presets of the cluster. Spawns the task that watches.
    #[must_use]
    pub fn follow(client: Client) -> Self {
        let (sender, listed) = watch::channel(false);
        let presets = Self { known: Arc::default(), listed };
        tokio::spawn(keep(client, Arc::clone(&presets.known), sender));
        presets
    }

    /// Waits until the presets were listed once.
    pub async fn ready(&mut self) {
        if self.listed.wait_for(|listed| *listed).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// The answer of the API server to a wish for the presets of a namespace; `None` where it has to be asked.
    #[must_use]
    pub fn answer(&self, wanted: &Wanted) -> Option<Outcome> {
        let of_presets = wanted.group == constants::GROUP
            && wanted.version == constants::VERSION
            && wanted.plural == VirtualMachineInstancePreset::plural(&());
        let all = matches!(&wanted.ask, Ask::List { labels, first: None } if labels.is_empty());
        let namespace = wanted.namespace.as_deref().filter(|_| of_presets && all)?;
        self.known.read().unwrap_or_else(PoisonError::into_inner).list(namespace).map(Outcome::List)
    }
}

async fn keep(client: Client, known: Arc<RwLock<Known>>, listed: watch::Sender<bool>) {
    // Untyped, since the definition lets a preset come without a spec, and one such must not hide the others.
    let api = Api::<DynamicObject>::all_with(client, &ApiResource::erase::<VirtualMachineInstancePreset>(&()));
    let mut pause = FIRST_PAUSE;
    loop {
        let mut events = std::pin::pin!(watcher::watcher(api.clone(), watcher::Config::default().page_size(PAGE)));
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    let done = matches!(event, Event::InitDone);
                    known.write().unwrap_or_else(PoisonError::into_inner).take(event);
                    if done {
                        listed.send_replace(true);
                        pause = FIRST_PAUSE;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "watch of presets was interrupted");
                    break;
                }
            }
        }
        // Nothing is known of what happens meanwhile, so that nothing is answered until it has been listed again.
        *known.write().unwrap_or_else(PoisonError::into_inner) = Known::default();
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Presets by namespace and name; one without text is there, but there was no room for it.
#[derive(Default)]
struct Known {
    listed: bool,
    namespaces: BTreeMap<String, BTreeMap<String, Option<Box<str>>>>,
    bytes: usize,
}

impl Known {
    fn take(&mut self, event: Event<DynamicObject>) {
        match event {
            Event::Init => *self = Self::default(),
            Event::InitApply(preset) | Event::Apply(preset) => self.put(&preset),
            Event::InitDone => self.listed = true,
            Event::Delete(preset) => self.remove(&preset.namespace().unwrap_or_default(), &preset.name_any()),
        }
    }

    fn put(&mut self, preset: &DynamicObject) {
        let (namespace, name) = (preset.namespace().unwrap_or_default(), preset.name_any());
        self.remove(&namespace, &name);
        let Some(spec) = preset.data.get("spec") else { return };
        let text = json!({"metadata": {"namespace": namespace, "name": name}, "spec": spec}).to_string();
        let text = (self.bytes + text.len() <= MAX_BYTES).then(|| text.into_boxed_str());
        self.bytes += text.as_ref().map_or(0, |text| text.len());
        self.namespaces.entry(namespace).or_default().insert(name, text);
    }

    fn remove(&mut self, namespace: &str, name: &str) {
        let Some(presets) = self.namespaces.get_mut(namespace) else { return };
        self.bytes -= presets.remove(name).flatten().map_or(0, |text| text.len());
        if presets.is_empty() {
            self.namespaces.remove(namespace);
        }
    }

    fn list(&self, namespace: &str) -> Option<Vec<Value>> {
        if !self.listed {
            return None;
        }
        let Some(presets) = self.namespaces.get(namespace) else { return Some(vec![]) };
        let bytes: usize = presets.values().flatten().map(|text| text.len()).sum();
        if presets.len() > MAX_LIST as usize || bytes > MAX_ANSWER {
            return None;
        }
        presets.values().map(|text| serde_json::from_str(text.as_deref()?).ok()).collect()
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

    /// Names known of a namespace.
    fn names(known: &Known, namespace: &str) -> Option<Vec<String>> {
        let name = |preset: &Value| preset["metadata"]["name"].as_str().unwrap().to_owned();
        Some(known.list(namespace)?.iter().map(name).collect())
    }

    #[test]
    fn what_the_watch_told_is_answered() {
        let mut known = Known::default();
        let spec = |cores: u32| Some(json!({"selector": {}, "domain": {"cpu": {"cores": cores}}}));
        assert_eq!(known.list("a"), None);
        known.take(Event::Init);
        known.take(Event::InitApply(preset("a", "one", spec(1))));
        known.take(Event::InitApply(preset("b", "other", spec(1))));
        assert_eq!(known.list("a"), None, "not before all were listed");
        known.take(Event::InitDone);
        assert_eq!(known.list("c"), Some(vec![]));
        known.take(Event::Apply(preset("a", "one", spec(2))));
        known.take(Event::Apply(preset("a", "two", spec(3))));
        known.take(Event::Apply(preset("a", "empty", None)));
        assert_eq!(names(&known, "a").unwrap(), ["one", "two"]);
        let metadata = json!({"namespace": "a", "name": "one"});
        assert_eq!(known.list("a").unwrap()[0], json!({"metadata": metadata, "spec": spec(2).unwrap()}));
        known.take(Event::Delete(preset("a", "one", None)));
        known.take(Event::Apply(preset("a", "two", None)));
        assert_eq!((known.list("a"), names(&known, "b").unwrap().len()), (Some(vec![]), 1));
        known.take(Event::Init);
        assert_eq!((known.list("b"), known.bytes), (None, 0), "listed anew");
    }

    #[test]
    fn memory_is_bounded_and_given_back() {
        let mut known = Known { listed: true, ..Known::default() };
        known.put(&sized("a", MAX_ANSWER / 2));
        known.put(&sized("b", MAX_BYTES));
        assert!(known.bytes <= MAX_BYTES);
        assert_eq!(known.list("big"), None, "one of them is not kept");
        assert_eq!(known.list("small"), Some(vec![]), "others have their answers");
        known.take(Event::Delete(sized("b", 0)));
        assert_eq!(names(&known, "big").unwrap(), ["a"]);
        known.put(&sized("b", MAX_ANSWER / 2));
        assert_eq!(known.list("big"), None, "both are kept, and too much for an answer");
        known.put(&sized("a", 1));
        assert_eq!(names(&known, "big").unwrap(), ["a", "b"]);
        known.remove("big", "a");
        known.remove("big", "b");
        assert_eq!((known.bytes, known.namespaces.len()), (0, 0));
        for number in 0..=MAX_LIST {
            known.put(&preset("many", &number.to_string(), Some(json!({}))));
        }
        assert_eq!(known.list("many"), None, "the reader says that there are too many");
    }

    #[test]
    fn other_wishes_are_not_answered() {
        let mut known = Known { listed: true, ..Known::default() };
        known.put(&preset("a", "one", Some(json!({}))));
        let presets = Presets { known: Arc::new(RwLock::new(known)), listed: watch::channel(true).1 };
        let list = |plural: &str, namespace: Option<&str>, labels: &str| {
            presets.answer(&Wanted::list("kubevirt.io", "v1", plural, namespace, labels))
        };
        let plural = "virtualmachineinstancepresets";
        assert!(matches!(list(plural, Some("a"), ""), Some(Outcome::List(items)) if items.len() == 1));
        for other in [list("virtualmachines", Some("a"), ""), list(plural, None, ""), list(plural, Some("a"), "a=b")] {
            assert_eq!(other, None);
        }
        assert_eq!(presets.answer(&Wanted::get("kubevirt.io", "v1", plural, Some("a"), "one")), None);
        assert_eq!(Presets::unknown().answer(&Wanted::list("kubevirt.io", "v1", plural, Some("a"), "")), None);
    }
}
