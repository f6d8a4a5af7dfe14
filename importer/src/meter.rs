//! The progress of an import: counters, the server that virt-controller asks, and the watchdog.

use std::{
    io,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

use crate::task::{PROGRESS_PATH, Phase, Progress};

/// Time limit of a request.
const REQUEST_TIME: Duration = Duration::from_secs(2);
/// Size limit of a request.
const REQUEST_SIZE: usize = 4096;

/// Counters of an import.
#[derive(Debug, Default)]
pub struct Meter {
    read: AtomicU64,
    length: AtomicU64,
    converting: AtomicBool,
    /// Hundredths of a percent.
    converted: AtomicU64,
    moves: AtomicU64,
}

impl Meter {
    /// Sets the length of the source.
    pub(crate) fn expect(&self, length: u64) {
        self.length.store(length, Relaxed);
    }

    /// Counts bytes of the source.
    pub(crate) fn add(&self, bytes: u64) {
        self.read.fetch_add(bytes, Relaxed);
        self.moved();
    }

    /// Notes progress that is not part of the percentage.
    pub(crate) fn moved(&self) {
        self.moves.fetch_add(1, Relaxed);
    }

    /// Notes the share of a conversion.
    pub(crate) fn converted(&self, percent: f64) {
        self.converting.store(true, Relaxed);
        // A percentage; the conversion saturates.
        let hundredths = (percent * 100.0) as u64;
        if self.converted.swap(hundredths, Relaxed) != hundredths {
            self.moved();
        }
    }

    /// Returns the progress. A conversion is half of the work, and may begin before the download ends.
    pub(crate) fn progress(&self) -> Progress {
        let (read, length) = (self.read.load(Relaxed), self.length.load(Relaxed));
        let downloaded = (length > 0).then(|| (read.min(length) as f64) * 100.0 / (length as f64));
        let converting = self.converting.load(Relaxed);
        let converted = (self.converted.load(Relaxed) as f64) / 100.0;
        let percent = if converting { Some((downloaded.unwrap_or(100.0) + converted) / 2.0) } else { downloaded };
        let phase =
            if converting && downloaded.is_none_or(|share| share >= 100.0) { Phase::Convert } else { Phase::Download };
        Progress { percent: percent.map(|percent| (percent * 100.0).round() / 100.0), phase }
    }

    /// Ends when nothing moved for a time.
    pub(crate) async fn stalled(&self, limit: Duration) {
        loop {
            let before = self.moves.load(Relaxed);
            sleep(limit).await;
            if self.moves.load(Relaxed) == before {
                return;
            }
        }
    }

    /// Serves the progress, one connection at a time.
    pub async fn serve(&self, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(timeout(REQUEST_TIME, self.answer(stream)).await),
                Err(_) => sleep(REQUEST_TIME).await,
            }
        }
    }

    async fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut request = Vec::new();
        let mut part = [0; 512];
        while !request.windows(4).any(|end| end == b"\r\n\r\n") {
            let count = stream.read(&mut part).await?;
            if count == 0 || request.len() + count > REQUEST_SIZE {
                return Ok(());
            }
            request.extend_from_slice(&part[..count]);
        }
        let known = request.starts_with(format!("GET {PROGRESS_PATH} ").as_bytes());
        let (status, body) =
            if known { ("200 OK", serde_json::to_string(&self.progress())?) } else { ("404 Not Found", String::new()) };
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversion_is_half_of_the_work() {
        let meter = Meter::default();
        assert_eq!(meter.progress(), Progress { percent: None, phase: Phase::Download });
        meter.expect(200);
        meter.add(50);
        assert_eq!(meter.progress(), Progress { percent: Some(25.0), phase: Phase::Download });
        meter.converted(5.0);
        assert_eq!(meter.progress(), Progress { percent: Some(15.0), phase: Phase::Download });
        meter.add(150);
        meter.converted(50.0);
        assert_eq!(meter.progress(), Progress { percent: Some(75.0), phase: Phase::Convert });
    }

    #[tokio::test]
    async fn progress_is_served_and_idle_connections_are_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let meter = Meter::default();
        let client = async {
            let mut idle = TcpStream::connect(address).await.unwrap();
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET /progress HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert!(answer.ends_with(r#"{"phase":"download"}"#), "{answer}");
            assert_eq!(idle.read(&mut [0]).await.unwrap(), 0);
        };
        tokio::select! { () = meter.serve(listener) => {}, () = client => {} }
    }

    #[tokio::test]
    async fn the_watchdog_waits_while_something_moves() {
        let meter = Meter::default();
        let limit = Duration::from_millis(30);
        let moving = async {
            for _ in 0..20 {
                meter.moved();
                sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! { () = meter.stalled(limit) => panic!("stalled"), () = moving => {} }
        timeout(Duration::from_secs(5), meter.stalled(limit)).await.unwrap();
    }
}
