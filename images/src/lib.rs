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

mod build;
pub mod cache;
pub mod domains;
mod error;
mod guests;
mod image;
mod layer;
mod object;
pub mod oci;
mod packages;
mod placeholder;
pub mod registry;
pub mod release;
mod run;
mod select;
mod services;
pub mod source;
mod tools;
mod tree;

pub use build::build;
pub use error::{Error, Result};
pub use guests::node;
pub(crate) use image::EPOCH_TEXT;
pub use image::{EPOCH, IMAGES, Image, Options, archive_path, resolve};
