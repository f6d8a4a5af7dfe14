//! Talking to admission webhooks as kube-apiserver does: HTTP/1.1 over TLS, one review at a time on a connection.

use std::{
    convert::Infallible,
    fs::File,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use ferrovirt_e2e_cluster::{host, plan::Plan, target};
use futures::{StreamExt, TryStreamExt, stream};
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::Frame,
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::{admissionregistration::v1::ValidatingWebhookConfiguration, core::v1::Pod};
use kube::{
    Api, Client,
    api::{AttachParams, AttachedProcess, ListParams},
};
use nix::sched::{CloneFlags, setns};
use rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    sign::{CertifiedKey, SingleCertAndKey},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{connect, kubeconfig, repository};

/// Longest that a connection or an answer may take; kube-apiserver waits five seconds for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Largest answer read.
const MAX_ANSWER: usize = 16 << 20;

/// A server of admission webhooks.
#[derive(Clone)]
pub struct Endpoint {
    way: Way,
    tls: TlsConnector,
    name: ServerName<'static>,
    /// Host and path that every request begins with.
    host: String,
    prefix: String,
}

#[derive(Clone)]
enum Way {
    /// An address this process can dial.
    Address(String),
    /// A pod's address, dialled from the network namespace of the API server.
    Namespace(PathBuf, SocketAddr),
    /// A pod's port, through the API server.
    Forward(Box<Api<Pod>>, String, u16),
    /// A host's port, from within a pod that has `nc`.
    Inside(Box<Api<Pod>>, String, u16),
}

/// A connection to a server that is reached directly, before anything is said on it.
pub type Direct = TlsStream<TcpStream>;

/// What came back.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Body.
    pub body: Bytes,
}

impl Endpoint {
    /// The server at `WEBHOOK_URL`, which holds everything in front of a webhook's own path (of virt-api:
    /// `https://virt-api.kubevirt.svc/admission/SEGMENT`, as in the webhook configurations), and whose certificate is checked against the PEM file `WEBHOOK_CA` (not at all without
    /// that); else virt-api of the cluster under test.
    ///
    /// # Errors
    /// When there is no such server, or the variables make no sense.
    pub async fn from_environment() -> Result<Self> {
        let Ok(url) = std::env::var("WEBHOOK_URL") else {
            return Self::of_cluster(&connect().await?).await;
        };
        let roots = match std::env::var_os("WEBHOOK_CA") {
            Some(file) => {
                Some(std::fs::read(&file).with_context(|| format!("cannot read {}", Path::new(&file).display()))?)
            }
            None => None,
        };
        Self::of_url(&url, roots.as_deref())
    }

    /// The server at a URL.
    ///
    /// # Errors
    /// When the URL is not one of an HTTPS server, or the certificates are not PEM.
    pub fn of_url(url: &str, roots: Option<&[u8]>) -> Result<Self> {
        let uri: http::Uri = url.parse().with_context(|| format!("{url} is not a URL"))?;
        ensure!(uri.scheme_str() == Some("https"), "{url} is not the URL of an HTTPS server");
        let host = uri.host().with_context(|| format!("{url} names no host"))?;
        let port = uri.port_u16().unwrap_or(443);
        Ok(Self {
            way: Way::Address(format!("{host}:{port}")),
            tls: TlsConnector::from(Arc::new(tls(roots)?)),
            name: ServerName::try_from(host.trim_matches(['[', ']']).to_owned())
                .with_context(|| format!("{host} is no server name"))?,
            host: uri.authority().map_or(host.to_owned(), ToString::to_string),
            prefix: uri.path().trim_end_matches('/').to_owned(),
        })
    }

