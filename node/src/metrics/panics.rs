//! Panics of the kernels of guests.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use daemon::{lock, metrics::Metrics as _};
use prometheus::{IntCounterVec, Registry};
use protocol::GuestPanic;

/// Most series. A VM that panics is started again, so they outlive VMIs; those that counted least recently are removed.
const MOST: usize = 512;
/// Most series of one VM: its guest selects the code.
const MOST_OF_ONE: usize = 8;
/// Kinds of reports of QEMU. A launcher could invent others.
const KINDS: [&str; 3] = ["hyper-v", "s390", "tdx"];
/// Value of labels without a known value.
const UNKNOWN: &str = "unknown";

/// Values of the labels namespace, name, type and code.
type Series = [String; 4];

/// The metric. Cheap to clone.
#[derive(Clone)]
pub(crate) struct GuestPanics {
    counter: IntCounterVec,
    /// The least recent first.
    series: Arc<Mutex<VecDeque<Series>>>,
}

impl GuestPanics {
    /// Registers the metric.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = registry.counters(
            "kubevirt_vmi_guest_os_panic_total",
            "Panics of the kernel of a guest, as its panic device reports",
            &["namespace", "name", "type", "bugcheck_code"],
        )?;
        Ok(Self { counter, series: Arc::default() })
    }

    /// Counts a panic of the guest of a VMI.
    pub(crate) fn count(&self, namespace: &str, name: &str, panic: &GuestPanic) {
        let (kind, code) = (kind(panic), code(panic));
        let of = |code: &str| [namespace, name, kind, code].map(str::to_owned);
        let mut known = lock(&self.series);
        let mut counted = of(&code);
        if !known.contains(&counted) {
            let own = known.iter().filter(|[of_namespace, of_name, ..]| of_namespace == namespace && of_name == name);
            if own.count() >= MOST_OF_ONE {
                counted = of(UNKNOWN);
            }
        }
        known.retain(|series| *series != counted);
        if known.len() >= MOST
            && let Some(oldest) = known.pop_front()
        {
            let _ = self.counter.remove_label_values(&oldest);
        }
        self.counter.with_label_values(&counted).inc();
        known.push_back(counted);
    }
}

/// Returns the kind of the report; unknown without details.
fn kind(panic: &GuestPanic) -> &'static str {
    KINDS.into_iter().find(|kind| *kind == panic.kind).unwrap_or(UNKNOWN)
}

/// Returns the bug check code of Windows in the form `0x7e`; unknown for other guests, and if it is 0.
fn code(panic: &GuestPanic) -> String {
    let first = panic.values.first().filter(|_| panic.kind == "hyper-v");
    let code = first.and_then(|text| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok());
    code.filter(|code| *code != 0).map_or_else(|| UNKNOWN.to_owned(), |code| format!("{code:#x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panic(kind: &str, values: &[&str]) -> GuestPanic {
        GuestPanic { kind: kind.to_owned(), values: values.iter().map(|value| (*value).to_owned()).collect() }
    }

    #[test]
    fn panics_have_the_labels_of_the_reference() {
        for (kind_of, values, expected) in [
            ("hyper-v", vec!["0xd1", "0x0"], ("hyper-v", "0xd1")),
            ("hyper-v", vec!["0x0000007E"], ("hyper-v", "0x7e")),
            ("hyper-v", vec!["0x0"], ("hyper-v", "unknown")),
            ("hyper-v", vec!["seven"], ("hyper-v", "unknown")),
            ("hyper-v", vec![], ("hyper-v", "unknown")),
            ("s390", vec!["0x1"], ("s390", "unknown")),
            ("", vec![], ("unknown", "unknown")),
            ("invented", vec!["0x1"], ("unknown", "unknown")),
        ] {
            let panic = panic(kind_of, &values);
            assert_eq!((kind(&panic), code(&panic).as_str()), expected, "{kind_of} {values:?}");
        }
    }

    #[test]
    fn panics_of_the_next_vmi_of_a_name_add_up() {
        let registry = Registry::new();
        let panics = GuestPanics::new(&registry).unwrap();
        for code in ["0xd1", "0xd1", "0x7e"] {
            panics.count("ns", "vm", &panic("hyper-v", &[code]));
        }
        let text = String::from_utf8(daemon::ops::encode(&registry).unwrap()).unwrap();
        for (code, count) in [("0xd1", 2), ("0x7e", 1)] {
            let line = format!(
                r#"kubevirt_vmi_guest_os_panic_total{{bugcheck_code="{code}",name="vm",namespace="ns",type="hyper-v"}} {count}"#
            );
            assert!(text.lines().any(|known| known == line), "{line} is not in {text}");
        }
    }

    #[test]
    fn cve_2026_13322_a_guest_cannot_make_many_series() {
        let registry = Registry::new();
        let panics = GuestPanics::new(&registry).unwrap();
        for code in 1..1000 {
            panics.count("ns", "vm", &panic("hyper-v", &[&format!("{code:#x}")]));
        }
        let series = || registry.gather().iter().map(|family| family.get_metric().len()).sum::<usize>();
        assert_eq!(series(), MOST_OF_ONE + 1, "further codes are unknown");
        for vm in 0..2 * MOST {
            panics.count("ns", &vm.to_string(), &panic("", &[]));
        }
        assert_eq!(series(), MOST);
        assert_eq!(panics.series.lock().unwrap().len(), MOST);
    }
}
