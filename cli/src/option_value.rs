//! Values of options: addresses and time limits.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use http::Uri;
use k8s_openapi::jiff::SignedDuration;

/// The reason why the value of an option is not valid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OptionError {
    /// The text is not a URL.
    #[error("{0}")]
    Url(String),
    /// The URL is not one of a server.
    #[error("not a server address; example: https://192.0.2.1:6443")]
    Server,
    /// The text is not a time limit.
    #[error("not a time limit; examples: 10s, 2m, 1h")]
    TimeLimit,
    /// The text is not a local address.
    #[error("must be an IP address or localhost")]
    LocalAddress,
}

/// Parses the address of an API server. The default scheme is https.
pub(crate) fn server(text: &str) -> Result<Uri, OptionError> {
    let url = if text.contains("://") { text.to_owned() } else { format!("https://{text}") };
    let uri = url.parse::<Uri>().map_err(|error| OptionError::Url(error.to_string()))?;
    match (uri.scheme_str(), uri.host()) {
        (Some("https" | "http"), Some(host)) if !host.is_empty() => Ok(uri),
        _ => Err(OptionError::Server),
    }
}

/// Parses a time limit as kubectl does: with a unit, or in seconds.
pub(crate) fn time_limit(text: &str) -> Result<Duration, OptionError> {
    if let Ok(seconds) = text.parse() {
        return Ok(Duration::from_secs(seconds));
    }
    let limit = text.parse::<SignedDuration>().ok().and_then(|limit| Duration::try_from(limit).ok());
    limit.ok_or(OptionError::TimeLimit)
}

/// Parses a local address to listen on: an IP address or `localhost`.
pub(crate) fn local_address(text: &str) -> Result<IpAddr, OptionError> {
    if text == "localhost" {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    text.parse().map_err(|_| OptionError::LocalAddress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_addresses() {
        for (text, expected) in [
            ("https://192.0.2.1:6443", Some("https://192.0.2.1:6443/")),
            ("api.example.com", Some("https://api.example.com/")),
            ("http://[::1]:8001/proxy", Some("http://[::1]:8001/proxy")),
            ("ftp://example.com", None),
            ("https://", None),
            ("", None),
        ] {
            assert_eq!(server(text).ok().map(|uri| uri.to_string()).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn time_limits_have_units_or_are_seconds() {
        for (text, expected) in [
            ("0", Some(0)),
            ("90", Some(90_000)),
            ("500ms", Some(500)),
            ("1m30s", Some(90_000)),
            ("-1s", None),
            ("-1", None),
            ("soon", None),
            ("", None),
        ] {
            assert_eq!(time_limit(text).ok(), expected.map(Duration::from_millis), "{text}");
        }
    }

    #[test]
    fn local_addresses_may_be_called_localhost() {
        assert_eq!(local_address("localhost"), Ok(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(local_address("::1"), Ok("::1".parse().unwrap()));
        assert!(local_address("example.com").is_err());
    }
}
