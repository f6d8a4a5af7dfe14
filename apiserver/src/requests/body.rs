//! Bodies of subresource requests, within a memory budget for all of them.
//!
//! Bytes are counted as they arrive. A large body that exceeds the budget is refused at once: no request waits for memory
//! that another one holds, so no two requests wait for each other. Small bodies are always read, since connections are
//! bounded: large or incomplete bodies of one client do not prevent another client from stopping a VM. An answer made of the
//! body keeps the reservation until it is sent, so a client that does not read its answer gains no memory.

use std::time::Duration;

use axum::{body::Body, response::Response};
use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use http_body_util::BodyExt;
use tokio::time::timeout;

use super::error::ApiError;
use crate::limits::{MemoryBudget, Reservation, body::discard, memory::weight};

/// Bytes of large bodies at a time: one VM of the largest size and some others. Parsed into values they take about
/// twenty times as much.
const MAX_BODIES: usize = 2 << 20;
/// Largest body that is not counted. Options have some hundred bytes.
const SMALL: usize = 4 << 10;
/// Longest time that a client may take for a body.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Size of the pieces of an answer; a connection takes a few of them before it sends the first.
const PIECE: usize = 8 << 10;

/// Reads bodies within one memory budget.
pub(crate) struct BodyReader {
    budget: MemoryBudget,
}

/// A body in memory, with its reservation.
#[derive(Debug, Default)]
pub(crate) struct ReadBody {
    /// The bytes.
    pub bytes: Vec<u8>,
    reservation: Reservation,
}

impl Default for BodyReader {
    fn default() -> Self {
        Self { budget: MemoryBudget::new(MAX_BODIES) }
    }
}

impl BodyReader {
    /// Reads a body of at most `limit` bytes and reserves as many.
    ///
    /// # Errors
    /// 400 when the body is longer, too slow or broken; 429 when the budget is exhausted.
    pub(crate) async fn read(&self, mut body: Body, limit: usize) -> Result<ReadBody, ApiError> {
        match timeout(TIMEOUT, self.receive(&mut body, limit)).await {
            Ok(Ok(read)) => Ok(read),
            Ok(Err(refusal)) => {
                discard(&mut body).await;
                Err(refusal)
            }
            Err(_) => Err(unreadable("body took too long")),
        }
    }

    async fn receive(&self, body: &mut Body, limit: usize) -> Result<ReadBody, ApiError> {
        let mut read = ReadBody::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| unreadable(&error.to_string()))?;
            let Ok(data) = frame.into_data() else { continue };
            let size = read.bytes.len() + data.len();
            if size > limit {
                return Err(unreadable("length limit exceeded"));
            }
            self.count(&mut read, size)?;
            read.bytes.extend_from_slice(&data);
        }
        Ok(read)
    }

    /// Reserves the memory that a JSON body takes once it is parsed.
    ///
    /// # Errors
    /// 429 when the budget is exhausted.
    pub(crate) fn count_values(&self, read: &mut ReadBody) -> Result<(), ApiError> {
        let weight = weight(&read.bytes).min(MAX_BODIES);
        self.count(read, weight)
    }

    /// Extends the reservation to `size` bytes.
    fn count(&self, read: &mut ReadBody, size: usize) -> Result<(), ApiError> {
        let missing = if size > SMALL { size.saturating_sub(read.reservation.bytes()) } else { 0 };
        self.budget.try_reserve(&mut read.reservation, missing).map_err(|_| {
            ApiError::TooManyRequests("virt-api reads too many large requests already, try again later".to_owned())
        })
    }
}

impl ReadBody {
    /// Returns an answer that keeps the reservation until its last piece is sent.
    pub(crate) fn answer(self, response: Response) -> Response {
        let reservation = self.reservation;
        response.map(|body| {
            let pieces = Box::pin(body.into_data_stream().map_ok(pieces).try_flatten());
            Body::from_stream(stream::unfold((pieces, reservation), |(mut pieces, reservation)| async move {
                Some((pieces.next().await?, (pieces, reservation)))
            }))
        })
    }
}

