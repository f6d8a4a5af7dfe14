//! What is answered to who asks for profiles: there are none to be had.

use axum::http::StatusCode;

/// What is asked of a profiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profiler {
    /// Begin.
    Start,
    /// End.
    Stop,
    /// Results of all processes.
    DumpCluster,
    /// Results of this process.
    Dump,
}

impl Profiler {
    /// Code and text of the answer. `enabled`: whether the cluster's configuration allows profiles.
    #[must_use]
    pub fn answer(self, enabled: bool) -> (StatusCode, String) {
        let what = match self {
            Self::Start => "Unable to start profiler.",
            Self::Stop => "Unable to stop profiler.",
            Self::DumpCluster => "Unable to dump profiler results.",
            Self::Dump => "Unable to retrieve profiler data.",
        };
        if enabled {
            (StatusCode::NOT_IMPLEMENTED, format!("{what} Profiling is not available yet"))
        } else {
            (StatusCode::FORBIDDEN, format!("{what} \"ClusterProfiler\" feature gate must be enabled"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_for_profiles_hears_what_it_takes() {
        let (code, text) = Profiler::DumpCluster.answer(false);
        assert_eq!(code, StatusCode::FORBIDDEN);
        assert_eq!(text, r#"Unable to dump profiler results. "ClusterProfiler" feature gate must be enabled"#);
        assert!(Profiler::Dump.answer(false).1.starts_with("Unable to retrieve profiler data. "));
        assert_eq!(Profiler::Start.answer(true).0, StatusCode::NOT_IMPLEMENTED);
    }
}
