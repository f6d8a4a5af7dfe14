//! Durations in Go's format: `1h30m`, `168h0m0s`, `500ms`.

use std::time::Duration;

use thiserror::Error;

/// The text is not a valid duration.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("{0:?} is not a duration")]
pub struct DurationError(String);

const NANOS: [(&str, f64); 8] =
    [("ns", 1.0), ("us", 1e3), ("µs", 1e3), ("μs", 1e3), ("ms", 1e6), ("s", 1e9), ("m", 60e9), ("h", 3600e9)];

/// Parses a duration. Rejects negative ones.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let fail = || DurationError(text.chars().take(64).collect());
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() || rest.len() > 64 {
        return Err(fail());
    }
    let mut nanos = 0.0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(fail)?;
        let number: f64 = rest[..end].parse().map_err(|_| fail())?;
        rest = &rest[end..];
        let end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let (_, unit) = NANOS.iter().find(|(name, _)| *name == &rest[..end]).ok_or_else(fail)?;
        nanos += number * unit;
        rest = &rest[end..];
    }
    Duration::try_from_secs_f64(nanos / 1e9).map_err(|_| fail())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_durations_read() {
        for (text, want) in
            [("0", 0), ("24h", 86400), ("168h0m0s", 604_800), ("1h30m", 5400), ("1.5m", 90), ("60000ms", 60)]
        {
            assert_eq!(parse(text), Ok(Duration::from_secs(want)), "{text}");
        }
        assert_eq!(parse("1ns"), Ok(Duration::from_nanos(1)));
    }

    #[test]
    fn invalid_text_is_rejected() {
        for text in ["", "h", "5", "-1h", "1d", "1h-", "1..5s"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