    /// A pod of virt-api, found and checked by what the webhook configuration says, as kube-apiserver does.
    ///
    /// It is dialled from the API server's network namespace where the cluster is the test cluster of this machine, and
    /// through a port-forward otherwise.
    ///
    /// # Errors
    /// When no pod of virt-api serves.
    pub async fn of_cluster(client: &Client) -> Result<Self> {
        let configurations: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
        let configuration = configurations.get("virt-api-validator").await.context("no webhook configuration")?;
        let webhook = configuration.webhooks.unwrap_or_default().into_iter().next().context("no webhook registered")?;
        let service = webhook.client_config.service.context("the webhook names no service")?;
        let roots = webhook.client_config.ca_bundle.context("the webhook has no caBundle yet")?;
        let pods: Api<Pod> = Api::namespaced(client.clone(), &service.namespace);
        let found = pods.list(&ListParams::default().labels("kubevirt.io=virt-api")).await?;
        let pod = found.items.into_iter().find(is_ready).context("no pod of virt-api is ready")?;
        let port = pod
            .spec
            .iter()
            .flat_map(|spec| &spec.containers)
            .flat_map(|container| container.ports.iter().flatten())
            .next()
            .and_then(|port| u16::try_from(port.container_port).ok())
            .context("the pod of virt-api has no port")?;
        let address = pod.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
        let host = format!("{}.{}.svc", service.name, service.namespace);
        let path = service.path.context("the webhook has no path yet")?;
        let (prefix, _) = path.rsplit_once('/').with_context(|| format!("{path} is no path of a webhook"))?;
        let way = match control_namespace()? {
            Some(namespace) => Way::Namespace(namespace, SocketAddr::new(address.parse()?, port)),
            None => Way::Forward(Box::new(pods), pod.metadata.name.context("pod without name")?, port),
        };
        Ok(Self {
            way,
            tls: TlsConnector::from(Arc::new(tls(Some(&roots.0))?)),
            name: ServerName::try_from(host.clone())?,
            host,
            prefix: prefix.to_owned(),
        })
    }

    /// The same server, where requests have whole paths.
    #[must_use]
    pub fn bare(&self) -> Self {
        Self { prefix: String::new(), ..self.clone() }
    }

    /// The same server by its service, as a pod that has `nc` reaches it; requests have whole paths.
    #[must_use]
    pub fn through_pod(&self, pods: Api<Pod>, pod: &str) -> Self {
        Self { way: Way::Inside(Box::new(pods), pod.to_owned(), 443), ..self.bare() }
    }

