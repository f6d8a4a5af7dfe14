//! Builds an image by its name.

use std::fs;

use crate::{
    error::{At, Error, Result},
    guests,
    image::{IMAGES, Image, Options, archive_path},
    oci::Summary,
    services,
};

/// Builds one image and returns its summary.
pub fn build(name: &str, options: &Options) -> Result<Summary> {
    let image = Image::find(name).ok_or_else(|| Error::UnknownImage {
        name: name.to_owned(),
        known: IMAGES.map(|image| image.name).join(", "),
    })?;
    let reference = format!("{}/{}:{}", options.prefix, image.path, image.tag(&options.tag));
    fs::create_dir_all(&options.out).at(&options.out)?;
    let archive = archive_path(&options.out, name);
    match name {
        name if name.starts_with("guest-") => guests::build(name, &reference, &archive, options),
        _ => services::build(name, &reference, &archive, options),
    }
}
