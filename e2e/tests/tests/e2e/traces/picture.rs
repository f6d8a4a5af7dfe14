//! A trace as a picture.

use std::fmt::Write;

use ferrovirt_e2e_tests::CollectedSpan;

/// Width of the picture and of the texts on its left, and the height of a row.
const WIDTH: f64 = 960.0;
const TEXTS: f64 = 250.0;
const ROW: f64 = 22.0;
/// Height of the head, which has the time scale.
const HEAD: f64 = 34.0;
/// Narrowest bar.
const NARROWEST: f64 = 2.0;

/// Draws the spans of a trace in SVG: a row for each, with the processes in colours and the time from left to right.
pub(super) fn draw(spans: &[CollectedSpan]) -> String {
    let begin = spans.iter().map(|span| span.times.0).min().unwrap_or_default();
    let end = spans.iter().map(|span| span.times.1).max().unwrap_or_default();
    let milliseconds = |at: u64| at.saturating_sub(begin) as f64 / 1e6;
    let scale = (WIDTH - TEXTS - 90.0) / milliseconds(end).max(1.0);
    let height = HEAD + ROW * spans.len() as f64 + 10.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    let step = step(milliseconds(end));
    let mut mark = 0.0;
    while mark <= milliseconds(end) {
        let x = TEXTS + mark * scale;
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{HEAD}\" x2=\"{x:.1}\" y2=\"{height}\" stroke=\"#dddddd\"/>\
             <text x=\"{x:.1}\" y=\"20\" fill=\"#555555\" text-anchor=\"middle\">{mark:.0} ms</text>"
        );
        mark += step;
    }
    for (index, span) in spans.iter().enumerate() {
        let y = HEAD + ROW * index as f64;
        let (from, to) = (milliseconds(span.times.0), milliseconds(span.times.1));
        let (x, width) = (TEXTS + from * scale, ((to - from) * scale).max(NARROWEST));
        let resource = span.attributes.get("resource").map(String::as_str).unwrap_or_default();
        let label = escape(&format!("{} {} {resource}", span.service, span.name));
        let _ = writeln!(
            svg,
            "<text x=\"8\" y=\"{:.1}\" fill=\"#222222\">{label}</text>\
             <rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\" rx=\"2\" fill=\"{}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#555555\" font-size=\"10\">{:.1} ms</text>",
            y + 15.0,
            y + 4.0,
            ROW - 8.0,
            colour(&span.service),
            x + width + 4.0,
            y + 15.0,
            to - from,
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// Returns the distance of marks, for about ten of them.
fn step(total: f64) -> f64 {
    let steps = [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0];
    steps.into_iter().find(|step| total / step <= 10.0).unwrap_or(60_000.0)
}

fn colour(service: &str) -> &'static str {
    match service {
        "virt-api" => "#4477aa",
        "virt-controller" => "#228833",
        "virt-handler" => "#ccbb44",
        "virt-launcher" => "#ee6677",
        _ => "#bbbbbb",
    }
}

fn escape(text: &str) -> String {
    text.trim().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
