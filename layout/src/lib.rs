//! Checks of the structure of this workspace and of its documents. `tests/` applies them; `make docs` renews generated parts.
//!
//! - [`source`]: the modules of a crate and what each of them imports.
//! - [`folders`]: imports between modules, level by level, and their cycles; imports of a crate's root.
//! - [`methods`]: calls between the methods of one type in several files.
//! - [`crates`]: the order of the crates.
//! - [`sources`]: the text of all files, and their length.
//! - [`documents`]: paths named in documents, the graph of folders that `docs/architecture.md` shows, decision records.
//! - [`lists`]: annotations, labels, metrics and subresources, read from the sources.
//! - [`values`]: values of the chart.
//! - [`promql`]: metrics in rules and dashboards of the chart.

pub mod crates;
pub mod documents;
mod error;
mod files;
pub mod folders;
pub mod lists;
pub mod methods;
pub mod promql;
pub mod source;
pub mod sources;
pub mod values;

pub use error::Error;
use files::read;
pub use files::root;
