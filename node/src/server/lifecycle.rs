//! Requests that are answered after the VMI carried them out.

use std::convert::Infallible;

use axum::{
    body::Body,
    extract::{Path, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use daemon::quota::Slot;
use protocol::ScreenshotRequest;

use super::{Failure, Served};
use crate::{
    launcher::CALL_TIMEOUT,
    vmi::{Refusal, Request},
};

/// Size of the pieces in which a screenshot is sent.
const PIECE: usize = 64 * 1024;

/// Passes the request of a user on to the VMI.
pub(super) async fn ask(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    request: Request,
) -> Result<StatusCode, Failure> {
    let handle = served.handle(&namespace, &name)?;
    let _slot = served.call_slot(&namespace)?;
    handle.request(request).await?;
    Ok(StatusCode::ACCEPTED)
}

pub(super) async fn screenshot(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
) -> Result<Response, Failure> {
    let handle = served.handle(&namespace, &name)?;
    let launcher = handle.launcher()?;
    // Size of the screenshot and speed of the client are untrusted: screenshots must not exhaust virt-handler's memory.
    let slot = served.screenshots.acquire(namespace).map_err(|_| {
        let message = "too many screenshots on the node, try again later";
        Failure(StatusCode::TOO_MANY_REQUESTS, message.to_owned())
    })?;
    let screenshot = launcher.call(ScreenshotRequest {}, CALL_TIMEOUT).await.map_err(Refusal::from)?.png;
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("image/png")),
        (header::CONTENT_LENGTH, HeaderValue::from(screenshot.len())),
    ];
    Ok((headers, in_pieces(screenshot.into(), slot)).into_response())
}

/// Returns a body that keeps its slot until the last piece is read.
fn in_pieces(screenshot: Bytes, slot: Slot) -> Body {
    Body::from_stream(futures::stream::unfold((screenshot, slot), |(mut rest, slot)| async move {
        if rest.is_empty() {
            return None;
        }
        let piece = rest.split_to(rest.len().min(PIECE));
        Some((Ok::<_, Infallible>(piece), (rest, slot)))
    }))
}

#[cfg(test)]
mod tests {
    use daemon::quota::StreamQuota;
    use futures::StreamExt;

    use super::*;

    #[tokio::test]
    async fn a_screenshot_holds_its_slot_until_its_last_piece_is_read() {
        let quota = StreamQuota::new(super::super::SCREENSHOTS);
        let screenshot: Vec<u8> = (0..2 * PIECE + 1).map(|number| number as u8).collect();
        let slot = quota.acquire("ns".to_owned()).unwrap();
        let mut pieces = in_pieces(screenshot.clone().into(), slot).into_data_stream();
        let mut read = Vec::new();
        while let Some(piece) = pieces.next().await {
            assert_eq!(quota.used(), 1);
            read.extend_from_slice(&piece.unwrap());
        }
        assert_eq!(read, screenshot);
        assert_eq!(quota.used(), 0);
    }

    #[test]
    fn no_namespace_gets_all_slots_for_screenshots() {
        let quota = StreamQuota::new(super::super::SCREENSHOTS);
        let held: Vec<Slot> = std::iter::from_fn(|| quota.acquire("greedy".to_owned()).ok()).collect();
        assert_eq!(held.len(), super::super::SCREENSHOTS - 1);
        assert!(quota.acquire("other".to_owned()).is_ok());
    }
}
