//! The bodies of subresource requests.
//!
//! A body is JSON or YAML; none at all means the defaults. Unknown fields are ignored, as every version of the API has
//! done, since `kind` and `apiVersion` of any value are sent along by some clients.

use serde::{Deserialize, de::DeserializeOwned};

use crate::error::ApiError;

/// Largest body of a subresource request. The longest sensible one has some hundred bytes.
pub const MAX_BODY: usize = 64 << 10;

/// Options of `start`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct StartOptions {
    /// Leave the guest paused at its first instruction.
    pub paused: Option<bool>,
    /// `All`: check, but change nothing.
    pub dry_run: Option<Vec<String>>,
}

/// Options of `stop`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct StopOptions {
    /// Seconds until the guest is forced to stop.
    pub grace_period: Option<i64>,
    /// `All`: check, but change nothing.
    pub dry_run: Option<Vec<String>>,
}

/// Options of `restart`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct RestartOptions {
    /// 0 forces the guest to stop at once; other values are refused.
    pub grace_period_seconds: Option<i64>,
    /// `All`: check, but change nothing.
    pub dry_run: Option<Vec<String>>,
}

/// Options of `pause` and `unpause`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct PauseOptions {
    /// `All`: check, but change nothing.
    pub dry_run: Option<Vec<String>>,
}

/// Reads a body.
pub fn parse<T: DeserializeOwned + Default>(body: &[u8]) -> Result<T, ApiError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    let failed =
        |error: String| ApiError::BadRequest(format!("Can not unmarshal Request body to struct, error: {error}"));
    // JSON first: its messages are better, and nearly everybody sends it.
    if body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{') {
        return serde_json::from_slice(body).map_err(|error| failed(error.to_string()));
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

/// Whether nothing is to be changed. What kube-apiserver would refuse is refused here, so that a misspelt word does not
/// turn a trial into the real thing.
pub fn is_dry_run(dry_run: Option<&Vec<String>>) -> Result<bool, ApiError> {
    let words = dry_run.map(Vec::as_slice).unwrap_or_default();
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
        for body in
            [r#"{"gracePeriod": 5, "unknown": true}"#, "gracePeriod: 5\n", "---\ngracePeriod: 5\n---\ngracePeriod: 6\n"]
        {
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
        assert_eq!(is_dry_run(None), Ok(false));
        assert_eq!(is_dry_run(Some(&vec![])), Ok(false));
        assert_eq!(is_dry_run(Some(&vec!["All".into()])), Ok(true));
        assert!(is_dry_run(Some(&vec!["all".into()])).is_err());
    }
}
