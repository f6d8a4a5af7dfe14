//! Serves the files of a folder by HTTP, also as servers that misbehave. For tests; part of the toolbox image.
//!
//! ```text
//! image-server FOLDER    on port 8080
//! ```
//!
//! It answers GET and HEAD, with ranges, and prints a line for each request. `/loop` redirects to itself. Parameters of the query:
//!
//! ```text
//! hold=PERCENT    sends the rest of the file only when the folder has a file `released`
//! cut=PERCENT     ends a connection at this part of the file; a request that begins there or later is answered in full
//! basic=BASE64    answers 401 without these credentials
//! header=NAME     answers 403 without this header
//! ```

use std::{
    collections::HashMap,
    fs::File,
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};

const PORT: u16 = 8080;
/// Longest head of a request.
const HEAD_LIMIT: u64 = 16 << 10;
/// Interval of looks for the file that releases.
const LOOK: Duration = Duration::from_millis(100);

fn main() -> Result<()> {
    let folder = PathBuf::from(std::env::args().nth(1).context("usage: image-server FOLDER")?);
    let listener = TcpListener::bind(("::", PORT)).or_else(|_| TcpListener::bind(("0.0.0.0", PORT)))?;
    for connection in listener.incoming() {
        let (connection, folder) = (connection?, folder.clone());
        thread::spawn(move || {
            if let Err(error) = serve(connection, &folder) {
                println!("{error:#}");
            }
        });
    }
    Ok(())
}

/// A request without its body.
struct Request {
    method: String,
    /// Path and query.
    target: String,
    path: String,
    parameters: HashMap<String, String>,
    /// By names in lower case.
    headers: HashMap<String, String>,
}

impl Request {
    fn read(connection: &TcpStream) -> Result<Self> {
        let mut lines = BufReader::new(connection.take(HEAD_LIMIT)).lines();
        let first = lines.next().context("no request")??;
        let mut words = first.split(' ');
        let (method, target) = (words.next().unwrap_or_default(), words.next().context("no path")?);
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let parameters = query.split('&').filter_map(|pair| pair.split_once('=')).map(owned).collect();
        let mut headers = HashMap::new();
        for line in lines {
            let line = line?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        println!("{first} {}", headers.get("range").map_or("", String::as_str));
        Ok(Self { method: method.to_owned(), target: target.to_owned(), path: path.to_owned(), parameters, headers })
    }

    /// Returns the offset of a part of a file.
    fn offset(&self, parameter: &str, length: u64) -> Option<u64> {
        let percent: u64 = self.parameters.get(parameter)?.parse().ok()?;
        Some(length * percent / 100)
    }

    /// Returns the status of a request that is refused.
    fn refusal(&self) -> Option<&'static str> {
        let parameter = |name: &str| self.parameters.get(name);
        let is_known = |basic: &String| self.headers.get("authorization") == Some(&format!("Basic {basic}"));
        let has_header = |name: &String| self.headers.contains_key(&name.to_ascii_lowercase());
        if parameter("basic").is_some_and(|basic| !is_known(basic)) {
            Some("401 Unauthorized")
        } else if parameter("header").is_some_and(|name| !has_header(name)) {
            Some("403 Forbidden")
        } else if !matches!(self.method.as_str(), "GET" | "HEAD") {
            Some("405 Method Not Allowed")
        } else {
            None
        }
    }

    /// Returns the first byte and the byte after the last one, of a file of this length.
    fn range(&self, length: u64) -> Option<(u64, u64)> {
        let (first, last) = self.headers.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
        let end = if last.is_empty() { length } else { last.parse::<u64>().ok()?.saturating_add(1).min(length) };
        Some((first.parse().ok()?, end))
    }
}

fn owned((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

fn serve(mut connection: TcpStream, folder: &Path) -> Result<()> {
    let request = Request::read(&connection)?;
    let refuse = |connection: &mut TcpStream, status: &str, header: &str| {
        write!(connection, "HTTP/1.1 {status}\r\n{header}Content-Length: 0\r\nConnection: close\r\n\r\n")
    };
    if let Some(status) = request.refusal() {
        return Ok(refuse(&mut connection, status, "")?);
    }
    if request.path == "/loop" {
        return Ok(refuse(&mut connection, "302 Found", "Location: /loop\r\n")?);
    }
    let name = request.path.trim_start_matches('/');
    ensure!(!name.contains('/') && !name.starts_with('.'), "not a name of a file: {name:?}");
    let Ok(mut file) = File::open(folder.join(name)) else {
        return Ok(refuse(&mut connection, "404 Not Found", "")?);
    };
    let length = file.metadata()?.len();
    let (first, end) = request.range(length).unwrap_or((0, length));
    if first > end || first >= length && length > 0 {
        let size = format!("Content-Range: bytes */{length}\r\n");
        return Ok(refuse(&mut connection, "416 Range Not Satisfiable", &size)?);
    }
    let (status, range) = match request.headers.contains_key("range") {
        true => ("206 Partial Content", format!("Content-Range: bytes {first}-{}/{length}\r\n", end.max(1) - 1)),
        false => ("200 OK", String::new()),
    };
    write!(
        connection,
        "HTTP/1.1 {status}\r\n{range}ETag: \"{length:x}\"\r\nAccept-Ranges: bytes\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        end - first
    )?;
    if request.method == "GET" {
        file.seek(SeekFrom::Start(first))?;
        send(&mut connection, file, &request, first..end, length, folder)?;
    }
    Ok(())
}

/// Sends a range of a file of this length, with the misbehaviour that the request names.
fn send(
    connection: &mut TcpStream,
    mut file: File,
    request: &Request,
    range: std::ops::Range<u64>,
    length: u64,
    folder: &Path,
) -> Result<()> {
    let mut sent = range.start;
    if let Some(cut) = request.offset("cut", length).filter(|cut| sent < *cut && *cut < range.end) {
        std::io::copy(&mut (&mut file).take(cut - sent), connection)?;
        bail!("cut at {cut}");
    }
    if let Some(hold) = request.offset("hold", length).filter(|hold| *hold < range.end) {
        sent += std::io::copy(&mut (&mut file).take(hold.saturating_sub(sent)), connection)?;
        connection.flush()?;
        println!("held {}", request.target);
        while !folder.join("released").exists() {
            thread::sleep(LOOK);
        }
    }
    std::io::copy(&mut file.take(range.end - sent), connection)?;
    Ok(())
}
