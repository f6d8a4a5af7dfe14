//! The supervisor: process 1 of the pod.
//!
//! It starts the worker, forwards signals, reaps the children of process 1 (QEMU among them) and restarts a crashed
//! worker, which takes over libvirt's daemon and the running guest. After the worker's final exit it makes sure that
//! QEMU has ended, ends the proxy of a service mesh, and exits with the worker's code.
//!
//! It stays small, since every pod pays for it: it links neither an async runtime nor libvirt.

use std::{
    ffi::OsString,
    fs,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitCode, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, WaitOptions, kill_process, wait},
};

use crate::{daemon_log::DaemonLog, proxy};

/// The worker.
const WORKER: &str = "/usr/bin/virt-launcher";
/// Number of crashes within [`CRASH_WINDOW`] after which the worker is not restarted.
const CRASH_LIMIT: usize = 5;
const CRASH_WINDOW: Duration = Duration::from_secs(300);
/// Time that processes have to end after SIGTERM.
const END_DEADLINE: Duration = Duration::from_secs(10);

/// Time that a worker has to install its signal handlers: its libraries are loaded first.
const HANDLERS_DEADLINE: Duration = Duration::from_secs(10);
/// Interval at which its handlers are looked for.
const HANDLERS_CHECK: Duration = Duration::from_millis(20);
/// Wait for a signal; a missed one costs at most this.
const IDLE: Duration = Duration::from_secs(60);

/// Argument of the supervisor: keep a failed pod for inspection until it is deleted.
const KEEP: &str = "--keep-after-failure";
/// Argument of the supervisor: the pod asked for the proxy of a service mesh.
const END_PROXY: &str = "--end-proxy";

/// Action after the worker has ended.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// The worker exited with this code.
    Exit(u8),
    /// The worker crashed: restart it.
    Restart,
}

/// Decides after a worker's end: an exit is final; a crash leads to a restart unless crashes accumulate or the pod is
/// terminating.
fn judge(status: ExitStatus, crashes: usize, terminating: bool) -> Next {
    match (status.code(), status.signal()) {
        // 101 is the exit code of a Rust program that panicked.
        (Some(101), _) | (None, Some(_)) if crashes < CRASH_LIMIT && !terminating => Next::Restart,
        (Some(code), _) => Next::Exit(u8::try_from(code).unwrap_or(1)),
        (None, _) => Next::Exit(1),
    }
}

/// Runs the supervisor.
pub(crate) fn run(args: Vec<OsString>) -> ExitCode {
    let signals = match signals::Signals::new() {
        Ok(signals) => signals,
        Err(error) => {
            eprintln!("virt-launcher-monitor: cannot receive signals: {error}");
            return ExitCode::FAILURE;
        }
    };
    let (own, args): (Vec<OsString>, Vec<OsString>) = args.into_iter().partition(|arg| arg == KEEP || arg == END_PROXY);
    let has = |option: &str| own.iter().any(|arg| arg == option);
    let worker = std::env::var_os("VIRT_LAUNCHER_WORKER").unwrap_or_else(|| WORKER.into());
    let mut log = DaemonLog::of(&args);
    let mut crashes: Vec<Instant> = Vec::new();
    let mut terminating = false;
    let code = loop {
        let mut child = match start(&worker, &args, log.as_ref()) {
            Ok(child) => child,
            Err(error) => {
                eprintln!("virt-launcher-monitor: cannot start {}: {error}", worker.to_string_lossy());
                break 1;
            }
        };
        let status = watch(&signals, &mut child, &mut terminating, &mut log);
        crashes.retain(|at| at.elapsed() < CRASH_WINDOW);
        match judge(status, crashes.len(), terminating) {
            Next::Exit(code) => break code,
            Next::Restart => {
                eprintln!("virt-launcher-monitor: the worker ended with {status}, restarting it");
                crashes.push(Instant::now());
                thread::sleep(Duration::from_millis(100));
            }
        }
    };
    let code = if end_all(&mut log) { code } else { 1 };
    proxy::end(has(END_PROXY));
    if code != 0 && has(KEEP) {
        eprintln!("virt-launcher-monitor: the VMI has failed, keeping its pod until it is deleted");
        while !terminating {
            wait_for_signal(&signals, None, IDLE);
            terminating = signals.take_end_request();
        }
    }
    ExitCode::from(code)
}

fn start(worker: &OsString, args: &[OsString], log: Option<&DaemonLog>) -> std::io::Result<Child> {
    let mut command = Command::new(worker);
    if let Some(log) = log {
        log.pass(&mut command);
    }
    command
        .args(args)
        // libvirt's client must not start a daemon: the worker does.
        .env("LIBVIRT_AUTOSTART", "0")
        .env("MALLOC_ARENA_MAX", "1")
        // Freed memory at the end of the heap returns to the system. The default keeps 128 KiB.
        .env("MALLOC_TRIM_THRESHOLD_", "16384")
        // A terminal's signals reach the worker through the supervisor only.
        .process_group(0)
        .spawn()
}

/// Waits for the worker's end, forwards signals and the log of libvirt's daemon, and reaps other children meanwhile.
fn watch(
    signals: &signals::Signals,
    child: &mut Child,
    terminating: &mut bool,
    log: &mut Option<DaemonLog>,
) -> ExitStatus {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // The latest time at which a signal that was received is forwarded.
    let mut due: Option<Instant> = None;
    loop {
        forward(log);
        // Children are reaped at each wake-up; a missed one costs at most the timeout.
        while let Ok(Some((reaped, status))) = wait(WaitOptions::NOHANG) {
            if Some(reaped) == pid {
                return ExitStatus::from_raw(status.as_raw());
            }
        }
        if signals.take_end_request() {
            *terminating = true;
            due.get_or_insert(Instant::now() + HANDLERS_DEADLINE);
        }
        if let (Some(pid), Some(latest)) = (pid, due)
            && (handles_term(pid) || Instant::now() >= latest)
        {
            let _ = kill_process(pid, Signal::TERM);
            due = None;
        }
        wait_for_signal(signals, log.as_ref(), if due.is_some() { HANDLERS_CHECK } else { IDLE });
    }
}

