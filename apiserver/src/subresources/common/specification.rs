//! The specification of a subresource, for dispatch, discovery, OpenAPI, metrics and RBAC.

use api::config::ClusterConfig;
use axum::{body::Body, response::Response};
use futures::future::BoxFuture;
use http::{Method, Request};
use serde_json::Value;

use super::call::Call;
use crate::{metrics::StreamKind, requests::error::ApiError};

/// Group of the aggregated API.
pub(crate) const GROUP: &str = "subresources.kubevirt.io";
/// Versions of the aggregated API, preferred first.
pub(crate) const VERSIONS: [&str; 2] = ["v1", "v1alpha3"];
/// Resource of VMs.
pub(crate) const VMS: &str = "virtualmachines";
/// Resource of VMIs.
pub(crate) const VMIS: &str = "virtualmachineinstances";

/// Serves a request to a subresource.
pub(crate) type Serve = for<'a> fn(Call<'a>, Request<Body>) -> BoxFuture<'a, Result<Response, ApiError>>;
/// Returns a JSON schema.
pub(crate) type Schema = fn() -> Value;
/// A parameter: name and JSON type.
pub(crate) type Parameter = (&'static str, &'static str);

/// Method of a subresource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// GET
    Get,
    /// PUT
    Put,
}

/// Media types of the request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// All: the body decides, not its label.
    Any,
    /// JSON, or a body without a label.
    JsonOrUnlabelled,
    /// JSON, labelled as such.
    Json,
}

/// Answer to a successful request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    /// 200 without a body.
    Empty,
    /// 202 without a body: the change follows.
    Accepted,
    /// 200 with a JSON document of this schema.
    Document(Schema),
    /// 200 with a picture.
    Picture,
    /// 101, then a WebSocket.
    Stream(&'static StreamKind),
}

/// A subresource.
#[derive(Clone, Copy)]
pub(crate) struct Specification {
    /// Plural resource.
    pub resource: &'static str,
    /// Name below the resource, or empty for a resource of its own.
    pub name: &'static str,
    /// Versions that serve it.
    pub versions: &'static [&'static str],
    /// Parameters in the path below the name. The last ones may be omitted, but not the first.
    pub path_parameters: &'static [Parameter],
    /// Parameters in the query, except `dryRun`.
    pub query_parameters: &'static [Parameter],
    /// Method.
    pub method: Verb,
    /// Schema of the options in the body.
    pub options: Option<Schema>,
    /// Media types of the body.
    pub content: Content,
    /// Answer to a successful request.
    pub answer: Answer,
    /// True if `dryRun`, in the body or the query, checks the request without a change.
    pub dry_run: bool,
    /// True if discovery names it.
    pub listed: bool,
    /// True if failures are answered 500 with a plain text, as for all reads through virt-handler.
    pub plain_errors: bool,
    /// Checks the configuration before any object is read.
    pub check_config: fn(&ClusterConfig) -> Result<(), ApiError>,
    /// Operation in OpenAPI documents, without the version.
    pub operation: &'static str,
    /// Description in OpenAPI documents.
    pub description: &'static str,
    /// Serves a request.
    pub serve: Serve,
}

impl Specification {
    /// Returns a listed subresource that reads (GET).
    pub(crate) const fn get(resource: &'static str, name: &'static str, answer: Answer, serve: Serve) -> Self {
        Self {
            resource,
            name,
            versions: &VERSIONS,
            path_parameters: &[],
            query_parameters: &[],
            method: Verb::Get,
            options: None,
            content: Content::Any,
            answer,
            dry_run: false,
            listed: true,
            plain_errors: false,
            check_config: |_| Ok(()),
            operation: "",
            description: "",
            serve,
        }
    }

    /// Returns a listed subresource that changes something (PUT).
    pub(crate) const fn put(resource: &'static str, name: &'static str, answer: Answer, serve: Serve) -> Self {
        Self { method: Verb::Put, ..Self::get(resource, name, answer, serve) }
    }

    /// Returns the HTTP method.
    pub(crate) const fn http_method(&self) -> Method {
        match self.method {
            Verb::Get => Method::GET,
            Verb::Put => Method::PUT,
        }
    }

    /// Returns the name in discovery and metrics: `virtualmachines/start`.
    pub(crate) fn full_name(&self) -> String {
        if self.name.is_empty() { self.resource.to_owned() } else { format!("{}/{}", self.resource, self.name) }
    }

    /// Returns true if the answer is a JSON document.
    pub(crate) const fn answers_json(&self) -> bool {
        matches!(self.answer, Answer::Document(_))
    }

    /// Returns true if a request changes something.
    pub(crate) const fn changes(&self) -> bool {
        matches!(self.method, Verb::Put) && !self.answers_json()
    }

    /// Returns the kind of its streams.
    pub(crate) const fn stream(&self) -> Option<&'static StreamKind> {
        match self.answer {
            Answer::Stream(kind) => Some(kind),
            _ => None,
        }
    }
}
