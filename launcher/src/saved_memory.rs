//! Files with the memory of a guest. A guest runs again only after its file was emptied, so that a complete one belongs to a guest that
//! has not run since. A file that is resumed is marked before the guest runs: its disks move on, so no other guest may start from it.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::Path,
};

use rustix::fs::{Mode, OFlags};

/// First bytes of a file that libvirt has written as a whole.
const SAVED: &[u8; 16] = b"LibvirtQemudSave";
/// First bytes of a file from which a guest was started.
const RESUMED: &[u8; 16] = b"FerrovirtResumed";

/// Failure to use a file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SavedMemoryError {
    /// A guest was started from it.
    #[error("the guest was resumed from it before")]
    Resumed,
    /// It is no file of libvirt, or an incomplete one.
    #[error("the file holds no complete memory")]
    Incomplete,
    /// Reading or writing failed.
    #[error("cannot use the file: {0}")]
    File(#[from] io::Error),
}

fn open(path: &Path) -> io::Result<(File, [u8; 16])> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let mut begin = [0; 16];
    match (&file).read_exact(&mut begin) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
        result => result?,
    }
    Ok((file, begin))
}

fn open_saved(path: &Path) -> Result<File, SavedMemoryError> {
    match open(path)? {
        (file, begin) if begin == *SAVED => Ok(file),
        (_, begin) if begin == *RESUMED => Err(SavedMemoryError::Resumed),
        _ => Err(SavedMemoryError::Incomplete),
    }
}

/// Fails for a file from which no guest can be started.
pub(crate) fn check(path: &Path) -> Result<(), SavedMemoryError> {
    open_saved(path).map(drop)
}

/// Fails as [`check`], and writes the file to its storage: libvirt does not sync the first bytes, which it writes last.
pub(crate) fn keep(path: &Path) -> Result<(), SavedMemoryError> {
    Ok(open_saved(path)?.sync_all()?)
}

/// Empties a file durably.
pub(crate) fn discard(path: &Path) -> Result<(), SavedMemoryError> {
    let (file, _) = open(path)?;
    file.set_len(0)?;
    Ok(file.sync_all()?)
}

/// Marks a file durably as resumed. Returns false if it was marked before.
pub(crate) fn mark(path: &Path) -> Result<bool, SavedMemoryError> {
    let file = match open_saved(path) {
        Err(SavedMemoryError::Resumed) => return Ok(false),
        file => file?,
    };
    let marked = begin_with(&file, RESUMED);
    if marked.is_err() {
        // The guest will not run.
        let _ = begin_with(&file, SAVED);
    }
    Ok(marked.map(|()| true)?)
}

/// Takes the mark of a file back durably.
pub(crate) fn unmark(path: &Path) -> Result<(), SavedMemoryError> {
    match open(path)? {
        (file, begin) if begin == *RESUMED => Ok(begin_with(&file, SAVED)?),
        _ => Err(SavedMemoryError::Incomplete),
    }
}

/// Frees the space of a file that is marked. The mark stays.
pub(crate) fn free(path: &Path) -> Result<(), SavedMemoryError> {
    match open(path)? {
        (file, begin) if begin == *RESUMED => Ok(file.set_len(RESUMED.len() as u64)?),
        _ => Err(SavedMemoryError::Incomplete),
    }
}

fn begin_with(file: &File, begin: &[u8; 16]) -> io::Result<()> {
    file.write_all_at(begin, 0)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_resumed_once() {
        let path = std::env::temp_dir().join(format!("saved-memory-{}", std::process::id()));
        let saved = [SAVED.as_slice(), &[7; 100]].concat();
        std::fs::write(&path, &saved).unwrap();
        check(&path).unwrap();
        keep(&path).unwrap();
        assert!(matches!(free(&path), Err(SavedMemoryError::Incomplete)), "it is not marked");
        assert!(matches!(unmark(&path), Err(SavedMemoryError::Incomplete)), "it is not marked");
        assert!(mark(&path).unwrap());
        assert!(matches!(check(&path), Err(SavedMemoryError::Resumed)));
        assert!(matches!(keep(&path), Err(SavedMemoryError::Resumed)));
        assert!(!mark(&path).unwrap(), "a later worker");
        unmark(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), saved);
        assert!(mark(&path).unwrap());
        free(&path).unwrap();
        assert!(!mark(&path).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), RESUMED);
        for content in ["", "short", "LibvirtQemudPart and more"] {
            std::fs::write(&path, content).unwrap();
            let used = [check(&path), keep(&path), unmark(&path), free(&path), mark(&path).map(drop)];
            for result in used {
                assert!(matches!(result, Err(SavedMemoryError::Incomplete)), "{content}");
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
            discard(&path).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(check(&path), Err(SavedMemoryError::File(_))));
    }
}
