//! The requests of a download: authentication, headers, redirects.

use std::{fs, path::Path, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response,
    header::{ACCEPT_ENCODING, AUTHORIZATION, IF_RANGE, LOCATION, RANGE, USER_AGENT},
};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::{Client as Pool, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::timeout;
use url::Url;

use super::{SourceError, chain, tls};
use crate::{
    places::Places,
    task::{ACCESS_KEY, HttpSource, SECRET_KEY},
};

/// Redirects of one request.
const REDIRECTS: usize = 10;
/// Time limit for a connection.
const CONNECT_TIME: Duration = Duration::from_secs(30);
/// Limit of a file with a header or credential.
const FILE_SIZE: usize = 64 << 10;
/// Buffer of a connection.
const BUFFER: usize = 256 << 10;

/// A client for one file.
pub(crate) struct Client {
    pool: Pool<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    url: Url,
    headers: HeaderMap,
    /// The content is checked, so that a redirect may leave HTTPS.
    may_downgrade: bool,
    /// Time without data after which a connection is given up.
    pub(super) silence: Duration,
}

impl Client {
    /// Creates the client for the source of a task.
    pub(crate) fn new(source: &HttpSource, places: &Places) -> Result<Self, SourceError> {
        let mut url = Url::parse(&source.url)
            .map_err(|error| SourceError::Url { url: source.url.clone(), reason: error.to_string() })?;
        if !["http", "https"].contains(&url.scheme()) {
            return Err(SourceError::Url {
                url: source.url.clone(),
                reason: "its scheme is not http or https".to_owned(),
            });
        }
        let mut headers = HeaderMap::new();
        headers.insert(USER_AGENT, HeaderValue::from_static("virt-importer"));
        // Offsets of ranges are those of the file.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if !url.username().is_empty() || url.password().is_some() {
            authenticate(&mut headers, &decode(url.username()), &decode(url.password().unwrap_or_default()))?;
            // Neither is part of messages.
            let _ = (url.set_username(""), url.set_password(None));
        }
        if source.secret {
            let (user, password) = (places.secret.join(ACCESS_KEY), places.secret.join(SECRET_KEY));
            authenticate(&mut headers, &read(&user)?, &read(&password)?)?;
        }
        for header in &source.headers {
            add_header(&mut headers, header)?;
        }
        for path in &source.secret_header_files {
            add_header_files(&mut headers, Path::new(path))?;
        }
        let certs = source.certs.then_some(places.certs.as_path());
        let tls = tls::config(certs, source.insecure_skip_verify)?;
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(CONNECT_TIME));
        tcp.set_keepalive(Some(CONNECT_TIME));
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let pool =
            Pool::builder(TokioExecutor::new()).http1_max_buf_size(BUFFER).pool_max_idle_per_host(1).build(connector);
        Ok(Self { pool, url, headers, may_downgrade: source.checksum.is_some(), silence: places.silence })
    }

    /// Returns the URL for messages.
    pub(crate) fn url(&self) -> &str {
        self.url.as_str()
    }

    /// Returns an address for messages. That of a redirect is often signed, so that it loses the parts that may be secret: messages are
    /// shown in conditions and events.
    fn shown(&self, url: &Url) -> String {
        let mut url = url.clone();
        if url != self.url {
            let _ = (url.set_username(""), url.set_password(None));
            url.set_query(None);
            url.set_fragment(None);
        }
        url.to_string()
    }

    /// Requests the file from an offset on, if its validator is still the same. Follows redirects.
    pub(super) async fn get(
        &self,
        offset: u64,
        validator: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>, SourceError> {
        let mut url = self.url.clone();
        for _ in 0..=REDIRECTS {
            let mut headers = HeaderMap::new();
            for (name, value) in &self.headers {
                // Other servers get no credentials. Any header of the user may contain one.
                if url.origin() == self.url.origin() || [USER_AGENT, ACCEPT_ENCODING].contains(name) {
                    headers.append(name, value.clone());
                }
            }
            if offset > 0 {
                let range = HeaderValue::try_from(format!("bytes={offset}-"));
                headers.insert(RANGE, range.map_err(|_| SourceError::Header("Range".to_owned()))?);
                if let Some(validator) = validator {
                    headers.insert(IF_RANGE, validator.clone());
                }
            }
            let answer = self.send(&url, headers).await?;
            if !answer.status().is_redirection() {
                return if answer.status().is_success() {
                    Ok(answer)
                } else {
                    Err(SourceError::Status { url: self.shown(&url), status: answer.status() })
                };
            }
            url = self.redirect(&url, &answer)?;
        }
        Err(SourceError::Redirects { url: self.url.to_string(), limit: REDIRECTS, last: self.shown(&url) })
    }

    async fn send(&self, url: &Url, headers: HeaderMap) -> Result<Response<Incoming>, SourceError> {
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = url.as_str().parse().map_err(|error: http::uri::InvalidUri| SourceError::Url {
            url: self.shown(url),
            reason: error.to_string(),
        })?;
        *request.headers_mut() = headers;
        match timeout(self.silence, self.pool.request(request)).await {
            Ok(answer) => answer.map_err(|error| SourceError::Connect { url: self.shown(url), reason: chain(&error) }),
            Err(_) => Err(SourceError::Silent { url: self.shown(url), after: self.silence }),
        }
    }

    fn redirect(&self, from: &Url, answer: &Response<Incoming>) -> Result<Url, SourceError> {
        let location = answer.headers().get(LOCATION).and_then(|location| location.to_str().ok()).unwrap_or_default();
        let rejected = |to: String, reason| SourceError::Redirect { url: self.shown(from), to, reason };
        if location.is_empty() {
            return Err(SourceError::Status { url: self.shown(from), status: answer.status() });
        }
        let to = from.join(location).map_err(|_| rejected("a location".to_owned(), "which is no URL"))?;
        match to.scheme() {
            "https" => Ok(to),
            "http" if from.scheme() == "http" || self.may_downgrade => Ok(to),
            "http" => Err(rejected(self.shown(&to), "which is not encrypted; set a checksum to allow that")),
            _ => Err(rejected(self.shown(&to), "which is neither HTTP nor HTTPS")),
        }
    }
}

