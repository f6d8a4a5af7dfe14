//! A scripted API server for tests.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use http::{Method, Request, Response};
use kube::{Client, client::Body};
use serde_json::{Value, json};

/// The reply to one request.
pub(crate) enum Reply {
    /// Status code and body.
    Answer(u16, Value),
    /// No answer at all.
    Silence,
    /// An answer after a function was called.
    After(Box<dyn FnOnce() + Send>, Value),
}

/// A server that replies to requests in order. Requests beyond the script get no answer. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Server {
    script: Arc<Mutex<VecDeque<Reply>>>,
    requests: Arc<Mutex<Vec<(Method, String)>>>,
    dry_runs: Arc<Mutex<Vec<bool>>>,
    bodies: Arc<Mutex<Vec<Value>>>,
}

impl Server {
    /// Creates a server with these replies.
    pub(crate) fn new(script: impl IntoIterator<Item = Reply>) -> Self {
        Self { script: Arc::new(Mutex::new(script.into_iter().collect())), ..Self::default() }
    }

    /// Returns a client of the server.
    pub(crate) fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            let called = (request.method().clone(), request.uri().path().to_owned());
            let query = request.uri().query().unwrap_or_default();
            server.dry_runs.lock().unwrap().push(query.split('&').any(|part| part == "dryRun=All"));
            async move {
                let body = request.into_body().collect_bytes().await.unwrap_or_default();
                server.bodies.lock().unwrap().push(serde_json::from_slice(&body).unwrap_or_default());
                server.answer(called).await
            }
        });
        Client::new(service, "default")
    }

    /// Returns method and path of the requests so far.
    pub(crate) fn requests(&self) -> Vec<(Method, String)> {
        self.requests.lock().unwrap().clone()
    }

    /// Returns which of the requests so far were dry runs.
    pub(crate) fn dry_runs(&self) -> Vec<bool> {
        self.dry_runs.lock().unwrap().clone()
    }

    /// Returns the bodies of the requests so far, null for those without JSON.
    pub(crate) fn bodies(&self) -> Vec<Value> {
        self.bodies.lock().unwrap().clone()
    }

    async fn answer(&self, request: (Method, String)) -> Result<Response<Body>, std::convert::Infallible> {
        self.requests.lock().unwrap().push(request);
        let reply = self.script.lock().unwrap().pop_front();
        let (code, body) = match reply {
            Some(Reply::Answer(code, body)) => (code, body),
            Some(Reply::After(act, body)) => {
                act();
                (200, body)
            }
            Some(Reply::Silence) | None => std::future::pending().await,
        };
        let response = Response::builder().status(code).header("content-type", "application/json");
        Ok(response.body(Body::from(body.to_string().into_bytes())).unwrap())
    }
}

/// Returns the body of an error.
pub(crate) fn status(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": reason, "reason": reason, "code": code})
}
