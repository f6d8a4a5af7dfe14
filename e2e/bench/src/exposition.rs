//! Samples in the text format of Prometheus.

/// Returns the sum of the samples of a metric that have all of these labels, written as `name="value"`.
pub(crate) fn sum<'a>(lines: impl IntoIterator<Item = &'a str>, metric: &str, labels: &[&str]) -> f64 {
    let values = lines.into_iter().filter_map(|line| {
        let rest = line.strip_prefix(metric)?;
        // Values of labels can contain spaces and braces.
        let (own, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once('}')?,
            None => ("", rest.strip_prefix(' ')?),
        };
        let has_all = labels.iter().all(|label| own.contains(label));
        has_all.then(|| value.split_whitespace().next()?.parse::<f64>().ok()).flatten()
    });
    values.sum()
}

#[cfg(test)]
mod tests {
    use super::sum;

    #[test]
    fn samples_of_the_metric_with_the_labels_are_added() {
        let text = "# HELP calls Calls\n# TYPE calls counter\ncalls{name=\"a b\",kind=\"policy\"} 2\n\
                    calls{name=\"{c}\",kind=\"policy\"} 1.5e+01\ncalls{name=\"d\",kind=\"webhook\"} 4 1700000000\n\
                    calls_total 100\nsize 7\nsize_in_use 9\n";
        for (metric, labels, expected) in [
            ("calls", &[][..], 21.0),
            ("calls", &["kind=\"policy\""], 17.0),
            ("calls", &["kind=\"policy\"", "name=\"a b\""], 2.0),
            ("size", &[], 7.0),
            ("missing", &[], 0.0),
        ] {
            assert_eq!(sum(text.lines(), metric, labels), expected, "{metric} {labels:?}");
        }
    }
}
