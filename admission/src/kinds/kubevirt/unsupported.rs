//! Settings of the KubeVirt object that are refused, since without them VMs would not be those that were asked for. Others without
//! effect are stored with a warning, see [`super::ignored`].

use api::kubevirt::configuration::KubeVirtConfiguration;

use super::CONFIGURATION;
use crate::context::FieldErrors;

/// Path of a field, reason of the refusal, and test for its use.
type Entry = (&'static str, &'static str, fn(&KubeVirtConfiguration) -> bool);

const FIELDS: &[Entry] = &[
    ("architectureConfiguration.defaultArchitecture", "other defaults than amd64", |from| {
        let architecture =
            from.architecture_configuration.as_ref().and_then(|arch| arch.default_architecture.as_deref());
        architecture.is_some_and(|architecture| !["", "amd64"].contains(&architecture))
    }),
    ("hypervisors", "hypervisors other than kvm", |from| {
        from.hypervisors.iter().any(|hypervisor| hypervisor.name.as_deref().is_some_and(|name| name != "kvm"))
    }),
];

/// Adds an error for each refused field of a configuration.
pub(super) fn field_errors(from: &KubeVirtConfiguration, errors: &mut FieldErrors) {
    for (path, why, _) in FIELDS.iter().filter(|(_, _, used)| used(from)) {
        let field = format!("{CONFIGURATION}.{path}");
        let message = format!("{field} is not supported yet: {why}");
        errors.not_supported(field, message);
    }
}

/// Returns the refused fields with their reasons, for documents.
pub(super) fn fields() -> Vec<(String, &'static str)> {
    FIELDS.iter().map(|(path, reason, _)| (format!("{CONFIGURATION}.{path}"), *reason)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_that_change_vms_are_refused() {
        for (configuration, refused) in [
            (json!({}), None),
            (json!({"architectureConfiguration": {"defaultArchitecture": "amd64", "ppc64le": {}}}), None),
            (json!({"architectureConfiguration": {"defaultArchitecture": ""}}), None),
            (json!({"hypervisors": [{"name": "kvm"}]}), None),
            (
                json!({"architectureConfiguration": {"defaultArchitecture": "arm64"}}),
                Some("spec.configuration.architectureConfiguration.defaultArchitecture"),
            ),
            (json!({"hypervisors": [{"name": "hyperv-direct"}]}), Some("spec.configuration.hypervisors")),
        ] {
            let mut errors = FieldErrors::new();
            field_errors(&serde_json::from_value(configuration.clone()).unwrap(), &mut errors);
            let fields: Vec<&str> = errors.as_slice().iter().map(|error| error.field.as_str()).collect();
            assert_eq!(fields, Vec::from_iter(refused), "{configuration}");
        }
    }
}
