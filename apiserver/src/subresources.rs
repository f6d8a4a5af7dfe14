//! Serving requests of the aggregated API: open documents, then authentication, authorization, and the subresource.

use std::{future::Future, sync::Arc};

use api::{VirtualMachine, VirtualMachineInstance};
use axum::{
    Extension,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, Request, StatusCode, header, request::Parts};
use hyper_util::rt::TokioIo;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use process::{CancellationToken, ops::Ops, tls::Peer};
use tokio::sync::Semaphore;
use tokio_tungstenite::{WebSocketStream, tungstenite::protocol::Role};
use tokio_util::task::TaskTracker;

use crate::{
    authentication::{authenticate, unix_now},
    authorization::{Authorizer, Decision},
    discovery::{self, Document},
    error::{ApiError, Kind, empty_response, json_response, text_response},
    front_proxy::FrontProxy,
    handler::{HandlerClient, HandlerError, Target},
    instance,
    lifecycle::{self, MachinePatch, Observed, Plan},
    metrics::Metrics,
    options::{self, MAX_BODY, PauseOptions, RestartOptions, StartOptions, StopOptions},
    path::{self, Attributes, NotServed, Subresource},
    stream, websocket,
};

/// Most streams at a time. Each takes two connections and up to two messages of buffers.
pub const MAX_STREAMS: usize = 256;
/// What kube-apiserver says when a tested value has changed.
const TEST_FAILED: &str = "jsonpatch test operation does not apply";

/// What serving a request takes.
pub struct Server {
    /// Client for the API server.
    pub client: Client,
    /// Whom to believe who the user is.
    pub front_proxy: FrontProxy,
    /// Who may do what.
    pub authorizer: Authorizer,
    /// Calls to node agents.
    pub handler: HandlerClient,
    /// Health.
    pub ops: Ops,
    /// Counters.
    pub metrics: Metrics,
    /// Free places for streams.
    pub stream_slots: Arc<Semaphore>,
    /// Streams that are open.
    pub streams: TaskTracker,
    /// Cancelled when the process stops.
    pub stop: CancellationToken,
}

