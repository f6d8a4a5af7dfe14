//! The proxy between this program and a server, by the rules of Go's `httpproxy`, which kubectl follows.

use std::net::IpAddr;

use http::Uri;
use ipnet::IpNet;

/// Parses the address of a proxy. The default port of SOCKS5 is 1080.
pub(crate) fn address(text: &str) -> Result<Uri, String> {
    // The text can contain a password, so no message repeats it.
    let uri = text.parse::<Uri>().map_err(|error| format!("the proxy is not a URL: {error}"))?;
    let authority = uri.authority().map(ToString::to_string).unwrap_or_default();
    match (uri.scheme_str(), uri.port_u16()) {
        (Some("http" | "https"), _) => Ok(uri),
        (Some("socks5"), _) if authority.contains('@') => {
            Err("SOCKS5 proxies that require a password are not supported".into())
        }
        (Some("socks5"), None) => {
            format!("socks5://{authority}:1080").parse().map_err(|error| format!("the proxy is not a URL: {error}"))
        }
        (Some("socks5"), Some(_)) => Ok(uri),
        (scheme, _) => Err(format!(
            "proxies with the scheme {:?} are not supported; use http, https or socks5",
            scheme.unwrap_or_default()
        )),
    }
}

/// Returns the proxy for a server by the variables `HTTPS_PROXY`, `HTTP_PROXY` (for plain HTTP) and `NO_PROXY`.
pub(crate) fn from_environment(server: &Uri, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Uri>, String> {
    let either = |name: &str| {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        set(name).or_else(|| set(&name.to_lowercase()))
    };
    let name = if server.scheme_str() == Some("http") { "HTTP_PROXY" } else { "HTTPS_PROXY" };
    let Some(proxy) = either(name) else { return Ok(None) };
    if is_direct(server, &either("NO_PROXY").unwrap_or_default()) {
        return Ok(None);
    }
    let proxy = if proxy.contains("://") { proxy } else { format!("http://{proxy}") };
    address(&proxy).map(Some).map_err(|error| format!("{name}: {error}"))
}

/// Returns whether a server is reached without a proxy: it is this host, or an entry of `NO_PROXY` matches it.
fn is_direct(server: &Uri, exceptions: &str) -> bool {
    let host = server.host().unwrap_or_default().trim_matches(['[', ']']).to_lowercase();
    let port = server.port_u16().unwrap_or(if server.scheme_str() == Some("http") { 80 } else { 443 });
    let ip = host.parse::<IpAddr>().ok();
    host == "localhost"
        || ip.is_some_and(|ip| ip.is_loopback())
        || exceptions.split(',').any(|entry| matches(entry.trim(), &host, ip, port))
}

/// Returns whether an entry of `NO_PROXY` matches a host: `*`, a network, or an address or name with or without port.
fn matches(entry: &str, host: &str, ip: Option<IpAddr>, port: u16) -> bool {
    if entry == "*" {
        return true;
    }
    if let Ok(network) = entry.parse::<IpNet>() {
        return ip.is_some_and(|ip| network.contains(&ip));
    }
    // An IPv6 address without port contains colons, too.
    let (name, wanted) = match entry.rsplit_once(':') {
        Some((name, port)) if name.starts_with('[') || !name.contains(':') => {
            (name.trim_matches(['[', ']']), Some(port))
        }
        _ => (entry, None),
    };
    if name.is_empty() || wanted.is_some_and(|wanted| wanted != port.to_string()) {
        return false;
    }
    if let Ok(address) = name.parse::<IpAddr>() {
        return ip == Some(address);
    }
    let name = name.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(name).to_lowercase();
    // A name matches itself and the names below it; with a dot in front, only those below.
    let below = if name.starts_with('.') { name.clone() } else { format!(".{name}") };
    ip.is_none() && (host == name || host.ends_with(&below))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_proxies() {
        for (text, expected) in [
            ("http://proxy:3128", Some("http://proxy:3128/")),
            ("https://joe:secret@proxy", Some("https://joe:secret@proxy/")),
            ("socks5://proxy", Some("socks5://proxy:1080/")),
            ("socks5://[::1]:9050", Some("socks5://[::1]:9050/")),
            ("socks5://joe:secret@proxy", None),
            ("socks4://proxy", None),
            ("proxy:3128", None),
            ("http://", None),
        ] {
            let result = address(text);
            assert_eq!(result.as_ref().ok().map(ToString::to_string).as_deref(), expected, "{text}");
            assert!(result.err().is_none_or(|message| !message.contains("secret")), "{text}");
        }
    }

    #[test]
    fn exceptions_are_judged_by_the_server() {
        for (server, exceptions, direct) in [
            ("https://api.example.com:6443", "", false),
            ("https://api.example.com:6443", "*", true),
            ("https://api.example.com:6443", "example.com", true),
            ("https://example.com", "example.com", true),
            ("https://badexample.com", "example.com", false),
            ("https://api.example.com", ".example.com", true),
            ("https://example.com", ".example.com", false),
            ("https://api.example.com", "*.example.com", true),
            ("https://API.example.com", "api.EXAMPLE.com", true),
            ("https://api.example.com:6443", "example.com:6443", true),
            ("https://api.example.com:6443", "example.com:443", false),
            ("https://api.example.com", "example.com:443", true),
            ("https://api.example.com", "other.com, example.com ,", true),
            ("https://api.example.com", ",", false),
            ("https://api.example.com", ":443", false),
            ("https://192.0.2.1:6443", "192.0.2.1", true),
            ("https://192.0.2.1:6443", "192.0.2.1:6443", true),
            ("https://192.0.2.1:6443", "192.0.2.1:443", false),
            ("https://192.0.2.1:6443", "192.0.2.0/24", true),
            ("https://192.0.2.1:6443", "198.51.100.0/24,", false),
            ("https://192.0.2.1", "2.1", false),
            ("https://[2001:db8::1]:6443", "2001:db8::1", true),
            ("https://[2001:db8::1]:6443", "[2001:db8::1]:6443", true),
            ("https://[2001:db8::1]:6443", "2001:db8::/32", true),
            ("https://api.example.com", "192.0.2.0/24", false),
            ("https://localhost:6443", "", true),
            ("https://127.0.0.1:6443", "", true),
            ("https://[::1]:6443", "", true),
        ] {
            assert_eq!(is_direct(&server.parse().unwrap(), exceptions), direct, "{server} {exceptions}");
        }
    }

    #[test]
    fn proxies_of_the_environment() {
        for (server, variables, expected) in [
            ("https://a", &[][..], Ok(None)),
            ("https://a", &[("HTTPS_PROXY", "http://p:1")], Ok(Some("http://p:1/"))),
            ("https://a", &[("https_proxy", "p:1")], Ok(Some("http://p:1/"))),
            ("https://a", &[("HTTPS_PROXY", ""), ("https_proxy", "http://q")], Ok(Some("http://q/"))),
            ("https://a", &[("HTTP_PROXY", "http://p:1")], Ok(None)),
            ("http://a", &[("HTTP_PROXY", "http://p:1")], Ok(Some("http://p:1/"))),
            ("https://a", &[("HTTPS_PROXY", "http://p:1"), ("NO_PROXY", "p")], Ok(Some("http://p:1/"))),
            ("https://a", &[("HTTPS_PROXY", "http://p:1"), ("no_proxy", "b,a,")], Ok(None)),
            ("https://a", &[("HTTPS_PROXY", "ftp://p:1"), ("NO_PROXY", "a")], Ok(None)),
            ("https://a", &[("HTTPS_PROXY", "ftp://p:1")], Err(())),
        ] {
            let get = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            let proxy = from_environment(&server.parse().unwrap(), get).map_err(|_| ());
            assert_eq!(proxy.map(|proxy| proxy.map(|uri| uri.to_string())), expected.map(|uri| uri.map(str::to_owned)));
        }
    }
}
