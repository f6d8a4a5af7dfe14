//! Lookups of other objects in the cluster.
//!
//! Rules are pure and do not read. A rule that needs another object looks its [`ObjectQuery`] up in [`Lookups`]. If the
//! result is not there yet, evaluation ends with [`LookupError::Missing`]; virt-api reads everything that is missing and
//! evaluates again from the start. A review has few rounds, so a rule requires all its queries at once
//! ([`Lookups::require`]).
//!
//! ```
//! use admission::{LookupError, Lookups, ObjectQuery};
//!
//! fn storage_class_exists(lookups: &Lookups, name: &str) -> Result<bool, LookupError> {
//!     let query = ObjectQuery::get("storage.k8s.io", "v1", "storageclasses", None, name);
//!     Ok(lookups.get(&query)?.is_some()) // `get_as::<StorageClass>` decodes it
//! }
//! ```
//!
//! An error of the API server fails the review with code 500; a rule with another message for it uses
//! [`Lookups::result`]. A query for a new kind needs the right in `charts/ferrovirt/templates/rbac-api.yaml`.
//!
//! ```text
//! evaluate ─▶ review
//!    ▲ └────▶ LookupError::Missing(queries) ─▶ virt-api reads ─▶ Lookups ─┐
//!    └────────────────────────────────────────────────────────────────────┘   at most [`MAX_ROUNDS`] times
//! ```

use std::{collections::BTreeMap, fmt};

use k8s_openapi::api::{
    authentication::v1::UserInfo,
    authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{decode, resource_path::collection_path};

/// Most rounds of lookups for a review.
pub const MAX_ROUNDS: usize = 6;
/// Most queries of a review.
pub const MAX_QUERIES: usize = 256;
/// Most objects of a list. A longer list fails, unless the query has a limit.
pub const MAX_LIST: u32 = 1000;

/// One read request to the API server.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct ObjectQuery {
    /// API group; empty for the core group.
    pub group: String,
    /// Version.
    pub version: String,
    /// Plural, as in paths.
    pub plural: String,
    /// Namespace; `None` for cluster-scoped kinds, and for a list over all namespaces.
    pub namespace: Option<String>,
    /// Selected objects.
    pub selection: Selection,
}

/// Objects of a kind that a query selects.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Selection {
    /// One object.
    Get {
        /// Its name.
        name: String,
    },
    /// A list of objects.
    List {
        /// Label selector; empty for all.
        labels: String,
        /// Number of objects to read; `None`: all of them, which fails if there are more than [`MAX_LIST`].
        limit: Option<u32>,
        /// Only the objects whose work has not ended. The others do not count against [`MAX_LIST`].
        unfinished: bool,
    },
    /// The answer to a SubjectAccessReview, which [`Lookups::is_allowed`] returns.
    AccessReview {
        /// The review as JSON.
        review: String,
    },
}

impl ObjectQuery {
    fn new(group: &str, version: &str, plural: &str, namespace: Option<&str>, selection: Selection) -> Self {
        Self {
            group: group.to_owned(),
            version: version.to_owned(),
            plural: plural.to_owned(),
            namespace: namespace.map(str::to_owned),
            selection,
        }
    }

    /// Selects one object by name.
    pub fn get(group: &str, version: &str, plural: &str, namespace: Option<&str>, name: &str) -> Self {
        Self::new(group, version, plural, namespace, Selection::Get { name: name.to_owned() })
    }

    /// Selects all objects with the labels in a namespace (or in all namespaces).
    pub fn list(group: &str, version: &str, plural: &str, namespace: Option<&str>, labels: &str) -> Self {
        let selection = Selection::List { labels: labels.to_owned(), limit: None, unfinished: false };
        Self::new(group, version, plural, namespace, selection)
    }

    /// Selects the first few objects, to see if there are any.
    pub fn first(group: &str, version: &str, plural: &str, namespace: Option<&str>, count: u32) -> Self {
        let selection = Selection::List { labels: String::new(), limit: Some(count), unfinished: false };
        Self::new(group, version, plural, namespace, selection)
    }

    /// Selects the objects of a namespace whose work has not ended: without `status.complete` and the condition Failure.
    pub fn unfinished(group: &str, version: &str, plural: &str, namespace: &str) -> Self {
        let selection = Selection::List { labels: String::new(), limit: None, unfinished: true };
        Self::new(group, version, plural, Some(namespace), selection)
    }

    /// Asks for a right of a user.
    pub(crate) fn access(user: &UserInfo, right: ResourceAttributes) -> Self {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: user.username.clone(),
                uid: user.uid.clone(),
                groups: user.groups.clone(),
                extra: user.extra.clone(),
                resource_attributes: Some(right),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let review = json!(review).to_string();
        Self::new("authorization.k8s.io", "v1", "subjectaccessreviews", None, Selection::AccessReview { review })
    }

