//! The images, and the options of their build.

use std::path::{Path, PathBuf};

use crate::{
    cache::Cache,
    error::{Error, Result},
    source::Source,
};

/// The time of every file in every image: the first second of 2025.
pub const EPOCH: u64 = 1_735_689_600;

/// [`EPOCH`] as RFC 3339.
pub(crate) const EPOCH_TEXT: &str = "2025-01-01T00:00:00Z";

/// An image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image {
    /// Name of the archive.
    pub name: &'static str,
    /// Name below the prefix of all images.
    pub path: &'static str,
    /// End of its tag. Variants of an image differ only in this.
    pub tag_suffix: &'static str,
}

impl Image {
    const fn plain(name: &'static str, path: &'static str) -> Self {
        Self { name, path, tag_suffix: "" }
    }

    /// Returns the image with the archive of this name.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        IMAGES.into_iter().find(|image| image.name == name)
    }

    /// Returns the tag of the image in a build with this tag.
    #[must_use]
    pub fn tag(&self, tag: &str) -> String {
        format!("{tag}{}", self.tag_suffix)
    }
}

/// All images in build order.
pub const IMAGES: [Image; 13] = [
    Image::plain("virt-api", "virt-api"),
    Image::plain("virt-controller", "virt-controller"),
    Image::plain("virt-handler", "virt-handler"),
    Image::plain("virt-launcher", "virt-launcher"),
    Image { name: "virt-launcher-debug", path: "virt-launcher", tag_suffix: "-debug" },
    Image { name: "virt-launcher-arm64", path: "virt-launcher", tag_suffix: "-arm64" },
    Image::plain("virt-importer", "virt-importer"),
    Image::plain("toolbox", "toolbox"),
    Image::plain("guest-tiny", "guests/tiny"),
    Image::plain("guest-tiny-kernel", "guests/tiny-kernel"),
    Image::plain("guest-tiny-signed", "guests/tiny-signed"),
    Image::plain("guest-tiny-arm64", "guests/tiny-arm64"),
    Image::plain("guest-debian", "guests/debian"),
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
    pub cache: Cache,
    /// Build information for virt-api.
    pub source: Option<Source>,
}

/// Returns the path of an image's archive.
pub fn archive_path(out: &Path, name: &str) -> PathBuf {
    out.join(format!("{name}.tar"))
}

/// Resolves names and the groups `services`, `guests` and `all`. No names mean all images. Variants of an image belong to no
/// group but `all`.
pub fn resolve(names: &[String]) -> Result<Vec<&'static str>> {
    let all = IMAGES.iter().map(|image| image.name);
    let is_variant = |name| Image::find(name).is_some_and(|image| !image.tag_suffix.is_empty());
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
                "services" => !name.starts_with("guest-") && !is_variant(name),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_names_are_resolved_without_duplicates() {
        let names = |given: &[&str]| resolve(&given.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(names(&[]).unwrap().len(), IMAGES.len());
        assert_eq!(
            names(&["guest-tiny", "guests"]).unwrap(),
            ["guest-tiny", "guest-tiny-kernel", "guest-tiny-signed", "guest-tiny-arm64", "guest-debian"]
        );
        assert_eq!(names(&["toolbox", "virt-api"]).unwrap(), ["virt-api", "toolbox"]);
        assert!(names(&["virt"]).unwrap_err().to_string().contains("virt-launcher"));
        assert_eq!(names(&["services"]).unwrap().len(), 6);
        assert_eq!(names(&["virt-launcher-debug"]).unwrap(), ["virt-launcher-debug"]);
    }

    #[test]
    fn variants_have_a_tag_of_their_own() {
        for (name, tag) in [("virt-launcher-debug", "v1-debug"), ("virt-launcher-arm64", "v1-arm64")] {
            let image = Image::find(name).unwrap();
            assert_eq!((image.path, image.tag("v1").as_str()), ("virt-launcher", tag));
        }
        assert_eq!(Image::find("virt-launcher").unwrap().tag("v1"), "v1");
        let references: std::collections::BTreeSet<_> =
            IMAGES.iter().map(|image| (image.path, image.tag("v1"))).collect();
        assert_eq!(references.len(), IMAGES.len());
    }
}
