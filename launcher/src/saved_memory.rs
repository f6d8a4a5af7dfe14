//! Files with the memory of a guest. A file that was resumed is marked before the guest runs: its disks move on, so no other guest may
//! start from it.

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

/// Fails for a file from which no guest can be started.
pub(crate) fn check(path: &Path) -> Result<(), SavedMemoryError> {
    match &open(path)?.1 {
        SAVED => Ok(()),
        RESUMED => Err(SavedMemoryError::Resumed),
        _ => Err(SavedMemoryError::Incomplete),
    }
}

/// Marks a file durably as resumed and frees its space. A file that is marked stays so.
pub(crate) fn consume(path: &Path) -> Result<(), SavedMemoryError> {
    let (file, begin) = open(path)?;
    match &begin {
        SAVED => {
            file.write_all_at(RESUMED, 0)?;
            file.sync_all()?;
        }
        RESUMED => {}
        _ => return Err(SavedMemoryError::Incomplete),
    }
    Ok(file.set_len(RESUMED.len() as u64)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_resumed_once() {
        let path = std::env::temp_dir().join(format!("saved-memory-{}", std::process::id()));
        std::fs::write(&path, [SAVED.as_slice(), &[7; 100]].concat()).unwrap();
        check(&path).unwrap();
        consume(&path).unwrap();
        assert!(matches!(check(&path), Err(SavedMemoryError::Resumed)));
        consume(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), RESUMED);
        for content in ["", "short", "LibvirtQemudPart and more"] {
            std::fs::write(&path, content).unwrap();
            assert!(matches!(check(&path), Err(SavedMemoryError::Incomplete)), "{content}");
            assert!(matches!(consume(&path), Err(SavedMemoryError::Incomplete)), "{content}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(check(&path), Err(SavedMemoryError::File(_))));
    }
}