    /// Returns the prefix of the webhooks' own paths.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A port of a pod, whose certificate is not checked; dialled as in [`Self::of_cluster`].
    ///
    /// # Errors
    /// When the pod has no address.
    pub(crate) fn of_pod(client: &Client, pod: &Pod, port: u16) -> Result<Self> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let name = pod.metadata.name.clone().context("pod without name")?;
        let address = pod.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
        let way = match control_namespace()? {
            Some(namespace) => Way::Namespace(namespace, SocketAddr::new(address.parse()?, port)),
            None => Way::Forward(Box::new(Api::namespaced(client.clone(), namespace)), name, port),
        };
        let host = "pod.invalid".to_owned();
        let tls = TlsConnector::from(Arc::new(tls(None)?));
        Ok(Self { way, tls, name: ServerName::try_from(host.clone())?, host, prefix: String::new() })
    }

    /// The same server, for a client that shows a certificate (both PEM, the certificate with what leads to its authority).
    ///
    /// # Errors
    /// When these are not a certificate and its key.
    pub fn showing(&self, certificate: &str, key: &str) -> Result<Self> {
        let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|error| anyhow::anyhow!("the certificate is not PEM: {error}"))?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes());
        let key = key.map_err(|error| anyhow::anyhow!("the key is not PEM: {error}"))?;
        let mut config = ClientConfig::clone(self.tls.config());
        let certified = CertifiedKey::from_der(chain, key, &ring::default_provider())?;
        config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(certified));
        // A session of before would be gone on with instead.
        config.resumption = Resumption::disabled();
        Ok(Self { tls: TlsConnector::from(Arc::new(config)), ..self.clone() })
    }

    /// Whether connections go straight to the server, so that their times mean something.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        !matches!(self.way, Way::Forward(..) | Way::Inside(..))
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// When the server cannot be reached or its certificate is not the right one.
    pub async fn connect(&self) -> Result<Connection> {
        let opened = async {
            match &self.way {
                Way::Forward(pods, pod, port) => {
                    let mut forward = pods.portforward(pod, &[*port]).await.context("cannot forward a port")?;
                    let stream = forward.take_stream(*port).context("no stream of the forwarded port")?;
                    self.speak(self.secure(stream).await?).await
                }
                Way::Inside(pods, pod, port) => {
                    let params = AttachParams::default().stdin(true).stdout(true).stderr(false);
                    let command = ["nc", &self.host, &port.to_string()];
                    let mut process = pods.exec(pod, command, &params).await.context("cannot run nc")?;
                    let (input, output) = (process.stdin(), process.stdout());
                    let stream = tokio::io::join(output.context("no output of nc")?, input.context("no input of nc")?);
                    let connection = self.speak(self.secure(stream).await?).await?;
                    Ok(Connection { _tunnel: Some(process), ..connection })
                }
                Way::Address(_) | Way::Namespace(..) => self.speak(self.direct().await?).await,
            }
        };
        tokio::time::timeout(PATIENCE, opened).await.context("the server did not let us connect in time")?
    }

    /// Opens a connection for who speaks HTTP without the help of a client.
    ///
    /// # Errors
    /// When the server is not reached directly, or not at all, or its certificate is not the right one.
    pub async fn direct(&self) -> Result<Direct> {
        let stream = match &self.way {
            Way::Address(address) => {
                let stream = TcpStream::connect(address).await.with_context(|| format!("cannot reach {address}"))?;
                stream.set_nodelay(true)?;
                stream
            }
            Way::Namespace(namespace, address) => {
                let (namespace, address) = (namespace.clone(), *address);
                TcpStream::from_std(tokio::task::spawn_blocking(move || dial_inside(&namespace, address)).await??)?
            }
            Way::Forward(..) | Way::Inside(..) => bail!("the server is reached by a pod only"),
        };
        self.secure(stream).await
    }

    /// The bytes of a request with a review, for such a connection.
    #[must_use]
    pub fn written(&self, path: &str, review: &str) -> Vec<u8> {
        let Self { host, prefix, .. } = self;
        let length = review.len();
        let head = format!(
            "POST {prefix}{path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        [head.as_bytes(), review.as_bytes()].concat()
    }

    /// Opens many connections, some at a time.
    ///
    /// # Errors
    /// When one of them cannot be opened.
    pub async fn connect_many(&self, count: usize) -> Result<Vec<Connection>> {
        stream::iter(0..count).map(|_| self.connect()).buffer_unordered(16).try_collect().await
    }

    async fn secure<S>(&self, stream: S) -> Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        self.tls.connect(self.name.clone(), stream).await.context("no TLS with the server")
    }

    async fn speak<S>(&self, stream: TlsStream<S>) -> Result<Connection>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // It ends with the server's side or with the sender; why is seen by who waits for an answer.
        tokio::spawn(connection);
        Ok(Connection { sender, host: self.host.clone(), prefix: self.prefix.clone(), _tunnel: None })
    }
}

/// A connection to a server, with one request at a time.
pub struct Connection {
    sender: SendRequest<BoxBody<Bytes, Infallible>>,
    host: String,
    prefix: String,
    /// Ends with the connection.
    _tunnel: Option<AttachedProcess>,
}

impl Connection {
    /// Posts a review as kube-apiserver does.
    ///
    /// # Errors
    /// When there is no whole answer.
    pub async fn review(&mut self, path: &str, body: impl Into<Bytes>) -> Result<Answer> {
        self.request(Method::POST, path, &[("content-type", "application/json")], body.into()).await
    }

