//! libvirt's cache of QEMU's capabilities on this node.
//!
//! virt-handler's init container runs libvirt from the launcher image once and keeps its cache. Hello transfers it to
//! launchers, so that their libvirt does not probe QEMU again.

use std::path::PathBuf;

use crate::safe_dir::{Error, Kind, SafeDir};

/// Cache created with `/dev/kvm`.
const WITH_KVM: &str = "cache-kvm";
/// Cache created without `/dev/kvm`.
const WITHOUT_KVM: &str = "cache-qemu";
/// Most files of a cache: libvirt writes one per QEMU binary.
const MAX_FILES: usize = 32;
/// Largest file of a cache; QEMU for amd64 needs about 300 KiB.
const MAX_FILE: usize = 2 * 1024 * 1024;
/// Largest cache: it has to fit into one message.
const MAX_TOTAL: usize = protocol::MAX_MESSAGE_SIZE / 2;

/// The caches of this node.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    directory: PathBuf,
}

impl Cache {
    /// Returns the caches in the directory to which the init container writes.
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Returns the cache for launchers with or without `/dev/kvm`. Without a usable cache it is empty, and libvirt probes
    /// QEMU itself, which is slower.
    pub(crate) fn files(&self, kvm: bool) -> Vec<protocol::CacheFile> {
        let name = if kvm { WITH_KVM } else { WITHOUT_KVM };
        match self.read(name) {
            Ok(files) => files,
            Err(error) if error.is_not_found() => Vec::new(),
            Err(error) => {
                tracing::warn!(%error, cache = name, "libvirt's capabilities cache of this node cannot be used");
                Vec::new()
            }
        }
    }

    fn read(&self, name: &str) -> Result<Vec<protocol::CacheFile>, Error> {
        let directory = SafeDir::trusted(&self.directory)?.open_dir(name)?;
        let mut files = Vec::new();
        let mut left = MAX_TOTAL;
        for entry in directory.list(MAX_FILES)? {
            let Some(name) = entry.name.to_str().filter(|name| name.ends_with(".xml")) else { continue };
            if entry.kind != Kind::File {
                continue;
            }
            let content = directory.read_bounded(name, MAX_FILE.min(left))?;
            left -= content.len();
            files.push(protocol::CacheFile { name: name.to_owned(), content });
        }
        Ok(files)
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests create the files that virt-handler finds")]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn only_files_of_the_cache_asked_for_are_read() {
        let directory = std::env::temp_dir().join(format!("ferrovirt-capabilities-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        let cache = Cache::new(directory.clone());
        assert!(cache.files(true).is_empty(), "no directory");
        fs::create_dir_all(directory.join("cache-qemu/nested.xml")).unwrap();
        fs::write(directory.join("cache-qemu/a.xml"), "<a/>").unwrap();
        fs::write(directory.join("cache-qemu/lock"), "x").unwrap();
        symlink("/etc/passwd", directory.join("cache-qemu/link.xml")).unwrap();
        let files = cache.files(false);
        assert_eq!(files.len(), 1);
        assert_eq!((files[0].name.as_str(), &files[0].content[..]), ("a.xml", &b"<a/>"[..]));
        assert!(cache.files(true).is_empty(), "no cache with KVM");
        fs::write(directory.join("cache-qemu/large.xml"), vec![b' '; MAX_FILE + 1]).unwrap();
        assert!(cache.files(false).is_empty(), "a cache that is too large is not used in part");
        fs::remove_dir_all(directory).unwrap();
    }
}
