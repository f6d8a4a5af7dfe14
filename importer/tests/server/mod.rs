//! A web server that serves one file, and misbehaves on demand.

use std::{
    fmt::Write,
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpListener,
};

/// Properties of a server.
#[derive(Clone, Debug)]
pub(crate) struct Behaviour {
    /// Bytes after which connections end.
    pub(crate) cut_after: Option<usize>,
    /// Connections stay open then.
    pub(crate) silent: bool,
    /// Connections that end early.
    pub(crate) failures: u32,
    /// Sends parts of the file.
    pub(crate) ranges: bool,
    /// Sends an ETag.
    pub(crate) validator: bool,
    /// The file is another one at each request.
    pub(crate) changes: bool,
    /// Sends no length.
    pub(crate) chunked: bool,
    /// Requests that fail with status 503.
    pub(crate) unavailable: u32,
    /// Target of a redirect.
    pub(crate) elsewhere: Option<String>,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            cut_after: None,
            silent: false,
            failures: u32::MAX,
            ranges: true,
            validator: true,
            changes: false,
            chunked: false,
            unavailable: 0,
            elsewhere: None,
        }
    }
}

/// A server, until the runtime ends.
pub(crate) struct Server {
    url: String,
    state: Arc<State>,
}

struct State {
    file: Vec<u8>,
    behaviour: Behaviour,
    requests: AtomicU32,
    last: Mutex<String>,
}

impl Server {
    pub(crate) async fn start(file: Vec<u8>, behaviour: Behaviour) -> Self {
        Self::listen(file, behaviour, None).await
    }

    /// Returns the certificate, too.
    pub(crate) async fn start_tls(file: Vec<u8>) -> (Self, String) {
        let key = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (pem, der) = (key.cert.pem(), key.cert.der().clone());
        let private = rustls::pki_types::PrivatePkcs8KeyDer::from(key.signing_key.serialize_der());
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![der], private.into())
            .unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        (Self::listen(file, Behaviour::default(), Some(acceptor)).await, pem)
    }

    async fn listen(file: Vec<u8>, behaviour: Behaviour, tls: Option<tokio_rustls::TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let url = if tls.is_some() { format!("https://localhost:{port}") } else { format!("http://127.0.0.1:{port}") };
        let state = Arc::new(State { file, behaviour, requests: AtomicU32::new(0), last: Mutex::default() });
        let server = Self { url, state: state.clone() };
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (state, tls) = (state.clone(), tls.clone());
                tokio::spawn(async move {
                    // Clients close connections.
                    let _ = match tls {
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => state.answer(stream).await,
                            Err(error) => Err(error),
                        },
                        None => state.answer(stream).await,
                    };
                });
            }
        });
        server
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    pub(crate) fn requests(&self) -> u32 {
        self.state.requests.load(Relaxed)
    }

    /// Returns the head of the last request in lower case.
    pub(crate) fn last_request(&self) -> String {
        self.state.last.lock().unwrap().clone()
    }
}

impl State {
    async fn answer(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
        self.last.lock().unwrap().clone_from(&head);
        let number = self.requests.fetch_add(1, Relaxed);
        if number < self.behaviour.unavailable {
            return stream.write_all(b"HTTP/1.1 503 Later\r\nContent-Length: 0\r\n\r\n").await;
        }
        let redirect = |to: &str| format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n");
        let text =
            |status: &str, text: &str| format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{text}", text.len());
        let path = head.split(' ').nth(1).unwrap_or_default();
        let allowed = ["authorization: basic dxnlcjpwyxnzd29yza==", "x-plain: 1", "x-secret: s3"];
        let answer = match path {
            "/missing" => text("404 Not Found", ""),
            "/loop" => redirect("/loop"),
            "/to-ftp" => redirect("ftp://a/b"),
            "/to-signed" => redirect("/signed?sig=s3cr3t"),
            "/to-signed-ftp" => redirect("ftp://user:s3cr3t@a/b?sig=s3cr3t#s3cr3t"),
            "/signed?sig=s3cr3t" => text("403 Forbidden", ""),
            "/page" => text("200 OK", "<!doctype html><html>Log in</html>"),
            "/empty" => text("200 OK", ""),
            "/elsewhere" => redirect(self.behaviour.elsewhere.as_deref().unwrap_or_default()),
            "/private" if !allowed.iter().all(|header| head.contains(header)) => text("401 Unauthorized", ""),
            _ => return self.send(&mut stream, &head, number).await,
        };
        stream.write_all(answer.as_bytes()).await
    }

    async fn send(&self, stream: &mut (impl AsyncWrite + Unpin), head: &str, number: u32) -> std::io::Result<()> {
        let Behaviour { cut_after, silent, failures, ranges, validator, changes, chunked, .. } = self.behaviour;
        let tag = if changes { format!("\"{number}\"") } else { "\"1\"".to_owned() };
        let from = head.split("range: bytes=").nth(1).and_then(|rest| rest.split('-').next()?.parse().ok());
        let same = head.contains(&format!("if-range: {tag}"));
        let from = from.filter(|_| ranges && same).unwrap_or(0);
        let (rest, size) = (&self.file[from..], self.file.len());
        let mut answer = if from > 0 {
            format!("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {from}-{}/{size}\r\n", size - 1)
        } else {
            "HTTP/1.1 200 OK\r\n".to_owned()
        };
        if validator {
            write!(answer, "ETag: {tag}\r\n").unwrap();
        }
        let frame =
            if chunked { "Transfer-Encoding: chunked".to_owned() } else { format!("Content-Length: {}", rest.len()) };
        write!(answer, "{frame}\r\n\r\n").unwrap();
        stream.write_all(answer.as_bytes()).await?;
        if chunked {
            stream.write_all(format!("{:x}\r\n", rest.len()).as_bytes()).await?;
            stream.write_all(rest).await?;
            return stream.write_all(b"\r\n0\r\n\r\n").await;
        }
        let cut = cut_after.filter(|cut| number < failures && *cut < rest.len());
        stream.write_all(&rest[..cut.unwrap_or(rest.len())]).await?;
        stream.flush().await?;
        if cut.is_some() && silent {
            pending::<()>().await;
        }
        stream.shutdown().await
    }
}
