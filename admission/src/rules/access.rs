//! Access credentials of guests.

use api::{VirtualMachineInstanceSpec, vmi::access::AccessCredentialSecretSource};

use crate::context::FieldErrors;

/// Validates the access credentials.
pub(super) fn validate(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let no_cloud = spec.volumes.iter().any(|volume| volume.cloud_init_no_cloud.is_some());
    let config_drive = spec.volumes.iter().any(|volume| volume.cloud_init_config_drive.is_some());
    for (index, credential) in spec.access_credentials.iter().enumerate() {
        let path = format!("{root}.accessCredentials[{index}]");
        if let Some(key) = &credential.ssh_public_key {
            let field = format!("{path}.sshPublicKey");
            let method = &key.propagation_method;
            for (name, used, there) in [
                ("noCloud", method.no_cloud.is_some(), no_cloud),
                ("configDrive", method.config_drive.is_some(), config_drive),
            ] {
                if used && !there {
                    errors.invalid(
                        format!("{field}.propagationMethod"),
                        format!(
                            "{path} requires a {name} volume to exist when the {name} propagationMethod is in use."
                        ),
                    );
                }
            }
            if method.qemu_guest_agent.as_ref().is_some_and(|agent| agent.users.is_empty()) {
                errors.invalid(
                    format!("{field}.propagationMethod.qemuGuestAgent.users"),
                    format!("{path} requires at least one user to be present in the users list"),
                );
            }
            let methods = [method.no_cloud.is_some(), method.config_drive.is_some(), method.qemu_guest_agent.is_some()];
            let methods = methods.iter().filter(|set| **set).count();
            validate_one_of_each(&path, &field, key.source.secret.as_ref(), methods == 1, errors);
        }
        if let Some(password) = &credential.user_password {
            let by_agent = password.propagation_method.qemu_guest_agent.is_some();
            validate_one_of_each(
                &path,
                &format!("{path}.userPassword"),
                password.source.secret.as_ref(),
                by_agent,
                errors,
            );
        }
        if credential.ssh_public_key.is_some() == credential.user_password.is_some() {
            errors.invalid(path.clone(), format!("{path} must have exactly one access credential type set"));
        }
    }
}

/// Validates that a credential has one source and one propagation method.
fn validate_one_of_each(
    path: &str,
    field: &str,
    secret: Option<&AccessCredentialSecretSource>,
    method: bool,
    errors: &mut FieldErrors,
) {
    match secret {
        None => errors.invalid(format!("{field}.source"), format!("{path} must have exactly one source set")),
        Some(secret) if secret.secret_name.is_empty() => {
            let field = format!("{field}.source.secret.secretName");
            let message = format!("{field} is a required field");
            errors.invalid(field, message);
        }
        Some(_) => {}
    }
    if !method {
        let message = format!("{path} must have exactly one propagationMethod set");
        errors.invalid(format!("{field}.propagationMethod"), message);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::rules::testing::*;

    const A: &str = "spec.accessCredentials[0]";

    fn credential(credential: Value) -> Value {
        json!({
            "accessCredentials": [credential],
            "volumes": [{"name": "root", "cloudInitNoCloud": {"userData": "a"}}],
        })
    }

    #[test]
    fn credential_has_one_kind_source_and_method() {
        let source = json!({"secret": {"secretName": "s"}});
        accepts(credential(json!({"sshPublicKey": {"source": source, "propagationMethod": {"noCloud": {}}}})));
        refuses(credential(json!({})), A, "exactly one access credential type set");
        refuses(
            credential(json!({"sshPublicKey": {"source": {}, "propagationMethod": {"noCloud": {}}}})),
            &format!("{A}.sshPublicKey.source"),
            "exactly one source set",
        );
        refuses(
            credential(json!({"sshPublicKey": {"source": source, "propagationMethod": {}}})),
            &format!("{A}.sshPublicKey.propagationMethod"),
            "exactly one propagationMethod set",
        );
        refuses(
            credential(json!({"sshPublicKey": {"source": source, "propagationMethod": {"configDrive": {}}}})),
            &format!("{A}.sshPublicKey.propagationMethod"),
            "requires a configDrive volume to exist",
        );
        refuses(
            credential(
                json!({"sshPublicKey": {"source": source, "propagationMethod": {"qemuGuestAgent": {"users": []}}}}),
            ),
            &format!("{A}.sshPublicKey.propagationMethod.qemuGuestAgent.users"),
            "requires at least one user",
        );
        let unnamed = json!({"secret": {"secretName": ""}});
        refuses(
            credential(json!({"userPassword": {"source": unnamed, "propagationMethod": {"qemuGuestAgent": {}}}})),
            &format!("{A}.userPassword.source.secret.secretName"),
            "is a required field",
        );
        refuses(
            credential(json!({"userPassword": {"source": source, "propagationMethod": {}}})),
            &format!("{A}.userPassword.propagationMethod"),
            "exactly one propagationMethod set",
        );
    }
}
