//! Writes small tar archives (ustar). The same input gives the same bytes.

/// A tar archive being written.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
}

const BLOCK: usize = 512;

impl Archive {
    /// Adds a file owned by root, dated 1970. The format limits names to 100 bytes.
    pub(crate) fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        let mut header = [0_u8; BLOCK];
        let mut put = |offset: usize, text: &[u8]| {
            for (target, byte) in header.iter_mut().skip(offset).zip(text) {
                *target = *byte;
            }
        };
        put(0, name.as_bytes());
        put(100, format!("{mode:07o}").as_bytes());
        put(108, b"0000000");
        put(116, b"0000000");
        put(124, format!("{:011o}", content.len()).as_bytes());
        put(136, b"00000000000");
        put(148, b"        ");
        put(156, b"0");
        put(257, b"ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        for (target, byte) in header.iter_mut().skip(148).zip(format!("{sum:06o}\0 ").bytes()) {
            *target = byte;
        }
        self.bytes.extend_from_slice(&header);
        self.bytes.extend_from_slice(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(BLOCK), 0);
    }

    /// Returns the bytes of the archive with its end mark.
    #[must_use]
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 2 * BLOCK, 0);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn tar_lists_the_files_with_mode_and_size() {
        let mut archive = Archive::default();
        archive.file("a/b", 0o755, b"hello");
        archive.file("c", 0o644, &[0; 600]);
        let mut tar = Command::new("tar")
            .args(["--list", "--verbose", "--file=-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        tar.stdin.take().unwrap().write_all(&archive.finish()).unwrap();
        let output = tar.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success());
        assert!(text.contains("-rwxr-xr-x 0/0") && text.contains("5 1970"), "{text}");
        assert!(text.contains("600 1970"), "{text}");
    }
}
