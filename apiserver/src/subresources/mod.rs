//! Serving requests of the aggregated API: open documents, then authentication, authorization, and the subresource.
//!
//! What may be done is decided by pure functions elsewhere; the modules here fetch, ask them, and act.

mod agent;
mod evacuation;
mod machine;
mod relations;
mod storage;
mod streams;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Instant};

use api::{VirtualMachine, VirtualMachineInstance, constants::label};
use axum::{
    Extension,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, Method, Request, StatusCode, header, request::Parts};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::ListParams};
use process::{
    CancellationToken,
    config::ConfigHandle,
    ops::Ops,
    profiler::Asked,
    shares::Shares,
    tls::{Peer, TrustedAddresses},
};
use sha2::{Digest, Sha256};
use tokio_util::task::TaskTracker;

use crate::{
    address,
    authentication::{Unauthenticated, User, authenticate, unix_now},
    authorization::{Authorizer, Decision},
    bodies::Bodies,
    discovery::{self, Document},
    endpoint::{self, NotServed, Subresource},
    error::{ApiError, Kind, empty_response, json_response, text_response},
    front_proxy::FrontProxy,
    guestfs::GuestFs,
    handler::{HandlerClient, HandlerError, Target},
    instance,
    metrics::Metrics,
    negotiation,
    options::{self, MAX_BODY, Trial},
    path::{self, Attributes},
    presence::Presence,
    profiles::Components,
    sev,
};

/// Most streams at a time. Each takes two connections and, where nobody reads, buffers of a few small messages, however
/// large the client's are.
pub const MAX_STREAMS: usize = 256;
/// Pods on a page of those that say to be of a machine. Mostly there is one.
const PODS_ON_PAGE: u32 = 16;
/// Most pages of them. Only pods that a node has admitted count, and of a namespace, so there are not as many.
const POD_PAGES: usize = 64;
/// What kube-apiserver says when a tested value has changed.
const TEST_FAILED: &str = "jsonpatch test operation does not apply";

/// What serving a request takes.
pub struct Server {
    /// Client for the API server.
    pub client: Client,
    /// The install namespace.
    pub namespace: String,
    /// The cluster configuration.
    pub config: ConfigHandle,
    /// Whom to believe who the user is.
    pub front_proxy: FrontProxy,
    /// Addresses that proved to be an API server.
    pub trusted: TrustedAddresses,
    /// Who may do what.
    pub authorizer: Authorizer,
    /// Calls to node agents.
    pub handler: HandlerClient,
    /// The components, for profiles of them.
    pub components: Components,
    /// Health.
    pub ops: Ops,
    /// Counters.
    pub metrics: Metrics,
    /// The image for looking into disks.
    pub guestfs: GuestFs,
    /// Machines whose ports are forwarded.
    pub presence: Presence,
    /// Room for bodies.
    pub bodies: Bodies,
    /// Places for streams.
    pub shares: Shares,
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
    /// Whom a stream to it counts for.
    holder: String,
}

impl Object {
    fn on<'a>(&'a self, node: &'a str) -> Target<'a> {
        Target { node, namespace: &self.namespace, name: &self.name }
    }
}

