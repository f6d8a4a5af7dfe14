//! Bodies of subresource requests, within what all of them may take of memory.
//!
//! Memory is counted as the bytes arrive, so it is not taken by announcing them. For a large body there is room or there
//! is not: nobody waits for the room that others hold, and so no two wait for each other. Small ones are always read,
//! since connections are bounded: who sends large bodies, or half of them, keeps nobody from stopping a machine.

use std::time::Duration;

use axum::body::Body;
use http_body_util::BodyExt;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
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

/// Room for bodies.
pub struct Bodies {
    room: Semaphore,
}

/// A body in memory, with its share of what all may take.
#[derive(Debug)]
pub struct Held<'a> {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Given back when this is dropped.
    pub share: Option<SemaphorePermit<'a>>,
}

impl Default for Bodies {
    fn default() -> Self {
        Self { room: Semaphore::new(MAX_BODIES) }
    }
}

impl Bodies {
    /// Reads a body of at most `limit` bytes, which counts for as much as it is long.
    ///
    /// # Errors
    /// 400 when it is longer, too slow or broken; 429 when there is no room for it.
    pub async fn read(&self, mut body: Body, limit: usize) -> Result<Held<'_>, ApiError> {
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

    async fn receive(&self, body: &mut Body, limit: usize) -> Result<Held<'_>, ApiError> {
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
    pub fn weigh<'a>(&'a self, held: &mut Held<'a>) -> Result<(), ApiError> {
        let weight = weight(&held.bytes).min(MAX_BODIES);
        self.count(held, weight)
    }

    /// Takes the room that is missing for `size` bytes.
    fn count<'a>(&'a self, held: &mut Held<'a>, size: usize) -> Result<(), ApiError> {
        let has = held.share.as_ref().map_or(0, SemaphorePermit::num_permits);
        let missing = if size > SMALL { size.saturating_sub(has) } else { 0 };
        let Ok(more) = self.room.try_acquire_many(u32::try_from(missing).unwrap_or(u32::MAX)) else {
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

    #[tokio::test(start_paused = true)]
    async fn what_is_too_long_or_too_slow_is_the_clients_fault() {
        let bodies = Bodies::default();
        let long = bodies.read(Body::from("123456"), 5).await.unwrap_err();
        assert_eq!(long, unreadable("length limit exceeded"));
        let silent = Body::from_stream(futures::stream::pending::<Result<bytes::Bytes, std::io::Error>>());
        assert_eq!(bodies.read(silent, 5).await.unwrap_err(), unreadable("body took too long"));
    }
}
