//! End-to-end tests: users' stories on a real cluster with real guests.
//!
//! `make e2e` runs them against the test cluster, or against the cluster of `KUBECONFIG`.

#![allow(missing_docs, reason = "names of tests describe them")]

mod access;
mod actions;
mod admission;
mod boot;
mod claims;
mod controller_rights;
mod cve_front_proxy;
mod cve_guest_agent;
mod cve_launcher_socket;
mod cve_streams;
mod definitions;
mod devices;
mod disks;
mod endpoints;
mod evacuation;
mod faults;
mod firmware;
mod forged_reviews;
mod guest_agent;
mod guest_loopback;
mod guides;
mod hanging_mounts;
mod host_devices;
mod hotplug;
mod hotplug_faults;
mod installation;
mod kills;
mod lifecycle;
mod live_resize;
mod live_resize_faults;
mod manifests;
mod memory_dump;
mod memory_dump_faults;
mod metrics_access;
mod network;
mod networks;
mod nics;
mod nics_faults;
mod owners;
mod pods;
mod port_forward_ends;
mod preferences;
mod processors;
mod profiles;
mod refusals;
mod replicas;
mod rights;
mod scheduling;
mod silent_connections;
mod spellings;
mod starts;
mod strategies;
mod stream_faults;
mod streams;
mod traces;
mod usb;
mod utility_volumes;
mod virt_handlers;
