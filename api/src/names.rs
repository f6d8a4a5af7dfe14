//! Names and labels derived from the names of objects.
//!
//! A name has up to 253 characters (RFC 1123 subdomain), a label value 63. Text that does not fit is cut and ends with a hash of the
//! whole: `BEGINNING-HASH`, with the first eight hexadecimal digits of SHA-1. Text that fits is not changed.

use sha1::{Digest, Sha1};

/// Longest value of a label.
pub const LABEL_LIMIT: usize = 63;
/// Longest name of an object.
const NAME_LIMIT: usize = 253;
/// Length of the hash and the hyphen before it.
const HASH_LENGTH: usize = 9;

/// Returns a name as the value of a label. The reference has the same rule for the label `vmi.kubevirt.io/id`.
pub fn label_value(name: &str) -> String {
    if name.len() <= LABEL_LIMIT { name.to_owned() } else { hashed(beginning(name, LABEL_LIMIT), name) }
}

/// Returns text that fits into `limit` characters and can be a part of an object's name.
pub fn shortened(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    // A hyphen must not follow a dot.
    hashed(beginning(text, limit).trim_end_matches(['.', '-']), text)
}

/// Returns `{text}{end}` as the name of an object.
pub fn object_name(text: &str, end: &str) -> String {
    format!("{}{end}", shortened(text, NAME_LIMIT.saturating_sub(end.len())))
}

/// Returns `{text}{end}` as a DNS label. Dots that `text` may contain as the name of an object become hyphens.
pub fn dns_label(text: &str, end: &str) -> String {
    let limit = LABEL_LIMIT.saturating_sub(end.len());
    if text.len() <= limit && !text.contains('.') {
        return format!("{text}{end}");
    }
    let label = text.replace('.', "-");
    let beginning = label.get(..limit.saturating_sub(HASH_LENGTH)).unwrap_or(&label);
    format!("{}{end}", hashed(beginning, text))
}

fn beginning(text: &str, limit: usize) -> &str {
    text.get(..limit.saturating_sub(HASH_LENGTH)).unwrap_or_default()
}

fn hashed(beginning: &str, whole: &str) -> String {
    format!("{beginning}-{}", hash(whole))
}

/// Returns the first eight hexadecimal digits of the SHA-1 of a text.
pub fn hash(text: &str) -> String {
    Sha1::digest(text.as_bytes()).iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns true for an RFC 1123 subdomain that can name an object.
    fn is_object_name(name: &str) -> bool {
        let is_edge = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        let is_label = |label: &str| {
            is_edge(label.as_bytes().first())
                && is_edge(label.as_bytes().last())
                && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        };
        name.len() <= NAME_LIMIT && name.split('.').all(is_label)
    }

    #[test]
    fn derived_names_fit_for_every_length() {
        let dotted = |length: usize| "a.b-c.".chars().cycle().take(length - 1).chain(['z']).collect::<String>();
        for length in [1, 2, 53, 54, 55, 62, 63, 64, 169, 238, 239, 252, 253] {
            for name in ["a".repeat(length), dotted(length)] {
                assert!(is_object_name(&name), "{name}");
                let label = label_value(&name);
                assert!(
                    label.len() <= LABEL_LIMIT && label.ends_with(|end: char| end.is_ascii_alphanumeric()),
                    "{label}"
                );
                assert_eq!(label == name, length <= LABEL_LIMIT, "{name}");
                let end = "-v1beta1-0123-7";
                let derived = object_name(&name, end);
                assert!(is_object_name(&derived) && derived.ends_with(end), "{derived}");
                assert_eq!(derived == format!("{name}{end}"), length + end.len() <= NAME_LIMIT);
                assert!(is_object_name(&shortened(&name, LABEL_LIMIT)));
                let end = "-access-cred";
                let label = dns_label(&name, end);
                assert!(is_object_name(&label) && !label.contains('.') && label.ends_with(end), "{label}");
                assert!(label.len() <= LABEL_LIMIT, "{label}");
                let fits = length + end.len() <= LABEL_LIMIT && !name.contains('.');
                assert_eq!(label == format!("{name}{end}"), fits, "{name}");
            }
        }
    }

    #[test]
    fn names_with_the_same_beginning_stay_different() {
        let (first, second) = (format!("{}1", "a".repeat(200)), format!("{}2", "a".repeat(200)));
        assert_ne!(label_value(&first), label_value(&second));
        assert_ne!(object_name(&first, &"-".repeat(100)), object_name(&second, &"-".repeat(100)));
        assert_ne!(dns_label(&first, "-c"), dns_label(&second, "-c"));
        assert_ne!(dns_label("a.b", "-c"), dns_label("a-b", "-c"));
    }

    #[test]
    fn hash_is_that_of_the_reference() {
        assert_eq!(label_value(&"x".repeat(63)), "x".repeat(63));
        assert_eq!(label_value(&"x".repeat(64)), format!("{}-bb2fa3ee", "x".repeat(54)));
    }
}
