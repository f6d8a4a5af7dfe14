//! Reads crashes of the guest's kernel, and of QEMU itself, from QEMU's log.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use protocol::GuestPanic;
use rustix::fs::OFlags;

/// Part of the log that is read, from its end, in bytes.
const TAIL: u64 = 64 * 1024;
/// Limits of a crash's values and of the characters of each.
const VALUES: usize = 8;
const TEXT_LIMIT: usize = 64;
/// Limits of the lines logged after a crash of QEMU and of the characters of each.
const LAST_LINES: usize = 8;
const LINE_LIMIT: usize = 400;

/// Returns the last crash in the log; empty if the guest's panic device gives no details.
pub(super) fn last(log: &Path) -> GuestPanic {
    match tail(log) {
        Ok(text) => parse(&text).unwrap_or_default(),
        Err(error) => {
            tracing::debug!(%error, "cannot read QEMU's log");
            GuestPanic::default()
        }
    }
}

/// Returns the last lines that QEMU and libvirt wrote, such as the reason of an abort.
pub(super) fn last_lines(log: &Path) -> Vec<String> {
    let text = tail(log).unwrap_or_else(|error| format!("cannot read QEMU's log: {error}"));
    let mut lines: Vec<String> = text.lines().rev().take(LAST_LINES).map(|line| bounded(line, LINE_LIMIT)).collect();
    lines.reverse();
    lines
}

/// Parts of QEMU's output come from the guest.
fn bounded(text: &str, limit: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(limit).collect()
}

/// Opens a file in a directory to which QEMU can write: a FIFO or device must not block the launcher.
pub(super) fn open(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    OpenOptions::new().read(true).custom_flags(i32::try_from(flags.bits()).unwrap_or_default()).open(path)
}

fn tail(path: &Path) -> std::io::Result<String> {
    let mut file = open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Parses the last line like `2026-01-02 03:04:05.678+0000: panic hyper-v: arg1='0x1', arg2='0x2'`.
fn parse(log: &str) -> Option<GuestPanic> {
    let (_, crash) = log.lines().rev().find_map(|line| line.split_once(": panic "))?;
    let (kind, values) = crash.split_once(": ").unwrap_or((crash, ""));
    let values = values.split(", ").filter_map(|pair| pair.split_once('='));
    let values = values.take(VALUES).map(|(_, value)| bounded(value.trim_matches('\''), TEXT_LIMIT)).collect();
    Some(GuestPanic { kind: bounded(kind, TEXT_LIMIT), values })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_crash_is_read_from_the_end_of_the_log() {
        let hyper_v = "2026-01-02 03:04:05.678+0000: panic hyper-v: arg1='0xd1', arg2='0x0', arg3='0x2'";
        for (log, kind, values) in [
            ("char device redirected", "", &[] as &[&str]),
            (hyper_v, "hyper-v", &["0xd1", "0x0", "0x2"]),
            ("x: panic hyper-v: arg1='0x1'\nx: panic s390: core='0'\nend", "s390", &["0"]),
            ("x: panic tdx", "tdx", &[]),
        ] {
            let values = values.iter().map(|value| (*value).to_owned()).collect();
            let expected = GuestPanic { kind: kind.to_owned(), values };
            assert_eq!(parse(log).unwrap_or_default(), expected, "{log}");
        }
        let path = std::env::temp_dir().join(format!("launcher-crash-{}", std::process::id()));
        assert_eq!(last(&path), GuestPanic::default(), "no log");
        std::fs::write(&path, format!("{}\n{hyper_v}\n", "noise\n".repeat(100_000))).unwrap();
        assert_eq!(last(&path).kind, "hyper-v");
        std::fs::remove_file(&path).unwrap();
    }
    #[test]
    fn last_lines_are_few_short_and_without_control_characters() {
        let path = std::env::temp_dir().join(format!("launcher-last-lines-{}", std::process::id()));
        assert!(last_lines(&path)[0].starts_with("cannot read QEMU's log: "));
        let text = format!("first\n{}\u{1b}[31mqemu: aborted\n{}\n", "noise\n".repeat(20), "x".repeat(1000));
        std::fs::write(&path, text).unwrap();
        let lines = last_lines(&path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(lines.len(), LAST_LINES);
        assert_eq!(lines[LAST_LINES - 2..], ["[31mqemu: aborted".to_owned(), "x".repeat(LINE_LIMIT)]);
    }
}
