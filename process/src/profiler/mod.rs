//! Profiles of the processor time of this process, for `pprof`.
//!
//! ```text
//!            start                       stop
//!   idle ──────────────▶ sampling ────────────────▶ idle, with a profile for `dump`
//!                         │    ▲                        │
//!                         └────┘ start: begins anew     └─ start: it is thrown away
//!                           no longer allowed by the configuration: idle, without a profile
//! ```
//!
//! The samples are taken by a process of its own, this program once more ([`sampler`]): nothing is walked in signal
//! handlers, and with it goes all memory that profiling takes. Who may ask is who shows the client certificate of virt-api
//! (which asks for all components), as long as the cluster's configuration allows profiles at all.

pub mod pprof;
#[cfg(target_arch = "x86_64")]
mod program;
#[cfg(target_arch = "x86_64")]
mod sampler;

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

use crate::config::ConfigHandle;

/// The argument by which a program is told to sample its parent.
const SAMPLE: &str = "sample-parent";
/// Longest wait for sampling to begin.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest wait for a profile; who asks for all components waits five seconds.
const END_TIMEOUT: Duration = Duration::from_secs(4);
/// Largest profile.
const MAX_PROFILE: u64 = 6 << 20;
/// Longest reason for not sampling.
const MAX_REASON: u64 = 1024;
/// The key of the profile in results.
pub const PROCESSOR_TIME: &str = "cpu";

/// What is asked of a profiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Begin.
    Start,
    /// End.
    Stop,
    /// Results of all processes.
    DumpCluster,
    /// Results of this process.
    Dump,
}

