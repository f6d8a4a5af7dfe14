//! Reading the bodies of subresource requests; their types are in [`api::subresources`].
//!
//! A body is JSON or YAML; none at all means the defaults. Unknown fields are ignored, as every version of the API has
//! done, since `kind` and `apiVersion` of any value are sent along by some clients.

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
    use api::subresources::StopOptions;

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
