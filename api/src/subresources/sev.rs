//! Attestation of guests with AMD SEV.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Options of `sev/setupsession`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SevSessionOptions {
    /// The guest owner's Diffie-Hellman key, base64. Required.
    #[serde(deserialize_with = "super::or_default", skip_serializing_if = "String::is_empty")]
    pub dh_cert: String,
    /// The session blob, base64. Required.
    #[serde(deserialize_with = "super::or_default", skip_serializing_if = "String::is_empty")]
    pub session: String,
}

/// Options of `sev/injectlaunchsecret`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SevSecretOptions {
    /// Header for decrypting the secret, base64.
    #[serde(deserialize_with = "super::or_default", skip_serializing_if = "String::is_empty")]
    pub header: String,
    /// The encrypted secret, base64.
    #[serde(deserialize_with = "super::or_default", skip_serializing_if = "String::is_empty")]
    pub secret: String,
}

/// Answer of `sev/fetchcertchain`: data for verifying the node's processor.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SevPlatformInfo {
    /// Certificate chain, base64.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cert_chain: String,
    /// The platform's Diffie-Hellman key, base64.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pdh: String,
}

/// Answer of `sev/querylaunchmeasurement`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SevMeasurementInfo {
    /// Major version of the node's SEV firmware interface.
    pub api_major: u32,
    /// Minor version of the node's SEV firmware interface.
    pub api_minor: u32,
    /// Build of the node's SEV firmware.
    #[serde(rename = "buildID")]
    pub build_id: u32,
    /// SHA-256 of the guest's firmware.
    #[serde(rename = "loaderSHA", skip_serializing_if = "String::is_empty")]
    pub loader_sha: String,
    /// Launch measurement, base64.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub measurement: String,
    /// Effective guest policy.
    pub policy: u32,
}
