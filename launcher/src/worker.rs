//! The worker: everything of a launcher pod but libvirt's daemon, QEMU and the supervisor.

use std::{process::ExitCode, time::Duration};

use tokio::signal::unix::{SignalKind, signal};
use tracing::Instrument;

use crate::{
    machine::{Driver, queue::Action},
    options::MachineArgs,
    paths::Paths,
    server,
};

/// How long streams may go on after the machine's end is recorded.
const LINGER: Duration = Duration::from_millis(200);
/// Where Kubernetes reads why a container ended.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Runs the machine of this pod.
///
/// # Errors
/// When the worker cannot be set up.
pub fn run(args: MachineArgs, paths: Paths) -> std::io::Result<ExitCode> {
    // One thread: the worker waits for others nearly all of the time, and each thread costs memory in each pod.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(12)
        .thread_keep_alive(Duration::from_secs(1))
        .thread_stack_size(512 * 1024)
        .build()?;
    let span = tracing::info_span!("machine", namespace = args.namespace, name = args.name, uid = args.uid);
    let result = runtime.block_on(work(args, paths).instrument(span));
    // A call to a wedged daemon must not keep the pod.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn work(args: MachineArgs, paths: Paths) -> std::io::Result<ExitCode> {
    let listener = server::listen(&paths.launcher_socket())?;
    let grace = args.grace_period_seconds;
    let (driver, machine) = Driver::new(args, paths);

    let (ended_sender, ended) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(
        server::serve(listener, machine.clone(), async move {
            let _ = ended.await;
        })
        .in_current_span(),
    );
    tokio::spawn(
        async move {
            let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
                tracing::error!("cannot listen for signals");
                return;
            };
            loop {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = int.recv() => {}
                }
                tracing::info!("asked to end");
                if let Err(error) = machine.act(Action::Terminate { grace }).await {
                    tracing::warn!(%error, "cannot end the machine yet");
                }
            }
        }
        .in_current_span(),
    );

    tracing::info!("ready");
    let outcome = driver.run().await;
    tracing::info!(success = outcome.success, message = outcome.message, "done");
    if let Err(error) = std::fs::write(TERMINATION_LOG, &outcome.message) {
        tracing::debug!(%error, "cannot leave a termination message");
    }
    let _ = ended_sender.send(());
    let _ = tokio::time::timeout(LINGER, serving).await;
    Ok(if outcome.success { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
