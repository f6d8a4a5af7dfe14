//! Packs trees as layers: tar archives with fixed times and order, compressed with zstd.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Read, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    EPOCH,
    cache::{Cache, hex},
    error::{At, Error, Result},
    tree::{Content, Node, Source, Tree},
};

/// Compression level with fast writing and reading.
const ZSTD_LEVEL: i32 = 6;

/// Digests and sizes of a layer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Facts {
    /// Digest of the compressed blob, `sha256:...`.
    pub digest: String,
    /// Digest of the tar inside.
    pub diff_id: String,
    /// Bytes of the blob.
    pub size: u64,
    /// Bytes of the files in it.
    pub unpacked: u64,
}

/// A layer in the cache.
#[derive(Debug, Clone)]
pub struct Layer {
    /// The compressed blob.
    pub blob: PathBuf,
    /// Its digests and sizes.
    pub facts: Facts,
}

/// Returns the layer of a tree, from the cache if the same files were packed before.
pub(crate) fn layer(cache: &Cache, tree: &Tree) -> Result<Layer> {
    let key = tree.key()?.with(format!("{EPOCH} zstd {ZSTD_LEVEL}")).finish();
    let entry = cache.entry("layers", &key, |dir| {
        let facts = write(tree, &dir.join("blob"))?;
        let path = dir.join("facts.json");
        fs::write(&path, serde_json::to_vec(&facts)?).at(&path)
    })?;
    let path = entry.join("facts.json");
    let facts = serde_json::from_slice(&fs::read(&path).at(&path)?)?;
    Ok(Layer { blob: entry.join("blob"), facts })
}

fn write(tree: &Tree, path: &Path) -> Result<Facts> {
    let file = File::create(path).at(path)?;
    let compressed = Hashing::new(BufWriter::new(file));
    let encoder = zstd::Encoder::new(compressed, ZSTD_LEVEL).at(path)?;
    let mut archive = tar::Builder::new(Hashing::new(encoder));
    for (name, node) in tree.iter() {
        append(&mut archive, name, node)?;
    }
    let plain = archive.into_inner().at(path)?;
    let diff_id = plain.digest();
    let mut compressed = plain.inner.finish().at(path)?;
    compressed.flush().at(path)?;
    Ok(Facts { digest: compressed.digest(), diff_id, size: compressed.count, unpacked: tree.size()? })
}

fn append<W: Write>(archive: &mut tar::Builder<W>, name: &str, node: &Node) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(node.mode);
    header.set_uid(u64::from(node.owner));
    header.set_gid(u64::from(node.owner));
    header.set_mtime(EPOCH);
    header.set_size(0);
    match &node.content {
        Content::Dir => {
            header.set_entry_type(tar::EntryType::Directory);
            archive.append_data(&mut header, format!("{name}/"), io::empty()).at(name)
        }
        Content::Link(target) => {
            header.set_entry_type(tar::EntryType::Symlink);
            archive.append_link(&mut header, name, target).at(name)
        }
        Content::File(source) => {
            header.set_entry_type(tar::EntryType::Regular);
            match source {
                Source::Bytes(bytes) => {
                    header.set_size(bytes.len() as u64);
                    archive.append_data(&mut header, name, bytes.as_slice()).at(name)
                }
                Source::Disk(from) => {
                    let file = File::open(from).at(from)?;
                    let size = file.metadata().at(from)?.len();
                    header.set_size(size);
                    let mut exact = file.take(size);
                    archive.append_data(&mut header, name, &mut exact).at(name)?;
                    if exact.limit() > 0 {
                        return Err(Error::Layout(from.display().to_string(), "shrank while it was read".to_owned()));
                    }
                    Ok(())
                }
            }
        }
    }
}

/// A writer that hashes and counts its input.
struct Hashing<W> {
    inner: W,
    hash: Sha256,
    count: u64,
}

impl<W> Hashing<W> {
    fn new(inner: W) -> Self {
        Self { inner, hash: Sha256::new(), count: 0 }
    }

    fn digest(&self) -> String {
        format!("sha256:{}", hex(&self.hash.clone().finalize()))
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.count += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(dir: &Path) -> Tree {
        let file = dir.join("on-disk");
        fs::write(&file, "from disk").unwrap();
        let mut tree = Tree::default();
        tree.link("bin", "usr/bin");
        tree.copy("usr/bin/tool", 0o755, 107, file);
        tree.file(&format!("usr/share/{}", "long/".repeat(60)), 0o644, "deep");
        tree
    }

    #[test]
    fn the_same_tree_gives_the_same_bytes_and_keeps_owner_mode_and_time() {
        let dir = std::env::temp_dir().join(format!("ferrovirt-images-layer-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let first = write(&sample(&dir), &dir.join("a")).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let second = write(&sample(&dir), &dir.join("b")).unwrap();
        assert_eq!(first.digest, second.digest);
        assert_eq!(first.size, fs::metadata(dir.join("a")).unwrap().len());

        let mut archive = tar::Archive::new(zstd::Decoder::new(File::open(dir.join("a")).unwrap()).unwrap());
        let mut seen = Vec::new();
        for entry in archive.entries().unwrap() {
            let entry = entry.unwrap();
            assert_eq!(entry.header().mtime().unwrap(), EPOCH);
            if entry.path().unwrap().ends_with("tool") {
                assert_eq!((entry.header().uid().unwrap(), entry.header().mode().unwrap()), (107, 0o755));
            }
            seen.push(entry.path().unwrap().into_owned());
        }
        assert_eq!(seen[0], Path::new("bin"));
        assert!(seen.iter().any(|path| path.to_string_lossy().len() > 250));
        fs::remove_dir_all(dir).unwrap();
    }
}
