//! Names: the rules of Kubernetes, with its messages.

const LABEL_MAX: usize = 63;
const SUBDOMAIN_MAX: usize = 253;
const PORT_NAME_MAX: usize = 15;

const DOTS_TEXT: &str = "must not contain dots";
const LABEL_TEXT: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const SUBDOMAIN_TEXT: &str = r"a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const NAME_TEXT: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const LABEL_VALUE_TEXT: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";

fn is_label_text(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
}

fn is_subdomain_text(text: &str) -> bool {
    text.split('.').all(is_label_text)
}

fn is_name_text(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    edge(bytes.first()) && edge(bytes.last()) && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
}

/// Returns the error of a text that is too long.
fn length_errors(text: &str, max: usize) -> Vec<String> {
    if text.len() > max { vec![format!("must be no more than {max} bytes")] } else { vec![] }
}

/// Returns the errors of a DNS label.
pub(crate) fn label_errors(text: &str) -> Vec<String> {
    let mut errors = length_errors(text, LABEL_MAX);
    if !is_label_text(text) {
        let error = if is_subdomain_text(text) { DOTS_TEXT } else { LABEL_TEXT };
        errors.push(error.to_owned());
    }
    errors
}

/// Returns the errors of a DNS subdomain.
pub(crate) fn subdomain_errors(text: &str) -> Vec<String> {
    let mut errors = length_errors(text, SUBDOMAIN_MAX);
    if !is_subdomain_text(text) {
        errors.push(SUBDOMAIN_TEXT.to_owned());
    }
    errors
}

/// Returns the errors of a label key, taint key or topology key.
pub(crate) fn qualified_name_errors(text: &str) -> Vec<String> {
    let (prefix, name) = match text.split_once('/') {
        Some((_, rest)) if rest.contains('/') => {
            return vec![format!(
                "a valid label key {NAME_TEXT} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, text),
    };
    let mut errors = vec![];
    match prefix {
        Some("") => errors.push("prefix part must be non-empty".to_owned()),
        Some(prefix) => errors.extend(subdomain_errors(prefix).into_iter().map(|error| format!("prefix part {error}"))),
        None => {}
    }
    if name.is_empty() {
        errors.push("name part must be non-empty".to_owned());
    }
    errors.extend(length_errors(name, LABEL_MAX).into_iter().map(|error| format!("name part {error}")));
    if !is_name_text(name) {
        errors.push(format!("name part {NAME_TEXT}"));
    }
    errors
}

/// Returns the errors of a label value.
pub(crate) fn label_value_errors(text: &str) -> Vec<String> {
    let mut errors = length_errors(text, LABEL_MAX);
    if !text.is_empty() && !is_name_text(text) {
        errors.push(LABEL_VALUE_TEXT.to_owned());
    }
    errors
}

/// Returns true if a text is an IANA service name.
pub(crate) fn is_port_name(text: &str) -> bool {
    text.len() <= PORT_NAME_MAX
        && is_label_text(text)
        && !text.contains("--")
        && text.bytes().any(|byte| byte.is_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_those_of_kubernetes() {
        assert_eq!(label_errors("a.b"), ["must not contain dots"]);
        assert_eq!(label_errors("a..b"), [LABEL_TEXT]);
        assert_eq!(label_errors(&"x".repeat(64)), ["must be no more than 63 bytes"]);
        let errors = qualified_name_errors("a/b/c");
        assert_eq!(errors.len(), 1);
        assert!(errors[0].starts_with("a valid label key must consist of"), "{errors:?}");
        assert!(errors[0].ends_with("prefix and '/' (e.g. 'example.com/MyName')"), "{errors:?}");
        assert_eq!(
            qualified_name_errors(""),
            ["name part must be non-empty".to_owned(), format!("name part {NAME_TEXT}")]
        );
    }

    #[test]
    fn names_follow_kubernetes() {
        assert!(label_errors("a-1").is_empty());
        for bad in ["", "-a", "a-", "A", "a.b", &"x".repeat(64)] {
            assert!(!label_errors(bad).is_empty(), "{bad}");
        }
        assert!(subdomain_errors("a.b-c.d").is_empty());
        assert!(!subdomain_errors("a..b").is_empty());
        assert!(qualified_name_errors("kubernetes.io/hostname").is_empty());
        assert!(qualified_name_errors("Zone_a").is_empty());
        for bad in ["", "/a", "a/", "a b", "UP.er/x"] {
            assert!(!qualified_name_errors(bad).is_empty(), "{bad}");
        }
        assert!(label_value_errors("").is_empty());
        assert!(!label_value_errors("a b").is_empty());
        assert!(is_port_name("http-1"));
        for bad in ["80", "a--b", "-a", "averyverylongportname", "HTTP"] {
            assert!(!is_port_name(bad), "{bad}");
        }
    }
}
