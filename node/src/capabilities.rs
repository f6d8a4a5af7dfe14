//! What libvirt found out about QEMU on this node.
//!
//! The agent's init container runs libvirt from the launcher's image once and leaves its capabilities cache. Launchers
//! get it with the first call, so that their libvirt does not probe QEMU again.

use std::path::PathBuf;

use crate::safe_dir::{Error, Kind, SafeDir};

/// Cache made where `/dev/kvm` can be used.
const WITH_KVM: &str = "cache-kvm";
/// Cache made without `/dev/kvm`.
const WITHOUT_KVM: &str = "cache-qemu";
/// Most files of a cache: libvirt writes one for each QEMU binary.
const MAX_FILES: usize = 32;
/// Largest file of a cache; QEMU for amd64 needs about 300 KiB.
const MAX_FILE: usize = 2 * 1024 * 1024;
/// Largest cache: it has to fit into one message, with room for the rest of it.
const MAX_TOTAL: usize = protocol::MAX_MESSAGE_SIZE / 2;

/// The caches of this node.
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
}

impl Cache {
    /// The caches in the directory that the init container writes to.
    #[must_use]
    pub fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// The files of the cache for launchers with or without `/dev/kvm`. Without a usable cache there are none, and
    /// libvirt probes QEMU itself: slower, not wrong.
    #[must_use]
    pub fn files(&self, kvm: bool) -> Vec<protocol::CacheFile> {
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
        let mut room = MAX_TOTAL;
        for entry in directory.list(MAX_FILES)? {
            let Some(name) = entry.name.to_str().filter(|name| name.ends_with(".xml")) else { continue };
            if entry.kind != Kind::File {
                continue;
            }
            let content = directory.read_bounded(name, MAX_FILE.min(room))?;
            room -= content.len();
            files.push(protocol::CacheFile { name: name.to_owned(), content });
        }
        Ok(files)
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests set up what the agent then meets")]
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
