//! What a rule wants to know of other objects in the cluster.
//!
//! Rules are pure: they never read. A rule that needs another object names it and asks the [`Neighbours`] read so far;
//! when it was not read yet, evaluation ends with [`Needs`], the server reads what is missing (all at once, with a
//! deadline) and evaluates again from the start. Ask for as much as possible in one go ([`Neighbours::need`]), since
//! a review has only a few rounds.
//!
//! ```
//! use admission::neighbours::{Needs, Neighbours, Wanted};
//!
//! fn storage_class_exists(neighbours: &Neighbours, name: &str) -> Result<bool, Needs> {
//!     let wanted = Wanted::get("storage.k8s.io", "v1", "storageclasses", None, name);
//!     Ok(neighbours.get(&wanted)?.is_some()) // `get_as::<StorageClass>` reads it as its type
//! }
//! ```
//!
//! In a webhook (`fn(&Context) -> Result<AdmissionReview, Stop>`) the `?` just works: `Stop` takes [`Needs`],
//! [`Causes`](crate::causes::Causes) and refusals. A failure of the API server refuses the review with code 500;
//! a rule that has to say something else about it looks at [`Neighbours::outcome`]. Whoever asks for a new kind of
//! object allows virt-api to read it (`charts/ferrovirt/templates/rbac-api.yaml`).
//!
//! ```text
//! evaluate ─▶ answer
//!    ▲ └────▶ Needs::Reads(wanted) ─▶ server reads ─▶ Neighbours ─┐
//!    └──────────────────────────────────────────────────────────┘   at most [`MAX_ROUNDS`] times
//! ```

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::read;

/// Most rounds of reading for a review.
pub const MAX_ROUNDS: usize = 6;
/// Most objects asked for by a review.
pub const MAX_WANTED: usize = 256;
/// Most objects of a list. A longer list fails, unless only its start was asked for.
pub const MAX_LIST: u32 = 1000;

/// One request to the API server.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Wanted {
    /// API group; empty for the core group.
    pub group: String,
    /// Version.
    pub version: String,
    /// Plural, as in paths.
    pub plural: String,
    /// Namespace; `None` for cluster-scoped kinds, and for a list over all namespaces.
    pub namespace: Option<String>,
    /// What of it.
    pub ask: Ask,
}

/// What is asked of a kind.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Ask {
    /// One object.
    Get {
        /// Its name.
        name: String,
    },
    /// Objects.
    List {
        /// Label selector; empty for all.
        labels: String,
        /// Only the first so many; `None`: all of them, which fails when there are more than [`MAX_LIST`].
        first: Option<u32>,
    },
    /// Whether an object could be made (a dry run).
    DryRunCreate {
        /// The object as JSON.
        object: String,
    },
    /// A change of an object: the one thing a webhook may cause (the eviction of a pod marks its machine).
    Patch {
        /// Name of the object.
        name: String,
        /// JSON patch, as JSON.
        patch: String,
        /// Whether nothing is to be stored, because the review itself is a dry run.
        dry_run: bool,
    },
}

impl Wanted {
    fn new(group: &str, version: &str, plural: &str, namespace: Option<&str>, ask: Ask) -> Self {
        Self {
            group: group.to_owned(),
            version: version.to_owned(),
            plural: plural.to_owned(),
            namespace: namespace.map(str::to_owned),
            ask,
        }
    }

    /// One object by name.
    pub fn get(group: &str, version: &str, plural: &str, namespace: Option<&str>, name: &str) -> Self {
        Self::new(group, version, plural, namespace, Ask::Get { name: name.to_owned() })
    }

    /// All objects of a namespace (or of all namespaces) with the labels.
    pub fn list(group: &str, version: &str, plural: &str, namespace: Option<&str>, labels: &str) -> Self {
        Self::new(group, version, plural, namespace, Ask::List { labels: labels.to_owned(), first: None })
    }

    /// The first few objects; for "is there any".
    pub fn first(group: &str, version: &str, plural: &str, namespace: Option<&str>, count: u32) -> Self {
        Self::new(group, version, plural, namespace, Ask::List { labels: String::new(), first: Some(count) })
    }

