//! The end of a QEMU whose guest has migrated.
//!
//! Once the target has the whole guest, libvirt decides that it has left, logs this, asks QEMU to end, and looks for its end every
//! 0.2 s. The guest stands still meanwhile, since the target runs it only after its end here. This module kills QEMU as soon as
//! libvirt has decided. QEMU counts as ended as soon as none of its threads can run the guest any more: the kernel may need seconds
//! to free the memory of a large guest.

use std::{
    fs::File,
    io::{Error, ErrorKind, Read, Result, Seek, SeekFrom},
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify::{self, CreateFlags, WatchFlags},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use tokio::{io::AsyncReadExt as _, net::unix::pipe::Receiver, time::sleep};

use super::crash::open;

/// Text that libvirt appends to QEMU's log (`qemuProcessStop`) after the target has confirmed the arrival. It never resumes the
/// guest afterwards.
const DECIDED: &str = "shutting down, reason=migrated";
/// Bytes of the log that are read at once.
const CHUNK: usize = 4096;
/// Limit of the content of the file with the process ID, in bytes.
const PID_LIMIT: u64 = 32;
/// Pause between looks at the threads of a killed QEMU.
const LOOK: Duration = Duration::from_millis(1);
/// Looks until the caller waits for libvirt instead.
const LOOKS: u32 = 10_000;
/// Flag of a thread that ends (`PF_EXITING` of the kernel, field 9 of `/proc/PID/stat`).
const EXITING: u64 = 4;
/// Error of the file of a thread that ends while it is read.
const GONE: i32 = rustix::io::Errno::SRCH.raw_os_error();

/// A QEMU whose guest is about to leave.
pub(super) struct Departure {
    pid: Pid,
    process: OwnedFd,
    log: File,
    /// Watch of the log (inotify): the guest stands still until its last line is read.
    changes: Receiver,
}

impl Departure {
    /// Watches the log of a domain from its current end.
    pub(super) fn watch(log: &Path, pid_file: &Path) -> Result<Self> {
        let invalid = || Error::new(ErrorKind::InvalidData, format!("no process in {}", pid_file.display()));
        let mut text = String::new();
        open(pid_file)?.take(PID_LIMIT).read_to_string(&mut text)?;
        let pid = text.trim().parse().ok().and_then(Pid::from_raw).ok_or_else(invalid)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let mut log = open(log)?;
        log.seek(SeekFrom::End(0))?;
        let changes = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        inotify::add_watch(&changes, format!("/proc/self/fd/{}", log.as_raw_fd()), WatchFlags::MODIFY)?;
        Ok(Self { pid, process, log, changes: Receiver::from_owned_fd_unchecked(changes)? })
    }

    /// Waits until libvirt has decided that the guest has left, and until its QEMU has ended.
    pub(super) async fn ended(mut self) -> Result<()> {
        self.decided().await?;
        self.kill().await?;
        // The kernel ends a watch after a grace period, for which the guest would wait.
        let changes = self.changes.into_nonblocking_fd()?;
        tokio::task::spawn_blocking(move || drop(changes));
        Ok(())
    }

    /// Reads what is appended until libvirt has decided.
    async fn decided(&mut self) -> Result<()> {
        let (mut chunk, mut tail) = ([0; CHUNK], Vec::new());
        loop {
            let length = self.log.read(&mut chunk)?;
            if length == 0 {
                self.changed().await?;
                continue;
            }
            tail.extend_from_slice(&chunk[..length]);
            if tail.windows(DECIDED.len()).any(|text| text == DECIDED.as_bytes()) {
                return Ok(());
            }
            // The beginning of a line.
            tail.drain(..tail.len().saturating_sub(DECIDED.len()));
            // QEMU can write without end.
            tokio::task::yield_now().await;
        }
    }

    /// Waits until the log has changed since the last call.
    async fn changed(&mut self) -> Result<()> {
        self.changes.read(&mut [0; CHUNK]).await.map(drop)
    }

    async fn kill(&self) -> Result<()> {
        match pidfd_send_signal(&self.process, Signal::KILL) {
            Ok(()) => {}
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        for _ in 0..LOOKS {
            if self.is_over()? {
                return Ok(());
            }
            sleep(LOOK).await;
        }
        Err(Error::new(ErrorKind::TimedOut, "the kernel has not ended QEMU"))
    }

    /// Returns true if the process has ended or each of its threads ends.
    fn is_over(&self) -> Result<bool> {
        let are_exiting = threads(self.pid).map(|threads| threads.iter().all(|stat| is_exiting(stat)));
        // Afterwards: the number may be that of another process once this one is gone.
        let mut fds = [PollFd::new(&self.process, PollFlags::IN)];
        let has_ended = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0;
        Ok(has_ended || are_exiting?)
    }
}

/// Returns the state of each thread of a process. Threads that have ended meanwhile are left out; a killed process gets no new ones.
fn threads(pid: Pid) -> Result<Vec<String>> {
    let directory = PathBuf::from(format!("/proc/{}/task", pid.as_raw_nonzero()));
    let mut found = Vec::new();
    for thread in std::fs::read_dir(directory)? {
        match std::fs::read_to_string(thread?.path().join("stat")) {
            Ok(stat) => found.push(stat),
            Err(error) if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(GONE) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Returns true if a thread cannot return to its program. `stat` is the content of its file `stat`.
fn is_exiting(stat: &str) -> bool {
    // The name in parentheses can contain anything.
    let Some((_, fields)) = stat.rsplit_once(')') else { return false };
    let flags = fields.split_ascii_whitespace().nth(6).and_then(|flags| flags.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & EXITING != 0)
}

#[cfg(test)]
mod tests {
    use std::{fs::OpenOptions, io::Write, process::Command};

    use super::*;

    #[test]
    fn threads_that_end_are_known_by_their_flags() {
        let stat = |flags: &str| format!("7 (CPU 0) x)/TCG) R 1 7 7 0 -1 {flags} 1 2 3");
        for (stat, expected) in [
            (stat("4194304"), false),
            (stat("4194308"), true),
            (stat("4"), true),
            (stat("x"), false),
            (String::new(), false),
            ("7 (a) R 1".into(), false),
        ] {
            assert_eq!(is_exiting(&stat), expected, "{stat}");
        }
    }

    #[tokio::test]
    async fn qemu_is_killed_once_libvirt_has_decided() {
        let path = |name: &str| std::env::temp_dir().join(format!("launcher-departure-{name}-{}", std::process::id()));
        let (log, pid_file) = (path("log"), path("pid"));
        std::fs::write(&log, format!("{DECIDED} of an earlier run\n")).unwrap();
        assert!(Departure::watch(&log, &pid_file).is_err(), "no process");
        let mut process = Command::new("sleep").arg("600").spawn().unwrap();
        std::fs::write(&pid_file, process.id().to_string()).unwrap();
        let departure = Departure::watch(&log, &pid_file).unwrap();
        let waiting = tokio::spawn(departure.ended());
        let mut file = OpenOptions::new().append(true).open(&log).unwrap();
        for text in ["2026-01-02: shutting down, reason=crashed\n", "x: shutting down, ", "reason=mig"] {
            file.write_all(text.as_bytes()).unwrap();
            sleep(Duration::from_millis(30)).await;
            assert!(process.try_wait().unwrap().is_none(), "killed after {text:?}");
            assert!(!waiting.is_finished());
        }
        file.write_all(b"rated\n").unwrap();
        waiting.await.unwrap().unwrap();
        assert!(!process.wait().unwrap().success());
        for path in [log, pid_file] {
            std::fs::remove_file(path).unwrap();
        }
    }
}
