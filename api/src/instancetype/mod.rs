//! Instance types (size classes of machines) and preferences (what a guest system works best with).
//!
//! A VM names one of each. Neither is ever written into the VM by what reads it: they are applied to a copy of the
//! template when the VM is checked ([`apply`], [`requirements`]), to the machine when the VM starts, and to the VM
//! itself when it is [`expand`]ed. What a VM uses is kept as it was when it was first seen, in a ControllerRevision
//! ([`revision`]).
//!
//! ```text
//! VM ── matcher ──> ControllerRevision, or object ──> specs ──> apply ──> spec of the machine, or conflicts
//! ```

pub mod apply;
pub mod expand;
pub mod matcher;
pub mod preference;
pub mod requirements;
pub mod revision;
pub mod spec;
pub mod topology;

mod prefer;

pub use apply::{Conflicts, apply};
pub use matcher::{MatchedKind, UnexpectedKind};
pub use preference::{VirtualMachineClusterPreference, VirtualMachinePreference, VirtualMachinePreferenceSpec};
pub use spec::{VirtualMachineClusterInstancetype, VirtualMachineInstancetype, VirtualMachineInstancetypeSpec};

/// API group of the kinds.
pub const GROUP: &str = "instancetype.kubevirt.io";
/// Version of the kinds.
pub const VERSION: &str = "v1beta1";
/// `apiVersion` of the kinds.
pub const API_VERSION: &str = "instancetype.kubevirt.io/v1beta1";
