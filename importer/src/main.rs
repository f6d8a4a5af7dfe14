//! The program of import pods.

use std::{
    env, fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::ExitCode,
    sync::Arc,
};

use importer::{
    ImportError, Meter, Places, import,
    task::{Outcome, PROGRESS_PORT, Reason, Report, TASK_VARIABLE, TERMINATION_LOG, Task},
};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};

/// Exit code of a container that SIGTERM ended.
const TERMINATED: u8 = 143;

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(run());
    // Threads that still work must not delay the end.
    std::process::exit(code.into())
}

async fn run() -> u8 {
    let meter = Arc::new(Meter::default());
    // A node may have no IPv6.
    let any = [IpAddr::from(Ipv6Addr::UNSPECIFIED), IpAddr::from(Ipv4Addr::UNSPECIFIED)];
    let addresses = any.map(|address| SocketAddr::new(address, PROGRESS_PORT));
    if let Ok(listener) = TcpListener::bind(&addresses[..]).await {
        let meter = meter.clone();
        tokio::spawn(async move { meter.serve(listener).await });
    } else {
        eprintln!("cannot listen on port {PROGRESS_PORT}: the progress is not shown");
    }
    let terminated = async {
        match signal(SignalKind::terminate()) {
            Ok(mut signal) => signal.recv().await,
            Err(_) => std::future::pending().await,
        }
    };
    let result = tokio::select! {
        result = carry_out(meter) => result,
        _ = terminated => return TERMINATED,
    };
    let report = match &result {
        Ok(size) => Report {
            result: Outcome::Complete,
            reason: Reason::Completed,
            message: "Import Complete".to_owned(),
            fatal: false,
            virtual_size: Some(*size),
            labels: Default::default(),
        },
        Err(error) => error.report(),
    };
    eprintln!("{}", report.message);
    if let Err(error) = fs::write(TERMINATION_LOG, report.to_termination_message()) {
        eprintln!("cannot write {TERMINATION_LOG}: {error}");
    }
    u8::from(result.is_err())
}

async fn carry_out(meter: Arc<Meter>) -> Result<u64, ImportError> {
    let text = env::var(TASK_VARIABLE).map_err(|error| ImportError::Task(format!("{TASK_VARIABLE}: {error}")))?;
    let task: Task =
        serde_json::from_str(&text).map_err(|error| ImportError::Task(format!("{TASK_VARIABLE}: {error}")))?;
    import(task, Places::default(), meter).await
}
