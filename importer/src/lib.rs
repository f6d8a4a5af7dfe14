//! virt-importer fills the claim of a DataVolume from its source.
//!
//! [`task`] is the contract with virt-controller, which starts the program in an import pod. [`import()`] carries a task out.

mod archive;
mod checksum;
mod compression;
mod disk;
mod error;
pub mod format;
mod http;
mod import;
mod meter;
mod nbd;
mod places;
mod qemu;
mod space;
mod sparse;
mod spool;
pub mod task;

pub use error::ImportError;
pub use http::SourceError;
pub use import::import;
pub use meter::Meter;
pub use places::Places;
