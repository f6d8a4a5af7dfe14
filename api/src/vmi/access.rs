//! Access credentials for the guest.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names;

/// Returns the name of the launcher pod's volume with a Secret of credentials.
pub fn pod_volume(secret: &str) -> String {
    names::dns_label(secret, "-access-cred")
}

/// An access credential; exactly one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AccessCredential {
    /// Public SSH keys from a Secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_public_key: Option<SshPublicKeyAccessCredential>,
    /// Passwords from a Secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_password: Option<UserPasswordAccessCredential>,
}

/// SSH keys and their propagation method.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SshPublicKeyAccessCredential {
    /// Propagation method.
    pub propagation_method: SshPublicKeyAccessCredentialPropagationMethod,
    /// Source of the credential.
    pub source: SshPublicKeyAccessCredentialSource,
}

/// Propagation method of SSH keys; exactly one member is set.
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

/// Marker for ConfigDrive.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct ConfigDriveSshPublicKeyAccessCredentialPropagation {}

/// Marker for NoCloud.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct NoCloudSshPublicKeyAccessCredentialPropagation {}

/// Guest users for SSH keys.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct QemuGuestAgentSshPublicKeyAccessCredentialPropagation {
    /// Guest users whose authorized keys are synchronized with the Secret.
    pub users: Vec<String>,
}

/// Source of SSH keys.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SshPublicKeyAccessCredentialSource {
    /// Secret with the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<AccessCredentialSecretSource>,
}

/// A Secret in the VMI's namespace.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AccessCredentialSecretSource {
    /// Name of the Secret.
    pub secret_name: String,
}

/// Guest passwords and their propagation method.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserPasswordAccessCredential {
    /// Propagation method.
    pub propagation_method: UserPasswordAccessCredentialPropagationMethod,
    /// Source of the credential.
    pub source: UserPasswordAccessCredentialSource,
}

/// Propagation method of passwords.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserPasswordAccessCredentialPropagationMethod {
    /// Written by the guest agent while the guest runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qemu_guest_agent: Option<QemuGuestAgentUserPasswordAccessCredentialPropagation>,
}

/// Marker for the guest agent.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct QemuGuestAgentUserPasswordAccessCredentialPropagation {}

/// Source of passwords; keys of the Secret are user names.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserPasswordAccessCredentialSource {
    /// Secret with the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<AccessCredentialSecretSource>,
}
