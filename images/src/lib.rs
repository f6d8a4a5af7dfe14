//! Builds images without daemon and registry.
//!
//! Service images contain binaries of this workspace and the Debian files that they need. Guest images contain test guests.
//! Each image becomes an OCI archive that `ctr images import` accepts, and the same input always gives the same
//! digest.
//!
//! ```text
//! services: packages (unpacked, cached) -> select (files + libraries) -> tree -> layer (cached) -> oci (archive)
//! guests:   packages (tools, kernel)    -> newc, grub, disk (cached)  -> tree -> layer (cached) -> oci (archive)
//! ```

pub mod cache;
pub mod domains;
mod error;
mod guests;
mod layer;
mod object;
pub mod oci;
mod packages;
pub mod registry;
mod run;
mod select;
mod services;
pub mod source;
mod tools;
mod tree;

use std::{
    fs,
    path::{Path, PathBuf},
};

use error::At;
pub use error::{Error, Result};

/// The time of every file in every image: the first second of 2025.
pub const EPOCH: u64 = 1_735_689_600;

/// All images in build order: name of the archive, and name of the image below its prefix.
pub const IMAGES: [(&str, &str); 9] = [
    ("virt-api", "virt-api"),
    ("virt-controller", "virt-controller"),
    ("virt-handler", "virt-handler"),
    ("virt-launcher", "virt-launcher"),
    ("toolbox", "toolbox"),
    ("guest-tiny", "guests/tiny"),
    ("guest-tiny-kernel", "guests/tiny-kernel"),
    ("guest-tiny-signed", "guests/tiny-signed"),
    ("guest-debian", "guests/debian"),
];

/// Options of a build.
#[derive(Debug, Clone)]
pub struct Options {
    /// Directory with the release binaries.
    pub bin_dir: PathBuf,
    /// Directory for the archives.
    pub out: PathBuf,
    /// Prefix of image names.
    pub prefix: String,
    /// Image tag.
    pub tag: String,
    /// Cache of intermediate results.
    pub cache: cache::Cache,
    /// Build information for virt-api.
    pub source: Option<source::Source>,
}

/// Resolves names and the groups `services`, `guests` and `all`. No names mean all images.
pub fn resolve(names: &[String]) -> Result<Vec<&'static str>> {
    let all = IMAGES.iter().map(|(name, _)| *name);
    if names.is_empty() {
        return Ok(all.collect());
    }
    let mut chosen = Vec::new();
    for wanted in names {
        let matching: Vec<_> = all
            .clone()
            .filter(|name| match wanted.as_str() {
                "all" => true,
                "guests" => name.starts_with("guest-"),
                "services" => !name.starts_with("guest-"),
                wanted => *name == wanted,
            })
            .collect();
        if matching.is_empty() {
            let known = all.collect::<Vec<_>>().join(", ");
            return Err(Error::UnknownImage { name: wanted.clone(), known });
        }
        chosen.extend(matching);
    }
    // Removes duplicates and keeps the order of the list.
    Ok(all.filter(|name| chosen.contains(name)).collect())
}

/// Builds one image and returns its summary.
pub fn build(name: &str, options: &Options) -> Result<oci::Summary> {
    let path = IMAGES.iter().find(|(known, _)| *known == name).map(|(_, path)| *path).unwrap_or(name);
    let reference = format!("{}/{path}:{}", options.prefix, options.tag);
    fs::create_dir_all(&options.out).at(&options.out)?;
    let archive = archive_path(&options.out, name);
    match name {
        name if name.starts_with("guest-") => guests::build(name, &reference, &archive, options),
        _ => services::build(name, &reference, &archive, options),
    }
}

/// Returns the path of an image's archive.
pub fn archive_path(out: &Path, name: &str) -> PathBuf {
    out.join(format!("{name}.tar"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_names_are_resolved_without_duplicates() {
        let names = |given: &[&str]| resolve(&given.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(names(&[]).unwrap().len(), IMAGES.len());
        assert_eq!(
            names(&["guest-tiny", "guests"]).unwrap(),
            ["guest-tiny", "guest-tiny-kernel", "guest-tiny-signed", "guest-debian"]
        );
        assert_eq!(names(&["toolbox", "virt-api"]).unwrap(), ["virt-api", "toolbox"]);
        assert!(names(&["virt"]).unwrap_err().to_string().contains("virt-launcher"));
    }
}
