//! Transfer of a file to CDI's upload proxy.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty, Limited, StreamBody};
use hyper::body::Frame;
use tokio::{fs::File, io::AsyncReadExt};

use super::client::{Body, client};
use crate::{Error, proxy::from_environment};

/// Paths of the proxy. The first answers when the data are there, the second when they are processed.
const ASYNCHRONOUS: &str = "/v1beta1/upload-async";
const SYNCHRONOUS: &str = "/v1beta1/upload";
/// Bytes that are read from the file at a time.
const PIECE: u64 = 256 * 1024;
/// Longest answer of the proxy that is shown.
const MAX_ANSWER: usize = 64 * 1024;
/// Time limit for the answer that decides between the paths.
const DISCOVERY: Duration = Duration::from_secs(30);

/// The file.
pub(super) struct Source {
    path: PathBuf,
    length: u64,
}

impl Source {
    /// Checks that the file can be read.
    pub(super) async fn open(path: &Path) -> Result<Self, Error> {
        let failed = || Error::io(format!("failed to open image file {}", path.display()));
        let file = File::open(path).await.map_err(failed())?;
        let metadata = file.metadata().await.map_err(failed())?;
        // Devices and pipes have no length that could be announced.
        if !metadata.is_file() {
            return Err(Error::Usage(format!(
                "failed to open image file {}: it is not a regular file",
                path.display()
            )));
        }
        Ok(Self { path: path.to_owned(), length: metadata.len() })
    }

    /// Returns the content, at most the length of the file when it was opened.
    async fn body(&self) -> Result<Body, Error> {
        let failed = || Error::io(format!("cannot read {}", self.path.display()));
        let file = File::open(&self.path).await.map_err(failed())?;
        let pieces = futures::stream::try_unfold((file, self.length), |(mut file, left)| async move {
            if left == 0 {
                return Ok(None);
            }
            let mut piece = Vec::new();
            let read = (&mut file).take(left.min(PIECE)).read_to_end(&mut piece).await?;
            if read == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file has become shorter"));
            }
            Ok(Some((Frame::data(Bytes::from(piece)), (file, left.saturating_sub(read as u64)))))
        });
        Ok(StreamBody::new(pieces).boxed_unsync())
    }
}

/// Why an attempt failed.
#[derive(Debug)]
enum Failure {
    /// It may be repeated.
    Passing(String),
    /// Another attempt fails as well.
    Final(String),
}

/// Sends the file. Each attempt begins anew and has a token of its own, which may not be older than five minutes.
pub(super) async fn send(
    source: &Source,
    proxy: &str,
    insecure: bool,
    attempts: u32,
    mut token: impl AsyncFnMut() -> Result<String, Error>,
) -> Result<(), Error> {
    let addresses = [address(proxy, ASYNCHRONOUS, insecure)?, address(proxy, SYNCHRONOUS, insecure)?];
    let mut config = kube::Config::new(addresses[0].clone());
    config.accept_invalid_certs = insecure;
    let variable = |name: &str| std::env::var(name).ok();
    config.proxy_url = from_environment(&addresses[0], variable).map_err(Error::Usage)?;
    let client = client(&config)?;
    let mut attempt = 1;
    loop {
        let bearer = format!("Bearer {}", token().await?);
        let (head, post) = requests(source, &addresses, &bearer).await?;
        let found = tokio::time::timeout(DISCOVERY, client(head)).await;
        let is_asynchronous = matches!(found, Ok(Ok(ref answer)) if answer.status() == StatusCode::OK);
        let [asynchronous, synchronous] = post;
        let failure = match client(if is_asynchronous { asynchronous } else { synchronous }).await {
            Err(error) => Failure::Passing(chain(&error)),
            Ok(answer) if answer.status() == StatusCode::OK => return Ok(()),
            Ok(answer) => {
                let status = answer.status();
                let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
                failure(status, &body.map(http_body_util::Collected::to_bytes).unwrap_or_default())
            }
        };
        match failure {
            Failure::Passing(why) if attempt < attempts => {
                eprintln!("attempt {attempt} of {attempts} failed: {why}");
                tokio::time::sleep(Duration::from_secs(u64::from(attempt.min(10)))).await;
                attempt += 1;
            }
            Failure::Passing(why) | Failure::Final(why) => {
                return Err(Error::Stream(format!("error uploading image after {attempt} attempts: {why}")));
            }
        }
    }
}

