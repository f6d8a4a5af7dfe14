//! The kubectl plugin. Each command family has a module; `subresource` sends their requests.
//!
//! kubectl runs `kubectl-virt` for `kubectl virt ...` and `kubectl_complete-virt` (a link to the same program) for shell
//! completion.

#[macro_use]
mod output;

mod cluster;
mod command_line;
mod completion;
mod console;
mod copies;
mod create;
mod credentials;
mod describe;
mod drain;
mod error;
mod evacuation;
mod examples;
mod expose;
mod forward;
mod graph;
mod guest;
mod hibernate;
mod image_upload;
mod kubeconfig;
mod lifecycle;
mod log_verbosity;
mod memory_dump;
mod migrate;
mod migrations;
mod option_value;
mod permitted_devices;
mod proxy;
mod relay;
mod resize;
mod run;
mod running;
mod snapshot;
mod ssh;
mod state;
mod subresource;
mod support_bundle;
mod target;
mod terminal;
mod top;
mod ui;
mod usb;
mod version;
#[cfg(test)]
mod virtctl;
mod vnc;
mod volumes;
mod wait;

use cluster::{ClusterOptions, Connection};
pub use error::Error;
use error::{failed_while, is_not_found};
use output::print;
pub use run::run;
use target::{Kind, object_name};