    /// Begins a review of `length` bytes and does not go on: sends `start`, and waits for what the server says to that.
    ///
    /// # Errors
    /// When the server ends the connection without an answer.
    pub async fn stall(&mut self, path: &str, length: usize, start: &'static [u8]) -> Result<u16> {
        let start = stream::once(async { Ok(Frame::data(Bytes::from_static(start))) });
        let body = BodyExt::boxed(StreamBody::new(Box::pin(start.chain(stream::pending()))));
        let request = Request::post(format!("{}{path}", self.prefix))
            .header(header::HOST, &self.host)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONTENT_LENGTH, length)
            .body(body)?;
        self.sender.ready().await?;
        Ok(self.sender.send_request(request).await?.status().as_u16())
    }

    /// Sends any request.
    ///
    /// # Errors
    /// When there is no whole answer.
    pub async fn request(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Answer> {
        let exchange = async {
            let mut request = Request::builder()
                .method(method)
                .uri(format!("{}{path}", self.prefix))
                .header(header::HOST, &self.host);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            self.sender.ready().await?;
            let response = self.sender.send_request(request.body(Full::new(body).boxed())?).await?;
            let status = response.status().as_u16();
            let body = http_body_util::Limited::new(response.into_body(), MAX_ANSWER).collect().await;
            let body = body.map_err(|error| anyhow::anyhow!("the answer was not whole: {error}"))?.to_bytes();
            Ok(Answer { status, body })
        };
        tokio::time::timeout(PATIENCE, exchange).await.context("no answer in time")?
    }
}

fn is_ready(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return false };
    pod.metadata.deletion_timestamp.is_none()
        && status.conditions.iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The plan of the cluster under test, if that is the test cluster of this working tree.
///
/// # Errors
/// When FERROVIRT_INSTANCE makes no sense.
pub fn own_cluster() -> Result<Option<Plan>> {
    let instance = match std::env::var("FERROVIRT_INSTANCE") {
        Ok(text) => text.parse().context("FERROVIRT_INSTANCE is not a number")?,
        Err(_) => 0,
    };
    let plan = Plan::new(repository(), instance)?;
    let own = target::foreign(&plan, Some(kubeconfig())).is_none();
    Ok(own.then_some(plan))
}

/// The network namespace of the API server, if the cluster under test is the test cluster of this machine.
fn control_namespace() -> Result<Option<PathBuf>> {
    let namespace = own_cluster()?.map(|plan| host::namespace_path(&plan.control_namespace()));
    Ok(namespace.filter(|namespace| namespace.exists()))
}

/// Dials from within a network namespace. The thread stays there, so it ends with the call.
fn dial_inside(namespace: &Path, address: SocketAddr) -> Result<std::net::TcpStream> {
    let file = File::open(namespace).with_context(|| format!("cannot open {}", namespace.display()))?;
    let dialled = std::thread::spawn(move || -> Result<std::net::TcpStream> {
        setns(file, CloneFlags::CLONE_NEWNET).context("cannot enter the network namespace of the API server")?;
        let stream = std::net::TcpStream::connect_timeout(&address, PATIENCE)
            .with_context(|| format!("cannot reach {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    });
    match dialled.join() {
        Ok(stream) => stream,
        Err(_) => bail!("the dialling thread ended"),
    }
}

pub(crate) fn tls(roots: Option<&[u8]>) -> Result<ClientConfig> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
    let mut config = match roots {
        Some(pem) => {
            let mut store = RootCertStore::empty();
            for certificate in CertificateDer::pem_slice_iter(pem) {
                store.add(certificate.map_err(|error| anyhow::anyhow!("the CA file is not PEM: {error}"))?)?;
            }
            builder.with_root_certificates(store)
        }
        None => builder.dangerous().with_custom_certificate_verifier(Arc::new(Anybody(provider))),
    }
    .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Takes any certificate: what is under test is behind it.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
