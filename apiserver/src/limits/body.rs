//! Discarding the rest of a refused body.

use std::time::Duration;

use axum::body::Body;
use http_body_util::BodyExt;
use tokio::time::timeout;

/// Largest number of bytes discarded of a refused body.
pub(crate) const MAX_DISCARDED: usize = 32 << 20;
/// Longest time for discarding.
const DISCARD_DEADLINE: Duration = Duration::from_millis(800);

/// Discards the rest of a body, within bounds: a client that is cut off while it sends does not read the answer.
pub(crate) async fn discard(body: &mut Body) {
    let all = async {
        let mut discarded = 0;
        while let Some(Ok(frame)) = body.frame().await {
            discarded += frame.data_ref().map_or(0, bytes::Bytes::len);
            if discarded > MAX_DISCARDED {
                break;
            }
        }
    };
    // A slower client misses the answer.
    timeout(DISCARD_DEADLINE, all).await.ok();
}
