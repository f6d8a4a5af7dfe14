//! Instance types (CPU, memory and other resources of a VMI) and preferences (preferred settings of a guest operating system).
//!
//! A VM refers to at most one of each. Reading them never changes the VM: they are applied to a copy of the template when the
//! VM is validated ([`apply`], [`requirements`]), to the VMI when the VM starts, and to the VM itself when it is
//! [`expand`]ed. A ControllerRevision stores a copy from the first use ([`revision`]).
//!
//! ```text
//! VM ── matcher ──> ControllerRevision, or object ──> specs ──> apply ──> VMI spec, or conflicts
//! ```

pub mod apply;
pub mod common;
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

/// API group of instance types and preferences.
pub const GROUP: &str = "instancetype.kubevirt.io";
/// Version of instance types and preferences.
pub const VERSION: &str = "v1beta1";
/// `apiVersion` of instance types and preferences.
pub const API_VERSION: &str = "instancetype.kubevirt.io/v1beta1";