impl Asked {
    /// How an answer that is a refusal begins.
    #[must_use]
    pub fn refusal(self) -> &'static str {
        match self {
            Self::Start => "Unable to start profiler.",
            Self::Stop => "Unable to stop profiler.",
            Self::DumpCluster => "Unable to dump profiler results.",
            Self::Dump => "Unable to retrieve profiler data.",
        }
    }

    /// The refusal where the cluster's configuration does not allow profiles.
    #[must_use]
    pub fn check(self, enabled: bool) -> Option<(StatusCode, String)> {
        let text = || format!("{} \"ClusterProfiler\" feature gate must be enabled", self.refusal());
        (!enabled).then(|| (StatusCode::FORBIDDEN, text()))
    }
}

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfilerError {
    /// The sampling process cannot be started or heard.
    #[error("the sampling process failed: {0}")]
    Process(#[from] io::Error),
    /// It may not do its work.
    #[error("{0}")]
    Refused(String),
    /// It does not answer.
    #[error("the sampling process did not answer in time")]
    Timeout,
    /// It has seen more than is passed on.
    #[error("the profile is larger than {MAX_PROFILE} bytes")]
    TooLarge,
}

#[derive(Default)]
struct State {
    sampler: Option<Child>,
    /// Ends the sampling when it is no longer allowed.
    watch: Option<AbortOnDropHandle<()>>,
    profile: Option<Vec<u8>>,
}

/// The profiler of this process. Cheap to clone; all clones are the same.
#[derive(Clone, Default)]
pub struct Profiler {
    state: Arc<Mutex<State>>,
}

impl Profiler {
    /// Does what is asked, as long as the configuration allows it.
    pub async fn answer(&self, asked: Asked, config: &ConfigHandle) -> Response {
        if let Some(refusal) = asked.check(config.current().cluster_profiler) {
            return refusal.into_response();
        }
        let done = match asked {
            Asked::Start => self.start(config.clone()).await,
            Asked::Stop => self.stop().await,
            Asked::Dump | Asked::DumpCluster => {
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
                tracing::warn!(%error, ?asked, "profiler");
                (StatusCode::INTERNAL_SERVER_ERROR, format!("{} {error}", asked.refusal())).into_response()
            }
        }
    }

    async fn start(&self, config: ConfigHandle) -> Result<(), ProfilerError> {
        let mut state = self.state.lock().await;
        *state = State::default();
        state.sampler = Some(timeout(BEGIN_TIMEOUT, begin()).await.map_err(|_| ProfilerError::Timeout)??);
        state.watch = Some(AbortOnDropHandle::new(tokio::spawn(end_with_permission(self.state.clone(), config))));
        tracing::info!("profiling");
        Ok(())
    }

    /// Harmless where nothing was started.
    async fn stop(&self) -> Result<(), ProfilerError> {
        let mut state = self.state.lock().await;
        state.watch = None;
        let Some(sampler) = state.sampler.take() else { return Ok(()) };
        state.profile = Some(timeout(END_TIMEOUT, end(sampler)).await.map_err(|_| ProfilerError::Timeout)??);
        tracing::info!("profiled");
        Ok(())
    }
}

/// Who may no longer profile can no longer stop it either.
async fn end_with_permission(state: Arc<Mutex<State>>, mut config: ConfigHandle) {
    while config.current().cluster_profiler {
        config.changed().await;
    }
    let mut state = state.lock().await;
    (state.sampler, state.profile) = (None, None);
    tracing::info!("no longer profiling");
}

/// Starts the sampling process, which is killed when it is dropped.
async fn begin() -> Result<Child, ProfilerError> {
    let mut sampler = Command::new("/proc/self/exe")
        .arg(SAMPLE)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    // Where a child may not trace its parent anyhow, it may now; elsewhere there is nothing to be permitted.
    if let Some(pid) = sampler.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
        let _ = set_ptracer(PTracer::ProcessID(pid));
    }
    let (Some(input), Some(output)) = (sampler.stdin.as_mut(), sampler.stdout.as_mut()) else {
        return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
    };
    input.write_all(&[0]).await?;
    if output.read_u8().await? == BEGUN {
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

/// The answer of the sampling process that it has begun; a reason for why not follows anything else.
const BEGUN: u8 = b'+';

/// Samples the parent, if that is what this process was started for. To be asked before anything else is done.
///
/// # Errors
/// When the parent cannot be heard or told.
pub fn sample_parent() -> Option<io::Result<()>> {
    std::env::args_os().nth(1).is_some_and(|argument| argument == SAMPLE).then(run_sampler)
}

#[cfg(target_arch = "x86_64")]
fn run_sampler() -> io::Result<()> {
    sampler::run()
}

#[cfg(not(target_arch = "x86_64"))]
fn run_sampler() -> io::Result<()> {
    io::Write::write_all(&mut io::stdout(), b"-stacks cannot be followed on this architecture")
}

#[cfg(test)]
mod tests {
    use api::config::ClusterConfig;

    use super::*;

    fn config(allowed: bool) -> ConfigHandle {
        ConfigHandle::fixed(ClusterConfig { cluster_profiler: allowed, ..ClusterConfig::default() })
    }

    #[test]
    fn who_asks_for_profiles_hears_what_it_takes() {
        let (code, text) = Asked::DumpCluster.check(false).unwrap();
        assert_eq!(code, StatusCode::FORBIDDEN);
        assert_eq!(text, r#"Unable to dump profiler results. "ClusterProfiler" feature gate must be enabled"#);
        assert!(Asked::Dump.check(false).unwrap().1.starts_with("Unable to retrieve profiler data. "));
        assert_eq!(Asked::Start.check(true), None);
    }

    #[tokio::test]
    async fn nothing_started_is_nothing_to_stop_or_to_get() {
        let profiler = Profiler::default();
        let allowed = config(true);
        assert_eq!(profiler.answer(Asked::Stop, &allowed).await.status(), StatusCode::OK);
        assert_eq!(profiler.answer(Asked::Dump, &config(false)).await.status(), StatusCode::FORBIDDEN);
        let answer = profiler.answer(Asked::Dump, &allowed).await;
        let body = axum::body::to_bytes(answer.into_body(), 1024).await.unwrap();
        assert_eq!(&body[..], br#"{"pprofData":{}}"#);
    }

    #[tokio::test]
    async fn sampling_process_that_cannot_begin_is_told_of() {
        // This program takes the argument for the name of a test, runs none, and ends.
        let answer = Profiler::default().answer(Asked::Start, &config(true)).await;
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = axum::body::to_bytes(answer.into_body(), 4096).await.unwrap();
        assert!(body.starts_with(b"Unable to start profiler. "), "{body:?}");
    }
}