    /// The verdict of the API server on an object that is not made.
    pub fn dry_run_create(group: &str, version: &str, plural: &str, namespace: &str, object: &Value) -> Self {
        Self::new(group, version, plural, Some(namespace), Ask::DryRunCreate { object: object.to_string() })
    }

    /// A JSON patch of an object.
    pub fn patch(
        [group, version, plural]: [&str; 3],
        namespace: Option<&str>,
        name: &str,
        patch: &Value,
        dry_run: bool,
    ) -> Self {
        let ask = Ask::Patch { name: name.to_owned(), patch: patch.to_string(), dry_run };
        Self::new(group, version, plural, namespace, ask)
    }

    /// Path of the collection; `None` when a part of it cannot be in a path, so that nothing of that name exists.
    pub fn collection(&self) -> Option<String> {
        let mut path = if self.group.is_empty() { "/api".to_owned() } else { format!("/apis/{}", self.group) };
        path.push_str(&format!("/{}", self.version));
        if let Some(namespace) = &self.namespace {
            path.push_str(&format!("/namespaces/{namespace}"));
        }
        path.push_str(&format!("/{}", self.plural));
        let named = match &self.ask {
            Ask::Get { name } | Ask::Patch { name, .. } => is_segment(name),
            Ask::List { .. } | Ask::DryRunCreate { .. } => true,
        };
        let parts = [&self.version, &self.plural];
        let sound = named
            && (self.group.is_empty() || is_segment(&self.group))
            && parts.into_iter().chain(self.namespace.as_ref()).all(|part| is_segment(part));
        sound.then_some(path)
    }
}

/// Whether a text is one segment of a path as it stands. Names come from objects that users write, and must not lead
/// to another path.
fn is_segment(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 253
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte))
        && text.bytes().any(|byte| byte != b'.')
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) };
        let place = self.namespace.as_ref().map(|namespace| format!("{namespace}/")).unwrap_or_default();
        match &self.ask {
            Ask::Get { name } => write!(out, "get {kind} \"{place}{name}\""),
            Ask::List { .. } if place.is_empty() => write!(out, "list {kind}"),
            Ask::List { .. } => write!(out, "list {kind} in namespace \"{}\"", place.trim_end_matches('/')),
            Ask::DryRunCreate { .. } => write!(out, "try to create {kind}"),
            Ask::Patch { name, .. } => write!(out, "patch {kind} \"{place}{name}\""),
        }
    }
}

/// What the API server answered.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The object (of a get, a dry run, a patch), or none of that name.
    Object(Option<Value>),
    /// The objects.
    List(Vec<Value>),
    /// It refused or failed.
    Failed {
        /// HTTP status; 0 when there was no answer.
        code: u16,
        /// Its text.
        message: String,
    },
}

/// Why a rule cannot be evaluated.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Needs {
    /// These have to be read first.
    Reads(Vec<Wanted>),
    /// Reading failed; a sentence for the user.
    Failed(String),
}

impl Needs {
    fn failed(wanted: &Wanted, message: &str) -> Self {
        Self::Failed(format!("cannot {wanted}: {message}"))
    }
}

/// What was read for one review.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Neighbours(BTreeMap<Wanted, Outcome>);

impl Neighbours {
    /// Nothing read yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in an answer.
    pub fn insert(&mut self, wanted: Wanted, outcome: Outcome) {
        self.0.insert(wanted, outcome);
    }

