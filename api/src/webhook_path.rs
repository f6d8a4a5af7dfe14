//! Paths of the admission webhooks: `/admission/<segment>/<webhook>`.
//!
//! Every pod reaches virt-api, so a review proves its sender only by a path that nobody can guess. virt-controller makes
//! the segment, keeps it in a Secret, and writes the paths into the webhook configurations; virt-api answers no others.

/// Secret with the segments.
pub const SECRET: &str = "kubevirt-webhook-path";
/// Key of the segment that the webhook configurations carry, or are about to.
pub const CURRENT_KEY: &str = "current";
/// Key of the segment that replaces the current one.
pub const NEXT_KEY: &str = "next";
/// Key of the segment that was replaced.
pub const PREVIOUS_KEY: &str = "previous";
/// Annotation of the Secret: since when users may have seen the current segment in the error of a failed call.
pub const EXPOSED_AT: &str = "ferrovirt.io/exposed-at";
/// Annotation of the Secret: since when users may have seen the previous segment.
pub const PREVIOUS_EXPOSED_AT: &str = "ferrovirt.io/previous-exposed-at";
/// Annotation of a webhook configuration: a JSON object with the path of each webhook, without prefix and segment, by the
/// webhook's name.
pub const PATHS: &str = "ferrovirt.io/webhook-paths";

/// Start of the path of every webhook.
const PREFIX: &str = "/admission/";
/// Bytes that a segment encodes.
pub const SEGMENT_BYTES: usize = 32;

/// Returns the segment that encodes `random`. kube-apiserver takes DNS subdomains as parts of a webhook's path, hence
/// lower-case hexadecimal digits.
#[must_use]
pub fn segment(random: [u8; SEGMENT_BYTES]) -> String {
    let digit = |nibble: u8| char::from_digit(u32::from(nibble), 16).unwrap_or('0');
    random.into_iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Returns true for text that can be a segment.
#[must_use]
pub fn is_segment(text: &str) -> bool {
    text.len() == 2 * SEGMENT_BYTES && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns the path at which `webhook`, which starts with a slash, is served behind a segment.
#[must_use]
pub fn join(segment: &str, webhook: &str) -> String {
    format!("{PREFIX}{segment}{webhook}")
}

/// Splits a path into what stands in the segment's place, which is not checked, and the webhook's path with its slash.
#[must_use]
pub fn split(path: &str) -> Option<(&str, &str)> {
    let rest = path.strip_prefix(PREFIX)?;
    Some(rest.split_at(rest.find('/')?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segment_is_lower_case_hexadecimal_and_a_part_of_a_path() {
        let mut random = [0; SEGMENT_BYTES];
        random[0] = 0xaf;
        let segment = segment(random);
        assert!(segment.starts_with("af00") && is_segment(&segment), "{segment}");
        assert_eq!(split(&join(&segment, "/status-validate")), Some((segment.as_str(), "/status-validate")));
    }

    #[test]
    fn only_whole_segments_are_segments() {
        let good = "0123456789abcdef".repeat(4);
        assert!(is_segment(&good));
        for bad in ["", &good[1..], &format!("{good}0"), &good.to_uppercase(), &good.replace('0', "/")] {
            assert!(!is_segment(bad), "{bad}");
        }
    }

    #[test]
    fn paths_are_split_at_the_first_slash_behind_the_prefix() {
        for (path, parts) in [
            ("/admission/a/b", Some(("a", "/b"))),
            ("/admission/a/b/c", Some(("a", "/b/c"))),
            ("/admission/a//b", Some(("a", "//b"))),
            ("/admission//b", Some(("", "/b"))),
            ("/admission/a/", Some(("a", "/"))),
            ("/admission/a", None),
            ("/admission/", None),
            ("/admission", None),
            ("//admission/a/b", None),
            ("/Admission/a/b", None),
            ("/%61dmission/a/b", None),
            ("/a/b", None),
            ("", None),
        ] {
            assert_eq!(split(path), parts, "{path}");
        }
    }
}