/// Answers everything that is neither a webhook nor a metric.
pub async fn serve(
    State(server): State<Arc<Server>>,
    Extension(peer): Extension<Peer>,
    request: Request<Body>,
) -> Response {
    let mut response = server.answer(&peer, request).await;
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// The subject of a request that may go on.
struct Object {
    namespace: String,
    name: String,
}

impl Server {
    async fn answer(&self, peer: &Peer, request: Request<Body>) -> Response {
        match discovery::find(request.uri().path()) {
            Some(Document::Health) => {
                let (status, body) = self.ops.health().await;
                return json_response(status, &body);
            }
            Some(document) => {
                return discovery::serve(document, request.method(), request.headers(), request.uri().query());
            }
            None => {}
        }
        let (parts, body) = request.into_parts();
        let attributes = match self.admit(peer, &parts).await {
            Ok(attributes) => attributes,
            Err(refusal) => return refusal,
        };
        let subresource = match path::subresource(&attributes, &parts.method) {
            Ok(subresource) => subresource,
            Err(NotServed::NoSuchPath) => return text_response(StatusCode::NOT_FOUND, "404: Page Not Found"),
            Err(NotServed::WrongMethod) => {
                return text_response(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed");
            }
        };
        let object = Object { namespace: attributes.namespace, name: attributes.name };
        let response = self.dispatch(subresource, &object, Request::from_parts(parts, body)).await;
        tracing::debug!(
            subresource = subresource.name(),
            namespace = object.namespace,
            name = object.name,
            status = response.status().as_u16(),
            "served"
        );
        self.metrics.requests.with_label_values(&[subresource.name(), response.status().as_str()]).inc();
        response
    }

    /// Authentication and authorization. Refusals are answers 401 with a plain text, whichever of the two refuses.
    async fn admit(&self, peer: &Peer, request: &Parts) -> Result<Attributes, Response> {
        let unauthorized = |text: String| text_response(StatusCode::UNAUTHORIZED, text);
        let trust = self.front_proxy.current();
        let user = authenticate(trust.as_deref(), &peer.certificates, &request.headers, unix_now())
            .map_err(|error| unauthorized(error.to_string()))?;
        let attributes =
            path::attributes(&request.method, request.uri.path()).map_err(|error| unauthorized(error.to_string()))?;
        match self.authorizer.authorize(&user, &attributes).await {
            Ok(Decision::Allowed) => Ok(attributes),
            Ok(Decision::Denied(reason)) => {
                tracing::info!(user = user.name, ?attributes, "denied");
                Err(unauthorized(reason))
            }
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "no access review");
                Err(empty_response(StatusCode::INTERNAL_SERVER_ERROR))
            }
        }
    }

    async fn dispatch(&self, subresource: Subresource, object: &Object, request: Request<Body>) -> Response {
        let result = match subresource {
            Subresource::Start => self.start(object, request).await,
            Subresource::Stop => self.stop(object, request).await,
            Subresource::Restart => self.restart(object, request).await,
            Subresource::Pause => self.pause(object, request).await,
            Subresource::Unpause => self.unpause(object, request).await,
            Subresource::SoftReboot => self.soft_reboot(object).await,
            Subresource::Reset => self.reset(object).await,
            Subresource::Console => self.console(object, request).await,
            Subresource::Vnc => self.vnc(object, request).await,
            Subresource::Screenshot => {
                // All failures of this one are 500 with a plain text.
                return self
                    .screenshot(object)
                    .await
                    .unwrap_or_else(|error| text_response(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()));
            }
        };
        result.unwrap_or_else(|error| {
            if matches!(error, ApiError::Internal(_)) {
                tracing::warn!(
                    subresource = subresource.name(),
                    namespace = object.namespace,
                    name = object.name,
                    %error,
                    "request failed"
                );
            }
            error.into_response()
        })
    }

    fn vms(&self, object: &Object) -> Api<VirtualMachine> {
        Api::namespaced(self.client.clone(), &object.namespace)
    }

    fn vmis(&self, object: &Object) -> Api<VirtualMachineInstance> {
        Api::namespaced(self.client.clone(), &object.namespace)
    }

    async fn vm(&self, object: &Object) -> Result<VirtualMachine, ApiError> {
        let name = &object.name;
        self.vms(object)
            .get_opt(name)
            .await
            .map_err(|error| ApiError::Internal(format!("unable to retrieve vm [{name}]: {}", message(&error))))?
            .ok_or_else(|| ApiError::not_found(Kind::VirtualMachine, name))
    }

    async fn vmi_opt(&self, object: &Object) -> Result<Option<VirtualMachineInstance>, ApiError> {
        let name = &object.name;
        self.vmis(object)
            .get_opt(name)
            .await
            .map_err(|error| ApiError::Internal(format!("unable to retrieve vmi [{name}]: {}", message(&error))))
    }

    async fn vmi(&self, object: &Object) -> Result<VirtualMachineInstance, ApiError> {
        self.vmi_opt(object).await?.ok_or_else(|| ApiError::not_found(Kind::VirtualMachineInstance, &object.name))
    }

    async fn start(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let options: StartOptions = body(request).await?;
        let dry_run = options::is_dry_run(options.dry_run.as_ref())?;
        let (vm, vmi) = (self.vm(object).await?, self.vmi_opt(object).await?);
        let plan = lifecycle::start(Observed { vm: &vm, vmi: vmi.as_ref() }, &options)?;
        self.carry_out(object, plan, dry_run).await
    }

    async fn stop(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let options: StopOptions = body(request).await?;
        let dry_run = options::is_dry_run(options.dry_run.as_ref())?;
        let (vm, vmi) = (self.vm(object).await?, self.vmi_opt(object).await?);
        let plan = lifecycle::stop(Observed { vm: &vm, vmi: vmi.as_ref() }, &options)?;
        self.carry_out(object, plan, dry_run).await
    }

    async fn restart(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let options: RestartOptions = body(request).await?;
        lifecycle::check_restart_options(&options)?;
        let dry_run = options::is_dry_run(options.dry_run.as_ref())?;
        let (vm, vmi) = (self.vm(object).await?, self.vmi_opt(object).await?);
        let plan = lifecycle::restart(Observed { vm: &vm, vmi: vmi.as_ref() }, &options)?;
        self.carry_out(object, plan, dry_run).await
    }

    async fn carry_out(&self, object: &Object, plan: Plan, dry_run: bool) -> Result<Response, ApiError> {
        let params = PatchParams { dry_run, ..PatchParams::default() };
        let name = object.name.as_str();
        let mut undo = None;
        if let Some(patch) = plan.instance {
            let vmis = self.vmis(object);
            vmis.patch(name, &params, &Patch::Json::<()>(patch.apply))
                .await
                .map_err(|error| ApiError::Internal(message(&error)))?;
            undo = patch.undo;
        }
        let result = match plan.machine {
            None => Ok(()),
            Some(MachinePatch::Spec(patch)) => {
                self.vms(object).patch(name, &params, &Patch::Json::<()>(patch)).await.map(drop)
            }
            Some(MachinePatch::Status(patch)) => {
                self.vms(object).patch_status(name, &params, &Patch::Json::<()>(patch)).await.map(drop)
            }
        };
        match result {
            Ok(()) => Ok(empty_response(StatusCode::ACCEPTED)),
            Err(error) => {
                if let Some(undo) = undo
                    && let Err(error) = self.vmis(object).patch(name, &params, &Patch::Json::<()>(undo)).await
                {
                    tracing::warn!(
                        namespace = object.namespace,
                        name,
                        error = message(&error),
                        "grace period was not put back"
                    );
                }
                let text = message(&error);
                if text.contains(TEST_FAILED) {
                    Err(ApiError::conflict(Kind::VirtualMachine, name, text))
                } else if matches!(&error, kube::Error::Api(status) if status.code == 404) {
                    Err(ApiError::not_found(Kind::VirtualMachine, name))
                } else {
                    Err(ApiError::Internal(text))
                }
            }
        }
    }

    async fn pause(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let options: PauseOptions = body(request).await?;
        let dry_run = options::is_dry_run(options.dry_run.as_ref())?;
        let vmi = self.vmi(object).await?;
        instance::check_pause(&vmi)?;
        self.call(object, instance::node(&vmi)?, "pause", dry_run).await
    }

    async fn unpause(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let options: PauseOptions = body(request).await?;
        let dry_run = options::is_dry_run(options.dry_run.as_ref())?;
        let vm = self.vms(object).get_opt(&object.name).await.map_err(|error| {
            ApiError::Internal(format!("unable to retrieve vm [{}]: {}", object.name, message(&error)))
        })?;
        instance::check_unpause_of_vm(vm.as_ref())?;
        let vmi = self.vmi(object).await?;
        instance::check_unpause(&vmi)?;
        self.call(object, instance::node(&vmi)?, "unpause", dry_run).await
    }

    async fn soft_reboot(&self, object: &Object) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_soft_reboot(&vmi)?;
        self.call(object, instance::node(&vmi)?, "softreboot", false).await
    }

    async fn reset(&self, object: &Object) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        self.call(object, instance::check_reset(&vmi)?, "reset", false).await
    }

    async fn call(&self, object: &Object, node: &str, action: &str, dry_run: bool) -> Result<Response, ApiError> {
        if !dry_run {
            self.handler.call(object.on(node), action).await.map_err(handler_error)?;
        }
        Ok(empty_response(StatusCode::OK))
    }

    async fn screenshot(&self, object: &Object) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_vnc(&vmi)?;
        let node = instance::node(&vmi)?;
        self.handler.fetch(object.on(node), "vnc/screenshot").await.map_err(handler_error)
    }

    async fn console(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_console(&vmi)?;
        self.stream(object, &vmi, "console", "console", request).await
    }

    async fn vnc(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_vnc(&vmi)?;
        let action = format!("vnc?preserveSession={}", preserves_session(request.uri().query()));
        self.stream(object, &vmi, "vnc", &action, request).await
    }

    /// Opens a stream to the agent, then the client's, and copies until one of them ends.
    ///
    /// In this order a failure behind us is an answer that the client can read, not a stream that ends at once.
    async fn stream(
        &self,
        object: &Object,
        vmi: &VirtualMachineInstance,
        kind: &'static str,
        action: &str,
        mut request: Request<Body>,
    ) -> Result<Response, ApiError> {
        let node = instance::node(vmi)?;
        let response = websocket::accept(request.method(), request.version(), request.headers())
            .map_err(|error| ApiError::BadRequest(error.to_string()))?;
        let slot = self.stream_slots.clone().try_acquire_owned().map_err(|_| {
            ApiError::TooManyRequests(format!("virt-api carries {MAX_STREAMS} streams already, try again later"))
        })?;
        let handler = self.handler.open(object.on(node), action).await.map_err(handler_error)?;
        let upgrade = hyper::upgrade::on(&mut request);
        let (metrics, stop) = (self.metrics.clone(), self.stop.clone());
        let (namespace, name) = (object.namespace.clone(), object.name.clone());
        self.streams.spawn(async move {
            let _slot = slot;
            let client = tokio::select! {
                upgraded = upgrade => upgraded,
                () = stop.cancelled() => return,
            };
            let client = match client {
                Ok(client) => client,
                Err(error) => {
                    tracing::debug!(namespace, name, kind, %error, "client did not take the stream");
                    return;
                }
            };
            let config = Some(websocket::config());
            let client = WebSocketStream::from_raw_socket(TokioIo::new(client), Role::Server, config).await;
            metrics.open_streams.inc();
            let end = stream::copy(client, handler, stream::Limits::default(), stop).await;
            metrics.open_streams.dec();
            metrics.ended_streams.with_label_values(&[kind, end.label()]).inc();
            tracing::info!(namespace, name, kind, end = end.label(), "stream ended");
        });
        Ok(response)
    }
}

