//! The calls with one request and one answer, by the type of the request.

use tonic::{Request, Response, Status, transport::Channel};

use crate::messages::*;

/// A client over a connection.
pub type Client = launcher_client::LauncherClient<Channel>;

/// The request of a call with one answer. `build.rs` implements it for each such call of the protocol.
pub trait Unary: Sized + Send + 'static {
    /// The answer.
    type Reply: Send;
    /// Name of the call.
    const NAME: &'static str;

    /// Sends the request.
    fn send(
        client: &mut Client,
        request: Request<Self>,
    ) -> impl Future<Output = Result<Response<Self::Reply>, Status>> + Send;
}

include!(concat!(env!("OUT_DIR"), "/calls.rs"));
