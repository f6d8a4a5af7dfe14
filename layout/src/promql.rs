//! Names of metrics in expressions of PromQL.

use std::collections::BTreeSet;

/// Words that stand where a metric can stand. Functions and aggregations are followed by a parenthesis.
const WORDS: &[&str] = &["and", "or", "unless", "bool", "offset", "atan2", "inf", "nan", "start", "end"];
/// Words that a list of labels follows.
const GROUPINGS: &[&str] = &["by", "without", "on", "ignoring", "group_left", "group_right"];

/// Returns the names of the metrics in an expression. Variables of Grafana (`$name`) are no metrics.
#[must_use]
pub fn metrics(expression: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut rest = expression;
    while let Some(first) = rest.chars().next() {
        rest = match first {
            '"' | '\'' | '`' => after_string(rest, first),
            '{' => after_brackets(rest, '{', '}'),
            '[' => after_brackets(rest, '[', ']'),
            '#' => rest.split_once('\n').map_or("", |(_, rest)| rest),
            '$' => rest[1..].trim_start_matches(is_part),
            _ if first.is_ascii_digit() => rest.trim_start_matches(is_part),
            _ if is_part(first) => {
                let name = rest.split(|c| !is_part(c)).next().unwrap_or_default();
                let after = &rest[name.len()..];
                let next = after.trim_start();
                let opens = next.starts_with('(');
                // The list of labels of an aggregation can stand before its parenthesis.
                let grouped = ["by", "without"].contains(&next.split(|c| !is_part(c)).next().unwrap_or_default());
                if GROUPINGS.contains(&name) {
                    if opens { after_brackets(next, '(', ')') } else { after }
                } else {
                    if !opens && !grouped && !WORDS.contains(&name.to_ascii_lowercase().as_str()) {
                        found.insert(name);
                    }
                    after
                }
            }
            _ => &rest[first.len_utf8()..],
        };
    }
    found
}

fn is_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// Skips a string at the start of a text.
fn after_string(text: &str, quote: char) -> &str {
    let mut escaped = false;
    for (index, c) in text.char_indices().skip(1) {
        if c == quote && !escaped {
            return &text[index + 1..];
        }
        escaped = c == '\\' && !escaped;
    }
    ""
}

/// Skips a bracket at the start of a text and all up to that which closes it.
fn after_brackets(text: &str, open: char, close: char) -> &str {
    let mut depth = 0_usize;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        rest = match c {
            '"' | '\'' | '`' => after_string(rest, c),
            _ => &rest[c.len_utf8()..],
        };
        if c == open {
            depth += 1;
        } else if c == close {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                return rest;
            }
        }
    }
    ""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_told_from_functions_labels_and_words() {
        for (expression, names) in [
            ("up", vec!["up"]),
            (r#"sum(up{pod=~"a-.*", job="x"}) or vector(0)"#, vec!["up"]),
            ("sum by (node) (rate(a_total[5m])) / on (x, y) group_left (z) b:c:sum > 0.8", vec!["a_total", "b:c:sum"]),
            ("sum(a) by (node) + sum(b) without(pod)", vec!["a", "b"]),
            ("a unless on () (b == 1) and c offset 10m", vec!["a", "b", "c"]),
            (r#"label_replace(a{x="}"}, "y", "$1", "z", "(.*)") # comment b"#, vec!["a"]),
            ("rate(a[$__rate_interval]) > bool 1e3 * $factor", vec!["a"]),
            (r#"a{x="\"b"} + 'c' + 1h"#, vec!["a"]),
            ("", vec![]),
        ] {
            assert_eq!(metrics(expression), names.into_iter().collect(), "{expression}");
        }
    }
}
