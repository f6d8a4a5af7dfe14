//! The settings of traces, from the environment.

/// Variable with the address of the collector. Traces are off without it.
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// Variable with the share of starts that are traced, from 0 to 1.
const RATIO: &str = "OTEL_TRACES_SAMPLER_ARG";

/// Settings of traces that are on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    /// Address of the collector.
    pub(super) endpoint: String,
    /// Share of starts that are traced.
    pub(super) ratio: f64,
}

/// The error of settings that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SettingsError {
    /// The collector is not reached over HTTP.
    #[error("{ENDPOINT} is {0:?}; it must be an address of OTLP over gRPC such as http://collector:4317, without TLS")]
    Endpoint(String),
    /// The share is not between 0 and 1.
    #[error("{RATIO} is {0:?}; it must be a number from 0 to 1")]
    Ratio(String),
}

impl Settings {
    /// Reads the environment of the process. `None`: traces are off.
    pub(super) fn from_env() -> Result<Option<Self>, SettingsError> {
        let value = |name: &str| std::env::var(name).unwrap_or_default();
        Self::parse(&value(ENDPOINT), &value(RATIO))
    }

    /// Parses the values of both variables; an empty one is not set.
    pub(super) fn parse(endpoint: &str, ratio: &str) -> Result<Option<Self>, SettingsError> {
        let endpoint = endpoint.trim();
        if endpoint.is_empty() {
            return Ok(None);
        }
        let has_host = endpoint
            .parse::<http::Uri>()
            .is_ok_and(|uri| uri.scheme_str() == Some("http") && uri.host().is_some_and(|host| !host.is_empty()));
        if !has_host {
            return Err(SettingsError::Endpoint(endpoint.to_owned()));
        }
        let ratio = match ratio.trim() {
            "" => 1.0,
            text => text
                .parse()
                .ok()
                .filter(|ratio| (0.0..=1.0).contains(ratio))
                .ok_or_else(|| SettingsError::Ratio(text.to_owned()))?,
        };
        Ok(Some(Self { endpoint: endpoint.to_owned(), ratio }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_checked() {
        let on = |ratio| Ok(Some(Settings { endpoint: "http://collector:4317".to_owned(), ratio }));
        let ratio = |text: &str| Err(SettingsError::Ratio(text.to_owned()));
        for (endpoint, text, expected) in [
            ("", "", Ok(None)),
            (" ", "nonsense", Ok(None)),
            ("http://collector:4317", "", on(1.0)),
            (" http://collector:4317\n", "0.25", on(0.25)),
            ("http://collector:4317", "0", on(0.0)),
            ("http://collector:4317", "1.5", ratio("1.5")),
            ("http://collector:4317", "-1", ratio("-1")),
            ("http://collector:4317", "NaN", ratio("NaN")),
            ("http://collector:4317", "all", ratio("all")),
        ] {
            assert_eq!(Settings::parse(endpoint, text), expected, "{endpoint} {text}");
        }
        for endpoint in ["https://collector:4317", "collector:4317", "grpc://collector", "/path", "http://", "a b"] {
            assert!(matches!(Settings::parse(endpoint, ""), Err(SettingsError::Endpoint(_))), "{endpoint}");
        }
    }
}