impl Object {
    fn on<'a>(&'a self, node: &'a str) -> Target<'a> {
        Target { node, namespace: &self.namespace, name: &self.name }
    }
}

/// The words of a failed request to the API server, without our own dressing.
fn message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

fn handler_error(error: HandlerError) -> ApiError {
    match error {
        HandlerError::NoPod(_) => ApiError::BadRequest(error.to_string()),
        _ => ApiError::Internal(error.to_string()),
    }
}

fn preserves_session(query: Option<&str>) -> bool {
    let value = query.unwrap_or_default().split('&').find_map(|pair| pair.strip_prefix("preserveSession="));
    matches!(value, Some("1" | "t" | "T" | "true" | "TRUE" | "True"))
}

async fn body<T>(request: Request<Body>) -> Result<T, ApiError>
where
    T: serde::de::DeserializeOwned + Default,
{
    let bytes = limited(axum::body::to_bytes(request.into_body(), MAX_BODY)).await?;
    options::parse(&bytes)
}

/// Reads a body within the time that a client may take for one.
async fn limited<T>(read: impl Future<Output = Result<T, axum::Error>>) -> Result<T, ApiError> {
    let failed =
        |error: String| ApiError::BadRequest(format!("Can not unmarshal Request body to struct, error: {error}"));
    match tokio::time::timeout(std::time::Duration::from_secs(10), read).await {
        Ok(result) => result.map_err(|error| failed(error.to_string())),
        Err(_) => Err(failed("body took too long".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_is_preserved_when_asked_for_in_so_many_words() {
        assert!(preserves_session(Some("a=b&preserveSession=true")));
        assert!(preserves_session(Some("preserveSession=1")));
        for query in
            [None, Some(""), Some("preserveSession=false"), Some("preserveSession=yes"), Some("preserveSession")]
        {
            assert!(!preserves_session(query), "{query:?}");
        }
    }

    #[test]
    fn missing_agent_is_the_requests_fault_and_all_else_is_ours() {
        assert_eq!(
            handler_error(HandlerError::NoPod("node1".into())),
            ApiError::BadRequest("No virt-handler on node node1 found".into())
        );
        assert_eq!(handler_error(HandlerError::ManyPods(2)).status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}
