//! Requests that are answered once the machine has done what they ask.

use std::convert::Infallible;

use axum::{
    body::Body,
    extract::{Path, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use process::shares::Share;

use super::{Failure, Served};
use crate::machine::{Refusal, Request};

/// A picture is handed over in pieces of this size.
const PIECE: usize = 64 * 1024;

pub(super) async fn pause(served: State<Served>, machine: Path<(String, String)>) -> Result<StatusCode, Failure> {
    ask(served, machine, Request::Pause).await
}

pub(super) async fn unpause(served: State<Served>, machine: Path<(String, String)>) -> Result<StatusCode, Failure> {
    ask(served, machine, Request::Unpause).await
}

pub(super) async fn reset(served: State<Served>, machine: Path<(String, String)>) -> Result<StatusCode, Failure> {
    ask(served, machine, Request::Reset).await
}

pub(super) async fn soft_reboot(served: State<Served>, machine: Path<(String, String)>) -> Result<StatusCode, Failure> {
    ask(served, machine, Request::SoftReboot).await
}

async fn ask(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    request: Request,
) -> Result<StatusCode, Failure> {
    let machine = served.machine(&namespace, &name)?;
    let _place = served.place(&namespace)?;
    machine.ask(request).await?;
    Ok(StatusCode::ACCEPTED)
}

pub(super) async fn screenshot(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
) -> Result<Response, Failure> {
    let machine = served.machine(&namespace, &name)?;
    let launcher = machine.launcher()?;
    // What the guest shows and how fast the client reads is up to them: together they must not fill the agent's memory.
    let place = served.pictures.claim(namespace).map_err(|_| {
        let message = "too many pictures are being taken on the node, try again later";
        Failure(StatusCode::TOO_MANY_REQUESTS, message.to_owned())
    })?;
    let picture = launcher.screenshot().await.map_err(Refusal::from)?;
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("image/png")),
        (header::CONTENT_LENGTH, HeaderValue::from(picture.len())),
    ];
    Ok((headers, in_pieces(picture.into(), place)).into_response())
}

/// The picture as a body that keeps its place until the last piece is taken.
fn in_pieces(picture: Bytes, place: Share) -> Body {
    Body::from_stream(futures::stream::unfold((picture, place), |(mut rest, place)| async move {
        if rest.is_empty() {
            return None;
        }
        let piece = rest.split_to(rest.len().min(PIECE));
        Some((Ok::<_, Infallible>(piece), (rest, place)))
    }))
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use process::shares::Shares;

    use super::*;

    #[tokio::test]
    async fn a_picture_has_its_place_until_its_last_piece_is_taken() {
        let places: Shares = Shares::of(super::super::PICTURES);
        let picture: Vec<u8> = (0..2 * PIECE + 1).map(|number| number as u8).collect();
        let place = places.claim("ns".to_owned()).unwrap();
        let mut pieces = in_pieces(picture.clone().into(), place).into_data_stream();
        let mut taken = Vec::new();
        while let Some(piece) = pieces.next().await {
            assert_eq!(places.taken(), 1);
            taken.extend_from_slice(&piece.unwrap());
        }
        assert_eq!(taken, picture);
        assert_eq!(places.taken(), 0);
    }

    #[test]
    fn no_namespace_has_all_places_for_pictures() {
        let places: Shares = Shares::of(super::super::PICTURES);
        let held: Vec<Share> = std::iter::from_fn(|| places.claim("greedy".to_owned()).ok()).collect();
        assert_eq!(held.len(), super::super::PICTURES - 1);
        assert!(places.claim("other".to_owned()).is_ok());
    }
}
