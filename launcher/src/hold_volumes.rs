//! The program of an attachment pod.
//!
//! kubelet attaches the claims of hot-plugged volumes to this pod. virt-handler connects to the socket, learns from the
//! kernel which process listens, and asks whether it [holds](protocol::holder) a volume of a VMI. Only then it enters the mount
//! namespace of this process and hands the volume to the launcher pod.

use std::{io, path::Path, time::Duration};

use protocol::holder::{Held, MAX_QUESTION};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    signal::unix::{SignalKind, signal},
    time::timeout,
};

use crate::socket;

/// Limit of a question with its answer. One connection is answered at a time.
const LIMIT: Duration = Duration::from_secs(1);

/// Listens on the socket until a termination signal arrives, and answers for the volumes.
///
/// # Errors
/// When the socket cannot be created.
pub fn run(path: &Path, held: &Held) -> io::Result<()> {
    // One thread, and no blocking ones: the pod exists once per VMI with hot-plugged volumes.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        // Of a former container of the pod.
        socket::remove(path)?;
        let listener = UnixListener::bind(path)?;
        tracing::info!(socket = %path.display(), vmi = held.vmi, volumes = ?held.volumes, "holding the volumes");
        tokio::select! {
            _ = term.recv() => Ok(()),
            _ = int.recv() => Ok(()),
            failed = serve(&listener, held) => failed,
        }
    })
}

/// Answers until the socket fails.
async fn serve(listener: &UnixListener, held: &Held) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        // A virt-handler of a former release asks nothing.
        match timeout(LIMIT, answer(stream, held)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a question was not answered"),
            Err(_) => tracing::debug!("a question did not come in time"),
        }
    }
}

async fn answer(mut stream: UnixStream, held: &Held) -> io::Result<()> {
    let mut question = String::new();
    BufReader::new((&mut stream).take(MAX_QUESTION)).read_line(&mut question).await?;
    stream.write_all(held.answer(&question).as_bytes()).await
}

#[cfg(test)]
mod tests {
    use protocol::holder::{FOREIGN, HELD, question};

    use super::*;

    #[tokio::test]
    async fn holder_answers_each_connection_and_none_stops_it() {
        let path = std::env::temp_dir().join(format!("ferrovirt-holder-{}.sock", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let held = Held { vmi: "u".to_owned(), volumes: vec!["data".to_owned()] };
        let server = tokio::spawn(async move { serve(&listener, &held).await });
        // Of a former virt-handler, without an end, and not text.
        drop(UnixStream::connect(&path).await.unwrap());
        for bytes in [vec![b'a'; 1 << 12], vec![0xff, b'\n']] {
            let _ = UnixStream::connect(&path).await.unwrap().write_all(&bytes).await;
        }
        let silent = UnixStream::connect(&path).await.unwrap();
        for (volume, expected) in [("data", HELD), ("other", FOREIGN)] {
            let mut stream = UnixStream::connect(&path).await.unwrap();
            stream.write_all(question("u", volume).as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert_eq!(answer, expected, "{volume}");
        }
        drop(silent);
        server.abort();
        std::fs::remove_file(path).unwrap();
    }
}
