//! Requests to the aggregated API: documents, then authentication, authorization, and the subresource.
//!
//! - [`run`]: starts the process; this file: serves requests; [`path`]: parses their paths.

mod path;
pub(crate) mod run;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Instant};

use api::constants::component;
use axum::{
    Extension,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use daemon::{
    ops::Ops,
    profiler::ProfilerAction,
    tls::{Peer, TrustedAddresses},
};
use http::{HeaderValue, Method, Request, StatusCode, header, request::Parts};
use kube::Client;
use sha2::{Digest, Sha256};
use tracing::{Instrument, field::Empty};

use crate::{
    auth::{
        authentication::{Unauthenticated, User, authenticate, unix_now},
        authorization::{Attributes, Authorizer, Decision},
        front_proxy::FrontProxy,
    },
    discovery::{
        cluster_profiler::ClusterProfiler,
        documents::{self, Document},
        guestfs::GuestFs,
    },
    requests::{
        error::{ApiError, empty_response, json_response, text_response},
        negotiation,
        options::{self, MAX_BODY},
    },
    subresources::{
        common::{
            call::{Call, Context, Object},
            specification::{Content, Specification},
        },
        registry::{self, NotServed},
    },
};

/// The aggregated API server.
pub(crate) struct Server {
    /// Client for the API server.
    pub client: Client,
    /// The install namespace.
    pub namespace: String,
    /// Trust in the front proxy.
    pub front_proxy: FrontProxy,
    /// Addresses that proved to be an API server.
    pub trusted: TrustedAddresses,
    /// Access reviews.
    pub authorizer: Authorizer,
    /// Profiles of the components.
    pub profiler: ClusterProfiler,
    /// Health.
    pub ops: Ops,
    /// The image of the libguestfs tools.
    pub guestfs: GuestFs,
    /// Services of subresources.
    pub context: Context,
}

/// Serves all requests except webhooks and metrics.
pub(crate) async fn serve(
    State(server): State<Arc<Server>>,
    Extension(peer): Extension<Peer>,
    request: Request<Body>,
) -> Response {
    let mut response = server.answer(&peer, request).await;
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

impl Server {
    async fn answer(&self, peer: &Peer, request: Request<Body>) -> Response {
        let (parts, body) = request.into_parts();
        if let Some(document) = documents::find(parts.uri.path()) {
            self.record_front_proxy(peer);
            return self.document(document, peer, &parts, body).await;
        }
        if parts.method == Method::OPTIONS {
            return options_response(parts.uri.path());
        }
        let (user, attributes) = match self.admit(peer, &parts).await {
            Ok(admitted) => admitted,
            Err(refusal) => return refusal,
        };
        let subresource = match registry::find(&attributes, &parts.method) {
            Ok(subresource) => subresource,
            Err(NotServed::NoSuchPath) => return ApiError::NoSuchPath.into_response(),
            Err(NotServed::WrongMethod(allowed)) => return ApiError::WrongMethod(allowed).into_response(),
        };
        let label = subresource.full_name();
        let span = tracing::info_span!(
            "request",
            request = audit_id(&parts),
            user = user.name,
            verb = attributes.verb,
            resource = label,
            namespace = attributes.namespace,
            name = attributes.name,
            vm_uid = Empty,
            vmi_uid = Empty,
        );
        let object = Object {
            namespace: attributes.namespace,
            name: attributes.name,
            holder: holder(&user),
            is_controller: is_controller(&user, &self.namespace),
        };
        let started = Instant::now();
        let served = self.dispatch(subresource, &object, Request::from_parts(parts, body)).instrument(span.clone());
        let response = served.await;
        span.in_scope(|| tracing::debug!(status = response.status().as_u16(), "served"));
        let metrics = &self.context.metrics;
        metrics.requests.with_label_values(&[label.as_str(), response.status().as_str()]).inc();
        metrics.request_seconds.with_label_values(&[label.as_str()]).observe(started.elapsed().as_secs_f64());
        response
    }

    /// Records the address of a client with a front-proxy certificate. kube-apiserver reads the discovery documents every 30
    /// seconds, so its address is known before users need it.
    fn record_front_proxy(&self, peer: &Peer) {
        if self.front_proxy.current().is_some_and(|trust| trust.is_front_proxy(&peer.certificates, unix_now())) {
            self.trusted.record(peer.address.ip());
        }
    }

    /// Serves a document.
    async fn document(&self, document: Document, peer: &Peer, request: &Parts, body: Body) -> Response {
        if let Some(refusal) = documents::refuse_method(&request.method) {
            return refusal;
        }
        match document {
            Document::Health => {
                let (status, body) = self.ops.health().await;
                json_response(status, &body)
            }
            Document::GuestFs => self.guestfs.answer(&self.client, &self.namespace).await,
            Document::Profiler(action) => self.profile(action, peer, request, body).await,
            document => documents::serve(document, &request.headers, request.uri.query()),
        }
    }

    /// Serves profiles of all components to users who may read the document.
    async fn profile(&self, action: ProfilerAction, peer: &Peer, request: &Parts, body: Body) -> Response {
        if let Some(refusal) = action.check(self.context.config.current().cluster_profiler) {
            return refusal.into_response();
        }
        let admitted = async {
            let user = self.user(peer, request).map_err(unauthorized)?;
            let attributes = path::document_attributes(request.uri.path()).map_err(unauthorized)?;
            self.authorize(&user, &attributes).await
        };
        if let Err(refusal) = admitted.await {
            return refusal;
        }
        let done = match action {
            ProfilerAction::Start | ProfilerAction::Stop => {
                self.profiler.switch(action).await.map(|()| StatusCode::OK.into_response())
            }
            ProfilerAction::Dump | ProfilerAction::DumpCluster => {
                let body = self.context.bodies.read(body, MAX_BODY).await;
                let request = match body.and_then(|body| options::parse(&body.bytes)) {
                    Ok(request) => request,
                    Err(error) => return error.into_response(),
                };
                self.profiler.dump(&request).await.map(|found| match found {
                    Some(results) => json_response(StatusCode::OK, &results),
                    None => empty_response(StatusCode::NO_CONTENT),
                })
            }
        };
        done.unwrap_or_else(|error| {
            if error.status().is_server_error() {
                tracing::error!(%error, ?action, "profiles of the components failed");
            }
            text_response(error.status(), format!("{} {error}", action.refusal()))
        })
    }

    /// Authenticates and authorizes a request. Both refuse with 401 and a plain text.
    async fn admit(&self, peer: &Peer, request: &Parts) -> Result<(User, Attributes), Response> {
        let user = self.user(peer, request).map_err(unauthorized)?;
        let attributes = path::attributes(&request.method, request.uri.path()).map_err(unauthorized)?;
        self.authorize(&user, &attributes).await?;
        Ok((user, attributes))
    }

    /// Returns the user that the front proxy names, and records the proxy's address.
    fn user(&self, peer: &Peer, request: &Parts) -> Result<User, Unauthenticated> {
        let trust = self.front_proxy.current();
        let user = authenticate(trust.as_deref(), &peer.certificates, &request.headers, unix_now())?;
        self.trusted.record(peer.address.ip());
        Ok(user)
    }

    /// Refuses a user without the right.
    async fn authorize(&self, user: &User, attributes: &Attributes) -> Result<(), Response> {
        match self.authorizer.authorize(user, attributes).await {
            Ok(Decision::Allowed) => Ok(()),
            Ok(Decision::Denied(reason)) => {
                tracing::info!(user = user.name, ?attributes, "denied");
                Err(unauthorized(reason))
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(error, user = user.name, ?attributes, "access review failed");
                Err(empty_response(StatusCode::INTERNAL_SERVER_ERROR))
            }
        }
    }

    async fn dispatch(&self, subresource: &Specification, object: &Object, request: Request<Body>) -> Response {
        let served = match self.check(subresource, &request) {
            Ok(()) => (subresource.serve)(Call { context: &self.context, object }, request).await,
            Err(error) => return error.into_response(),
        };
        let error = match served {
            Ok(response) => return response,
            Err(error) => error,
        };
        // The only place that logs the failure of a request. Its span names the object and the user.
        match error {
            ApiError::Internal(_) | ApiError::Unavailable(_) => tracing::error!(%error, "request failed"),
            // Also the answer about a guest that cannot do what was requested.
            ApiError::Handler(_) => tracing::warn!(%error, "virt-handler refused the request"),
            _ => {}
        }
        if subresource.plain_errors && !keeps_its_code(&error) {
            return text_response(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
        }
        error.into_response()
    }

    /// Rejects requests that are invalid for any object.
    fn check(&self, subresource: &Specification, request: &Request<Body>) -> Result<(), ApiError> {
        if subresource.answers_json() && !negotiation::accepts_json(request.headers()) {
            return Err(ApiError::NotAcceptable);
        }
        // A client that requests a dry run does not expect a change.
        if subresource.changes() && !subresource.dry_run && !options::dry_run_in_query(request.uri()).is_empty() {
            return Err(ApiError::BadRequest(format!("dryRun is not supported by {}", subresource.full_name())));
        }
        let labelled = request.headers().contains_key(header::CONTENT_TYPE);
        let json = negotiation::sends_json(request.headers());
        match subresource.content {
            Content::Json if !json => return Err(ApiError::UnsupportedMediaType),
            Content::JsonOrUnlabelled if labelled && !json => return Err(ApiError::UnsupportedMediaType),
            _ => {}
        }
        (subresource.check_config)(&self.context.config.current())
    }
}

/// Returns the identifier that kube-apiserver gave to the request, as in its audit log.
fn audit_id(request: &Parts) -> &str {
    const LIMIT: usize = 64;
    let sent = request.headers.get("audit-id").and_then(|id| id.to_str().ok());
    sent.filter(|id| id.len() <= LIMIT).unwrap_or_default()
}

/// Returns 401 with a plain text.
fn unauthorized(text: impl ToString) -> Response {
    text_response(StatusCode::UNAUTHORIZED, text.to_string())
}

/// Returns the name under which streams of a user are counted, here and by virt-handler: a hash of fixed length, valid in a
/// header, which reveals no user in the logs of a node.
fn holder(user: &User) -> String {
    format!("{:x}", Sha256::digest(user.name.as_bytes()))
}

/// Returns true for the service account of virt-controller in the install namespace. Every user can make one of this name elsewhere.
fn is_controller(user: &User, namespace: &str) -> bool {
    let account = user.name.strip_prefix("system:serviceaccount:").and_then(|account| account.split_once(':'));
    account == Some((namespace, component::CONTROLLER_SERVICE_ACCOUNT))
}

/// Returns the answer to `OPTIONS`, for every client: the method of the path.
fn options_response(path: &str) -> Response {
    let served = [Method::GET, Method::PUT]
        .into_iter()
        .find(|method| path::attributes(method, path).is_ok_and(|found| registry::find(&found, method).is_ok()));
    let Some(method) = served else { return ApiError::NoSuchPath.into_response() };
    let mut response = empty_response(StatusCode::OK);
    if let Ok(value) = HeaderValue::from_str(method.as_str()) {
        response.headers_mut().insert(header::ALLOW, value);
    }
    response
}

/// Returns true for errors that keep their code in subresources with plain errors: the function is not implemented, or a
/// limit is reached.
const fn keeps_its_code(error: &ApiError) -> bool {
    matches!(error, ApiError::NotAvailable(_) | ApiError::TooManyRequests(_))
}
