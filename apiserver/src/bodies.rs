//! Bodies of subresource requests, within what all of them may take of memory.
//!
//! Memory is counted as the bytes arrive, so it is not taken by announcing them. For a large body there is room or there
//! is not: nobody waits for the room that others hold, and so no two wait for each other. Small ones are always read,
//! since connections are bounded: who sends large bodies, or half of them, keeps nobody from stopping a machine. What is
//! answered with what was sent keeps the room until it is on its way, so that not to read it wins nobody any memory.

use std::{sync::Arc, time::Duration};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use http_body_util::BodyExt;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use crate::{
    error::ApiError,
    webhooks::{discard, weight},
};

/// Most bytes of large bodies at a time: one VM of the largest size and some others. Read into values they take some
/// twenty times as much.
const MAX_BODIES: usize = 2 << 20;
/// Largest body that is not counted. Options have some hundred bytes.
const SMALL: usize = 4 << 10;
/// Longest time that a client may take for a body.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Size of the pieces of an answer; a connection takes a few of them before it sends the first.
const PIECE: usize = 8 << 10;

/// Room for bodies.
pub struct Bodies {
    room: Arc<Semaphore>,
}

/// A body in memory, with its share of what all may take.
#[derive(Debug)]
pub struct Held {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Given back when this is dropped.
    share: Option<OwnedSemaphorePermit>,
}

impl Default for Bodies {
    fn default() -> Self {
        Self { room: Arc::new(Semaphore::new(MAX_BODIES)) }
    }
}

impl Bodies {
    /// Reads a body of at most `limit` bytes, which counts for as much as it is long.
    ///
    /// # Errors
    /// 400 when it is longer, too slow or broken; 429 when there is no room for it.
    pub async fn read(&self, mut body: Body, limit: usize) -> Result<Held, ApiError> {
        match timeout(TIMEOUT, self.receive(&mut body, limit)).await {
            Ok(Ok(held)) => Ok(held),
            Ok(Err(refusal)) => {
                // A sender that is cut off in the middle does not read the answer.
                discard(&mut body).await;
                Err(refusal)
            }
            Err(_) => Err(unreadable("body took too long")),
        }
    }

    async fn receive(&self, body: &mut Body, limit: usize) -> Result<Held, ApiError> {
        let mut held = Held { bytes: Vec::new(), share: None };
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| unreadable(&error.to_string()))?;
            let Ok(data) = frame.into_data() else { continue };
            let size = held.bytes.len() + data.len();
            if size > limit {
                return Err(unreadable("length limit exceeded"));
            }
            self.count(&mut held, size)?;
            held.bytes.extend_from_slice(&data);
        }
        Ok(held)
    }

    /// Counts a JSON body for what it takes once it is read into values.
    ///
    /// # Errors
    /// 429 when there is no room for it.
    pub fn weigh(&self, held: &mut Held) -> Result<(), ApiError> {
        let weight = weight(&held.bytes).min(MAX_BODIES);
        self.count(held, weight)
    }

    /// Takes the room that is missing for `size` bytes.
    fn count(&self, held: &mut Held, size: usize) -> Result<(), ApiError> {
        let has = held.share.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = if size > SMALL { size.saturating_sub(has) } else { 0 };
        let Ok(more) = self.room.clone().try_acquire_many_owned(u32::try_from(missing).unwrap_or(u32::MAX)) else {
            return Err(ApiError::TooManyRequests(
                "virt-api reads too many large requests already, try again later".to_owned(),
            ));
        };
        match &mut held.share {
            Some(share) => share.merge(more),
            share @ None => *share = Some(more),
        }
        Ok(())
    }
}

impl Held {
    /// An answer made of this, which keeps its share until the last pieces are sent.
    pub fn answer(self, response: Response) -> Response {
        let share = self.share;
        response.map(|body| {
            let pieces = Box::pin(body.into_data_stream().map_ok(pieces).try_flatten());
            Body::from_stream(stream::unfold((pieces, share), |(mut pieces, share)| async move {
                Some((pieces.next().await?, (pieces, share)))
            }))
        })
    }
}

/// Copies, so that none of them keeps the whole in memory.
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

    const LARGEST: usize = crate::expansion::MAX_VM;

    #[tokio::test]
    async fn large_bodies_have_room_or_are_refused_and_small_ones_are_read_all_the_same() {
        let bodies = Bodies::default();
        let sent = |size: usize| Body::from(vec![b' '; size]);
        let first = bodies.read(sent(LARGEST), LARGEST).await.unwrap();
        assert_eq!(first.bytes.len(), LARGEST);
        let refused = bodies.read(sent(LARGEST), LARGEST).await.unwrap_err();
        assert!(matches!(refused, ApiError::TooManyRequests(_)), "{refused:?}");
        let second = bodies.read(sent(MAX_BODIES - LARGEST), LARGEST).await.unwrap();
        assert_eq!(bodies.room.available_permits(), 0);
        assert!(bodies.read(sent(SMALL + 1), LARGEST).await.is_err());
        assert_eq!(bodies.read(sent(SMALL), LARGEST).await.unwrap().bytes.len(), SMALL);
        drop((first, second));
        assert_eq!(bodies.room.available_permits(), MAX_BODIES);
    }

    #[tokio::test]
    async fn many_values_count_for_more_than_their_bytes() {
        let bodies = Bodies::default();
        let json = format!("[{}]", vec!["{}"; 5_000].join(","));
        let mut held = bodies.read(Body::from(json), LARGEST).await.unwrap();
        let before = bodies.room.available_permits();
        bodies.weigh(&mut held).unwrap();
        assert!(before - bodies.room.available_permits() > 1 << 20, "{}", bodies.room.available_permits());
        // A small one that holds little is still free of charge.
        let mut held = bodies.read(Body::from("{}"), LARGEST).await.unwrap();
        let before = bodies.room.available_permits();
        bodies.weigh(&mut held).unwrap();
        assert_eq!(bodies.room.available_permits(), before);
    }

    #[tokio::test]
    async fn answer_that_is_not_read_keeps_the_room_of_its_question() {
        let bodies = Bodies::default();
        let held = bodies.read(Body::from(vec![b' '; LARGEST]), LARGEST).await.unwrap();
        let text = (0..LARGEST).map(|at| b'a' + u8::try_from(at % 23).unwrap()).collect::<Vec<_>>();
        let mut answer = held.answer(Response::new(Body::from(text.clone()))).into_body().into_data_stream();
        let mut read = answer.next().await.unwrap().unwrap().to_vec();
        assert_eq!(read.len(), PIECE);
        assert_eq!(bodies.room.available_permits(), MAX_BODIES - LARGEST);
        while let Some(piece) = answer.next().await {
            read.extend_from_slice(&piece.unwrap());
        }
        assert!(read == text);
        assert_eq!(bodies.room.available_permits(), MAX_BODIES);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_too_long_or_too_slow_is_the_clients_fault() {
        let bodies = Bodies::default();
        let long = bodies.read(Body::from("123456"), 5).await.unwrap_err();
        assert_eq!(long, unreadable("length limit exceeded"));
        let silent = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        assert_eq!(bodies.read(silent, 5).await.unwrap_err(), unreadable("body took too long"));
    }
}