    /// Returns true if an object of the collection belongs to the result.
    pub fn selects(&self, object: &Value) -> bool {
        !matches!(self.selection, Selection::List { unfinished: true, .. }) || !is_finished(object)
    }

    /// Returns the path of the collection; `None` if a name is not a path segment, so that no such object exists.
    pub fn collection(&self) -> Option<String> {
        let name = match &self.selection {
            Selection::Get { name } => Some(name.as_str()),
            Selection::List { .. } | Selection::AccessReview { .. } => None,
        };
        collection_path(&self.group, &self.version, &self.plural, self.namespace.as_deref(), name)
    }
}

fn is_finished(object: &Value) -> bool {
    let mut conditions = object.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
    object.pointer("/status/complete") == Some(&Value::Bool(true))
        || conditions.any(|condition| {
            let has = |key: &str, value: &str| condition.get(key).and_then(Value::as_str) == Some(value);
            has("type", "Failure") && has("status", "True")
        })
}

impl fmt::Display for ObjectQuery {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) };
        match (&self.selection, &self.namespace) {
            (Selection::Get { name }, None) => write!(out, "get {kind} \"{name}\""),
            (Selection::Get { name }, Some(namespace)) => write!(out, "get {kind} \"{namespace}/{name}\""),
            (Selection::AccessReview { .. }, _) => write!(out, "create {kind}"),
            (Selection::List { .. }, None) => write!(out, "list {kind}"),
            (Selection::List { .. }, Some(namespace)) => write!(out, "list {kind} in namespace \"{namespace}\""),
        }
    }
}

/// Response of the API server to a query.
#[derive(Clone, Debug, PartialEq)]
pub enum LookupResult {
    /// The object, or `None` if it does not exist.
    Object(Option<Value>),
    /// The objects.
    List(Vec<Value>),
    /// The API server refused or failed.
    Failed {
        /// HTTP status; 0 without a response.
        code: u16,
        /// Its message.
        message: String,
    },
}

/// Reason why a rule cannot be evaluated.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum LookupError {
    /// These queries have no result yet.
    #[error("{} lookups are missing", .0.len())]
    Missing(Vec<ObjectQuery>),
    /// A read failed; a message for the user.
    #[error("{0}")]
    Failed(String),
}

impl LookupError {
    fn failed(query: &ObjectQuery, message: &str) -> Self {
        Self::Failed(format!("cannot {query}: {message}"))
    }
}

/// Results of the queries of one review.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lookups(BTreeMap<ObjectQuery, LookupResult>);

impl Lookups {
    /// Returns an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a result.
    pub fn insert(&mut self, query: ObjectQuery, result: LookupResult) {
        self.0.insert(query, result);
    }

