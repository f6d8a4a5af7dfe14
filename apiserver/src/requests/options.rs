//! Options of subresource requests, in bodies and queries. Their types are in [`api::subresources`].
//!
//! A body is JSON or YAML, of which the first document counts; an empty one means the defaults. Unknown fields are ignored, as
//! in every version of the API, since some clients send `kind` and `apiVersion` of any value.

use std::borrow::Cow;

use api::subresources::{
    AddVolumeRequest, EvacuateCancelOptions, HibernateOptions, MigrateOptions, PauseOptions, RemoveVolumeRequest,
    RestartOptions, StartOptions, StopOptions,
};
use http::Uri;
use serde::de::DeserializeOwned;

use super::error::ApiError;

/// Largest body of a subresource request. The longest sensible one has some hundred bytes.
pub(crate) const MAX_BODY: usize = 64 << 10;

/// Parses a body.
pub(crate) fn parse<T: DeserializeOwned + Default>(body: &[u8]) -> Result<T, ApiError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    let failed =
        |error: String| ApiError::BadRequest(format!("Can not unmarshal Request body to struct, error: {error}"));
    // JSON first: its messages are better, and most clients send it.
    if body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{') {
        return T::deserialize(&mut serde_json::Deserializer::from_slice(body))
            .map_err(|error| failed(error.to_string()));
    }
    let text = std::str::from_utf8(body).map_err(|error| failed(error.to_string()))?;
    match serde_saphyr::read::<_, Option<T>>(&mut text.as_bytes()).next() {
        None => Ok(T::default()),
        Some(options) => Ok(options.map_err(|error| failed(error.to_string()))?.unwrap_or_default()),
    }
}

/// Options with a field `dryRun`.
pub(crate) trait DryRunOptions {
    /// Returns the values of `dryRun`.
    fn dry_run(&self) -> &[String];
}

macro_rules! dry_run_options {
    ($($options:ty),+ $(,)?) => {
        $(impl DryRunOptions for $options {
            fn dry_run(&self) -> &[String] {
                self.dry_run.as_deref().unwrap_or_default()
            }
        })+
    };
}

dry_run_options!(
    AddVolumeRequest,
    EvacuateCancelOptions,
    HibernateOptions,
    MigrateOptions,
    PauseOptions,
    RemoveVolumeRequest,
    RestartOptions,
    StartOptions,
    StopOptions,
);

/// Returns the values of a query parameter.
pub(crate) fn query_values<'a>(query: Option<&'a str>, name: &'a str) -> impl Iterator<Item = Cow<'a, str>> {
    form_urlencoded::parse(query.unwrap_or_default().as_bytes())
        .filter(move |(key, _)| key == name)
        .map(|(_, value)| value)
}

/// Returns the first value of a query parameter.
pub(crate) fn query_value<'a>(query: Option<&'a str>, name: &'a str) -> Option<Cow<'a, str>> {
    query_values(query, name).next()
}

/// Returns true if a query parameter is set to a true value.
pub(crate) fn is_set(query: Option<&str>, name: &str) -> bool {
    query_value(query, name).is_some_and(|value| api::is_true(&value))
}

/// Returns the values of `dryRun` in a query, which generic clients use.
pub(crate) fn dry_run_in_query(uri: &Uri) -> Vec<String> {
    query_values(uri.query(), "dryRun").map(Cow::into_owned).collect()
}

/// Returns true for a dry run. As in kube-apiserver, unknown values are refused, so a misspelt one changes nothing.
pub(crate) fn is_dry_run(values: &[String]) -> Result<bool, ApiError> {
    match values.iter().find(|value| *value != "All") {
        Some(value) => {
            Err(ApiError::BadRequest(format!("dryRun: Unsupported value: \"{value}\": supported values: \"All\"")))
        }
        None => Ok(!values.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_may_be_empty_json_or_yaml() {
        let expected = StopOptions { grace_period: Some(5), dry_run: None };
        for body in [
            r#"{"gracePeriod": 5, "unknown": true}"#,
            r#"{"gracePeriod": 5}{"gracePeriod": 6}"#,
            "gracePeriod: 5\n",
            "---\ngracePeriod: 5\n---\ngracePeriod: 6\n",
        ] {
            assert_eq!(parse::<StopOptions>(body.as_bytes()), Ok(expected.clone()), "{body}");
        }
        for body in ["", " \n", "---\n", "null", "{}"] {
            assert_eq!(parse::<StopOptions>(body.as_bytes()), Ok(StopOptions::default()), "{body:?}");
        }
        for body in ["{", "[1]", "gracePeriod: soon", "{\"gracePeriod\": \"soon\"}"] {
            let Err(ApiError::BadRequest(message)) = parse::<StopOptions>(body.as_bytes()) else {
                panic!("accepted {body}")
            };
            assert!(message.starts_with("Can not unmarshal Request body to struct, error: "), "{message}");
        }
    }

    #[test]
    fn dry_run_accepts_one_value() {
        assert_eq!(is_dry_run(&[]), Ok(false));
        assert_eq!(is_dry_run(&["All".into()]), Ok(true));
        assert_eq!(is_dry_run(&["All".into(), "All".into()]), Ok(true));
        for words in [&["all"][..], &[""], &["All", "Some"]] {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            assert!(is_dry_run(&words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn query_values_are_decoded() {
        for (query, expected) in [
            ("?dryRun=All", &["All"][..]),
            ("", &[]),
            ("?", &[]),
            ("?dryrun=All&x=dryRun&dryRunning=All", &[]),
            ("?x=y&dry%52un=%41ll&dryRun=So+me", &["All", "So me"]),
            ("?dryRun", &[""]),
            ("?dryRun=", &[""]),
        ] {
            let uri: Uri = format!("/apis{query}").parse().unwrap();
            assert_eq!(dry_run_in_query(&uri), expected, "{query}");
        }
    }

    #[test]
    fn parameter_is_set_by_a_true_value() {
        assert!(is_set(Some("a=b&preserveSession=true"), "preserveSession"));
        assert!(is_set(Some("preserveSession=1"), "preserveSession"));
        for query in
            [None, Some(""), Some("preserveSession=false"), Some("preserveSession=yes"), Some("preserveSession")]
        {
            assert!(!is_set(query, "preserveSession"), "{query:?}");
        }
    }
}
