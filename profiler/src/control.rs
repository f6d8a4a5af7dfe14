//! Requests to a profiler, and the sampling process that serves them.

use std::{io, process::Stdio, sync::Arc, time::Duration};

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use rustix::process::{PTracer, Pid, set_ptracer};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
    sync::Mutex,
    time::timeout,
};
use tokio_util::task::AbortOnDropHandle;

/// Argument that makes a program sample its parent.
pub(crate) const SAMPLE: &str = "sample-parent";
/// Time limit for the start of sampling.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for a profile. virt-api waits five seconds for a component.
const END_TIMEOUT: Duration = Duration::from_secs(4);
/// Largest profile in bytes.
const MAX_PROFILE: u64 = 6 << 20;
/// Longest error message of the sampling process in bytes.
const MAX_REASON: u64 = 1024;
/// Key of the profile in results.
pub const PROCESSOR_TIME: &str = "cpu";

/// Requests to a profiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProfilerAction {
    /// Start sampling.
    Start,
    /// Stop sampling.
    Stop,
    /// Return the results of all processes.
    DumpCluster,
    /// Return the results of this process.
    Dump,
}

impl ProfilerAction {
    /// Returns the beginning of the error message.
    #[must_use]
    pub fn refusal(self) -> &'static str {
        match self {
            Self::Start => "Unable to start profiler.",
            Self::Stop => "Unable to stop profiler.",
            Self::DumpCluster => "Unable to dump profiler results.",
            Self::Dump => "Unable to retrieve profiler data.",
        }
    }

    /// Returns the error for a cluster whose configuration does not allow profiles.
    #[must_use]
    pub fn check(self, enabled: bool) -> Option<(StatusCode, String)> {
        let text = || format!("{} \"ClusterProfiler\" feature gate must be enabled", self.refusal());
        (!enabled).then(|| (StatusCode::FORBIDDEN, text()))
    }
}

/// Errors of the profiler.
#[derive(Debug, thiserror::Error)]
pub enum ProfilerError {
    /// The sampling process cannot be started, or its pipe failed.
    #[error("the sampling process failed: {0}")]
    Process(#[from] io::Error),
    /// The sampling process cannot sample.
    #[error("{0}")]
    Refused(String),
    /// The sampling process did not answer in time.
    #[error("the sampling process did not answer in time")]
    Timeout,
    /// The profile exceeds the size limit.
    #[error("the profile is larger than {MAX_PROFILE} bytes")]
    TooLarge,
}

#[derive(Default)]
struct State {
    sampler: Option<Child>,
    /// Stops sampling when the configuration no longer allows it.
    watch: Option<AbortOnDropHandle<()>>,
    profile: Option<Vec<u8>>,
}

/// Profiler of this process. Clones share their state.
#[derive(Clone, Default)]
pub struct Profiler {
    state: Arc<Mutex<State>>,
}

impl Profiler {
    /// Serves a request if the configuration allows it. `forbidden` ends when the configuration no longer does.
    pub async fn answer(
        &self,
        action: ProfilerAction,
        allowed: bool,
        forbidden: impl Future<Output = ()> + Send + 'static,
    ) -> Response {
        if let Some(refusal) = action.check(allowed) {
            return refusal.into_response();
        }
        let done = match action {
            ProfilerAction::Start => self.start(forbidden).await,
            ProfilerAction::Stop => self.stop().await,
            ProfilerAction::Dump | ProfilerAction::DumpCluster => {
                let state = self.state.lock().await;
                let data = state.profile.as_ref().map(|profile| (PROCESSOR_TIME, STANDARD.encode(profile)));
                let data: serde_json::Map<_, _> =
                    data.map(|(key, text)| (key.to_owned(), text.into())).into_iter().collect();
                return Json(json!({"pprofData": data})).into_response();
            }
        };
        match done {
            Ok(()) => StatusCode::OK.into_response(),
            Err(error) => {
                tracing::warn!(%error, ?action, "profiler");
                (StatusCode::INTERNAL_SERVER_ERROR, format!("{} {error}", action.refusal())).into_response()
            }
        }
    }

