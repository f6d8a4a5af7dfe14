//! Hypervisor features.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hypervisor features of the guest.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Features {
    /// ACPI tables; on by default.
    #[serde(default)]
    pub acpi: FeatureState,
    /// Local APIC; on by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub apic: Option<FeatureApic>,
    /// Hyper-V enlightenments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hyperv: Option<FeatureHyperv>,
    /// All Hyper-V enlightenments that the host supports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hyperv_passthrough: Option<HypervPassthrough>,
    /// KVM features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kvm: Option<FeatureKvm>,
    /// Paravirtual spinlocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvspinlock: Option<FeatureState>,
    /// System management mode; needed for secure boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smm: Option<FeatureState>,
}

/// A feature switch.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FeatureState {
    /// Enables the feature; default: true if the object is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// Local APIC.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FeatureApic {
    /// Enables the feature; default: true if the object is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Paravirtual end-of-interrupt.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub end_of_interrupt: bool,
}

/// Hyper-V enlightenments.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FeatureHyperv {
    /// Enlightened VMCS for nested virtualization.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evmcs: Option<FeatureState>,
    /// TSC and APIC frequency registers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frequencies: Option<FeatureState>,
    /// Paravirtual inter-processor interrupts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ipi: Option<FeatureState>,
    /// Notification of TSC changes after a migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reenlightenment: Option<FeatureState>,
    /// Tell the guest to tolerate late timer interrupts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relaxed: Option<FeatureState>,
    /// Reset register.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reset: Option<FeatureState>,
    /// vCPU run time register.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime: Option<FeatureState>,
    /// Number of retries before the guest yields a spinlock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spinlocks: Option<FeatureSpinlocks>,
    /// Synthetic interrupt controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub synic: Option<FeatureState>,
    /// Synthetic timers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub synictimer: Option<SynicTimer>,
    /// Paravirtual TLB flush.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tlbflush: Option<TlbFlush>,
    /// Paravirtual APIC access.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vapic: Option<FeatureState>,
    /// Vendor string of the hypervisor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vendorid: Option<FeatureVendorId>,
    /// Virtual processor index register.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vpindex: Option<FeatureState>,
}

/// Spinlock retries.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FeatureSpinlocks {
    /// Enables the feature; default: true if the object is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Number of retries, at least 4096; default: 4096.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spinlocks: Option<u32>,
}

/// Synthetic timers.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SynicTimer {
    /// Direct delivery to the guest's handler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct: Option<FeatureState>,
    /// Enables the feature; default: true if the object is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// Paravirtual TLB flush.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TlbFlush {
    /// Direct delivery to the guest's handler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct: Option<FeatureState>,
    /// Enables the feature; default: true if the object is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Extended hypercalls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended: Option<FeatureState>,
}

/// Vendor string of the hypervisor.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FeatureVendorId {
    /// Enables the feature; default: true if the object is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Up to twelve characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vendorid: Option<String>,
}

/// Marker for host enlightenments.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HypervPassthrough {
    /// Enables the feature; default: true if the object is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// KVM features.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FeatureKvm {
    /// Hide KVM from the guest.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub hidden: bool,
}
