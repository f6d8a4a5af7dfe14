//! Credentials put into the guest.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One credential to put into the guest; exactly one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AccessCredential {
    /// Public SSH keys of a secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_public_key: Option<SshPublicKeyAccessCredential>,
    /// Passwords of a secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_password: Option<UserPasswordAccessCredential>,
}

/// SSH keys and the way they reach the guest.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SshPublicKeyAccessCredential {
    /// How the credential reaches the guest.
    pub propagation_method: SshPublicKeyAccessCredentialPropagationMethod,
    /// Where the credential comes from.
    pub source: SshPublicKeyAccessCredentialSource,
}

/// Way for SSH keys; exactly one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SshPublicKeyAccessCredentialPropagationMethod {
    /// Written to the cloud-init ConfigDrive volume at start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_drive: Option<ConfigDriveSshPublicKeyAccessCredentialPropagation>,
    /// Written to the cloud-init NoCloud volume at start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_cloud: Option<NoCloudSshPublicKeyAccessCredentialPropagation>,
    /// Written by the guest agent while the guest runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qemu_guest_agent: Option<QemuGuestAgentSshPublicKeyAccessCredentialPropagation>,
}

/// Marker for the ConfigDrive way.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct ConfigDriveSshPublicKeyAccessCredentialPropagation {}

/// Marker for the NoCloud way.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct NoCloudSshPublicKeyAccessCredentialPropagation {}

/// Guest users that get the keys.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct QemuGuestAgentSshPublicKeyAccessCredentialPropagation {
    /// Guest users whose authorized keys are kept equal to the secret.
    pub users: Vec<String>,
}

/// Source of SSH keys.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SshPublicKeyAccessCredentialSource {
    /// Secret holding the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<AccessCredentialSecretSource>,
}

/// A secret in the machine's namespace.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AccessCredentialSecretSource {
    /// Name of the secret.
    pub secret_name: String,
}

/// Guest passwords and the way they reach the guest.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserPasswordAccessCredential {
    /// How the credential reaches the guest.
    pub propagation_method: UserPasswordAccessCredentialPropagationMethod,
    /// Where the credential comes from.
    pub source: UserPasswordAccessCredentialSource,
}

/// Way for passwords.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserPasswordAccessCredentialPropagationMethod {
    /// Written by the guest agent while the guest runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qemu_guest_agent: Option<QemuGuestAgentUserPasswordAccessCredentialPropagation>,
}

/// Marker for the guest-agent way.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct QemuGuestAgentUserPasswordAccessCredentialPropagation {}

/// Source of passwords; secret keys are user names.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserPasswordAccessCredentialSource {
    /// Secret holding the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<AccessCredentialSecretSource>,
}
