//! The worker: all of a launcher pod except libvirt's daemon, QEMU and the supervisor.

use std::{
    process::ExitCode,
    time::{Duration, SystemTime},
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};
use tracing::Instrument;

use crate::{
    descriptors,
    domain::domain_name,
    engine::{Action, Driver, EngineHandle, Outcome, Request},
    hypervisor::libvirt::Libvirt,
    migration,
    options::VmiArgs,
    paths::Paths,
    server, socket,
    tasks::{TaskFailure, TaskFailures, Tasks},
};

/// Time that streams may continue after virt-handler has recorded the domain's end.
const LINGER: Duration = Duration::from_millis(200);
/// File of the container's termination message.
const TERMINATION_LOG: &str = "/dev/termination-log";
/// Most threads for calls that block: those to libvirt, and a few for files and pictures.
pub(crate) const BLOCKING_THREADS: usize = 15;
/// Exit code of a Rust program that panicked: virt-launcher-monitor restarts the worker.
const RESTART: u8 = 101;

/// Runs the domain of this pod.
///
/// # Errors
/// When the worker cannot be set up.
pub fn run(args: VmiArgs, paths: Paths) -> std::io::Result<ExitCode> {
    // First: there are no threads yet.
    descriptors::take_first_table()?;
    // One thread: the worker mostly waits, and each thread costs memory in each pod.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
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
    let began = SystemTime::now();
    // First: until then a signal ends the worker, and the supervisor delays it.
    let signals = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    let listener = socket::listen(&paths.launcher_socket())?;
    let migration_listener = socket::listen(&paths.migration_socket())?;
    let grace = args.grace_period_seconds;
    let (tasks, mut failures) = Tasks::new();
    let domain = domain_name(&args.namespace, &args.name);
    let libvirt = Libvirt::new(paths.clone(), tasks.clone(), domain, args.libvirt_log_filters.clone());
    let (driver, engine) = Driver::new(args, paths, Box::new(libvirt), &tasks);
    engine.timings.worker(began, SystemTime::now());

    let (end, ended) = oneshot::channel();
    let (served_sender, served) = oneshot::channel::<()>();
    tasks.keep("server", serve(listener, engine.clone(), ended, served_sender));
    tasks.keep("migration server", migration::serve(migration_listener, engine.clone()));
    tasks.keep("signals", stop_on_signals(signals, engine, grace));

    tracing::info!("ready");
    let outcome = match until_failure(driver, &mut failures).await {
        Ok(outcome) => outcome,
        Err(failure) => {
            tracing::error!(%failure, "the worker restarts, the domain is not touched");
            return Ok(ExitCode::from(RESTART));
        }
    };
    tracing::info!(success = outcome.success, message = outcome.message, "done");
    if let Err(error) = std::fs::write(TERMINATION_LOG, &outcome.message) {
        tracing::debug!(%error, "cannot write the termination message");
    }
    let _ = end.send(());
    let _ = tokio::time::timeout(LINGER, served).await;
    Ok(if outcome.success { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the engine until the domain has ended or a task has failed.
async fn until_failure(driver: Driver, failures: &mut TaskFailures) -> Result<Outcome, TaskFailure> {
    tokio::select! {
        outcome = driver.run() => outcome,
        failure = failures.first() => Err(failure),
    }
}

/// Serves virt-handler until `end`. An earlier end is a failure.
async fn serve(
    listener: tokio::net::UnixListener,
    engine: EngineHandle,
    end: oneshot::Receiver<()>,
    served: oneshot::Sender<()>,
) {
    let (stopping, mut stopped) = oneshot::channel();
    let end = async move {
        let _ = end.await;
        let _ = stopping.send(());
    };
    if let Err(error) = server::serve(listener, engine, end).await {
        tracing::error!(%error, "the server has failed");
    }
    if stopped.try_recv().is_ok() {
        let _ = served.send(());
        std::future::pending().await
    }
}

/// Stops the domain on each termination signal.
async fn stop_on_signals([mut term, mut int]: [Signal; 2], engine: EngineHandle, grace: u64) {
    loop {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        tracing::info!("received a termination signal");
        if let Err(error) = engine.ask(Request::Act(Action::Terminate { grace })).await {
            tracing::warn!(%error, "cannot stop the domain yet");
        }
    }
}
