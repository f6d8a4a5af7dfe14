//! Metrics of this process, with the names that all Prometheus clients use.

use std::{fs, sync::Mutex};

use prometheus::{
    Counter, Gauge, IntGauge,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use crate::lock;

/// Clock ticks in a second in files of procfs, on all architectures that KubeVirt supports.
const TICKS: f64 = 100.0;
/// Fields of `/proc/self/stat` after the name of the program (proc_pid_stat(5), less 3).
const USER_TIME: usize = 11;
const SYSTEM_TIME: usize = 12;
const START_TIME: usize = 19;

/// The metrics, read from procfs when they are collected.
pub(super) struct Process {
    resident: IntGauge,
    virtual_memory: IntGauge,
    cpu: Counter,
    open_files: IntGauge,
    most_files: IntGauge,
    start: Gauge,
    /// Held while they are read: two scrapes at a time must not add the same time twice.
    turn: Mutex<()>,
}

impl Process {
    /// Creates the metrics.
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        let process = Self {
            resident: IntGauge::new("process_resident_memory_bytes", "Resident memory of the process")?,
            virtual_memory: IntGauge::new("process_virtual_memory_bytes", "Virtual memory of the process")?,
            cpu: Counter::new("process_cpu_seconds_total", "Processor time of the process")?,
            open_files: IntGauge::new("process_open_fds", "Open file descriptors of the process")?,
            most_files: IntGauge::new("process_max_fds", "Most file descriptors that the process can open")?,
            start: Gauge::new("process_start_time_seconds", "When the process was started")?,
            turn: Mutex::default(),
        };
        let boot = fs::read_to_string("/proc/stat").ok().and_then(|stat| boot_time(&stat));
        let after = fs::read_to_string("/proc/self/stat").ok().and_then(|stat| ticks(&stat, START_TIME));
        if let (Some(boot), Some(after)) = (boot, after) {
            process.start.set(boot + after / TICKS);
        }
        Ok(process)
    }

    fn all(&self) -> [&dyn Collector; 6] {
        [&self.resident, &self.virtual_memory, &self.cpu, &self.open_files, &self.most_files, &self.start]
    }

    /// Reads the metrics. What cannot be read stays as it is.
    fn read(&self) {
        let text = |file: &str| fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
        let status = text("status");
        for (gauge, value) in [
            (&self.resident, bytes(&status, "VmRSS:")),
            (&self.virtual_memory, bytes(&status, "VmSize:")),
            (&self.open_files, open_files()),
            (&self.most_files, most_files(&text("limits"))),
        ] {
            if let Some(value) = value {
                gauge.set(value);
            }
        }
        if let Some(seconds) = cpu_seconds(&text("stat")) {
            self.cpu.inc_by((seconds - self.cpu.get()).max(0.0));
        }
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        self.all().into_iter().flat_map(|collector| collector.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let _turn = lock(&self.turn);
        self.read();
        self.all().into_iter().flat_map(|collector| collector.collect()).collect()
    }
}

/// Returns the file descriptors of this process, without that of the directory that is read.
fn open_files() -> Option<i64> {
    let count = fs::read_dir("/proc/self/fd").ok()?.count();
    i64::try_from(count).ok().map(|count| (count - 1).max(0))
}

/// Returns a value in KiB of `/proc/self/status` in bytes.
fn bytes(status: &str, name: &str) -> Option<i64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: i64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// Returns the soft limit of files in `/proc/self/limits`; none if there is no limit.
fn most_files(limits: &str) -> Option<i64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns a time in `/proc/self/stat`, in clock ticks. The name of the program can contain spaces and parentheses.
fn ticks(stat: &str, field: usize) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(field)?.parse().ok()
}

fn cpu_seconds(stat: &str) -> Option<f64> {
    Some((ticks(stat, USER_TIME)? + ticks(stat, SYSTEM_TIME)?) / TICKS)
}

/// Returns the time of the host's boot in `/proc/stat`.
fn boot_time(stat: &str) -> Option<f64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_procfs_are_read() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 8 0 12345 1000 20 18446744073709551615";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(ticks(stat, START_TIME), Some(12345.0));
        assert_eq!(cpu_seconds("7 (a) S 1"), None);
        let status = "Name:\tvirt-api\nVmSize:\t  200 kB\nVmRSS:\t   12 kB\n";
        assert_eq!((bytes(status, "VmRSS:"), bytes(status, "VmSize:")), (Some(12_288), Some(204_800)));
        let limits = "Limit      Soft Limit  Hard Limit  Units\nMax open files            1024                 524288               files\n";
        assert_eq!(most_files(limits), Some(1024));
        assert_eq!(most_files("Max open files  unlimited  unlimited  files"), None);
        assert_eq!(boot_time("cpu 1 2\nbtime 1893456000\nprocesses 7\n"), Some(1_893_456_000.0));
        for text in ["", "x", ")", "btime"] {
            assert_eq!((cpu_seconds(text), bytes(text, "VmRSS:"), boot_time(text)), (None, None, None));
        }
    }

    #[test]
    fn own_process_is_shown() {
        let process = Process::new().unwrap();
        let shown: Vec<_> = process.collect().iter().map(|family| (family.name().to_owned(), value(family))).collect();
        assert_eq!(shown.len(), 6);
        assert_eq!(process.desc().len(), 6);
        // A short test may have used no whole clock tick.
        let empty: Vec<_> =
            shown.iter().filter(|(name, value)| *value <= 0.0 && name != "process_cpu_seconds_total").collect();
        assert!(empty.is_empty(), "{empty:?}");
    }

    fn value(family: &MetricFamily) -> f64 {
        let metric = &family.get_metric()[0];
        metric.get_gauge().get_value().max(metric.get_counter().get_value())
    }
}