    /// Returns the number of results.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no results.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Fails with all queries that have no result yet.
    pub fn require<'a>(&self, queries: impl IntoIterator<Item = &'a ObjectQuery>) -> Result<(), LookupError> {
        let missing: Vec<_> = queries.into_iter().filter(|query| !self.0.contains_key(*query)).cloned().collect();
        if missing.is_empty() { Ok(()) } else { Err(LookupError::Missing(missing)) }
    }

    /// Returns the result of a query.
    pub fn result(&self, query: &ObjectQuery) -> Result<&LookupResult, LookupError> {
        self.0.get(query).ok_or_else(|| LookupError::Missing(vec![query.clone()]))
    }

    /// Returns an object; `None` if it does not exist.
    pub fn get(&self, query: &ObjectQuery) -> Result<Option<&Value>, LookupError> {
        match self.result(query)? {
            LookupResult::Object(object) => Ok(object.as_ref()),
            LookupResult::List(_) => Err(LookupError::failed(query, "a list was read")),
            LookupResult::Failed { message, .. } => Err(LookupError::failed(query, message)),
        }
    }

    /// Decodes an object.
    pub fn get_as<T: DeserializeOwned>(&self, query: &ObjectQuery) -> Result<Option<T>, LookupError> {
        self.get(query)?.map(|object| Self::decode(query, object)).transpose()
    }

    /// Returns true if the user of an access review has the right.
    pub(crate) fn is_allowed(&self, query: &ObjectQuery) -> Result<bool, LookupError> {
        let status = |name: &str| Ok(self.get(query)?.and_then(|answer| answer.get("status")?.get(name)?.as_bool()));
        Ok(status("allowed")? == Some(true) && status("denied")? != Some(true))
    }

    /// Returns the objects of a list. An unknown kind (its CRD is not installed) has none.
    pub fn list(&self, query: &ObjectQuery) -> Result<&[Value], LookupError> {
        match self.result(query)? {
            LookupResult::List(items) => Ok(items),
            LookupResult::Object(None) => Ok(&[]),
            LookupResult::Object(Some(_)) => Err(LookupError::failed(query, "an object was read")),
            LookupResult::Failed { message, .. } => Err(LookupError::failed(query, message)),
        }
    }

    /// Decodes the objects of a list.
    pub fn list_as<T: DeserializeOwned>(&self, query: &ObjectQuery) -> Result<Vec<T>, LookupError> {
        self.list(query)?.iter().map(|object| Self::decode(query, object)).collect()
    }

    fn decode<T: DeserializeOwned>(query: &ObjectQuery, object: &Value) -> Result<T, LookupError> {
        decode::stored(object).map_err(|error| LookupError::failed(query, &error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pvc(name: &str) -> ObjectQuery {
        ObjectQuery::get("", "v1", "persistentvolumeclaims", Some("ns"), name)
    }

    #[test]
    fn queries_without_a_result_are_missing() {
        let mut lookups = Lookups::new();
        let (a, b) = (pvc("a"), pvc("b"));
        assert_eq!(lookups.require([&a, &b]), Err(LookupError::Missing(vec![a.clone(), b.clone()])));
        lookups.insert(a.clone(), LookupResult::Object(None));
        assert_eq!(lookups.get(&a), Ok(None));
        assert_eq!(lookups.get(&b), Err(LookupError::Missing(vec![b.clone()])));
        let failure = LookupResult::Failed { code: 403, message: "no".into() };
        lookups.insert(b.clone(), failure.clone());
        let message = "cannot get persistentvolumeclaims \"ns/b\": no";
        assert_eq!(lookups.get(&b), Err(LookupError::Failed(message.into())));
        assert_eq!(lookups.result(&b), Ok(&failure));
    }

    #[test]
    fn right_is_had_if_the_review_allows_it() {
        let user = UserInfo { username: Some("jane".into()), groups: Some(vec!["a".into()]), ..UserInfo::default() };
        let right = ResourceAttributes { verb: Some("create".into()), ..ResourceAttributes::default() };
        let query = ObjectQuery::access(&user, right);
        let Selection::AccessReview { review } = &query.selection else { panic!("{query}") };
        let spec = json!({"groups": ["a"], "resourceAttributes": {"verb": "create"}, "user": "jane"});
        assert_eq!(serde_json::from_str::<Value>(review).unwrap()["spec"], spec);
        assert_eq!(query.collection().as_deref(), Some("/apis/authorization.k8s.io/v1/subjectaccessreviews"));
        for (answer, expected) in [
            (Some(json!({"status": {"allowed": true}})), true),
            (Some(json!({"status": {"allowed": true, "denied": true}})), false),
            (Some(json!({"status": {"allowed": false}})), false),
            (Some(json!({"status": {}})), false),
            (Some(json!({})), false),
            (None, false),
        ] {
            let mut lookups = Lookups::new();
            lookups.insert(query.clone(), LookupResult::Object(answer.clone()));
            assert_eq!(lookups.is_allowed(&query), Ok(expected), "{answer:?}");
        }
        let mut lookups = Lookups::new();
        assert_eq!(lookups.is_allowed(&query), Err(LookupError::Missing(vec![query.clone()])));
        lookups.insert(query.clone(), LookupResult::Failed { code: 403, message: "no".into() });
        assert!(matches!(lookups.is_allowed(&query), Err(LookupError::Failed(_))));
    }

    #[test]
    fn finished_objects_are_left_out_of_unfinished_ones() {
        let all = ObjectQuery::list("a.b", "v1", "things", Some("ns"), "");
        let query = ObjectQuery::unfinished("a.b", "v1", "things", "ns");
        let failure = |status: &str| json!({"status": {"conditions": [{"type": "Failure", "status": status}]}});
        for (object, unfinished) in [
            (json!({}), true),
            (json!({"status": {"complete": false, "conditions": [{"type": "Ready", "status": "True"}]}}), true),
            (failure("False"), true),
            (failure("True"), false),
            (json!({"status": {"complete": true}}), false),
        ] {
            assert_eq!((query.selects(&object), all.selects(&object)), (unfinished, true), "{object}");
        }
    }

    #[test]
    fn objects_are_decoded() {
        let mut lookups = Lookups::new();
        lookups.insert(pvc("a"), LookupResult::Object(Some(json!({"x": 1}))));
        assert_eq!(lookups.get_as(&pvc("a")), Ok(Some(BTreeMap::from([("x".to_owned(), 1)]))));
        assert!(matches!(lookups.get_as::<Vec<u8>>(&pvc("a")), Err(LookupError::Failed(_))));
        let list = ObjectQuery::list("a.b", "v1", "things", None, "x=y");
        lookups.insert(list.clone(), LookupResult::List(vec![json!(1), json!(2)]));
        assert_eq!(lookups.list_as::<u8>(&list), Ok(vec![1, 2]));
        assert!(lookups.get(&list).is_err());
    }
}
