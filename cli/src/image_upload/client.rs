//! Client of the upload proxy. The way to it can lead through a proxy of the environment.

use std::io;

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{HeaderValue, Request, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use hyper_util::{
    client::legacy::{
        Client, ResponseFuture,
        connect::{
            Connect, HttpConnector,
            proxy::{SocksV5, Tunnel},
        },
    },
    rt::TokioExecutor,
};
use kube::client::ConfigExt;
use percent_encoding::percent_decode_str;

use crate::Error;

/// Body of a request.
pub(super) type Body = UnsyncBoxBody<Bytes, io::Error>;
/// Sends a request.
pub(super) type Sender = Box<dyn Fn(Request<Body>) -> ResponseFuture>;

/// Returns a client with the proxy of this configuration. The client of kube takes no body that is read piece by piece.
pub(super) fn client(config: &kube::Config) -> Result<Sender, Error> {
    let failed = |error: kube::Error| Error::Stream(error.to_string());
    let mut direct = HttpConnector::new();
    // The connector around this one knows https.
    direct.enforce_http(false);
    let Some(proxy) = config.proxy_url.clone() else {
        return Ok(over(config.rustls_https_connector_with_connector(direct).map_err(failed)?));
    };
    Ok(match proxy.scheme_str() {
        Some("socks5") => {
            let socks = SocksV5::new(proxy, direct);
            over(config.rustls_https_connector_with_connector(socks).map_err(failed)?)
        }
        Some("https") => {
            let encrypted = config.rustls_https_connector_with_connector(direct).map_err(failed)?;
            over(config.rustls_https_connector_with_connector(tunnel(proxy, encrypted)).map_err(failed)?)
        }
        _ => over(config.rustls_https_connector_with_connector(tunnel(proxy, direct)).map_err(failed)?),
    })
}

fn over(connector: impl Connect + Clone + Send + Sync + 'static) -> Sender {
    let client: Client<_, Body> = Client::builder(TokioExecutor::new()).build(connector);
    Box::new(move |request| client.request(request))
}

fn tunnel<C>(proxy: Uri, connector: C) -> Tunnel<C> {
    let credentials = credentials(&proxy);
    let tunnel = Tunnel::new(proxy, connector);
    match credentials {
        Some(credentials) => tunnel.with_auth(credentials),
        None => tunnel,
    }
}

/// Returns the header value of a user and a password in the address of a proxy. A missing password is an empty one.
fn credentials(proxy: &Uri) -> Option<HeaderValue> {
    let (user, _) = proxy.authority()?.as_str().rsplit_once('@')?;
    let colon = if user.contains(':') { "" } else { ":" };
    let decoded: Vec<u8> = percent_decode_str(&format!("{user}{colon}")).collect();
    HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(decoded))).ok()
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, Empty};
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn requests_go_through_the_proxy() {
        let connect = "CONNECT a.example.com:443 HTTP/1.1\r\nHost: a.example.com:443\r\n";
        let authorized = format!("{connect}Proxy-Authorization: Basic am9lOnBAc3M=\r\n\r\n");
        for (scheme, user, address, greeting) in [
            ("http", "", "https://a.example.com/v1beta1/upload", format!("{connect}\r\n").as_bytes()),
            ("http", "joe:p%40ss@", "https://a.example.com/v1beta1/upload", authorized.as_bytes()),
            ("http", "", "http://a.example.com:80/v1beta1/upload", b"CONNECT a.example.com:80 "),
            ("socks5", "", "https://a.example.com/v1beta1/upload", &[5, 1, 0]),
        ] {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let proxy = format!("{scheme}://{user}{}", listener.local_addr().unwrap());
            let mut config = kube::Config::new(address.parse().unwrap());
            config.accept_invalid_certs = true;
            config.proxy_url = Some(proxy.parse().unwrap());
            let client = client(&config).unwrap();
            let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
            let request = Request::get(address).body(body).unwrap();
            let received = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut bytes = vec![0; greeting.len()];
                stream.read_exact(&mut bytes).await.unwrap();
                bytes
            };
            tokio::select! {
                _ = client(request) => panic!("{proxy}: no connection to the proxy"),
                bytes = received => assert_eq!(bytes, greeting, "{proxy}"),
            }
        }
    }

    #[test]
    fn user_of_a_proxy_needs_no_password() {
        for (proxy, expected) in [
            ("http://joe@proxy", Some("Basic am9lOg==")),
            ("http://joe:pw@proxy", Some("Basic am9lOnB3")),
            ("http://proxy:3128", None),
        ] {
            let found = credentials(&proxy.parse().unwrap());
            assert_eq!(found.as_ref().map(|value| value.to_str().unwrap()), expected, "{proxy}");
        }
    }
}