fn authenticate(headers: &mut HeaderMap, user: &str, password: &str) -> Result<(), SourceError> {
    let credentials = BASE64_STANDARD.encode(format!("{user}:{password}"));
    let mut value = HeaderValue::try_from(format!("Basic {credentials}"))
        .map_err(|_| SourceError::Header(AUTHORIZATION.to_string()))?;
    value.set_sensitive(true);
    headers.insert(AUTHORIZATION, value);
    Ok(())
}

fn add_header(headers: &mut HeaderMap, header: &str) -> Result<(), SourceError> {
    // The value may be a secret, so that messages have the name only.
    let (name, value) = header.split_once(':').ok_or_else(|| SourceError::Header("without a colon".to_owned()))?;
    let invalid = || SourceError::Header(name.trim().to_owned());
    let key = HeaderName::try_from(name.trim()).map_err(|_| invalid())?;
    let mut value = HeaderValue::try_from(value.trim()).map_err(|_| invalid())?;
    value.set_sensitive(true);
    headers.append(key, value);
    Ok(())
}

/// Adds the header in a file, or those in all files of a mounted Secret.
fn add_header_files(headers: &mut HeaderMap, path: &Path) -> Result<(), SourceError> {
    if !path.is_dir() {
        return add_header(headers, &read(path)?);
    }
    let failed =
        |error: std::io::Error| SourceError::File { path: path.display().to_string(), reason: error.to_string() };
    let mut files: Vec<_> = fs::read_dir(path).map_err(failed)?.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.iter().filter(|file| file.is_file()).try_for_each(|file| add_header(headers, &read(file)?))
}

fn read(path: &Path) -> Result<String, SourceError> {
    let failed = |reason: String| SourceError::File { path: path.display().to_string(), reason };
    let text = fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    if text.len() > FILE_SIZE {
        return Err(failed("it is too long".to_owned()));
    }
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

fn decode(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}