/// Returns the request that asks for the asynchronous path, and the upload to each path.
async fn requests(
    source: &Source,
    addresses: &[Uri; 2],
    bearer: &str,
) -> Result<(Request<Body>, [Request<Body>; 2]), Error> {
    let failed = |error: http::Error| Error::Stream(error.to_string());
    let empty = Empty::new().map_err(|never| match never {}).boxed_unsync();
    let head = request(Method::HEAD, &addresses[0], bearer)?.body(empty).map_err(failed)?;
    let post = async |address: &Uri| {
        request(Method::POST, address, bearer)?
            .header(header::CONTENT_TYPE, "application/octet-stream")
            .header(header::CONTENT_LENGTH, source.length)
            .body(source.body().await?)
            .map_err(failed)
    };
    Ok((head, [post(&addresses[0]).await?, post(&addresses[1]).await?]))
}

fn request(method: Method, uri: &Uri, bearer: &str) -> Result<http::request::Builder, Error> {
    let value = header::HeaderValue::from_str(bearer);
    let value = value.map_err(|_| Error::Stream("the upload token is not valid in a header".to_owned()))?;
    Ok(Request::builder().method(method).uri(uri).header(header::AUTHORIZATION, value))
}

/// Describes an answer that is no success.
fn failure(status: StatusCode, body: &[u8]) -> Failure {
    let text: String = String::from_utf8_lossy(body).chars().filter(|c| !c.is_control()).collect();
    let why = format!("unexpected return value {}, {}", status.as_u16(), text.trim());
    // The image does not fit, or another upload is done.
    if [StatusCode::BAD_REQUEST, StatusCode::CONFLICT].contains(&status) {
        Failure::Final(why)
    } else {
        Failure::Passing(why)
    }
}

/// Appends a path of the proxy to its address, unless the address has it. Token and image pass in clear text on request only.
fn address(proxy: &str, path: &str, insecure: bool) -> Result<Uri, Error> {
    let wrong =
        |why: &dyn std::fmt::Display| Error::Usage(format!("{proxy:?} is not the address of an upload proxy: {why}"));
    let base = proxy.trim_end_matches('/');
    let base = [ASYNCHRONOUS, SYNCHRONOUS].iter().find_map(|known| base.strip_suffix(known)).unwrap_or(base);
    let uri: Uri = format!("{base}{path}").parse().map_err(|error| wrong(&error))?;
    match (uri.scheme_str(), uri.host()) {
        (Some("https"), Some(_)) => Ok(uri),
        // The tunnel of a proxy leads to port 443 unless the address names one.
        (Some("http"), Some(host)) if insecure && uri.port().is_none() => {
            let uri = Uri::builder().scheme("http").authority(format!("{host}:80")).path_and_query(uri.path());
            uri.build().map_err(|error| wrong(&error))
        }
        (Some("http"), Some(_)) if insecure => Ok(uri),
        (Some("http"), Some(_)) => Err(wrong(&"the token would pass in clear text; use https, or --insecure")),
        _ => Err(wrong(&"an URL with https is expected")),
    }
}

