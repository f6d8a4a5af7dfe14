//! JSON logs on stderr, with the reference's verbosity scale (2 is the default, 5 and up is very talkative).

use std::sync::Arc;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    Registry,
    filter::Targets,
    fmt,
    layer::{Layer, SubscriberExt},
    reload,
    util::SubscriberInitExt,
};

/// Verbosity without a configured one.
pub const DEFAULT_VERBOSITY: u32 = 2;

/// Crates of this project. Their messages appear one step before those of libraries.
const OWN_CRATES: &[&str] =
    &["admission", "api", "apiserver", "controllers", "launcher", "node", "daemon", "profiler", "protocol", "cli"];

/// Changes the verbosity of the running process.
#[derive(Clone)]
pub struct Verbosity {
    handle: Option<Arc<reload::Handle<Targets, Registry>>>,
}

impl Verbosity {
    /// Sets the verbosity. Does nothing when `RUST_LOG` fixes the filter.
    pub fn set(&self, verbosity: u32) {
        if let Some(handle) = &self.handle
            && let Err(error) = handle.reload(filter(verbosity))
        {
            tracing::warn!(%error, "cannot change verbosity");
        }
    }
}

/// Starts logging for the process `name`. `verbosity` is the number of `-v`; `RUST_LOG` overrides it for good.
///
/// Call once. A second call is harmless and changes nothing.
pub fn init(name: &'static str, verbosity: u32) -> Verbosity {
    let fixed = std::env::var("RUST_LOG").ok().and_then(|text| text.parse::<Targets>().ok());
    let is_fixed = fixed.is_some();
    let (targets, handle) = reload::Layer::new(fixed.unwrap_or_else(|| filter(verbosity)));
    let lines = fmt::layer()
        .json()
        .flatten_event(true)
        .with_current_span(true)
        .with_span_list(false)
        .with_writer(std::io::stderr)
        .with_filter(targets);
    if tracing_subscriber::registry().with(lines).try_init().is_err() {
        return Verbosity { handle: None };
    }
    tracing::info!(component = name, version = env!("CARGO_PKG_VERSION"), "starting");
    Verbosity { handle: (!is_fixed).then(|| Arc::new(handle)) }
}

/// Returns the levels for a verbosity: those of our crates rise before those of libraries.
fn filter(verbosity: u32) -> Targets {
    let (own, libraries) = match verbosity {
        0 | 1 => (LevelFilter::WARN, LevelFilter::ERROR),
        2 => (LevelFilter::INFO, LevelFilter::WARN),
        3 | 4 => (LevelFilter::DEBUG, LevelFilter::WARN),
        5 | 6 => (LevelFilter::DEBUG, LevelFilter::INFO),
        7 | 8 => (LevelFilter::TRACE, LevelFilter::DEBUG),
        _ => (LevelFilter::TRACE, LevelFilter::TRACE),
    };
    OWN_CRATES.iter().fold(Targets::new().with_default(libraries), |targets, krate| targets.with_target(*krate, own))
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::filter;

    #[test]
    fn default_verbosity_shows_own_info_and_library_warnings() {
        let targets = filter(super::DEFAULT_VERBOSITY);
        assert!(targets.would_enable("controllers::vm", &Level::INFO));
        assert!(!targets.would_enable("controllers::vm", &Level::DEBUG));
        assert!(targets.would_enable("kube_client", &Level::WARN));
        assert!(!targets.would_enable("kube_client", &Level::INFO));
    }
}
