//! Servers of admission webhooks and the ways to reach them.

use std::{
    fs::File,
    net::SocketAddr,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_cluster::host;
use futures::{StreamExt, TryStreamExt, stream};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::{admissionregistration::v1::ValidatingWebhookConfiguration, core::v1::Pod};
use kube::{
    Api, Client,
    api::{AttachParams, ListParams},
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use rustls::{
    ClientConfig,
    client::Resumption,
    crypto::ring,
    sign::{CertifiedKey, SingleCertAndKey},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{
    connection::{Connection, TIMEOUT},
    tls::tls,
};
use crate::environment::{connect, own_cluster};

/// A server of admission webhooks.
#[derive(Clone)]
pub struct Endpoint {
    route: Route,
    tls: TlsConnector,
    name: ServerName<'static>,
    /// Host and path prefix of every request.
    host: String,
    prefix: String,
}

#[derive(Clone)]
enum Route {
    /// An address that this process can dial.
    Address(String),
    /// A pod's address, dialled from the network namespace of the API server.
    Namespace(PathBuf, SocketAddr),
    /// A pod's port, through the API server.
    Forward(Box<Api<Pod>>, String, u16),
    /// A port of a host, through `nc` in a pod.
    Inside(Box<Api<Pod>>, String, u16),
}

/// An unused TLS connection to a server that is reached directly.
pub type Direct = TlsStream<TcpStream>;

impl Endpoint {
    /// Returns the server at `WEBHOOK_URL`, else virt-api of the cluster under test. The URL contains everything before the path
    /// of a webhook (of virt-api: `https://virt-api.kubevirt.svc/admission/SEGMENT`, as in the webhook configurations). The
    /// certificate is verified with the PEM file `WEBHOOK_CA`, if given.
    ///
    /// # Errors
    /// Fails without such a server, or if a variable is invalid.
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

    /// Returns the server at a URL.
    ///
    /// # Errors
    /// Fails if the URL does not start with https, or the certificates are not PEM.
    pub fn of_url(url: &str, roots: Option<&[u8]>) -> Result<Self> {
        let uri: http::Uri = url.parse().with_context(|| format!("{url} is not a URL"))?;
        ensure!(uri.scheme_str() == Some("https"), "{url} is not the URL of an HTTPS server");
        let host = uri.host().with_context(|| format!("{url} names no host"))?;
        let port = uri.port_u16().unwrap_or(443);
        Ok(Self {
            route: Route::Address(format!("{host}:{port}")),
            tls: TlsConnector::from(Arc::new(tls(roots)?)),
            name: ServerName::try_from(host.trim_matches(['[', ']']).to_owned())
                .with_context(|| format!("{host} is not a server name"))?,
            host: uri.authority().map_or(host.to_owned(), ToString::to_string),
            prefix: uri.path().trim_end_matches('/').to_owned(),
        })
    }

    /// Returns a pod of virt-api, found and verified with the webhook configuration as kube-apiserver does.
    ///
    /// It is dialled from the API server's network namespace in the test cluster of this host, and through a port-forward
    /// otherwise.
    ///
    /// # Errors
    /// Fails if no pod of virt-api is ready.
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
        let (prefix, _) = path.rsplit_once('/').with_context(|| format!("{path} is not the path of a webhook"))?;
        let route = match control_namespace()? {
            Some(namespace) => Route::Namespace(namespace, SocketAddr::new(address.parse()?, port)),
            None => Route::Forward(Box::new(pods), pod.metadata.name.context("pod without name")?, port),
        };
        Ok(Self {
            route,
            tls: TlsConnector::from(Arc::new(tls(Some(&roots.0))?)),
            name: ServerName::try_from(host.clone())?,
            host,
            prefix: prefix.to_owned(),
        })
    }

    /// Returns the same server without the path prefix.
    #[must_use]
    pub fn without_prefix(&self) -> Self {
        Self { prefix: String::new(), ..self.clone() }
    }

    /// Returns the same server by its service, through `nc` in a pod, without the path prefix.
    #[must_use]
    pub fn through_pod(&self, pods: Api<Pod>, pod: &str) -> Self {
        Self { route: Route::Inside(Box::new(pods), pod.to_owned(), 443), ..self.without_prefix() }
    }

    /// Returns the path prefix of the webhooks.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns a port of a pod, dialled as in [`Self::of_cluster`]. Its certificate is not verified.
    ///
    /// # Errors
    /// Fails if the pod has no address.
    pub fn of_pod(client: &Client, pod: &Pod, port: u16) -> Result<Self> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let name = pod.metadata.name.clone().context("pod without name")?;
        let address = pod.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
        let route = match control_namespace()? {
            Some(namespace) => Route::Namespace(namespace, SocketAddr::new(address.parse()?, port)),
            None => Route::Forward(Box::new(Api::namespaced(client.clone(), namespace)), name, port),
        };
        Self::unverified(route)
    }

    /// Returns a port of a pod behind a port-forward, which connects to the pod's loopback address. Its certificate is not
    /// verified.
    ///
    /// # Errors
    /// Fails if the pod has no name.
    pub(crate) fn forwarded(client: &Client, pod: &Pod, port: u16) -> Result<Self> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let name = pod.metadata.name.clone().context("pod without name")?;
        Self::unverified(Route::Forward(Box::new(Api::namespaced(client.clone(), namespace)), name, port))
    }

    fn unverified(route: Route) -> Result<Self> {
        let host = "pod.invalid".to_owned();
        let tls = TlsConnector::from(Arc::new(tls(None)?));
        Ok(Self { route, tls, name: ServerName::try_from(host.clone())?, host, prefix: String::new() })
    }

    /// Returns the same server for a client with a certificate (chain and key as PEM).
    ///
    /// # Errors
    /// Fails if they are not a certificate and its key.
    pub fn with_client_certificate(&self, certificate: &str, key: &str) -> Result<Self> {
        let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|error| anyhow::anyhow!("the certificate is not PEM: {error}"))?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes());
        let key = key.map_err(|error| anyhow::anyhow!("the key is not PEM: {error}"))?;
        let mut config = ClientConfig::clone(self.tls.config());
        let certified = CertifiedKey::from_der(chain, key, &ring::default_provider())?;
        config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(certified));
        // A resumed session would keep the former identity.
        config.resumption = Resumption::disabled();
        Ok(Self { tls: TlsConnector::from(Arc::new(config)), ..self.clone() })
    }

    /// Returns true if connections are direct, so that latencies are meaningful.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        !matches!(self.route, Route::Forward(..) | Route::Inside(..))
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// Fails if the server cannot be reached or its certificate is invalid.
    pub async fn connect(&self) -> Result<Connection> {
        let opened = async {
            match &self.route {
                Route::Forward(pods, pod, port) => {
                    let mut forward = pods.portforward(pod, &[*port]).await.context("cannot forward a port")?;
                    let stream = forward.take_stream(*port).context("no stream of the forwarded port")?;
                    self.handshake(self.secure(stream).await?).await
                }
                Route::Inside(pods, pod, port) => {
                    let params = AttachParams::default().stdin(true).stdout(true).stderr(false);
                    let command = ["nc", &self.host, &port.to_string()];
                    let mut process = pods.exec(pod, command, &params).await.context("cannot run nc")?;
                    let (input, output) = (process.stdin(), process.stdout());
                    let stream = tokio::io::join(output.context("no output of nc")?, input.context("no input of nc")?);
                    let connection = self.handshake(self.secure(stream).await?).await?;
                    Ok(connection.with_tunnel(process))
                }
                Route::Address(_) | Route::Namespace(..) => self.handshake(self.direct().await?).await,
            }
        };
        tokio::time::timeout(TIMEOUT, opened).await.context("no connection in time")?
    }

    /// Opens a connection without an HTTP client.
    ///
    /// # Errors
    /// Fails if the server is not reached directly, cannot be reached, or its certificate is invalid.
    pub async fn direct(&self) -> Result<Direct> {
        let stream = match &self.route {
            Route::Address(address) => {
                let stream = TcpStream::connect(address).await.with_context(|| format!("cannot reach {address}"))?;
                stream.set_nodelay(true)?;
                stream
            }
            Route::Namespace(namespace, address) => {
                let (namespace, address) = (namespace.clone(), *address);
                TcpStream::from_std(tokio::task::spawn_blocking(move || dial_inside(&namespace, address)).await??)?
            }
            Route::Forward(..) | Route::Inside(..) => bail!("the server is only reachable through a pod"),
        };
        self.secure(stream).await
    }

    /// Returns the bytes of a request with a review, for such a connection.
    #[must_use]
    pub fn encode_review(&self, path: &str, review: &str) -> Vec<u8> {
        let Self { host, prefix, .. } = self;
        let length = review.len();
        let head = format!(
            "POST {prefix}{path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        [head.as_bytes(), review.as_bytes()].concat()
    }

    /// Opens many connections, 16 at a time.
    ///
    /// # Errors
    /// Fails if one of them cannot be opened.
    pub async fn connect_many(&self, count: usize) -> Result<Vec<Connection>> {
        stream::iter(0..count).map(|_| self.connect()).buffer_unordered(16).try_collect().await
    }

    async fn secure<S>(&self, stream: S) -> Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        self.tls.connect(self.name.clone(), stream).await.context("no TLS with the server")
    }

    async fn handshake<S>(&self, stream: TlsStream<S>) -> Result<Connection>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // It ends with the server or the sender. The pending request reports errors.
        tokio::spawn(connection);
        Ok(Connection::new(sender, self.host.clone(), self.prefix.clone()))
    }
}

/// Returns true if a pod is ready and not about to end.
pub fn is_ready(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return false };
    pod.metadata.deletion_timestamp.is_none()
        && status.conditions.iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Returns the network namespace of the API server if the cluster under test is the test cluster of this host.
fn control_namespace() -> Result<Option<PathBuf>> {
    let namespace = own_cluster()?.map(|plan| host::namespace_path(&plan.control_namespace()));
    Ok(namespace.filter(|namespace| namespace.exists()))
}

/// Dials from a network namespace, on a thread of its own because it cannot return.
fn dial_inside(namespace: &Path, address: SocketAddr) -> Result<std::net::TcpStream> {
    let file = File::open(namespace).with_context(|| format!("cannot open {}", namespace.display()))?;
    let dialled = std::thread::spawn(move || -> Result<std::net::TcpStream> {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .context("cannot enter the network namespace of the API server")?;
        let stream = std::net::TcpStream::connect_timeout(&address, TIMEOUT)
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
