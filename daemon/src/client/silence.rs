//! Ends watches on which nothing arrives.
//!
//! The API server ends a watch after a time that the client names, and kube's watcher waits as long, and 5 s more, for an event or a
//! bookmark. So that time alone would have to be short for a connection that was lost silently to be noticed. kube-apiserver sends a bookmark
//! a minute. Here a watch on which nothing arrives for some minutes ends as if the API server had ended it: it begins anew from the last
//! version that it has seen. A watch without bookmarks merely does so often.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use http::{Request, Response};
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tower::{Layer, Service};

/// Returns true for the query of a watch.
pub(super) fn is_watch(query: Option<&str>) -> bool {
    query.unwrap_or_default().split('&').any(|pair| matches!(pair, "watch=true" | "watch=1"))
}

/// Ends the silent watches of a client.
#[derive(Clone, Copy)]
pub(super) struct SilenceLayer;

impl<S> Layer<S> for SilenceLayer {
    type Service = Silence<S>;

    fn layer(&self, inner: S) -> Silence<S> {
        Silence { inner }
    }
}

/// A service whose silent watches end.
#[derive(Clone)]
pub(super) struct Silence<S> {
    inner: S,
}

impl<S, B, R> Service<Request<B>> for Silence<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = Response<Bounded<R>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let longest = is_watch(request.uri().query()).then(crate::watch::silence);
        let answer = self.inner.call(request);
        async move { answer.await.map(|answer| answer.map(|body| Bounded::new(body, longest))) }.boxed()
    }
}

/// The body of an answer, which ends when nothing arrives for some time.
pub(super) struct Bounded<R> {
    /// `None` after its end. The connection of a body that is dropped before its end is closed.
    body: Option<R>,
    limit: Option<Limit>,
}

/// The limit of a body.
struct Limit {
    longest: Duration,
    end: Pin<Box<Sleep>>,
}

impl<R> Bounded<R> {
    /// Creates a body that ends after this silence; `None`: it may be silent for ever.
    fn new(body: R, longest: Option<Duration>) -> Self {
        let limit = longest.map(|longest| Limit { longest, end: Box::pin(tokio::time::sleep(longest)) });
        Self { body: Some(body), limit }
    }
}

impl<R: Body + Unpin> Body for Bounded<R> {
    type Data = R::Data;
    type Error = R::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<R::Data>, R::Error>>> {
        let this = self.get_mut();
        let Some(body) = this.body.as_mut() else { return Poll::Ready(None) };
        let frame = Pin::new(body).poll_frame(context);
        let Some(limit) = this.limit.as_mut() else { return frame };
        if frame.is_ready() {
            limit.end.as_mut().reset(Instant::now() + limit.longest);
            return frame;
        }
        ready!(limit.end.as_mut().poll(context));
        tracing::debug!("watch was silent for too long");
        this.body = None;
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::{StreamExt, stream};

    use super::*;

    /// A body with a frame after each of these pauses in seconds, which does not end.
    fn body(pauses: &[u64]) -> axum::body::Body {
        let frames = stream::iter(pauses.to_vec()).then(|pause| async move {
            tokio::time::sleep(Duration::from_secs(pause)).await;
            Ok::<_, Infallible>("frame")
        });
        axum::body::Body::from_stream(frames.chain(stream::pending()))
    }

    #[tokio::test(start_paused = true)]
    async fn body_ends_when_nothing_arrives_for_its_limit() {
        // Pauses before its frames, number of those that arrive, and seconds until the end.
        for (pauses, frames, end) in
            [(&[][..], 0, 100), (&[60, 60, 99][..], 3, 319), (&[60, 101][..], 1, 160), (&[99; 30][..], 30, 3070)]
        {
            let start = Instant::now();
            let bounded = Bounded::new(body(pauses), Some(Duration::from_secs(100)));
            let found = axum::body::Body::new(bounded).into_data_stream().collect::<Vec<_>>().await;
            assert!(found.iter().all(Result::is_ok));
            assert_eq!((found.len(), start.elapsed().as_secs()), (frames, end), "{pauses:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_watches_end() {
        for (query, ends) in
            [("?timeoutSeconds=1800&watch=true", true), ("?watch=1", true), ("?watch=false", false), ("", false)]
        {
            let service = tower::service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(body(&[]))) });
            let request = Request::get(format!("/api/v1/pods{query}")).body(()).unwrap();
            let answer = SilenceLayer.layer(service).call(request).await.unwrap();
            let rest = axum::body::Body::new(answer.into_body()).into_data_stream().collect::<Vec<_>>();
            assert_eq!(tokio::time::timeout(Duration::from_secs(290), rest).await.is_ok(), ends, "{query}");
        }
    }
}
