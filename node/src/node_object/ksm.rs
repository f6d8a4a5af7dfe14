//! Kernel same-page merging: pages of the same content in guests share memory, at the cost of CPU time.
//!
//! On nodes that `ksmConfiguration` selects, virt-handler starts it when memory gets scarce, lets it scan more pages the longer
//! that lasts, fewer afterwards, and stops it at last. Elsewhere it stops only what it has started, which an annotation of the
//! node records. The kernel merges pages of processes that offer them: QEMU does.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use api::constants::annotation;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::core::{Selector, SelectorExt};
use tokio::time::Instant;

use crate::safe_dir::{Error, SafeDir};

/// Pause between two adjustments.
const INTERVAL: Duration = Duration::from_secs(180);
/// Largest file of the kernel that is read.
const MAX_FILE: usize = 64 * 1024;
/// Used memory for which the baseline of the pause holds, in KiB.
const BASELINE_MEMORY: u64 = 16 << 20;

/// The label and the annotation of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shown {
    /// The node is selected, and its kernel can merge pages.
    pub(super) enabled: bool,
    /// virt-handler has started the merging.
    pub(super) managed: bool,
}

/// The kernel's settings and the node's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Observed {
    is_running: bool,
    /// Pages that it scans before each pause.
    pages: u64,
    /// Memory in KiB.
    total: u64,
    available: u64,
}

/// Settings for the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    run: bool,
    pages: u64,
    /// Milliseconds between two scans.
    sleep: u64,
}

/// Limits and steps of the adjustment.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Parameters {
    boost: u64,
    /// Pages less per step, as a positive number.
    decay: u64,
    min: u64,
    max: u64,
    init: u64,
    sleep_baseline: u64,
    free_percent: f64,
}

impl Parameters {
    /// Returns the parameters with the overrides of the node's annotations. An override out of its bounds is replaced by the
    /// default, or by the lower bound if the default is not within the bounds either.
    fn of(annotations: &BTreeMap<String, String>) -> Self {
        let number = |key: &str| annotations.get(key).and_then(|text| text.trim().parse::<i64>().ok());
        let bounded = |key: &str, default: i64, least: i64, most: i64| {
            let given = number(key).unwrap_or(default);
            let value = if (least..=most).contains(&given) { given } else { default };
            let value = if (least..=most).contains(&value) { value } else { least };
            value.unsigned_abs()
        };
        let min = bounded(annotation::KSM_PAGES_MIN, 64, 0, i64::MAX);
        let least = i64::try_from(min).unwrap_or(i64::MAX);
        let max = bounded(annotation::KSM_PAGES_MAX, 1250, least, i64::MAX);
        let most = i64::try_from(max).unwrap_or(i64::MAX);
        let free = annotations.get(annotation::KSM_FREE_PERCENT).and_then(|text| text.trim().parse::<f64>().ok());
        Self {
            boost: bounded(annotation::KSM_PAGES_BOOST, 300, 0, i64::MAX),
            decay: bounded(annotation::KSM_PAGES_DECAY, -50, i64::MIN, 0),
            min,
            max,
            init: bounded(annotation::KSM_PAGES_INIT, 100, least, most),
            sleep_baseline: bounded(annotation::KSM_SLEEP_BASELINE, 100, 1, i64::MAX),
            free_percent: free.filter(|free| (0.0..=1.0).contains(free)).unwrap_or(0.2),
        }
    }
}

/// Returns the next settings of a selected node.
fn decide(observed: Observed, parameters: &Parameters) -> Settings {
    let Parameters { boost, decay, min, max, init, sleep_baseline, free_percent } = *parameters;
    let used = observed.total.saturating_sub(observed.available).max(1);
    let sleep = u128::from(sleep_baseline) * u128::from(BASELINE_MEMORY) / u128::from(used);
    // The kernel keeps 32 bits.
    let sleep = u64::try_from(sleep).unwrap_or(u64::MAX).max(sleep_baseline / 10).min(u64::from(u32::MAX));
    #[expect(clippy::cast_precision_loss, reason = "kibibytes of memory are far below 2^52")]
    let is_scarce = observed.available as f64 <= observed.total as f64 * free_percent;
    let (run, pages) = match (is_scarce, observed.is_running) {
        (true, true) => (true, observed.pages.saturating_add(boost).min(max)),
        (true, false) => (true, init),
        (false, true) => {
            let pages = observed.pages.checked_sub(decay).filter(|pages| *pages >= min);
            (pages.is_some(), pages.unwrap_or(min))
        }
        (false, false) => (false, observed.pages),
    };
    Settings { run, pages, sleep }
}

/// Returns true if the selector matches the labels of the node. Without a selector no node is selected, an empty one selects all.
fn is_selected(selector: Option<&LabelSelector>, node: &ObjectMeta) -> bool {
    let Some(selector) = selector else { return false };
    let labels = node.labels.clone().unwrap_or_default();
    Selector::try_from(selector.clone()).is_ok_and(|selector| selector.matches(&labels))
}

