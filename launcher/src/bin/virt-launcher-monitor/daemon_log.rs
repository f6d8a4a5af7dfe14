//! The log of libvirt's daemon where hardware virtualization may be missing: without the errors that are expected then.
//!
//! The supervisor reads it, because the daemon outlives crashed workers.

use std::{
    io::{PipeReader, PipeWriter, Read, Write, pipe, stderr},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    process::Command,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Argument of the worker: hardware virtualization may be missing.
const ALLOW_EMULATION: &str = "--allow-emulation";
/// Longest line that is held back until it ends.
const LONGEST: usize = 64 * 1024;

/// Returns true for an error about hardware virtualization of which the daemon needs nothing.
fn is_expected(line: &[u8]) -> bool {
    let line = String::from_utf8_lossy(line);
    line.contains(": error : virHostCPU") && line.contains("Unable to open /dev/kvm: ")
}

/// A pipe between libvirt's daemon and the log of the pod.
pub(crate) struct DaemonLog {
    reader: PipeReader,
    /// Keeps the pipe open between two daemons.
    writer: PipeWriter,
    /// The beginning of a line.
    line: Vec<u8>,
}

impl DaemonLog {
    /// Creates the pipe for a worker with these arguments, if its daemon's log needs one.
    pub(crate) fn of(args: &[std::ffi::OsString]) -> Option<Self> {
        if !args.iter().any(|arg| arg == ALLOW_EMULATION) {
            return None;
        }
        let (reader, writer) = pipe().ok()?;
        Some(Self { reader, writer, line: Vec::new() })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }

    /// Passes the path of the pipe to a worker.
    pub(crate) fn pass(&self, command: &mut Command) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), self.writer.as_raw_fd());
        command.env("VIRT_LAUNCHER_DAEMON_LOG", path);
    }

    /// Copies the lines in the pipe to the log of the pod.
    pub(crate) fn forward(&mut self) {
        self.forward_to(&mut stderr());
    }

    fn forward_to(&mut self, log: &mut impl Write) {
        let mut buffer = [0; 4096];
        while self.is_readable() {
            let Ok(count @ 1..) = self.reader.read(&mut buffer) else { return };
            for part in buffer[..count].split_inclusive(|byte| *byte == b'\n') {
                self.line.extend_from_slice(part);
                if !self.line.ends_with(b"\n") && self.line.len() < LONGEST {
                    continue;
                }
                if !is_expected(&self.line) {
                    let _ = log.write_all(&self.line);
                }
                self.line.clear();
            }
        }
    }

    fn is_readable(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    const EXPECTED: &str = "2026-01-01 00:00:00.000+0000: 598: error : virHostCPUGetMSRFromKVM:1341 : Unable to open /dev/kvm: \
                            Permission denied\n";
    const OTHER: &str =
        "2026-01-01 00:00:00.000+0000: 598: error : qemuProcessLaunch:1 : Unable to open /dev/kvm: gone\n";

    #[test]
    fn only_the_expected_errors_are_dropped_also_in_parts() {
        let mut log = DaemonLog::of(&["--allow-emulation".into()]).unwrap();
        let mut command = Command::new("true");
        log.pass(&mut command);
        let path = command.get_envs().next().unwrap().1.unwrap().to_owned();
        let mut daemon = OpenOptions::new().write(true).open(path).unwrap();
        let mut shown = Vec::new();
        let text = format!("{EXPECTED}{OTHER}{EXPECTED}plain\nhalf");
        for part in text.as_bytes().chunks(50) {
            daemon.write_all(part).unwrap();
            log.forward_to(&mut shown);
        }
        assert_eq!(String::from_utf8(shown.clone()).unwrap(), format!("{OTHER}plain\n"));
        drop(daemon);
        log.forward_to(&mut shown);
        log.writer.write_all(b" line\n").unwrap();
        log.forward_to(&mut shown);
        assert_eq!(String::from_utf8(shown).unwrap(), format!("{OTHER}plain\nhalf line\n"));
    }

    #[test]
    fn log_goes_through_no_pipe_where_hardware_virtualization_is_required() {
        assert!(DaemonLog::of(&["--name".into(), "m".into()]).is_none());
    }
}
