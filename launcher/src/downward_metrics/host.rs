//! Metrics of the node, from `/proc`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Read,
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};

/// Largest file that is read: `cpuinfo` has some 1.5 KiB for each CPU.
const LIMIT: u64 = 4 << 20;
/// Unit of CPU times in `/proc/stat`, on all architectures.
pub(super) const TICKS_PER_SECOND: f64 = 100.0;
/// Type of the entry with the page size in the auxiliary vector.
const PAGE_SIZE_ENTRY: u64 = 6;

/// Processor packages, which do not change: the kernel asks each CPU for its frequency when this file is read.
static PROCESSORS: OnceLock<Option<usize>> = OnceLock::new();

/// Metrics of the node. `None`: the kernel does not report it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostMetrics {
    /// Processor packages.
    pub(crate) processors: Option<usize>,
    /// CPU time of user and kernel.
    pub(crate) cpu_ticks: Option<u64>,
    pub(crate) memory: Memory,
    /// KiB that were read from swap.
    pub(crate) paged_in: Option<u64>,
    /// KiB that were written to swap.
    pub(crate) paged_out: Option<u64>,
    /// Seconds since 1970.
    pub(crate) time: Option<u64>,
}

/// Memory of the node in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) total: Option<u64>,
    pub(crate) free: Option<u64>,
    pub(crate) buffers: Option<u64>,
    pub(crate) cached: Option<u64>,
    pub(crate) swap_total: Option<u64>,
    pub(crate) swap_free: Option<u64>,
    pub(crate) swap_cached: Option<u64>,
}

impl Memory {
    /// Returns free memory and swap.
    pub(super) fn free_virtual(&self) -> Option<u64> {
        self.free?.checked_add(self.swap_free?)
    }

    /// Returns the memory that is neither free nor a cache.
    pub(super) fn used(&self) -> Option<u64> {
        less(self.total?, &[self.free?, self.buffers?, self.cached?])
    }

    /// Returns the memory and swap that are neither free nor a cache.
    pub(super) fn used_virtual(&self) -> Option<u64> {
        let all = self.total?.checked_add(self.swap_total?)?;
        less(all, &[self.free?, self.cached?, self.buffers?, self.swap_cached?])
    }
}

/// Subtracts. The kernel does not read all counters at the same time.
fn less(from: u64, parts: &[u64]) -> Option<u64> {
    let parts = parts.iter().try_fold(0_u64, |sum, part| sum.checked_add(*part))?;
    Some(from.saturating_sub(parts))
}

/// Reads the metrics of the node.
pub(super) fn read() -> HostMetrics {
    let page_kib = page_size(&bytes("/proc/self/auxv")) / 1024;
    let text = |path: &str| String::from_utf8_lossy(&bytes(path)).into_owned();
    let [stat, meminfo, vmstat] = ["/proc/stat", "/proc/meminfo", "/proc/vmstat"].map(text);
    let vmstat = table(&vmstat, ' ');
    let swapped = |name: &str| vmstat.get(name)?.checked_mul(page_kib);
    HostMetrics {
        processors: *PROCESSORS.get_or_init(|| processors(&text("/proc/cpuinfo"))),
        cpu_ticks: cpu_ticks(&stat),
        memory: memory(&table(&meminfo, ':')),
        paged_in: swapped("pswpin"),
        paged_out: swapped("pswpout"),
        time: SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs()),
    }
}

/// Returns the content of a file; empty if it cannot be read.
fn bytes(path: &str) -> Vec<u8> {
    let mut content = Vec::new();
    match File::open(path).and_then(|file| file.take(LIMIT).read_to_end(&mut content)) {
        Ok(_) => content,
        Err(_) => Vec::new(),
    }
}

/// Returns the numbers of a file with a name and a number in each line.
fn table(text: &str, separator: char) -> BTreeMap<&str, u64> {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(separator)?;
            Some((name, value.split_whitespace().next()?.parse().ok()?))
        })
        .collect()
}

fn memory(values: &BTreeMap<&str, u64>) -> Memory {
    let value = |name: &str| values.get(name).copied();
    Memory {
        total: value("MemTotal"),
        free: value("MemFree"),
        buffers: value("Buffers"),
        cached: value("Cached"),
        swap_total: value("SwapTotal"),
        swap_free: value("SwapFree"),
        swap_cached: value("SwapCached"),
    }
}

/// Counts the packages in `cpuinfo`; `None` on an architecture that does not name them.
fn processors(cpuinfo: &str) -> Option<usize> {
    let ids: BTreeSet<&str> = cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(name, _)| name.trim() == "physical id")
        .map(|(_, id)| id.trim())
        .collect();
    (!ids.is_empty()).then_some(ids.len())
}

/// Returns the time in user mode, of low priority and in the kernel.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.lines().find(|line| line.starts_with("cpu "))?.split_whitespace().skip(1);
    let mut next = || fields.next()?.parse::<u64>().ok();
    next()?.checked_add(next()?)?.checked_add(next()?)
}

/// Returns the page size in an auxiliary vector: pairs of numbers.
fn page_size(auxv: &[u8]) -> u64 {
    let number = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).ok();
    let mut pairs = auxv.chunks_exact(16).filter_map(|pair| Some((number(pair.get(..8)?)?, number(pair.get(8..)?)?)));
    pairs.find(|(kind, _)| *kind == PAGE_SIZE_ENTRY).map_or(4096, |(_, size)| size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_kernel_are_read() {
        assert_eq!(cpu_ticks("cpu  10 20 30 400 5\ncpu0 1 2 3 4\n"), Some(60));
        assert_eq!(processors("physical id\t: 0\ncore id\t: 1\nphysical id\t: 0\nphysical id\t: 1\n"), Some(2));
        let meminfo = "MemTotal:       1000 kB\nMemFree:         100 kB\nBuffers: 10 kB\nCached: 200 kB\n\
                       SwapCached: 0 kB\nSwapTotal: 50 kB\nSwapFree: 50 kB\n";
        let memory = memory(&table(meminfo, ':'));
        assert_eq!((memory.used(), memory.free_virtual(), memory.used_virtual()), (Some(690), Some(150), Some(740)));
        assert_eq!(table("pswpin 7\npswpout 0\n", ' ').get("pswpin"), Some(&7));
        let pair = |kind: u64, value: u64| [kind.to_ne_bytes(), value.to_ne_bytes()].concat();
        assert_eq!(page_size(&[pair(3, 1), pair(6, 65536)].concat()), 65536);
    }

    #[test]
    fn values_that_are_missing_or_no_numbers_are_left_out() {
        for text in ["", "cpu", "cpu a b c", "cpu  1 2", &format!("cpu  {} 1 1", u64::MAX)] {
            assert_eq!(cpu_ticks(text), None, "{text:?}");
        }
        assert_eq!(processors("processor : 0\n"), None);
        assert_eq!(memory(&table("MemTotal 5\nMemFree: many kB\n", ':')), Memory::default());
        assert_eq!(Memory { total: Some(1), ..Memory::default() }.used(), None);
        assert_eq!(page_size(&[]), 4096);
    }

    #[test]
    fn this_node_reports_its_metrics() {
        let host = read();
        assert!(host.cpu_ticks.is_some() && host.memory.used().is_some() && host.time.is_some(), "{host:?}");
    }
}
