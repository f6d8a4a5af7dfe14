//! The folder of volumes and snapshots, which all processes of the driver use.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Write},
    marker::PhantomData,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Serialize, de::DeserializeOwned};
use tonic::Status;

use crate::record::{Id, Snapshot, Volume};

/// Limit of the wait for another call on the same volume or snapshot.
const LOCK_ATTEMPTS: u32 = 200;
const LOCK_INTERVAL: Duration = Duration::from_millis(50);

/// Volumes and snapshots.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    data: PathBuf,
}

/// Records of one kind.
pub(crate) struct Records<T> {
    folder: PathBuf,
    kind: &'static str,
    of: PhantomData<T>,
}

impl Store {
    /// Opens the folder, and creates it if it is missing.
    pub(crate) fn open(data: &Path) -> io::Result<Self> {
        for part in ["volumes", "snapshots", "locks"] {
            fs::create_dir_all(data.join(part))?;
        }
        // Calls contain paths that are compared with those of losetup.
        Ok(Self { data: fs::canonicalize(data)? })
    }

    pub(crate) fn volumes(&self) -> Records<Volume> {
        Records { folder: self.data.join("volumes"), kind: "volume", of: PhantomData }
    }

    pub(crate) fn snapshots(&self) -> Records<Snapshot> {
        Records { folder: self.data.join("snapshots"), kind: "snapshot", of: PhantomData }
    }

    /// Returns the free bytes.
    pub(crate) fn free(&self) -> Result<u64, Status> {
        let statistics =
            rustix::fs::statvfs(&self.data).map_err(|error| failed("measure", &self.data, error.into()))?;
        Ok(statistics.f_bavail * statistics.f_frsize)
    }

    /// Locks a volume or snapshot against other processes and calls until the file is dropped.
    pub(crate) async fn lock(&self, id: &Id) -> Result<File, Status> {
        let path = self.data.join("locks").join(id.to_string());
        let file = File::create(&path).map_err(|error| failed("create", &path, error))?;
        for _ in 0..LOCK_ATTEMPTS {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(fs::TryLockError::WouldBlock) => tokio::time::sleep(LOCK_INTERVAL).await,
                Err(fs::TryLockError::Error(error)) => return Err(failed("lock", &path, error)),
            }
        }
        Err(Status::aborted(format!("another call about {id} has not ended yet")))
    }
}

impl<T: Serialize + DeserializeOwned> Records<T> {
    /// Returns the path of the content.
    pub(crate) fn content(&self, id: &Id) -> PathBuf {
        self.folder.join(id.to_string()).join("content")
    }

    /// Returns the path of the content of a record that is not complete yet, in an empty folder.
    pub(crate) fn draft(&self, id: &Id) -> Result<PathBuf, Status> {
        let folder = self.partial(id);
        remove(&folder)?;
        fs::create_dir_all(&folder).map_err(|error| failed("create", &folder, error))?;
        Ok(folder.join("content"))
    }

    /// Adds a record to a draft, which makes it complete.
    pub(crate) fn complete(&self, id: &Id, record: &T) -> Result<(), Status> {
        let partial = self.partial(id);
        write(&partial.join("record.json"), record)?;
        fs::rename(&partial, self.folder.join(id.to_string())).map_err(|error| failed("rename", &partial, error))
    }

    /// Replaces a record.
    pub(crate) fn replace(&self, id: &Id, record: &T) -> Result<(), Status> {
        write(&self.folder.join(id.to_string()).join("record.json"), record)
    }

    /// Returns a record, if it exists.
    pub(crate) fn find(&self, id: &Id) -> Result<Option<T>, Status> {
        let path = self.folder.join(id.to_string()).join("record.json");
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|error| Status::internal(format!("cannot parse {}: {error}", path.display()))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read", &path, error)),
        }
    }

    /// Returns the record that a call names.
    pub(crate) fn get(&self, id: &str) -> Result<T, Status> {
        let found = Id::parse(id).map_or(Ok(None), |id| self.find(&id))?;
        found.ok_or_else(|| Status::not_found(format!("{} {id} does not exist", self.kind)))
    }

    /// Returns all records in the order of their identifiers.
    pub(crate) fn list(&self) -> Result<Vec<T>, Status> {
        let entries = fs::read_dir(&self.folder).map_err(|error| failed("list", &self.folder, error))?;
        let names = entries.flatten().filter_map(|entry| Id::parse(entry.file_name().to_str()?));
        let mut ids: Vec<Id> = names.collect();
        ids.sort();
        ids.iter().filter_map(|id| self.find(id).transpose()).collect()
    }

    /// Removes a record with its content.
    pub(crate) fn remove(&self, id: &Id) -> Result<(), Status> {
        let (folder, partial) = (self.folder.join(id.to_string()), self.partial(id));
        remove(&partial)?;
        match fs::rename(&folder, &partial) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            renamed => renamed.map_err(|error| failed("rename", &folder, error))?,
        }
        remove(&partial)
    }

    fn partial(&self, id: &Id) -> PathBuf {
        self.folder.join(format!("{id}.partial"))
    }
}

fn write<T: Serialize>(path: &Path, record: &T) -> Result<(), Status> {
    let partial = path.with_extension("partial");
    let bytes = serde_json::to_vec(record).map_err(|error| Status::internal(format!("cannot render it: {error}")))?;
    let written = File::create(&partial).and_then(|mut file| file.write_all(&bytes));
    written.and_then(|()| fs::rename(&partial, path)).map_err(|error| failed("write", path, error))
}

fn remove(folder: &Path) -> Result<(), Status> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", folder, error)),
        _ => Ok(()),
    }
}

/// Returns the status of a failed operation on a file.
pub(crate) fn failed(action: &str, path: &Path, error: io::Error) -> Status {
    let text = format!("cannot {action} {}: {error}", path.display());
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Status::resource_exhausted(text),
        ErrorKind::FileTooLarge => Status::out_of_range(text),
        ErrorKind::NotFound => Status::not_found(text),
        _ => Status::internal(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Content;

    fn snapshot(name: &str) -> Snapshot {
        Snapshot {
            id: Id::of_name(name),
            name: name.to_owned(),
            source: Id::of_name("volume"),
            size: 1,
            content: Content::Block,
            created: 0,
        }
    }

    #[tokio::test]
    async fn records_appear_when_they_are_complete_and_one_call_holds_the_lock() {
        let folder = std::env::temp_dir().join(format!("ferrovirt-csi-store-{}", std::process::id()));
        let store = Store::open(&folder).unwrap();
        let (records, made) = (store.snapshots(), snapshot("a"));
        fs::write(records.draft(&made.id).unwrap(), "half").unwrap();
        assert!(records.list().unwrap().is_empty());
        assert_eq!(records.get(&made.id.to_string()).unwrap_err().code(), tonic::Code::NotFound);
        fs::write(records.draft(&made.id).unwrap(), "whole").unwrap();
        records.complete(&made.id, &made).unwrap();
        assert_eq!(records.list().unwrap(), std::slice::from_ref(&made));
        assert_eq!(fs::read(records.content(&made.id)).unwrap(), b"whole");
        let held = store.lock(&made.id).await.unwrap();
        assert!(File::create(folder.join("locks").join(made.id.to_string())).unwrap().try_lock().is_err());
        drop(held);
        assert!(store.lock(&made.id).await.is_ok());
        records.remove(&made.id).unwrap();
        records.remove(&made.id).unwrap();
        assert!(records.list().unwrap().is_empty() && store.free().unwrap() > 0);
        fs::remove_dir_all(folder).unwrap();
    }
}
