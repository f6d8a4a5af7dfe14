//! Reading the bodies of subresource requests; their types are in [`api::subresources`].
//!
//! A body is JSON or YAML, of which the first document counts; none at all means the defaults. Unknown fields are
//! ignored, as every version of the API has done, since `kind` and `apiVersion` of any value are sent along by some
//! clients.

use api::subresources::{
    AddVolumeRequest, EvacuateCancelOptions, MigrateOptions, PauseOptions, RemoveVolumeRequest, RestartOptions,
    StartOptions, StopOptions,
};
use axum::extract::Query;
use http::Uri;
use serde::{Deserialize, de::DeserializeOwned};

use crate::error::ApiError;

/// Largest body of a subresource request. The longest sensible one has some hundred bytes.
pub const MAX_BODY: usize = 64 << 10;

/// Reads a body.
pub fn parse<T: DeserializeOwned + Default>(body: &[u8]) -> Result<T, ApiError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    let failed =
        |error: String| ApiError::BadRequest(format!("Can not unmarshal Request body to struct, error: {error}"));
    // JSON first: its messages are better, and nearly everybody sends it.
    if body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{') {
        return T::deserialize(&mut serde_json::Deserializer::from_slice(body))
            .map_err(|error| failed(error.to_string()));
    }
    let text = std::str::from_utf8(body).map_err(|error| failed(error.to_string()))?;
    match serde_yaml::Deserializer::from_str(text).next() {
        None => Ok(T::default()),
        Some(document) => {
            let options = Option::<T>::deserialize(document).map_err(|error| failed(error.to_string()))?;
            Ok(options.unwrap_or_default())
        }
    }
}

/// Options that may ask for a trial.
pub trait Trial {
    /// The words of their field `dryRun`.
    fn dry_run(&self) -> &[String];
}

macro_rules! trials {
    ($($options:ty),+ $(,)?) => {
        $(impl Trial for $options {
            fn dry_run(&self) -> &[String] {
                self.dry_run.as_deref().unwrap_or_default()
            }
        })+
    };
}

trials!(
    AddVolumeRequest,
    EvacuateCancelOptions,
    MigrateOptions,
    PauseOptions,
    RemoveVolumeRequest,
    RestartOptions,
    StartOptions,
    StopOptions,
);

/// The words of `dryRun` in a query, where clients put it that know nothing of these options.
pub fn dry_run_in_query(uri: &Uri) -> Result<Vec<String>, ApiError> {
    let Query(pairs) = Query::<Vec<(String, String)>>::try_from_uri(uri)
        .map_err(|error| ApiError::BadRequest(format!("the query cannot be read: {error}")))?;
    Ok(pairs.into_iter().filter(|(name, _)| name == "dryRun").map(|(_, word)| word).collect())
}

/// Whether nothing is to be changed. What kube-apiserver would refuse is refused here, so that a misspelt word does not
/// turn a trial into the real thing.
pub fn is_dry_run(words: &[String]) -> Result<bool, ApiError> {
    match words.iter().find(|word| *word != "All") {
        Some(word) => {
            Err(ApiError::BadRequest(format!("dryRun: Unsupported value: \"{word}\": supported values: \"All\"")))
        }
        None => Ok(!words.is_empty()),
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
    fn dry_run_knows_one_word() {
        assert_eq!(is_dry_run(&[]), Ok(false));
        assert_eq!(is_dry_run(&["All".into()]), Ok(true));
        assert_eq!(is_dry_run(&["All".into(), "All".into()]), Ok(true));
        for words in [&["all"][..], &[""], &["All", "Some"]] {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            assert!(is_dry_run(&words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn words_of_a_query_are_found_however_they_are_written() {
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
            assert_eq!(dry_run_in_query(&uri).unwrap(), expected, "{query}");
        }
    }
}