/// Same-page merging of this node.
#[derive(Debug)]
pub(super) struct Ksm {
    /// Directory of the kernel's settings.
    settings: PathBuf,
    /// Directory of `meminfo`.
    proc: PathBuf,
    /// Time of the next adjustment while the node is selected.
    due: Option<Instant>,
    /// Parameters of the last adjustment. Annotations can be seen later than the selector.
    adjusted: Option<Parameters>,
    shown: Shown,
}

impl Ksm {
    pub(super) fn new(settings: PathBuf, proc: PathBuf) -> Self {
        Self { settings, proc, due: None, adjusted: None, shown: Shown::default() }
    }

    /// Returns the time of the next adjustment.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Adjusts the kernel if it is time or the parameters have changed, and returns what the node shows.
    pub(super) fn follow(&mut self, selector: Option<&LabelSelector>, node: &ObjectMeta, now: Instant) -> Shown {
        let empty = BTreeMap::new();
        let annotations = node.annotations.as_ref().unwrap_or(&empty);
        let parameters = Parameters::of(annotations);
        let is_due = self.due.is_none_or(|due| due <= now) || self.adjusted != Some(parameters);
        let selected = is_selected(selector, node);
        if selected && !is_due {
            return self.shown;
        }
        match self.adjust(selected, annotations, &parameters) {
            Ok(shown) => self.shown = shown,
            // A kernel without it.
            Err(error) if error.is_not_found() => self.shown = Shown::default(),
            Err(error) => tracing::warn!(%error, "cannot adjust kernel same-page merging"),
        }
        self.due = selected.then(|| now + INTERVAL);
        self.adjusted = selected.then_some(parameters);
        self.shown
    }

    fn adjust(
        &self,
        selected: bool,
        annotations: &BTreeMap<String, String>,
        parameters: &Parameters,
    ) -> Result<Shown, Error> {
        let directory = SafeDir::trusted(&self.settings)?;
        let number =
            |name: &str| -> Result<u64, Error> { Ok(directory.read_text(name, MAX_FILE)?.trim().parse().unwrap_or(0)) };
        let set = |name: &str, value: u64| directory.write_existing(name, value.to_string().as_bytes());
        let is_running = number("run")? == 1;
        if !selected {
            let is_ours = annotations.get(annotation::KSM_HANDLER_MANAGED).is_some_and(|managed| managed == "true");
            if is_running && is_ours {
                set("run", 0)?;
                tracing::info!("kernel same-page merging is stopped");
            }
            return Ok(Shown::default());
        }
        let (total, available) = memory(&SafeDir::trusted(&self.proc)?.read_text("meminfo", MAX_FILE)?);
        let observed = Observed { is_running, pages: number("pages_to_scan")?, total, available };
        let settings = decide(observed, parameters);
        if settings.run {
            set("pages_to_scan", settings.pages)?;
            set("sleep_millisecs", settings.sleep)?;
        }
        if settings.run != is_running {
            set("run", u64::from(settings.run))?;
            tracing::info!(run = settings.run, "kernel same-page merging follows the node's memory");
        }
        Ok(Shown { enabled: true, managed: settings.run })
    }
}

