//! Memory encryption.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Memory encryption; one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LaunchSecurity {
    /// AMD SEV or SEV-ES.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sev: Option<Sev>,
    /// AMD SEV-SNP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snp: Option<Sevsnp>,
    /// Intel TDX.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tdx: Option<Tdx>,
}

/// AMD SEV.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sev {
    /// Start the guest only after attestation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attestation: Option<SevAttestation>,
    /// Guest owner's Diffie-Hellman key, base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dh_cert: Option<String>,
    /// SEV policy of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<SevPolicy>,
    /// Launch session blob, base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
}

/// Marker for attestation.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct SevAttestation {}

/// SEV guest policy.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SevPolicy {
    /// Encrypt the register state, too (SEV-ES).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encrypted_state: Option<bool>,
}

/// Marker for SEV-SNP.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct Sevsnp {}

/// Marker for TDX.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct Tdx {}
