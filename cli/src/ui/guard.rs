//! Guards the local server: a request needs the token of this run in its path, the server's own `Host`, and, if it changes
//! something or opens a stream, the `Origin` of the server's own pages.
//!
//! The token is no cookie: browsers send those of 127.0.0.1 to each port of it, also to a port of another user of the host.

use std::io::Read;

use http::{HeaderMap, Method, header, request::Parts};
use subtle::ConstantTimeEq;

use crate::Error;

/// Length of the token in bytes.
const TOKEN: usize = 32;
/// Hosts in the URLs of the server.
const HOSTS: [&str; 2] = ["127.0.0.1", "localhost"];

/// Reason to refuse a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Denied {
    /// The path does not begin with the token.
    #[error("open the URL that kubectl virt ui printed: it contains the token of this run")]
    Token,
    /// The request was meant for another host: a name of somebody else may resolve to this one.
    #[error("the host of the URL must be 127.0.0.1 or localhost, with the port of this server")]
    Host,
    /// Another page sent the request.
    #[error("only the pages of this server can send this request")]
    Origin,
}

/// The token and the port of a run.
pub(super) struct Guard {
    token: String,
    port: u16,
}

impl Guard {
    /// Draws a token.
    pub(super) fn new(port: u16) -> Result<Self, Error> {
        let failed = || Error::io("cannot read random bytes from /dev/urandom");
        let mut bytes = [0_u8; TOKEN];
        let mut source = std::fs::File::open("/dev/urandom").map_err(failed())?;
        source.read_exact(&mut bytes).map_err(failed())?;
        Ok(Self { token: bytes.iter().map(|byte| format!("{byte:02x}")).collect(), port })
    }

    /// Returns the URL of the first page.
    pub(super) fn url(&self) -> String {
        format!("http://{}:{}/{}/", HOSTS[0], self.port, self.token)
    }

    /// Returns the path below the token.
    pub(super) fn admit<'a>(&self, request: &'a Parts) -> Result<&'a str, Denied> {
        let host = only(&request.headers, &header::HOST).ok_or(Denied::Host)?;
        // Browsers leave out the port of the scheme.
        let is_own = |name: &&str| host == format!("{name}:{}", self.port) || (self.port == 80 && host == *name);
        if !HOSTS.iter().any(is_own) {
            return Err(Denied::Host);
        }
        let path = request.uri.path().strip_prefix('/').and_then(|path| path.split_once('/'));
        let (token, path) = path.ok_or(Denied::Token)?;
        if !bool::from(token.as_bytes().ct_eq(self.token.as_bytes())) {
            return Err(Denied::Token);
        }
        let is_origin_needed = request.method != Method::GET || request.headers.contains_key(header::UPGRADE);
        match only(&request.headers, &header::ORIGIN) {
            Some(origin) if origin == format!("http://{host}") => Ok(path),
            None if !is_origin_needed && !request.headers.contains_key(header::ORIGIN) => Ok(path),
            _ => Err(Denied::Origin),
        }
    }
}

/// Returns the value of a header that the request has once.
fn only<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn guard(token: &str) -> Guard {
        Guard { token: token.to_owned(), port: 8080 }
    }

    fn parts(method: &str, path: &str, headers: &[(&str, &str)]) -> Parts {
        let request = headers.iter().fold(Request::builder(), |request, (name, value)| request.header(*name, *value));
        request.method(method).uri(path).body(()).unwrap().into_parts().0
    }

    #[test]
    fn requests_need_token_host_and_origin() {
        let host = ("host", "127.0.0.1:8080");
        let origin = ("origin", "http://127.0.0.1:8080");
        let upgrade = ("upgrade", "websocket");
        for (method, path, headers, expected) in [
            ("GET", "/secret/", &[host][..], Ok("")),
            ("GET", "/secret/novnc/core/rfb.js?a=b", &[host], Ok("novnc/core/rfb.js")),
            ("GET", "/secret/", &[host, origin], Ok("")),
            ("GET", "/secret/", &[("host", "localhost:8080")], Ok("")),
            ("POST", "/secret/vms/a/b/stop", &[host, origin], Ok("vms/a/b/stop")),
            ("GET", "/secret/watch", &[host, origin, upgrade], Ok("watch")),
            ("GET", "/", &[host], Err(Denied::Token)),
            ("GET", "/secret", &[host], Err(Denied::Token)),
            ("GET", "/Secret/", &[host], Err(Denied::Token)),
            ("GET", "/secret1/", &[host], Err(Denied::Token)),
            ("GET", "//secret/", &[host], Err(Denied::Token)),
            ("GET", "/index.html?secret", &[host], Err(Denied::Token)),
            ("GET", "/secret/", &[], Err(Denied::Host)),
            ("GET", "/secret/", &[("host", "127.0.0.1")], Err(Denied::Host)),
            ("GET", "/secret/", &[("host", "127.0.0.1:8081")], Err(Denied::Host)),
            ("GET", "/secret/", &[("host", "rebound.example.com:8080")], Err(Denied::Host)),
            ("GET", "/secret/", &[host, ("host", "example.com")], Err(Denied::Host)),
            ("GET", "/secret/", &[host, ("origin", "null")], Err(Denied::Origin)),
            ("GET", "/secret/watch", &[host, upgrade], Err(Denied::Origin)),
            ("GET", "/secret/watch", &[host, upgrade, ("origin", "https://example.com")], Err(Denied::Origin)),
            ("GET", "/secret/watch", &[host, upgrade, ("origin", "http://127.0.0.1:8081")], Err(Denied::Origin)),
            ("POST", "/secret/vms/a/b/stop", &[host], Err(Denied::Origin)),
            ("POST", "/secret/vms/a/b/stop", &[host, origin, origin], Err(Denied::Origin)),
            ("POST", "/secret/vms/a/b/stop", &[host, ("origin", "http://localhost:8080")], Err(Denied::Origin)),
        ] {
            assert_eq!(guard("secret").admit(&parts(method, path, headers)), expected, "{method} {path} {headers:?}");
        }
    }

    #[test]
    fn port_of_the_scheme_may_be_left_out() {
        let guard = Guard { token: "secret".to_owned(), port: 80 };
        for (host, origin, expected) in [
            ("127.0.0.1", "http://127.0.0.1", Ok("watch")),
            ("localhost:80", "http://localhost:80", Ok("watch")),
            ("127.0.0.1", "http://localhost", Err(Denied::Origin)),
            ("example.com", "http://example.com", Err(Denied::Host)),
        ] {
            let request =
                parts("GET", "/secret/watch", &[("host", host), ("origin", origin), ("upgrade", "websocket")]);
            assert_eq!(guard.admit(&request), expected, "{host} {origin}");
        }
    }

    #[test]
    fn each_run_has_a_token_of_its_own() {
        let (first, second) = (Guard::new(8080).unwrap(), Guard::new(8080).unwrap());
        assert!(first.token.len() == 2 * TOKEN && first.token != second.token);
        assert_eq!(first.url(), format!("http://127.0.0.1:8080/{}/", first.token));
    }
}
