//! The subresources of VMs and VMIs, one file each: specification, `decide` (pure), `serve`.
//!
//! [`registry`] lists them; dispatch, discovery, OpenAPI, metrics and the test of the users' roles iterate it. [`common`]
//! contains what several subresources share.

mod addvolume;
mod backup;
pub(crate) mod common;
mod console;
mod evacuate_cancel;
mod expand_spec;
mod expand_vm_spec;
mod filesystemlist;
mod freeze;
mod guestosinfo;
mod hibernate;
mod memorydump;
mod migrate;
mod objectgraph;
mod pause;
mod portforward;
mod redefine_checkpoint;
pub(crate) mod registry;
mod removememorydump;
mod removevolume;
mod reset;
mod restart;
mod sev_fetch_cert_chain;
mod sev_inject_launch_secret;
mod sev_query_launch_measurement;
mod sev_setup_session;
mod softreboot;
mod start;
mod stop;
mod unfreeze;
mod unpause;
mod usage;
mod usbredir;
mod userlist;
mod vnc;
mod vnc_screenshot;
mod vsock;
