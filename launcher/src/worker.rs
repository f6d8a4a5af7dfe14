//! The worker: all of a launcher pod except libvirt's daemon, QEMU and the supervisor.

use std::{process::ExitCode, time::Duration};

use tokio::signal::unix::{SignalKind, signal};
use tracing::Instrument;

use crate::{
    engine::{Driver, queue::Action},
    options::VmiArgs,
    paths::Paths,
    server,
};

/// Time that streams may continue after virt-handler has recorded the domain's end.
const LINGER: Duration = Duration::from_millis(200);
/// File of the container's termination message.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Runs the domain of this pod.
///
/// # Errors
/// When the worker cannot be set up.
pub fn run(args: VmiArgs, paths: Paths) -> std::io::Result<ExitCode> {
    // One thread: the worker mostly waits, and each thread costs memory in each pod.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(12)
        .thread_keep_alive(Duration::from_secs(1))
        .thread_stack_size(512 * 1024)
        .build()?;
    let span = tracing::info_span!("vmi", namespace = args.namespace, name = args.name, uid = args.uid);
    let result = runtime.block_on(work(args, paths).instrument(span));
    // A blocked call to the daemon must not keep the pod.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn work(args: VmiArgs, paths: Paths) -> std::io::Result<ExitCode> {
    let listener = server::listen(&paths.launcher_socket())?;
    let grace = args.grace_period_seconds;
    let (driver, engine) = Driver::new(args, paths);

    let (ended_sender, ended) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(
        server::serve(listener, engine.clone(), async move {
            let _ = ended.await;
        })
        .in_current_span(),
    );
    tokio::spawn(
        async move {
            let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
                tracing::error!("cannot register signal handlers");
                return;
            };
            loop {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = int.recv() => {}
                }
                tracing::info!("received a termination signal");
                if let Err(error) = engine.act(Action::Terminate { grace }).await {
                    tracing::warn!(%error, "cannot stop the domain yet");
                }
            }
        }
        .in_current_span(),
    );

    tracing::info!("ready");
    let outcome = driver.run().await;
    tracing::info!(success = outcome.success, message = outcome.message, "done");
    if let Err(error) = std::fs::write(TERMINATION_LOG, &outcome.message) {
        tracing::debug!(%error, "cannot write the termination message");
    }
    let _ = ended_sender.send(());
    let _ = tokio::time::timeout(LINGER, serving).await;
    Ok(if outcome.success { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