    /// How much was read.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Asks for several at once; an error lists all that were not read yet.
    pub fn need<'a>(&self, wanted: impl IntoIterator<Item = &'a Wanted>) -> Result<(), Needs> {
        let missing: Vec<Wanted> = wanted.into_iter().filter(|wanted| !self.0.contains_key(*wanted)).cloned().collect();
        if missing.is_empty() { Ok(()) } else { Err(Needs::Reads(missing)) }
    }

    /// The answer as it came, for a rule that has its own words about failures.
    pub fn outcome(&self, wanted: &Wanted) -> Result<&Outcome, Needs> {
        self.0.get(wanted).ok_or_else(|| Needs::Reads(vec![wanted.clone()]))
    }

    /// An object; `None` when there is none of that name.
    pub fn get(&self, wanted: &Wanted) -> Result<Option<&Value>, Needs> {
        match self.outcome(wanted)? {
            Outcome::Object(object) => Ok(object.as_ref()),
            Outcome::List(_) => Err(Needs::failed(wanted, "a list was read")),
            Outcome::Failed { message, .. } => Err(Needs::failed(wanted, message)),
        }
    }

    /// An object as its type.
    pub fn get_as<T: DeserializeOwned>(&self, wanted: &Wanted) -> Result<Option<T>, Needs> {
        self.get(wanted)?
            .map(|object| read::stored(object).map_err(|error| Needs::failed(wanted, &error.to_string())))
            .transpose()
    }

    /// Objects of a list. An unknown kind (its CRD is not installed) has none.
    pub fn list(&self, wanted: &Wanted) -> Result<&[Value], Needs> {
        match self.outcome(wanted)? {
            Outcome::List(items) => Ok(items),
            Outcome::Object(None) => Ok(&[]),
            Outcome::Object(Some(_)) => Err(Needs::failed(wanted, "an object was read")),
            Outcome::Failed { message, .. } => Err(Needs::failed(wanted, message)),
        }
    }

    /// Objects of a list as their type.
    pub fn list_as<T: DeserializeOwned>(&self, wanted: &Wanted) -> Result<Vec<T>, Needs> {
        self.list(wanted)?
            .iter()
            .map(|object| read::stored(object).map_err(|error| Needs::failed(wanted, &error.to_string())))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pvc(name: &str) -> Wanted {
        Wanted::get("", "v1", "persistentvolumeclaims", Some("ns"), name)
    }

    #[test]
    fn what_was_not_read_is_needed() {
        let mut neighbours = Neighbours::new();
        let (a, b) = (pvc("a"), pvc("b"));
        assert_eq!(neighbours.need([&a, &b]), Err(Needs::Reads(vec![a.clone(), b.clone()])));
        neighbours.insert(a.clone(), Outcome::Object(None));
        assert_eq!(neighbours.get(&a), Ok(None));
        assert_eq!(neighbours.get(&b), Err(Needs::Reads(vec![b.clone()])));
        let failure = Outcome::Failed { code: 403, message: "no".into() };
        neighbours.insert(b.clone(), failure.clone());
        assert_eq!(neighbours.get(&b), Err(Needs::Failed("cannot get persistentvolumeclaims \"ns/b\": no".into())));
        assert_eq!(neighbours.outcome(&b), Ok(&failure));
    }

    #[test]
    fn objects_are_read_as_their_type() {
        let mut neighbours = Neighbours::new();
        neighbours.insert(pvc("a"), Outcome::Object(Some(json!({"x": 1}))));
        assert_eq!(neighbours.get_as(&pvc("a")), Ok(Some(BTreeMap::from([("x".to_owned(), 1)]))));
        assert!(matches!(neighbours.get_as::<Vec<u8>>(&pvc("a")), Err(Needs::Failed(_))));
        let list = Wanted::list("a.b", "v1", "things", None, "x=y");
        neighbours.insert(list.clone(), Outcome::List(vec![json!(1), json!(2)]));
        assert_eq!(neighbours.list_as::<u8>(&list), Ok(vec![1, 2]));
        assert!(neighbours.get(&list).is_err());
    }

    #[test]
    fn paths_are_those_of_the_api() {
        assert_eq!(pvc("a").collection().as_deref(), Some("/api/v1/namespaces/ns/persistentvolumeclaims"));
        let cluster = Wanted::get("storage.k8s.io", "v1", "storageclasses", None, "fast");
        assert_eq!(cluster.collection().as_deref(), Some("/apis/storage.k8s.io/v1/storageclasses"));
    }

    #[test]
    fn names_do_not_lead_to_other_paths() {
        for name in ["", ".", "..", "a/b", "../secrets", "a?b", "a#b", "a%2fb", "a b", "ä", &"x".repeat(254)] {
            assert_eq!(pvc(name).collection(), None, "{name}");
            let elsewhere = Wanted::list("", "v1", "pods", Some(name), "");
            assert_eq!(elsewhere.collection(), None, "{name}");
        }
    }
}
