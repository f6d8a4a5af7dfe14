//! Fingerprints of the images over which disks are overlays: size and SHA-256 of the whole file. Each is computed once.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, ErrorKind, Read},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::{files::UntrustedDir, paths::Paths};

/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;
/// Limit of images of a pod.
const MOST: usize = 256;

/// The image of a container disk, over which a disk is an overlay.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct BaseImage {
    pub(crate) volume: String,
    /// Path within the container disk.
    pub(crate) path: PathBuf,
}

impl BaseImage {
    /// Returns the image of this path in the directory of container disks; `None` for another file.
    pub(crate) fn beneath(directory: &Path, path: &Path) -> Option<Self> {
        let mut components = path.strip_prefix(directory).ok()?.components();
        let volume = components.next()?.as_os_str().to_str()?.to_owned();
        let path = components.as_path().to_owned();
        (!path.as_os_str().is_empty()).then_some(Self { volume, path })
    }
}

/// Content of an image. A missing one has the default, which no file has.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(super) struct Fingerprint {
    size: u64,
    sha256: String,
}

/// Fingerprints by volume.
pub(super) type Found = BTreeMap<String, Result<Fingerprint, String>>;

/// The result of a thread that reads an image, once it has one.
type Reading = watch::Receiver<Option<Result<Fingerprint, String>>>;

/// The images of this pod. Their files do not change as long as it exists.
#[derive(Debug)]
pub(super) struct Fingerprints {
    paths: Paths,
    readings: Mutex<BTreeMap<BaseImage, Reading>>,
}

impl Fingerprints {
    pub(super) fn new(paths: Paths) -> Self {
        Self { paths, readings: Mutex::default() }
    }

    /// Begins to read an image, unless that has begun.
    pub(super) fn begin(&self, image: &BaseImage) -> Reading {
        let mut readings = self.readings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reading) = readings.get(image).filter(|reading| !has_failed(reading)) {
            return reading.clone();
        }
        let (result, reading) = watch::channel(None);
        if readings.len() >= MOST {
            result.send_replace(Some(Err("there are too many images".to_owned())));
            return reading;
        }
        readings.insert(image.clone(), reading.clone());
        let is_name = Paths::is_single_component(&image.volume);
        let (directory, path) = (is_name.then(|| self.paths.container_disk(&image.volume)), image.path.clone());
        let work = move || {
            let found = directory.map_or_else(|| Err("the name is not valid".to_owned()), |disk| read(&disk, &path));
            result.send_replace(Some(found));
        };
        // The runtime waits for threads of its own when the launcher exits.
        if let Err(error) = std::thread::Builder::new().name("fingerprint".to_owned()).spawn(work) {
            tracing::warn!(%error, volume = image.volume, "cannot read the image of a container disk");
        }
        reading
    }

    /// Returns the fingerprint of an image.
    async fn of(&self, image: &BaseImage) -> Result<Fingerprint, String> {
        let interrupted = || "reading it was interrupted".to_owned();
        let mut reading = self.begin(image);
        let found = reading.wait_for(Option::is_some).await.map_err(|_| interrupted())?;
        found.clone().unwrap_or_else(|| Err(interrupted()))
    }

    /// Returns the fingerprints of images, which are read at the same time.
    pub(super) async fn all(&self, images: &[BaseImage]) -> Found {
        for image in images {
            drop(self.begin(image));
        }
        let mut found = Found::new();
        for image in images {
            found.insert(image.volume.clone(), self.of(image).await);
        }
        found
    }
}

/// Returns true if there is no result and none will come.
fn has_failed(reading: &Reading) -> bool {
    match &*reading.borrow() {
        Some(result) => result.is_err(),
        None => reading.has_changed().is_err(),
    }
}

fn read(disk: &Path, path: &Path) -> Result<Fingerprint, String> {
    let file = match UntrustedDir::open(disk).and_then(|disk| disk.regular_file(path)) {
        Err(error) if error.errno() == Some(Errno::NOENT) => return Ok(Fingerprint::default()),
        found => found.map_err(|error| error.to_string())?,
    };
    fingerprint(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))
}

