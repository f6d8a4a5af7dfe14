//! The proxy of a service mesh in the pod. It does not end by itself, and the pod completes only after it has.
//!
//! Istio's agent ends it on request. The requests have the ports, limits and repetitions of KubeVirt's monitor. A pod can get the
//! proxy by a label of its namespace, too, of which nothing in the VMI tells: then the proxy is found by its port, so that other
//! pods do not wait for one.

use std::{
    fs,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

/// Port at which Envoy reports its health.
const HEALTH: u16 = 15021;
/// Port of Istio's agent.
const AGENT: u16 = 15020;
/// Limit of a connection attempt, and of a request.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Pauses between the tries of a request.
const PAUSES: [Duration; 3] = [Duration::from_millis(50), Duration::from_millis(250), Duration::from_millis(1250)];
/// Longest head of an answer.
const MAX_HEAD: usize = 8 * 1024;

/// Ends the proxy if there is one. `expected`: the pod asked for one.
pub(crate) fn end(expected: bool) {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    if expected || tables.iter().any(|table| listens(&fs::read_to_string(table).unwrap_or_default(), HEALTH)) {
        end_at(HEALTH, AGENT);
    }
}

/// Returns true if the kernel's table of TCP sockets has a listener at a port.
fn listens(table: &str, port: u16) -> bool {
    let end = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        // Own address, that of the peer, and state.
        fields.next().is_some_and(|address| address.ends_with(&end)) && fields.nth(1) == Some("0A")
    })
}

fn end_at(health: u16, agent: u16) {
    let Ok(head) = repeat(|| send(health, "GET /healthz/ready")) else { return };
    if !is_envoy(&head) {
        return;
    }
    let ended = repeat(|| match send(agent, "POST /quitquitquit")? {
        head if is_ok(&head) => Ok(()),
        head => Err(io::Error::other(shown(&head))),
    });
    if let Err(error) = ended {
        eprintln!("virt-launcher-monitor: cannot end the proxy of the service mesh: {error}");
    }
}

/// Returns the status line of an answer for the log. Any process of the pod can have written it.
fn shown(head: &str) -> String {
    head.lines().next().unwrap_or_default().chars().take(80).flat_map(char::escape_default).collect()
}

/// Tries until it succeeds, once more than there are pauses. Missing answers are not waited for again.
fn repeat<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    for pause in PAUSES {
        match attempt() {
            Err(error) if !matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) => {
                thread::sleep(pause);
            }
            done => return done,
        }
    }
    attempt()
}

/// Sends a request and returns the beginning of the answer, with its whole head.
fn send(port: u16, request: &str) -> io::Result<String> {
    let deadline = Instant::now() + TIMEOUT;
    let mut stream = connect(port)?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let head = format!("{request} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    let mut answer = Vec::new();
    let mut buffer = [0; 1024];
    while answer.len() < MAX_HEAD && !answer.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(buffer.get(..count).unwrap_or_default()),
            // Signals interrupt reads with a timeout.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Connects to the pod's `localhost`.
fn connect(port: u16) -> io::Result<TcpStream> {
    let connect = |address: IpAddr| TcpStream::connect_timeout(&SocketAddr::new(address, port), TIMEOUT);
    connect(Ipv4Addr::LOCALHOST.into()).or_else(|_| connect(Ipv6Addr::LOCALHOST.into()))
}

/// Returns true for an answer of Envoy. It may be unhealthy.
fn is_envoy(head: &str) -> bool {
    let mut headers = head.lines().skip(1).take_while(|line| !line.is_empty()).filter_map(|line| line.split_once(':'));
    headers.any(|(name, value)| name.eq_ignore_ascii_case("server") && value.trim() == "envoy")
}

fn is_ok(head: &str) -> bool {
    head.lines().next().and_then(|line| line.split_whitespace().nth(1)) == Some("200")
}

#[cfg(test)]
mod tests {
    use std::{
        net::TcpListener,
        sync::mpsc::{Receiver, channel},
    };

    use super::*;

    /// A server that gives this answer. Returns its port, and the first lines of the requests.
    fn server(answer: &'static str) -> (u16, Receiver<String>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (seen, requests) = channel();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut request = [0; 1024];
                let count = stream.read(&mut request).unwrap();
                let request = String::from_utf8_lossy(&request[..count]).into_owned();
                let _ = seen.send(request.lines().next().unwrap_or_default().to_owned());
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        (port, requests)
    }

    #[test]
    fn envoy_is_ended_and_nothing_else() {
        for (health, agent, count) in [
            ("HTTP/1.1 200 OK\r\nserver: envoy\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\nok", 1),
            ("HTTP/1.1 503 Service Unavailable\r\nServer: envoy\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", 1),
            ("HTTP/1.1 200 OK\r\nserver: envoy\r\n\r\n", "HTTP/1.1 500 Internal Server Error\r\n\r\n", 4),
            ("HTTP/1.1 200 OK\r\nserver: other\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", 0),
            ("HTTP/1.1 200 OK\r\n\r\nserver: envoy\r\n", "HTTP/1.1 200 OK\r\n\r\n", 0),
            ("", "HTTP/1.1 200 OK\r\n\r\n", 0),
        ] {
            let ((health_port, checks), (agent_port, ends)) = (server(health), server(agent));
            end_at(health_port, agent_port);
            assert_eq!(checks.try_iter().collect::<Vec<_>>(), ["GET /healthz/ready HTTP/1.1"], "{health}");
            let ends: Vec<String> = ends.try_iter().collect();
            assert_eq!(ends, vec!["POST /quitquitquit HTTP/1.1"; count], "{health} {agent}");
        }
    }

    #[test]
    fn missing_proxy_is_looked_for_four_times() {
        let mut tries = 0;
        let started = Instant::now();
        let result: io::Result<()> = repeat(|| {
            tries += 1;
            Err(io::ErrorKind::ConnectionRefused.into())
        });
        assert!(result.is_err() && started.elapsed() >= Duration::from_millis(1550));
        assert_eq!(tries, 4);
    }

    #[test]
    fn silent_server_is_asked_once() {
        for kind in [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock] {
            let mut tries = 0;
            let result: io::Result<()> = repeat(|| {
                tries += 1;
                Err(kind.into())
            });
            assert_eq!((result.map_err(|error| error.kind()), tries), (Err(kind), 1));
        }
    }

    #[test]
    fn listener_is_found_by_its_port() {
        let table = |address: &str, state: &str| format!("sl local_address\n 0: {address} 00000000:0000 {state} 0:0\n");
        for (address, state, found) in [
            ("00000000:3AAD", "0A", true),
            ("00000000000000000000000000000000:3AAD", "0A", true),
            ("0100007F:3AAD", "01", false),
            ("00000000:3AAC", "0A", false),
        ] {
            assert_eq!(listens(&table(address, state), HEALTH), found, "{address} {state}");
        }
        assert!(!listens("", HEALTH));
    }

    #[test]
    fn answers_are_shown_without_control_characters() {
        assert_eq!(shown("HTTP/1.1 403 \u{1b}[2J\r\nx: y\r\n\r\n"), "HTTP/1.1 403 \\u{1b}[2J");
        assert_eq!(shown(&"a".repeat(1000)).len(), 80);
    }
}
