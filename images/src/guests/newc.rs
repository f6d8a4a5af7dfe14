//! Packs a tree as an initial RAM file system ("newc" cpio).

use crate::{
    error::Result,
    tree::{Content, Tree},
};

/// Returns the archive of a tree. All times are zero, and root owns everything.
pub(super) fn pack(tree: &Tree) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    for (number, (path, node)) in tree.iter().enumerate() {
        let (kind, data) = match &node.content {
            Content::Dir => (0o040_000, Vec::new()),
            Content::File(source) => (0o100_000, source.read()?),
            Content::Link(target) => (0o120_000, target.clone().into_bytes()),
        };
        entry(&mut out, number + 1, path, kind | node.mode, &data);
    }
    entry(&mut out, 0, "TRAILER!!!", 0, &[]);
    Ok(out)
}

fn entry(out: &mut Vec<u8>, inode: usize, name: &str, mode: u32, data: &[u8]) {
    let mode = u64::from(mode);
    let fields = [inode as u64, mode, 0, 0, 1, 0, data.len() as u64, 0, 0, 0, 0, name.len() as u64 + 1, 0];
    out.extend_from_slice(b"070701");
    for field in fields {
        out.extend_from_slice(format!("{field:08X}").as_bytes());
    }
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    pad(out);
    out.extend_from_slice(data);
    pad(out);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_name_and_data_are_aligned_to_four() {
        let mut tree = Tree::default();
        tree.file("init", 0o755, "abcde");
        let packed = pack(&tree).unwrap();
        assert!(packed.starts_with(b"07070100000001000081ED"));
        assert_eq!(packed.len() % 4, 0);
        // 110 bytes of header, "init\0", one byte of padding: the data starts at 116.
        assert_eq!(&packed[116..121], b"abcde");
        assert!(packed.ends_with(b"TRAILER!!!\0\0\0\0"));
    }
}