/// Returns an error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use http_body_util::Full;
    use hyper::{Response, body::Incoming, service::service_fn};
    use hyper_util::rt::TokioIo;

    use super::*;

    #[test]
    fn addresses_get_the_path_of_the_proxy() {
        for (proxy, insecure, expected) in [
            ("https://a.example.com", false, Some("https://a.example.com/v1beta1/upload")),
            ("https://a.example.com/cdi/", false, Some("https://a.example.com/cdi/v1beta1/upload")),
            ("https://a.example.com/v1beta1/upload-async", false, Some("https://a.example.com/v1beta1/upload")),
            ("http://a.example.com", false, None),
            ("http://a.example.com", true, Some("http://a.example.com:80/v1beta1/upload")),
            ("http://a.example.com:8080", true, Some("http://a.example.com:8080/v1beta1/upload")),
            ("ftp://a.example.com", true, None),
            ("https://", false, None),
        ] {
            let found = address(proxy, SYNCHRONOUS, insecure).ok().map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), expected, "{proxy}");
        }
    }

    /// Requests and the length of their bodies, as the proxy received them.
    type Seen = Arc<Mutex<Vec<(Method, String, String, usize)>>>;

    /// Serves a proxy that answers uploads with these codes in turn.
    async fn proxy(codes: &'static [u16], has_async: bool) -> (String, Seen) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let seen = Seen::default();
        let recorded = seen.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let recorded = recorded.clone();
                let service = service_fn(move |request: Request<Incoming>| {
                    let recorded = recorded.clone();
                    async move {
                        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
                        let bearer = request.headers()[header::AUTHORIZATION].to_str().unwrap().to_owned();
                        let body = request.into_body().collect().await?.to_bytes();
                        let mut recorded = recorded.lock().unwrap();
                        let code = match method {
                            Method::HEAD => {
                                if has_async {
                                    200
                                } else {
                                    404
                                }
                            }
                            _ => codes[recorded.iter().filter(|(method, ..)| *method == Method::POST).count()],
                        };
                        recorded.push((method, path, bearer, body.len()));
                        Ok::<_, hyper::Error>(
                            Response::builder().status(code).body(Full::new(Bytes::from("text"))).unwrap(),
                        )
                    }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        (address, seen)
    }

    #[tokio::test]
    async fn file_is_sent_again_with_a_new_token_until_the_proxy_takes_it() {
        let path = std::env::temp_dir().join(format!("image-upload-{}", std::process::id()));
        std::fs::write(&path, vec![7; 600_000]).unwrap();
        let source = Source::open(&path).await.unwrap();
        for (codes, has_async, expected) in [
            (&[200][..], true, Ok(1)),
            (&[503, 401, 200], false, Ok(3)),
            (&[400], true, Err("unexpected return value 400, text")),
            (&[503, 503, 503], true, Err("after 3 attempts")),
        ] {
            let (address, seen) = proxy(codes, has_async).await;
            let mut tokens = 0;
            let token = async || {
                tokens += 1;
                Ok(format!("t{tokens}"))
            };
            let sent = send(&source, &address, true, 3, token).await;
            let posts =
                seen.lock().unwrap().iter().filter(|(method, ..)| *method == Method::POST).cloned().collect::<Vec<_>>();
            match expected {
                Ok(attempts) => {
                    sent.unwrap();
                    assert_eq!(posts.len(), attempts);
                }
                Err(text) => assert!(sent.unwrap_err().to_string().contains(text)),
            }
            let path = if has_async { ASYNCHRONOUS } else { SYNCHRONOUS };
            for (at, (_, found, bearer, length)) in posts.iter().enumerate() {
                assert_eq!(
                    (found.as_str(), bearer.as_str(), *length),
                    (path, &*format!("Bearer t{}", at + 1), 600_000)
                );
            }
        }
        std::fs::remove_file(path).unwrap();
    }

    #[tokio::test]
    async fn file_that_is_missing_or_has_no_length_is_named() {
        for (path, why) in
            [("/nonexistent/image", "failed to open"), ("/dev/null", "not a regular file"), ("/", "not a regular file")]
        {
            let error = Source::open(Path::new(path)).await.err().unwrap().to_string();
            assert!(error.contains(path) && error.contains(why), "{error}");
        }
    }
}