    async fn start(&self, forbidden: impl Future<Output = ()> + Send + 'static) -> Result<(), ProfilerError> {
        let mut state = self.state.lock().await;
        *state = State::default();
        state.sampler = Some(timeout(BEGIN_TIMEOUT, begin()).await.map_err(|_| ProfilerError::Timeout)??);
        state.watch = Some(AbortOnDropHandle::new(tokio::spawn(discard_after(self.state.clone(), forbidden))));
        tracing::info!("profiling");
        Ok(())
    }

    /// Stops sampling. Does nothing if it was not started.
    async fn stop(&self) -> Result<(), ProfilerError> {
        let mut state = self.state.lock().await;
        state.watch = None;
        let Some(sampler) = state.sampler.take() else { return Ok(()) };
        state.profile = Some(timeout(END_TIMEOUT, end(sampler)).await.map_err(|_| ProfilerError::Timeout)??);
        tracing::info!("profiled");
        Ok(())
    }
}

/// Stops sampling and discards the profile when the configuration no longer allows profiles: users can no longer stop it then.
async fn discard_after(state: Arc<Mutex<State>>, forbidden: impl Future<Output = ()>) {
    forbidden.await;
    let mut state = state.lock().await;
    (state.sampler, state.profile) = (None, None);
    tracing::info!("no longer profiling");
}

/// Starts the sampling process, which is killed on drop.
async fn begin() -> Result<Child, ProfilerError> {
    let mut sampler = Command::new("/proc/self/exe")
        .arg(SAMPLE)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    // Permits tracing under Yama, which otherwise forbids a child to trace its parent. Without Yama it fails harmlessly.
    if let Some(pid) = sampler.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
        let _ = set_ptracer(PTracer::ProcessID(pid));
    }
    let (Some(input), Some(output)) = (sampler.stdin.as_mut(), sampler.stdout.as_mut()) else {
        return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
    };
    input.write_all(&[0]).await?;
    if output.read_u8().await? == STARTED {
        return Ok(sampler);
    }
    let mut reason = String::new();
    output.take(MAX_REASON).read_to_string(&mut reason).await?;
    Err(ProfilerError::Refused(reason))
}

async fn end(mut sampler: Child) -> Result<Vec<u8>, ProfilerError> {
    drop(sampler.stdin.take());
    let mut profile = Vec::new();
    if let Some(output) = sampler.stdout.take() {
        output.take(MAX_PROFILE + 1).read_to_end(&mut profile).await?;
    }
    if profile.len() as u64 > MAX_PROFILE {
        return Err(ProfilerError::TooLarge);
    }
    let status = sampler.wait().await?;
    if status.success() { Ok(profile) } else { Err(io::Error::other(format!("it ended with {status}")).into()) }
}

/// First byte of the sampling process's answer after a successful start. Another byte precedes an error message.
pub(crate) const STARTED: u8 = b'+';

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[test]
    fn error_names_the_feature_gate() {
        let (code, text) = ProfilerAction::DumpCluster.check(false).unwrap();
        assert_eq!(code, StatusCode::FORBIDDEN);
        assert_eq!(text, r#"Unable to dump profiler results. "ClusterProfiler" feature gate must be enabled"#);
        assert!(ProfilerAction::Dump.check(false).unwrap().1.starts_with("Unable to retrieve profiler data. "));
        assert_eq!(ProfilerAction::Start.check(true), None);
    }

    #[tokio::test]
    async fn stop_and_dump_without_start_are_empty() {
        let profiler = Profiler::default();
        assert_eq!(profiler.answer(ProfilerAction::Stop, true, pending()).await.status(), StatusCode::OK);
        assert_eq!(profiler.answer(ProfilerAction::Dump, false, pending()).await.status(), StatusCode::FORBIDDEN);
        let answer = profiler.answer(ProfilerAction::Dump, true, pending()).await;
        let body = axum::body::to_bytes(answer.into_body(), 1024).await.unwrap();
        assert_eq!(&body[..], br#"{"pprofData":{}}"#);
    }

    #[tokio::test]
    async fn error_of_the_sampling_process_is_returned() {
        // The test program takes the argument as the name of a test, runs none and exits.
        let answer = Profiler::default().answer(ProfilerAction::Start, true, pending()).await;
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = axum::body::to_bytes(answer.into_body(), 4096).await.unwrap();
        assert!(body.starts_with(b"Unable to start profiler. "), "{body:?}");
    }
}
