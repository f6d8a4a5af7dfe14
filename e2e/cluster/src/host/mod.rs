//! Changes of the cluster to the host.
//!
//! Settings are recorded and undone; network namespaces, processes and cgroups are removed. The names on the host have one owner,
//! and conflicts with the host's routes are refused.

mod cgroups;
mod namespaces;
mod owner;
mod routes;
mod settings;

pub use cgroups::{enter_cgroup, make_cgroup, remove_cgroup};
pub use namespaces::{init_process, kill_all, namespace_path, namespaces};
pub use owner::{check_owner, owner};
pub use routes::check_routes;
pub use settings::{prepare, release};
