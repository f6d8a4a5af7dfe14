//! The trace context of a VM's start: the annotation [`annotation::TRACEPARENT`], in the format of W3C Trace Context.
//!
//! virt-api writes the annotation when it reviews a new VM or VMI and traces are on. The value identifies the span of that review;
//! all other spans of the start belong to the same trace.

use std::{fmt, str::FromStr};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    jiff::{SignedDuration, Timestamp},
};

use crate::constants::annotation;

/// Length of the only known version: `00-<trace>-<span>-<flags>`.
const LENGTH: usize = 55;
/// Age of an object after which its start is not traced any more, so that a VMI that never starts has a bounded trace.
const LIMIT: SignedDuration = SignedDuration::from_mins(15);

/// A span within a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceParent {
    /// Identifies the trace.
    pub trace_id: [u8; 16],
    /// Identifies the span.
    pub span_id: [u8; 8],
    /// Spans of this trace are exported.
    pub sampled: bool,
}

/// The error of a text that is no trace context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a trace context of the form 00-<32 hexadecimal digits>-<16 hexadecimal digits>-<2 hexadecimal digits>")]
pub struct NotATraceParent;

impl TraceParent {
    /// Returns the context in the annotations of an object, if there is a valid one.
    #[must_use]
    pub fn of(metadata: &ObjectMeta) -> Option<Self> {
        metadata.annotations.as_ref()?.get(annotation::TRACEPARENT)?.parse().ok()
    }

    /// Returns the context of an object whose start can be traced now, because it is new.
    #[must_use]
    pub fn of_new(metadata: &ObjectMeta, now: Timestamp) -> Option<Self> {
        let created = metadata.creation_timestamp.as_ref()?.0;
        Self::of(metadata).filter(|_| is_new(created, now))
    }

    /// Returns the context to which the start of an object adds spans now: that of a new object, if it is sampled.
    #[must_use]
    pub fn of_start(metadata: &ObjectMeta, now: Timestamp) -> Option<Self> {
        Self::of_new(metadata, now).filter(|context| context.sampled)
    }
}

/// Returns true if the start of an object created at `created` is still traced.
#[must_use]
pub fn is_new(created: Timestamp, now: Timestamp) -> bool {
    now.duration_since(created) < LIMIT
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = |f: &mut fmt::Formatter<'_>, bytes: &[u8]| bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"));
        f.write_str("00-")?;
        hex(f, &self.trace_id)?;
        f.write_str("-")?;
        hex(f, &self.span_id)?;
        write!(f, "-{:02x}", u8::from(self.sampled))
    }
}

impl FromStr for TraceParent {
    type Err = NotATraceParent;

    /// Accepts version 00 only. Flags other than the first are ignored.
    fn from_str(text: &str) -> Result<Self, NotATraceParent> {
        if text.len() != LENGTH {
            return Err(NotATraceParent);
        }
        let mut parts = text.split('-');
        let (Some("00"), Some(trace), Some(span), Some(flags), None) =
            (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(NotATraceParent);
        };
        let (trace_id, span_id, [flags]) = (bytes::<16>(trace)?, bytes::<8>(span)?, bytes::<1>(flags)?);
        if trace_id == [0; 16] || span_id == [0; 8] {
            return Err(NotATraceParent);
        }
        Ok(Self { trace_id, span_id, sampled: flags & 1 == 1 })
    }
}

/// Decodes exactly N bytes in lower-case hexadecimal digits.
fn bytes<const N: usize>(text: &str) -> Result<[u8; N], NotATraceParent> {
    let mut digits = text.bytes().map(|digit| match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        _ => Err(NotATraceParent),
    });
    let mut next = || digits.next().unwrap_or(Err(NotATraceParent));
    let mut decoded = [0; N];
    for byte in &mut decoded {
        *byte = next()? << 4 | next()?;
    }
    if digits.next().is_some() { Err(NotATraceParent) } else { Ok(decoded) }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_context_is_written_as_it_was_read() {
        for text in [VALID, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"] {
            assert_eq!(text.parse::<TraceParent>().unwrap().to_string(), text);
        }
        // Unknown flags are ignored.
        assert!(VALID.replace("-01", "-ff").parse::<TraceParent>().unwrap().sampled);
        assert!(!VALID.replace("-01", "-02").parse::<TraceParent>().unwrap().sampled);
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            String::new(),
            VALID.to_uppercase(),
            VALID.replace("00-4", "01-4"),
            VALID.replace("00-4", "ff-4"),
            VALID.replace('-', "_"),
            VALID.replace("4bf92f", "+bf92f"),
            VALID.replace("4bf92f", "4b 92f"),
            VALID.replace("e4736-0", "e47360-"),
            VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            VALID.replace("00f067aa0ba902b7", &"0".repeat(16)),
            format!("{VALID}-00"),
            format!("{VALID} "),
            VALID[..54].to_owned(),
            VALID.replace("4bf", "é"),
            "é".repeat(27) + "a",
        ] {
            assert_eq!(text.parse::<TraceParent>(), Err(NotATraceParent), "{text}");
        }
    }

    #[test]
    fn only_the_sampled_start_of_a_new_object_is_traced() {
        let created = Timestamp::UNIX_EPOCH;
        let metadata = |value: &str| ObjectMeta {
            annotations: Some([(annotation::TRACEPARENT.to_owned(), value.to_owned())].into()),
            creation_timestamp: Some(Time(created)),
            ..ObjectMeta::default()
        };
        for (value, seconds, traced) in [
            (VALID, 0, true),
            (VALID, 899, true),
            (VALID, 900, false),
            (&VALID.replace("-01", "-00"), 0, false),
            ("00-forged", 0, false),
        ] {
            let now = created + SignedDuration::from_secs(seconds);
            assert_eq!(TraceParent::of_start(&metadata(value), now).is_some(), traced, "{value} {seconds}");
        }
        let unknown = ObjectMeta { creation_timestamp: None, ..metadata(VALID) };
        assert_eq!(TraceParent::of_start(&unknown, created), None);
    }
}