/// Copies the pieces, so that none of them keeps the whole in memory.
fn pieces(data: Bytes) -> impl Stream<Item = Result<Bytes, axum::Error>> {
    let starts = (0..data.len()).step_by(PIECE);
    stream::iter(starts.map(move |start| {
        let piece = data.get(start..data.len().min(start + PIECE)).unwrap_or_default();
        Ok(Bytes::copy_from_slice(piece))
    }))
}

fn unreadable(error: &str) -> ApiError {
    ApiError::BadRequest(format!("Can not unmarshal Request body to struct, error: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest VM.
    const LARGEST: usize = 3 << 19;

    #[tokio::test]
    async fn large_body_beyond_the_budget_is_refused_and_small_ones_are_read() {
        let bodies = BodyReader::default();
        let sent = |size: usize| Body::from(vec![b' '; size]);
        let first = bodies.read(sent(LARGEST), LARGEST).await.unwrap();
        assert_eq!(first.bytes.len(), LARGEST);
        let refused = bodies.read(sent(LARGEST), LARGEST).await.unwrap_err();
        assert!(matches!(refused, ApiError::TooManyRequests(_)), "{refused:?}");
        let second = bodies.read(sent(MAX_BODIES - LARGEST), LARGEST).await.unwrap();
        assert_eq!(bodies.budget.available(), 0);
        assert!(bodies.read(sent(SMALL + 1), LARGEST).await.is_err());
        assert_eq!(bodies.read(sent(SMALL), LARGEST).await.unwrap().bytes.len(), SMALL);
        drop((first, second));
        assert_eq!(bodies.budget.available(), MAX_BODIES);
    }

    #[tokio::test]
    async fn many_values_count_more_than_their_bytes() {
        let bodies = BodyReader::default();
        let json = format!("[{}]", vec!["{}"; 5_000].join(","));
        let mut read = bodies.read(Body::from(json), LARGEST).await.unwrap();
        let before = bodies.budget.available();
        bodies.count_values(&mut read).unwrap();
        assert!(before - bodies.budget.available() > 1 << 20, "{}", bodies.budget.available());
        // A small body with few values is not counted.
        let mut read = bodies.read(Body::from("{}"), LARGEST).await.unwrap();
        let before = bodies.budget.available();
        bodies.count_values(&mut read).unwrap();
        assert_eq!(bodies.budget.available(), before);
    }

    #[tokio::test]
    async fn unread_answer_keeps_the_reservation_of_its_request() {
        let bodies = BodyReader::default();
        let read = bodies.read(Body::from(vec![b' '; LARGEST]), LARGEST).await.unwrap();
        let text = (0..LARGEST).map(|at| b'a' + u8::try_from(at % 23).unwrap()).collect::<Vec<_>>();
        let mut answer = read.answer(Response::new(Body::from(text.clone()))).into_body().into_data_stream();
        let mut sent = answer.next().await.unwrap().unwrap().to_vec();
        assert_eq!(sent.len(), PIECE);
        assert_eq!(bodies.budget.available(), MAX_BODIES - LARGEST);
        while let Some(piece) = answer.next().await {
            sent.extend_from_slice(&piece.unwrap());
        }
        assert!(sent == text);
        assert_eq!(bodies.budget.available(), MAX_BODIES);
    }

    #[tokio::test(start_paused = true)]
    async fn long_or_slow_body_is_a_bad_request() {
        let bodies = BodyReader::default();
        let long = bodies.read(Body::from("123456"), 5).await.unwrap_err();
        assert_eq!(long, unreadable("length limit exceeded"));
        let silent = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        assert_eq!(bodies.read(silent, 5).await.unwrap_err(), unreadable("body took too long"));
    }
}
