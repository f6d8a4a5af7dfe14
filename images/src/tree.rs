//! Files of an image or archive in memory.
//!
//! Paths are relative to the root and sorted, so that the same files always have the same order.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{
    cache::Key,
    error::{At, Error, Result},
};

/// User and group of virt-launcher and QEMU, which own the files on volumes.
pub(crate) const QEMU_USER: u32 = 107;

/// Source of a file's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A file on the host.
    Disk(PathBuf),
    /// Bytes in memory.
    Bytes(Vec<u8>),
}

impl Source {
    /// Reads the whole content.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        match self {
            Self::Disk(path) => fs::read(path).at(path),
            Self::Bytes(bytes) => Ok(bytes.clone()),
        }
    }
}

/// Type and content of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    /// A directory.
    Dir,
    /// A regular file.
    File(Source),
    /// A symbolic link and its target.
    Link(String),
}

/// An entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    /// Permission bits.
    pub mode: u32,
    /// Owner and group, which are equal in all images.
    pub owner: u32,
    /// Type and content.
    pub content: Content,
}

/// Files by path, without leading or trailing slash.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tree {
    nodes: BTreeMap<String, Node>,
}

impl Tree {
    /// Iterates over all entries, parents before children.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.nodes.iter().map(|(path, node)| (path.as_str(), node))
    }

    /// Returns the entry at this path.
    pub(crate) fn get(&self, path: &str) -> Option<&Node> {
        self.nodes.get(path)
    }

    /// Adds a directory, or changes its mode and owner, and missing parents.
    pub(crate) fn dir(&mut self, path: &str, mode: u32, owner: u32) {
        self.put(path, Node { mode, owner, content: Content::Dir });
    }

    /// Adds a file with these bytes.
    pub(crate) fn file(&mut self, path: &str, mode: u32, bytes: impl Into<Vec<u8>>) {
        self.put(path, Node { mode, owner: 0, content: Content::File(Source::Bytes(bytes.into())) });
    }

    /// Adds a file of the host.
    pub(crate) fn copy(&mut self, path: &str, mode: u32, owner: u32, from: impl Into<PathBuf>) {
        self.put(path, Node { mode, owner, content: Content::File(Source::Disk(from.into())) });
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.put(path, Node { mode: 0o777, owner: 0, content: Content::Link(target.to_owned()) });
    }

    /// Adds an entry and missing parents.
    pub(crate) fn put(&mut self, path: &str, node: Node) {
        let path = path.trim_matches('/');
        let mut at = 0;
        while let Some(slash) = path[at..].find('/') {
            at += slash;
            self.nodes.entry(path[..at].to_owned()).or_insert(Node { mode: 0o755, owner: 0, content: Content::Dir });
            at += 1;
        }
        self.nodes.insert(path.to_owned(), node);
    }

    /// Adds an entry of a host directory with its mode. Fails unless it is a directory, file or link.
    pub(crate) fn take(&mut self, root: &Path, path: &str) -> Result<()> {
        let from = root.join(path);
        let meta = fs::symlink_metadata(&from).at(&from)?;
        // Files of packages belong to root. Images need no set-user-ID bits.
        let mode = meta.mode() & 0o1777;
        if meta.is_dir() {
            self.dir(path, mode, 0);
        } else if meta.is_symlink() {
            let target = fs::read_link(&from).at(&from)?;
            self.link(path, &target.to_string_lossy());
        } else if meta.is_file() {
            self.copy(path, mode, 0, from);
        } else {
            return Err(Error::Layout(path.to_owned(), "is not a directory, file or link".to_owned()));
        }
        Ok(())
    }

    /// Adds all entries of `other`.
    pub(crate) fn extend(&mut self, other: Self) {
        for (path, node) in other.nodes {
            self.put(&path, node);
        }
    }

    /// Returns the entries that `base` lacks or has in another form: the layer that makes this tree of it.
    pub(crate) fn over(&self, base: &Self) -> Self {
        let mut layer = Self::default();
        for (path, node) in self.iter().filter(|(path, node)| base.get(path) != Some(node)) {
            // Parents keep the mode and owner that they have in the whole tree.
            for (end, _) in path.match_indices('/') {
                if let Some((parent, known)) = self.nodes.get_key_value(&path[..end]) {
                    layer.nodes.insert(parent.clone(), known.clone());
                }
            }
            layer.nodes.insert(path.to_owned(), node.clone());
        }
        layer
    }

    /// Returns a key of all entries. It includes size and modification time of files on disk, not their content.
    pub(crate) fn key(&self) -> Result<Key> {
        let mut key = Key::default();
        for (path, node) in self.iter() {
            key.add(path);
            key.add(format!("{:o} {}", node.mode, node.owner));
            match &node.content {
                Content::Dir => key.add("dir"),
                Content::Link(target) => key.add(format!("link {target}")),
                Content::File(Source::Bytes(bytes)) => key.add(bytes),
                Content::File(Source::Disk(from)) => {
                    let meta = fs::metadata(from).at(from)?;
                    key.add(format!(
                        "{} {} {}.{} {}",
                        from.display(),
                        meta.len(),
                        meta.ctime(),
                        meta.ctime_nsec(),
                        meta.ino()
                    ));
                }
            }
        }
        Ok(key)
    }

    /// Returns the total size of all files in bytes.
    pub(crate) fn size(&self) -> Result<u64> {
        let mut size = 0;
        for (_, node) in self.iter() {
            size += match &node.content {
                Content::File(Source::Bytes(bytes)) => bytes.len() as u64,
                Content::File(Source::Disk(path)) => fs::metadata(path).at(path)?.len(),
                Content::Dir | Content::Link(_) => 0,
            };
        }
        Ok(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_come_before_children_and_keep_an_explicit_mode() {
        let mut tree = Tree::default();
        tree.dir("run/kubevirt", 0o700, 107);
        tree.file("run/kubevirt/a", 0o644, "x");
        tree.file("/etc/passwd", 0o644, "y");
        let paths: Vec<_> = tree.iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["etc", "etc/passwd", "run", "run/kubevirt", "run/kubevirt/a"]);
        assert_eq!(tree.get("run/kubevirt").unwrap().mode, 0o700);
    }

    #[test]
    fn layer_over_a_base_has_what_the_base_lacks() {
        let mut base = Tree::default();
        base.dir("usr/bin", 0o700, 7);
        base.file("usr/bin/a", 0o755, "a");
        base.file("etc/passwd", 0o644, "x");
        let mut whole = base.clone();
        whole.file("usr/bin/b", 0o755, "b");
        whole.file("etc/passwd", 0o644, "y");
        let layer = whole.over(&base);
        let paths: Vec<_> = layer.iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["etc", "etc/passwd", "usr", "usr/bin", "usr/bin/b"]);
        assert_eq!(layer.get("usr/bin").unwrap().owner, 7);
        assert_eq!(whole.over(&whole).iter().count(), 0);
    }

    #[test]
    fn the_key_changes_with_mode_owner_and_content() {
        let key = |mode, content: &str| {
            let mut tree = Tree::default();
            tree.file("a", mode, content);
            tree.key().unwrap().finish()
        };
        assert_eq!(key(0o644, "x"), key(0o644, "x"));
        assert_ne!(key(0o644, "x"), key(0o600, "x"));
        assert_ne!(key(0o644, "x"), key(0o644, "z"));
    }
}
