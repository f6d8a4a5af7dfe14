//! Stopping on signals.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Waits for SIGTERM or SIGINT.
pub async fn terminated() {
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(mut term), Ok(mut int)) => {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
        }
        (Err(error), _) | (_, Err(error)) => {
            // Without handlers the kernel's default applies: the signal ends the process.
            tracing::error!(%error, "signal handlers cannot be installed");
            std::future::pending::<()>().await;
        }
    }
}

/// Returns a token that is cancelled on SIGTERM or SIGINT. Spawns the task that waits for it.
#[must_use]
pub fn stop_token() -> CancellationToken {
    let token = CancellationToken::new();
    let stop = token.clone();
    tokio::spawn(async move {
        terminated().await;
        tracing::info!("stopping");
        stop.cancel();
    });
    token
}