impl Server {
    async fn answer(&self, peer: &Peer, request: Request<Body>) -> Response {
        let (parts, body) = request.into_parts();
        if let Some(document) = discovery::find(parts.uri.path()) {
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
        let subresource = match endpoint::find(&attributes, &parts.method) {
            Ok(subresource) => subresource,
            Err(NotServed::NoSuchPath) => return ApiError::NoSuchPath.into_response(),
            Err(NotServed::WrongMethod(right)) => return ApiError::WrongMethod(right).into_response(),
        };
        let object = Object { namespace: attributes.namespace, name: attributes.name, holder: holder(&user) };
        let started = Instant::now();
        let response = self.dispatch(subresource, &object, Request::from_parts(parts, body)).await;
        let label = subresource.full_name();
        tracing::debug!(
            subresource = label,
            namespace = object.namespace,
            name = object.name,
            status = response.status().as_u16(),
            "served"
        );
        self.metrics.requests.with_label_values(&[label.as_str(), response.status().as_str()]).inc();
        self.metrics.request_seconds.with_label_values(&[label.as_str()]).observe(started.elapsed().as_secs_f64());
        response
    }

    /// Records the address of a peer with a front-proxy certificate. kube-apiserver asks for the discovery documents every
    /// half a minute, so its address is known before users need it.
    fn record_front_proxy(&self, peer: &Peer) {
        if self.front_proxy.current().is_some_and(|trust| trust.is_front_proxy(&peer.certificates, unix_now())) {
            self.trusted.record(peer.address.ip());
        }
    }

    /// A document that is open to everybody.
    async fn document(&self, document: Document, peer: &Peer, request: &Parts, body: Body) -> Response {
        if let Some(refusal) = discovery::refuse_method(&request.method) {
            return refusal;
        }
        match document {
            Document::Health => {
                let (status, body) = self.ops.health().await;
                json_response(status, &body)
            }
            Document::GuestFs => self.guestfs.answer(&self.client, &self.namespace).await,
            Document::Profiler(asked) => self.profile(asked, peer, request, body).await,
            document => discovery::serve(document, &request.headers, request.uri.query()),
        }
    }

    /// Profiles of all components, for users who may read the document.
    async fn profile(&self, asked: Asked, peer: &Peer, request: &Parts, body: Body) -> Response {
        if let Some(refusal) = asked.check(self.config.current().cluster_profiler) {
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
        let done = match asked {
            Asked::Start | Asked::Stop => self.components.tell(asked).await.map(|()| StatusCode::OK.into_response()),
            Asked::Dump | Asked::DumpCluster => {
                let request = match self.bodies.read(body, MAX_BODY).await.and_then(|body| options::parse(&body.bytes))
                {
                    Ok(request) => request,
                    Err(error) => return error.into_response(),
                };
                self.components.dump(&request).await.map(|found| match found {
                    Some(results) => json_response(StatusCode::OK, &results),
                    None => empty_response(StatusCode::NO_CONTENT),
                })
            }
        };
        done.unwrap_or_else(|error| text_response(error.status(), format!("{} {error}", asked.refusal())))
    }

    /// Authentication and authorization. Refusals are answers 401 with a plain text, whichever of the two refuses.
    async fn admit(&self, peer: &Peer, request: &Parts) -> Result<(User, Attributes), Response> {
        let user = self.user(peer, request).map_err(unauthorized)?;
        let attributes = path::attributes(&request.method, request.uri.path()).map_err(unauthorized)?;
        self.authorize(&user, &attributes).await?;
        Ok((user, attributes))
    }

    /// Returns the user whom the front proxy names, and records the proxy's address.
    fn user(&self, peer: &Peer, request: &Parts) -> Result<User, Unauthenticated> {
        let trust = self.front_proxy.current();
        let user = authenticate(trust.as_deref(), &peer.certificates, &request.headers, unix_now())?;
        self.trusted.record(peer.address.ip());
        Ok(user)
    }

    /// Refuses what the user may not do.
    async fn authorize(&self, user: &User, attributes: &Attributes) -> Result<(), Response> {
        match self.authorizer.authorize(user, attributes).await {
            Ok(Decision::Allowed) => Ok(()),
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
        if let Err(error) = self.check(subresource, &request) {
            return error.into_response();
        }
        let error = match self.carry_out(subresource, object, request).await {
            Ok(response) => return response,
            Err(error) => error,
        };
        if matches!(error, ApiError::Internal(_) | ApiError::Agent(_)) {
            tracing::warn!(
                subresource = subresource.full_name(),
                namespace = object.namespace,
                name = object.name,
                %error,
                "request failed"
            );
        }
        if subresource.fails_plainly() && !keeps_its_code(&error) {
            return text_response(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
        }
        error.into_response()
    }

    /// What can be refused without looking at any object.
    fn check(&self, subresource: Subresource, request: &Request<Body>) -> Result<(), ApiError> {
        if subresource.answers_json() && !negotiation::accepts_json(request.headers()) {
            return Err(ApiError::NotAcceptable);
        }
        // Who asks for a trial does not want the real thing.
        if subresource.changes() && !subresource.can_be_tried() && !options::dry_run_in_query(request.uri())?.is_empty()
        {
            return Err(ApiError::BadRequest(format!("dryRun is not supported by {}", subresource.full_name())));
        }
        let typed = request.headers().contains_key(header::CONTENT_TYPE);
        match subresource {
            Subresource::ExpandVmSpec if !negotiation::sends_json(request.headers()) => {
                Err(ApiError::UnsupportedMediaType)
            }
            other if other.takes_json_only() && typed && !negotiation::sends_json(request.headers()) => {
                Err(ApiError::UnsupportedMediaType)
            }
            Subresource::FetchCertChain
            | Subresource::QueryLaunchMeasurement
            | Subresource::SetupSession
            | Subresource::InjectLaunchSecret => sev::check_gate(&self.config.current()),
            _ => Ok(()),
        }
    }

    async fn carry_out(
        &self,
        subresource: Subresource,
        object: &Object,
        request: Request<Body>,
    ) -> Result<Response, ApiError> {
        match subresource {
            Subresource::Start => self.start(object, request).await,
            Subresource::Stop => self.stop(object, request).await,
            Subresource::Restart => self.restart(object, request).await,
            Subresource::Migrate => self.migrate(object, request).await,
            Subresource::ExpandSpec => self.expand_spec(object).await,
            Subresource::ExpandVmSpec => self.expand_vm_spec(object, request).await,
            Subresource::Pause => self.pause(object, request).await,
            Subresource::Unpause => self.unpause(object, request).await,
            Subresource::SoftReboot => self.soft_reboot(object).await,
            Subresource::Reset => self.reset(object).await,
            Subresource::Freeze => self.freeze(object, request).await,
            Subresource::Unfreeze => self.unfreeze(object).await,
            Subresource::GuestOsInfo => self.ask_agent(object, "guestosinfo").await,
            Subresource::UserList => self.ask_agent(object, "userlist").await,
            Subresource::FileSystemList => self.ask_agent(object, "filesystemlist").await,
            Subresource::Screenshot => self.screenshot(object).await,
            Subresource::Backup => self.backup(object, request).await,
            Subresource::RedefineCheckpoint => self.redefine_checkpoint(object, request).await,
            Subresource::FetchCertChain => self.fetch_cert_chain(object).await,
            Subresource::QueryLaunchMeasurement => self.query_launch_measurement(object).await,
            Subresource::SetupSession => self.set_up_session(object, request).await,
            Subresource::InjectLaunchSecret => self.inject_launch_secret(object, request).await,
            Subresource::Console => self.console(object, request).await,
            Subresource::Vnc => self.vnc(object, request).await,
            Subresource::UsbRedir => self.usb_redirection(object, request).await,
            Subresource::Vsock => self.vsock(object, request).await,
            Subresource::PortForward => self.port_forward(object, self.vmi(object).await?, request).await,
            Subresource::VmPortForward => self.port_forward(object, self.vmi_of_vm(object).await?, request).await,
            Subresource::CancelEvacuation => self.cancel_evacuation(object, self.vmi(object).await?, request).await,
            Subresource::VmCancelEvacuation => {
                self.cancel_evacuation(object, self.vmi_of_vm(object).await?, request).await
            }
            Subresource::AddVolume => self.add_volume(object, request).await,
            Subresource::RemoveVolume => self.remove_volume(object, request).await,
            Subresource::VmAddVolume => self.add_volume_to_vm(object, request).await,
            Subresource::VmRemoveVolume => self.remove_volume_from_vm(object, request).await,
            Subresource::MemoryDump => self.dump_memory(object, request).await,
            Subresource::RemoveMemoryDump => self.remove_memory_dump(object).await,
            Subresource::ObjectGraph => self.graph_of_vmi(object, request).await,
            Subresource::VmObjectGraph => self.graph_of_vm(object, request).await,
        }
    }

    /// The options in a body; without one, the defaults.
    async fn options<T>(&self, request: Request<Body>) -> Result<T, ApiError>
    where
        T: serde::de::DeserializeOwned + Default,
    {
        options::parse(&self.bodies.read(request.into_body(), MAX_BODY).await?.bytes)
    }

    /// The options in a body, and whether nothing is to be changed, which body and query may say.
    async fn trial<T>(&self, request: Request<Body>) -> Result<(T, bool), ApiError>
    where
        T: serde::de::DeserializeOwned + Default + Trial,
    {
        let mut words = options::dry_run_in_query(request.uri())?;
        let options: T = self.options(request).await?;
        words.extend_from_slice(options.dry_run());
        Ok((options, options::is_dry_run(&words)?))
    }

    fn vms(&self, object: &Object) -> Api<VirtualMachine> {
        Api::namespaced(self.client.clone(), &object.namespace)
    }

    fn vmis(&self, object: &Object) -> Api<VirtualMachineInstance> {
        Api::namespaced(self.client.clone(), &object.namespace)
    }

    async fn vm_opt(&self, object: &Object) -> Result<Option<VirtualMachine>, ApiError> {
        let name = &object.name;
        self.vms(object)
            .get_opt(name)
            .await
            .map_err(|error| ApiError::Internal(format!("unable to retrieve vm [{name}]: {}", message(&error))))
    }

    async fn vm(&self, object: &Object) -> Result<VirtualMachine, ApiError> {
        self.vm_opt(object).await?.ok_or_else(|| ApiError::not_found(Kind::VirtualMachine, &object.name))
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

    /// The machine of a VM that has been started.
    async fn vmi_of_vm(&self, object: &Object) -> Result<VirtualMachineInstance, ApiError> {
        let vm = self.vm(object).await?;
        instance::check_created(&vm)?;
        let vmi = self.vmi(object).await?;
        instance::check_owner(&vm, &vmi)?;
        Ok(vmi)
    }

    /// The launcher pod of a machine: the page of pods that it is on.
    async fn pods(&self, vmi: &VirtualMachineInstance) -> Result<Vec<Pod>, ApiError> {
        let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let Some(selector) = pod_selector(vmi) else { return Ok(Vec::new()) };
        let mut selector = selector.limit(PODS_ON_PAGE);
        for _ in 0..POD_PAGES {
            let page = pods.list(&selector).await;
            let page = page.map_err(|error| ApiError::Internal(format!("unable to list pods: {}", message(&error))))?;
            if address::launcher(vmi, &page.items).is_some() {
                return Ok(page.items);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => selector = selector.continue_token(&token),
                None => return Ok(Vec::new()),
            }
        }
        Err(ApiError::Internal("unable to find the launcher among pods with its label".to_owned()))
    }

    /// A pod in the namespace of an object.
    async fn pod(&self, object: &Object, name: &str) -> Result<Option<Pod>, ApiError> {
        let pod = Api::<Pod>::namespaced(self.client.clone(), &object.namespace).get_opt(name).await;
        pod.map_err(|error| ApiError::Internal(format!("unable to retrieve pod [{name}]: {}", message(&error))))
    }
}

/// 401 with a plain text.
fn unauthorized(text: impl ToString) -> Response {
    text_response(StatusCode::UNAUTHORIZED, text.to_string())
}

/// Selects the pods that may be the launcher of a machine: those with its label, on its node, that have not ended. Anybody who may make
/// pods can give them the label, but a node admits a limited number. `None`: the machine has no node.
fn pod_selector(vmi: &VirtualMachineInstance) -> Option<ListParams> {
    let uid = vmi.metadata.uid.as_deref().filter(|uid| !uid.is_empty())?;
    let node = vmi.status.as_ref()?.node_name.as_deref().filter(|node| !node.is_empty())?;
    let fields = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
    Some(ListParams::default().labels(&format!("{}={uid}", label::CREATED_BY)).fields(&fields))
}

/// The name under which the streams of a user are counted, here and by node agents: of one length, without what a header
/// cannot carry, and of no interest to who reads the logs of a node.
fn holder(user: &User) -> String {
    format!("{:x}", Sha256::digest(user.name.as_bytes()))
}

/// What `OPTIONS` is answered: the method of the path, whoever asks.
fn options_response(path: &str) -> Response {
    let served = [Method::GET, Method::PUT]
        .into_iter()
        .find(|method| path::attributes(method, path).is_ok_and(|found| endpoint::find(&found, method).is_ok()));
    let Some(method) = served else { return ApiError::NoSuchPath.into_response() };
    let mut response = empty_response(StatusCode::OK);
    if let Ok(value) = HeaderValue::from_str(method.as_str()) {
        response.headers_mut().insert(header::ALLOW, value);
    }
    response
}

/// The words of a failed request to the API server, without our own dressing.
fn message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

/// What is said with a code of its own even by subresources that fail plainly: that there is no such thing yet, and that
/// there is no place now.
const fn keeps_its_code(error: &ApiError) -> bool {
    matches!(error, ApiError::NotAvailable(_) | ApiError::TooManyRequests(_))
}

fn handler_error(error: HandlerError) -> ApiError {
    match error {
        HandlerError::NoPod(_) => ApiError::BadRequest(error.to_string()),
        HandlerError::Handshake { status: StatusCode::TOO_MANY_REQUESTS, message }
        | HandlerError::Refused { status: StatusCode::TOO_MANY_REQUESTS, message } => {
            ApiError::TooManyRequests(message)
        }
        _ => ApiError::Internal(error.to_string()),
    }
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn missing_agent_is_the_requests_fault_and_all_else_is_ours() {
        assert_eq!(
            handler_error(HandlerError::NoPod("node1".into())),
            ApiError::BadRequest("No virt-handler on node node1 found".into())
        );
        assert_eq!(handler_error(HandlerError::ManyPods(2)).status(), StatusCode::INTERNAL_SERVER_ERROR);
        let (status, message) = (StatusCode::TOO_MANY_REQUESTS, || "too many".to_owned());
        for full in [
            HandlerError::Handshake { status, message: message() },
            HandlerError::Refused { status, message: message() },
        ] {
            assert_eq!(handler_error(full), ApiError::TooManyRequests(message()));
        }
    }

    #[test]
    fn launcher_is_looked_for_on_the_node_of_its_machine() {
        let selected = |uid: &str, node: &str| {
            let vmi = serde_json::json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m", "uid": uid},
                "spec": {"domain": {"devices": {}}}, "status": {"nodeName": node},
            });
            let selector = pod_selector(&serde_json::from_value(vmi).unwrap())?;
            selector.label_selector.zip(selector.field_selector)
        };
        let fields = "spec.nodeName=n1,status.phase!=Succeeded,status.phase!=Failed";
        assert_eq!(selected("u", "n1"), Some(("kubevirt.io/created-by=u".to_owned(), fields.to_owned())));
        assert_eq!(selected("u", ""), None);
        assert_eq!(selected("", "n1"), None);
    }

    #[test]
    fn what_fails_plainly_still_says_when_to_ask_again() {
        for (error, kept) in [
            (ApiError::NotAvailable("attestation"), true),
            (ApiError::TooManyRequests("too many".into()), true),
            (ApiError::Agent("no answer".into()), false),
            (ApiError::BadRequest("wrong".into()), false),
        ] {
            assert_eq!(keeps_its_code(&error), kept, "{error}");
        }
    }

    #[test]
    fn streams_of_a_user_count_under_a_name_of_one_length() {
        let named = |name: &str| {
            holder(&User { name: name.into(), groups: vec![], uid: None, extra: std::collections::BTreeMap::new() })
        };
        assert_eq!((named("Ольга").len(), named("").len()), (64, 64));
        assert!(named("a") != named("b") && named("a").bytes().all(|byte| byte.is_ascii_hexdigit()));
    }

    #[test]
    fn options_names_the_method_of_the_path() {
        let base = "/apis/subresources.kubevirt.io/v1/namespaces/a";
        for (path, method) in [
            ("virtualmachines/b/start", Some("PUT")),
            ("virtualmachineinstances/b/vnc/screenshot", Some("GET")),
            ("expand-vm-spec", Some("PUT")),
            ("virtualmachines/b/nothing", None),
            ("secrets/b/start", None),
        ] {
            let response = options_response(&format!("{base}/{path}"));
            let allow = response.headers().get(header::ALLOW).and_then(|value| value.to_str().ok());
            assert_eq!(allow, method, "{path}");
        }
    }
}