fn fingerprint(path: &Path) -> io::Result<Fingerprint> {
    let mut file = File::open(path)?;
    let (mut size, mut hash, mut chunk) = (0_u64, Sha256::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok(Fingerprint { size, sha256: format!("{:x}", hash.finalize()) }),
            Ok(length) => {
                hash.update(&chunk[..length]);
                size += length as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Fails if an image of the source is not that of the target.
pub(super) fn compare(source: &Found, target: &Found) -> Result<(), String> {
    for (volume, own) in source {
        let failed = |node: &str, error: &str| {
            Err(format!(r#"cannot compare the image of volume "{volume}" on the {node} node: {error}"#))
        };
        match (own, target.get(volume)) {
            (Err(error), _) => return failed("source", error),
            (Ok(_), Some(Err(error))) => return failed("target", error),
            (Ok(_), None) => return failed("target", "it is missing in the answer"),
            (Ok(own), Some(Ok(other))) if own == other && *own != Fingerprint::default() => {}
            (Ok(_), Some(Ok(_))) => {
                return Err(format!(
                    r#"the image of volume "{volume}" on the target node differs from that on the source node"#
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(volume: &str, path: &str) -> BaseImage {
        BaseImage { volume: volume.into(), path: path.into() }
    }

    #[test]
    fn images_are_files_of_container_disks() {
        for (path, expected) in [
            ("/run/disks/root/disk/a.img", Some(image("root", "disk/a.img"))),
            ("/run/disks/root", None),
            ("/run/disks", None),
            ("/run/disks2/root/disk/a.img", None),
            ("/private/vmi-disks/data/disk.img", None),
        ] {
            assert_eq!(BaseImage::beneath(Path::new("/run/disks"), Path::new(path)), expected, "{path}");
        }
    }

    #[tokio::test]
    async fn fingerprints_are_those_of_the_whole_file_and_are_computed_once() {
        let root = std::env::temp_dir().join(format!("launcher-fingerprint-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let mut content = vec![7_u8; CHUNK + 5];
        for (volume, last) in [("one", 1), ("same", 1), ("other", 2)] {
            std::fs::create_dir_all(root.join(volume)).unwrap();
            *content.last_mut().unwrap() = last;
            std::fs::write(root.join(volume).join("disk"), &content).unwrap();
        }
        std::fs::write(root.join("one/short"), "abc").unwrap();
        let fingerprints = Fingerprints::new(Paths { container_disks: root.clone(), ..Paths::default() });
        let short = fingerprints.of(&image("one", "short")).await.unwrap();
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".into();
        assert_eq!(short, Fingerprint { size: 3, sha256 });
        let one = fingerprints.of(&image("one", "disk")).await.unwrap();
        assert_eq!(one.size, CHUNK as u64 + 5);
        assert_eq!(fingerprints.of(&image("same", "disk")).await.unwrap(), one);
        assert_ne!(fingerprints.of(&image("other", "disk")).await.unwrap(), one);
        for missing in [image("one", "none"), image("none", "disk")] {
            assert_eq!(fingerprints.of(&missing).await, Ok(Fingerprint::default()));
        }
        for invalid in [image("../one", "disk"), image("one", "../other/disk"), image("one", ".")] {
            assert!(fingerprints.of(&invalid).await.is_err(), "{invalid:?}");
        }
        std::fs::write(root.join("one/short"), "abcd").unwrap();
        assert_eq!(fingerprints.of(&image("one", "short")).await, Ok(short));
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn only_equal_images_pass() {
        let found = |size, sha256: &str| Ok(Fingerprint { size, sha256: sha256.into() });
        let list = |of: &[(&str, Result<Fingerprint, String>)]| -> Found {
            of.iter().map(|(volume, found)| ((*volume).to_owned(), found.clone())).collect()
        };
        let differs = r#"the image of volume "root" on the target node differs from that on the source node"#;
        let own = list(&[("data", found(2, "d")), ("root", found(3, "r"))]);
        for (of_root, expected) in [
            (found(3, "r"), Ok(())),
            (found(3, "x"), Err(differs)),
            (found(4, "r"), Err(differs)),
            (Ok(Fingerprint::default()), Err(differs)),
            (Err("broken".into()), Err(r#"cannot compare the image of volume "root" on the target node: broken"#)),
        ] {
            let target = list(&[("data", found(2, "d")), ("root", of_root), ("further", found(1, "f"))]);
            assert_eq!(compare(&own, &target), expected.map_err(str::to_owned));
        }
        assert!(compare(&own, &list(&[("data", found(2, "d"))])).is_err());
        assert!(compare(&list(&[("root", Err("broken".into()))]), &own).is_err());
        let missing = list(&[("root", Ok(Fingerprint::default()))]);
        assert_eq!(compare(&missing, &missing), Err(differs.to_owned()));
        assert_eq!(compare(&Found::new(), &own), Ok(()));
    }
}
