//! Answers the requests of the pages.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::SinkExt;
use http::{Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::Full;
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use tokio::sync::OwnedSemaphorePermit;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::server::create_response_with_body,
        protocol::{Role, WebSocketConfig},
    },
};

use super::{
    files::Files,
    guard::Guard,
    route::{self, Named, Route},
    watch,
};
use crate::{Connection, Error, relay};

/// Time limit of an answer of the API server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for sending the close frame.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Largest message of a page, such as a pasted text.
const MAX_MESSAGE: usize = 1 << 20;

/// Limits the pages to files and streams of this server. Terminals get their fonts and colours by generated style sheets.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const CONSOLE: &str = "console.html";

/// Headers of all answers.
const HEADERS: [(header::HeaderName, &str); 5] = [
    (header::CACHE_CONTROL, "no-store"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (header::HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Answer of the server.
type Answer = Response<Full<Bytes>>;
/// WebSocket of a page.
type Page = WebSocketStream<TokioIo<hyper::upgrade::Upgraded>>;

/// The local server.
pub(super) struct Server {
    pub guard: Guard,
    pub files: Files,
    pub connection: Connection,
    /// Namespace of the list; `None` for all.
    pub namespace: Option<String>,
}

impl Server {
    /// Answers a request. A stream keeps the connection's permit until its end.
    pub(super) async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        permit: Arc<OwnedSemaphorePermit>,
    ) -> Answer {
        let (mut parts, _) = request.into_parts();
        let upgrade = parts.extensions.remove::<OnUpgrade>();
        let path = match self.guard.admit(&parts) {
            Ok(path) => path,
            Err(denied) => return text(StatusCode::FORBIDDEN, format!("403 Forbidden: {denied}\n")),
        };
        match route::parse(&parts.method, path) {
            Ok(Route::File(path)) => self.file(path),
            Ok(Route::Act(named, resource, action)) => self.act(&named, resource, action).await,
            Ok(Route::Watch) => open(&parts, upgrade, async move |mut page| {
                watch::serve(&self.connection, self.namespace.as_deref(), &mut page).await;
                drop(permit);
            }),
            Ok(Route::Stream(named, subresource)) => open(&parts, upgrade, async move |mut page| {
                if let Err(error) = self.stream(&named, subresource, &mut page).await {
                    let _ = page.send(Message::text(error.to_string())).await;
                }
                let _ = tokio::time::timeout(CLOSE_TIMEOUT, page.close(None)).await;
                drop(permit);
            }),
            Err(code) => text(code, format!("{code}\n")),
        }
    }

    fn file(&self, path: &str) -> Answer {
        let Some((content, type_)) = self.files.get(path) else {
            return text(StatusCode::NOT_FOUND, format!("{}\n", StatusCode::NOT_FOUND));
        };
        let policy = match path {
            CONSOLE => POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'"),
            _ => POLICY.to_owned(),
        };
        with_headers(StatusCode::OK, type_, &policy, content)
    }

    async fn act(&self, named: &Named, resource: &str, action: &str) -> Answer {
        let connection = self.connection.clone().within(Some(&named.namespace));
        let path = connection.path(resource, &named.name, action);
        let called = async {
            match connection.call(Method::PUT, &path, Vec::new()).await {
                Ok(_) => Ok(()),
                Err(error) => Err(connection.explain(&named.name, false, error).await),
            }
        };
        match in_time(called).await {
            Ok(()) => text(StatusCode::OK, String::new()),
            Err(error) => {
                let code = match &error {
                    Error::Refused { code, .. } => StatusCode::from_u16(*code).unwrap_or(StatusCode::BAD_GATEWAY),
                    _ => StatusCode::BAD_GATEWAY,
                };
                text(code, error.to_string())
            }
        }
    }

    async fn stream(&self, named: &Named, subresource: &str, page: &mut Page) -> Result<(), Error> {
        let connection = self.connection.clone().within(Some(&named.namespace));
        let path = connection.path("virtualmachineinstances", &named.name, subresource);
        let stream = in_time(connection.stream_of(&named.name, false, &path)).await?;
        relay::join(stream, page, "the stream was closed").await
    }
}

/// Waits for an answer of the API server.
async fn in_time<T>(answer: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let late = |_| Err(Error::Transport(format!("no answer within {ANSWER_TIMEOUT:?}")));
    tokio::time::timeout(ANSWER_TIMEOUT, answer).await.unwrap_or_else(late)
}

/// Accepts a WebSocket and serves it by a task of its own.
fn open<T>(parts: &Parts, upgrade: Option<OnUpgrade>, serve: impl FnOnce(Page) -> T + Send + 'static) -> Answer
where
    T: Future<Output = ()> + Send + 'static,
{
    let handshake = Request::from_parts(parts.clone(), ());
    let (Ok(answer), Some(upgrade)) = (create_response_with_body(&handshake, Full::default), upgrade) else {
        return text(StatusCode::BAD_REQUEST, "400 Bad Request: this path is a WebSocket\n".to_owned());
    };
    tokio::spawn(async move {
        // A page that leaves at once ends the connection.
        let Ok(upgraded) = upgrade.await else { return };
        let mut limits = WebSocketConfig::default();
        limits.max_message_size = Some(MAX_MESSAGE);
        limits.max_frame_size = Some(MAX_MESSAGE);
        let page = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, Some(limits)).await;
        serve(page).await;
    });
    answer
}

fn text(code: StatusCode, text: String) -> Answer {
    with_headers(code, "text/plain; charset=utf-8", POLICY, Bytes::from(text))
}

fn with_headers(code: StatusCode, type_: &str, policy: &str, content: Bytes) -> Answer {
    let mut answer = Response::new(Full::new(content));
    *answer.status_mut() = code;
    let own = [(header::CONTENT_TYPE, type_), (header::CONTENT_SECURITY_POLICY, policy)];
    for (name, value) in HEADERS.into_iter().chain(own) {
        if let Ok(value) = header::HeaderValue::from_str(value) {
            answer.headers_mut().insert(name, value);
        }
    }
    answer
}