/// Parses total and available memory in KiB.
fn memory(meminfo: &str) -> (u64, u64) {
    let value = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    (value("MemTotal"), value("MemAvailable"))
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests create the files that virt-handler finds")]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;

    fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| (format!("kubevirt.io/ksm-{key}"), (*value).to_owned())).collect()
    }

    #[test]
    fn merging_follows_the_memory_of_the_node() {
        let gib = 1 << 20;
        let parameters = Parameters::of(&BTreeMap::new());
        // Running, pages, available GiB of 32; running, pages, sleep.
        for (before, pages, available, run, next, sleep) in [
            (false, 100, 20, false, 100, 133),
            (false, 700, 6, true, 100, 61),
            (true, 100, 6, true, 400, 61),
            (true, 1200, 1, true, 1250, 51),
            (true, 1250, 7, true, 1200, 64),
            (true, 114, 31, true, 64, 1600),
            (true, 113, 31, false, 64, 1600),
        ] {
            let observed = Observed { is_running: before, pages, total: 32 * gib, available: available * gib };
            let expected = Settings { run, pages: next, sleep };
            assert_eq!(decide(observed, &parameters), expected, "{observed:?}");
        }
        // Much memory, and none.
        for (total, sleep) in [(2048 * gib, 10), (0, 100 * (16 << 20))] {
            let observed = Observed { total, ..Observed::default() };
            assert_eq!(decide(observed, &parameters).sleep, sleep);
        }
    }

    #[test]
    fn overrides_apply_within_their_bounds() {
        let default = Parameters::of(&BTreeMap::new());
        for (pairs, expected) in [
            (&[][..], default),
            (
                &[("pages-boost-override", "5"), ("pages-decay-override", "-7")],
                Parameters { boost: 5, decay: 7, ..default },
            ),
            (&[("pages-boost-override", "-5"), ("pages-decay-override", "7")], default),
            (&[("pages-min-override", "2000")], Parameters { min: 2000, max: 2000, init: 2000, ..default }),
            (&[("pages-max-override", "80")], Parameters { max: 80, init: 64, ..default }),
            (&[("pages-init-override", "65")], Parameters { init: 65, ..default }),
            (&[("sleep-ms-baseline-override", "0")], default),
            (&[("free-percent-override", "1.0")], Parameters { free_percent: 1.0, ..default }),
            (&[("free-percent-override", "NaN")], default),
            (&[("free-percent-override", "2")], default),
            (&[("pages-max-override", "many")], default),
        ] {
            assert_eq!(Parameters::of(&annotations(pairs)), expected, "{pairs:?}");
        }
    }

    #[test]
    fn selected_nodes_run_it_and_others_stop_their_own() {
        let root = std::env::temp_dir().join(format!("ferrovirt-ksm-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).unwrap();
        let write = |name: &str, content: &str| fs::write(root.join(name), content).unwrap();
        let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
        write("meminfo", "MemTotal:       33554432 kB\nMemFree:  1 kB\nMemAvailable:    1048576 kB\n");
        let selector = |selector: Value| -> Option<LabelSelector> { serde_json::from_value(selector).unwrap() };
        let (all, some) = (selector(json!({})), selector(json!({"matchLabels": {"a": "b"}})));
        let node = |labels: Value, managed: Option<&str>| -> ObjectMeta {
            serde_json::from_value(
                json!({"labels": labels, "annotations": {"kubevirt.io/ksm-handler-managed": managed.unwrap_or("")}}),
            )
            .unwrap()
        };
        let (start, on, off) = (Instant::now(), json!({"a": "b"}), json!({}));
        let mut ksm = Ksm::new(root.clone(), root.clone());
        assert_eq!(ksm.follow(all.as_ref(), &node(off.clone(), None), start), Shown::default(), "no such kernel");
        ksm.due = None;
        for (run, selector, labels, managed, expected, after) in [
            ("0\n", None, &off, None, (false, false), "0\n"),
            ("0\n", some.as_ref(), &off, None, (false, false), "0\n"),
            ("0\n", some.as_ref(), &on, None, (true, true), "1"),
            ("1\n", all.as_ref(), &off, Some("true"), (true, true), "1\n"),
            // Somebody else's.
            ("1\n", None, &off, Some("false"), (false, false), "1\n"),
            ("1\n", some.as_ref(), &off, Some("true"), (false, false), "0"),
        ] {
            for (name, content) in [("run", run), ("pages_to_scan", "100\n"), ("sleep_millisecs", "20\n")] {
                write(name, content);
            }
            ksm.due = None;
            let shown = ksm.follow(selector, &node(labels.clone(), managed), start);
            assert_eq!(
                ((shown.enabled, shown.managed), read("run").trim()),
                (expected, after.trim()),
                "{labels} {managed:?}"
            );
        }
        // Once in an interval.
        ksm.due = None;
        for (later, pages) in [(0, "100"), (179, "100"), (180, "400")] {
            ksm.follow(all.as_ref(), &node(off.clone(), None), start + Duration::from_secs(later));
            assert_eq!(read("pages_to_scan").trim_end_matches('\n')[..3].to_owned(), pages, "{later}");
        }
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn overrides_that_are_seen_after_the_selector_apply_at_once() {
        let root = std::env::temp_dir().join(format!("ferrovirt-ksm-overrides-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).unwrap();
        for (name, content) in [
            ("meminfo", "MemTotal:       33554432 kB\nMemAvailable:   31457280 kB\n"),
            ("run", "0\n"),
            ("pages_to_scan", "100\n"),
            ("sleep_millisecs", "20\n"),
        ] {
            fs::write(root.join(name), content).unwrap();
        }
        let node =
            |pairs: &[(&str, &str)]| ObjectMeta { annotations: Some(annotations(pairs)), ..ObjectMeta::default() };
        let (start, all) = (Instant::now(), LabelSelector::default());
        let mut ksm = Ksm::new(root.clone(), root.clone());
        let free = &[("free-percent-override", "1.0")][..];
        for (later, pairs, managed, pages) in
            [(0, &[][..], false, "100"), (1, free, true, "100"), (2, free, true, "100"), (181, free, true, "400")]
        {
            let now = start + Duration::from_secs(later);
            let shown = ksm.follow(Some(&all), &node(pairs), now);
            let scanned = fs::read_to_string(root.join("pages_to_scan")).unwrap();
            assert_eq!((shown, scanned.get(..3)), (Shown { enabled: true, managed }, Some(pages)), "{later}");
        }
        assert_eq!(ksm.due(), Some(start + Duration::from_secs(361)));
        fs::remove_dir_all(root).unwrap();
    }
}