/// Returns true once a process has a handler for SIGTERM. Without one the signal would end the worker, and the guest without
/// its grace period.
fn handles_term(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
    is_caught(&status, Signal::TERM)
}

/// Reports a handler of a signal in the text of `/proc/PID/status`.
fn is_caught(status: &str, signal: Signal) -> bool {
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    mask & (1 << (signal.as_raw() - 1)) != 0
}

fn forward(log: &mut Option<DaemonLog>) {
    if let Some(log) = log {
        log.forward();
    }
}

/// Waits for a signal or a line of the log, for at most `limit`.
fn wait_for_signal(signals: &signals::Signals, log: Option<&DaemonLog>, limit: Duration) {
    let fds = [Some(signals.fd()), log.map(DaemonLog::fd)];
    let mut fds: Vec<PollFd<'_>> =
        fds.into_iter().flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
    let _ = poll(&mut fds, Some(&limit));
}

/// Ends the remaining processes of the pod. Returns true if all have ended.
fn end_all(log: &mut Option<DaemonLog>) -> bool {
    let started = Instant::now();
    let mut asked = false;
    loop {
        forward(log);
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        let left = remaining();
        if left.is_empty() {
            return true;
        }
        if !asked {
            asked = true;
            for pid in &left {
                let _ = kill_process(*pid, Signal::TERM);
            }
        } else if started.elapsed() > END_DEADLINE {
            for pid in &left {
                let _ = kill_process(*pid, Signal::KILL);
            }
            if started.elapsed() > END_DEADLINE * 2 {
                eprintln!("virt-launcher-monitor: {} processes do not end", left.len());
                return false;
            }
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Returns running children. Orphans of the pod become children of process 1.
fn remaining() -> Vec<Pid> {
    let own = std::process::id();
    let path = format!("/proc/{own}/task/{own}/children");
    let children = fs::read_to_string(path).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| pid.parse().ok().and_then(Pid::from_raw)).collect()
}

mod signals {
    //! Signals as a file descriptor: the kernel's handlers write one byte each into a socket.

    use std::{
        io::Read,
        os::{
            fd::{AsFd, BorrowedFd},
            unix::net::UnixStream,
        },
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
    };

    use signal_hook::consts::{SIGCHLD, SIGINT, SIGQUIT, SIGTERM};

    pub(super) struct Signals {
        reader: UnixStream,
        end: Arc<AtomicBool>,
    }

    impl Signals {
        pub(super) fn new() -> std::io::Result<Self> {
            let (reader, writer) = UnixStream::pair()?;
            reader.set_nonblocking(true)?;
            writer.set_nonblocking(true)?;
            let end = Arc::new(AtomicBool::new(false));
            for signal in [SIGTERM, SIGINT, SIGQUIT] {
                signal_hook::flag::register(signal, end.clone())?;
            }
            for signal in [SIGTERM, SIGINT, SIGQUIT, SIGCHLD] {
                signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
            }
            Ok(Self { reader, end })
        }

        pub(super) fn fd(&self) -> BorrowedFd<'_> {
            self.reader.as_fd()
        }

        /// Reports a request to terminate since the last call.
        pub(super) fn take_end_request(&self) -> bool {
            let mut buffer = [0; 64];
            while matches!((&self.reader).read(&mut buffer), Ok(n) if n > 0) {}
            self.end.swap(false, Ordering::AcqRel)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_is_final_and_a_crash_is_not() {
        assert_eq!(judge(ExitStatus::from_raw(0), 0, false), Next::Exit(0));
        assert_eq!(judge(ExitStatus::from_raw(3 << 8), 0, false), Next::Exit(3));
        assert_eq!(judge(ExitStatus::from_raw(11), 0, false), Next::Restart);
        assert_eq!(judge(ExitStatus::from_raw(101 << 8), 0, false), Next::Restart);
    }

    #[test]
    fn a_worker_that_keeps_crashing_or_a_pod_that_ends_is_given_up() {
        assert_eq!(judge(ExitStatus::from_raw(11), CRASH_LIMIT, false), Next::Exit(1));
        assert_eq!(judge(ExitStatus::from_raw(11), 0, true), Next::Exit(1));
    }

    #[test]
    fn handlers_are_read_from_the_status_of_a_process() {
        let status = |mask: &str| format!("Name:\tx\nSigIgn:\t0000000000004000\nSigCgt:\t{mask}\n");
        assert!(is_caught(&status("0000000180014a02"), Signal::TERM));
        assert!(!is_caught(&status("0000000180010a02"), Signal::TERM));
        assert!(!is_caught(&status(""), Signal::TERM));
        assert!(!is_caught("", Signal::TERM), "the process is gone");
    }

    #[test]
    fn signal_before_the_worker_has_handlers_reaches_them() {
        let signals = signals::Signals::new().unwrap();
        let slow = "sleep 0.5; trap 'exit 7' TERM; while :; do sleep 0.05; done";
        let mut worker = start(&"/bin/sh".into(), &["-c".into(), slow.into()], None).unwrap();
        kill_process(rustix::process::getpid(), Signal::TERM).unwrap();
        let mut terminating = false;
        let status = watch(&signals, &mut worker, &mut terminating, &mut None);
        assert!(terminating);
        assert_eq!(judge(status, 0, terminating), Next::Exit(7), "{status}");
    }
}
