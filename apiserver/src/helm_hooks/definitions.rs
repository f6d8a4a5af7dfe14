//! `apply-definitions`: the custom resource definitions, and their deletion by `clean-up`.

use admission::kinds::kubevirt::{configuration_errors, ignored_settings, update_errors};
use api::{KubeVirt, cdi::label, constants::KUBEVIRT_NAME, kubevirt::spec::KubeVirtSpec};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams},
};
use serde_json::Value;

use super::{HookError, call};

/// Field manager of the definitions: that of Helm. Helm 4 applies them on an installation, which after an upgrade by this hook and an
/// uninstallation would conflict with fields of another manager.
const MANAGER: &str = "helm";

/// Field manager of the definitions of the importer.
const IMPORTER_MANAGER: &str = "ferrovirt-importer";
/// Definition of CDI's own configuration. While it exists, CDI is installed.
const CDI: &str = "cdis.cdi.kubevirt.io";
/// Label of the definitions of CDI, and beginning of those with the versions of its operator.
const CDI_LABEL: &str = "cdi.kubevirt.io";
const CDI_OPERATOR: &str = "operator.cdi.kubevirt.io";

/// Validates a configuration as JSON like the webhook. Malformed JSON is left to the API server.
///
/// # Errors
/// If the configuration is invalid or not supported.
pub fn check_configuration(text: &str) -> Result<(), HookError> {
    for warning in unknown_keys(text) {
        tracing::warn!("value kubevirt.configuration: {warning}");
    }
    let Ok(configuration) = serde_json::from_str(text) else { return Ok(()) };
    let object = KubeVirt::new(KUBEVIRT_NAME, KubeVirtSpec { configuration, ..KubeVirtSpec::default() });
    for setting in ignored_settings(&object.spec) {
        tracing::warn!("value kubevirt.configuration: without effect: {setting}");
    }
    // Helm writes the object after this hook, and the webhook would refuse the change when half of the release is applied.
    let found = [configuration_errors(&object), update_errors(&object.spec, &KubeVirtSpec::default())];
    let messages: Vec<&str> =
        found.iter().flat_map(|errors| errors.as_slice()).map(|error| error.message.as_str()).collect();
    if messages.is_empty() {
        return Ok(());
    }
    Err(HookError::Configuration(messages.join("; ")))
}

/// Returns messages about keys of a configuration that do not exist. The API server drops them without a word.
fn unknown_keys(text: &str) -> Vec<String> {
    let Ok(configuration) = serde_json::from_str::<Value>(text) else { return vec![] };
    let object = KubeVirt::new(KUBEVIRT_NAME, KubeVirtSpec::default());
    let Ok(mut object) = serde_json::to_value(object) else { return vec![] };
    object["spec"]["configuration"] = configuration;
    let found = admission::decode::object::<KubeVirt>(&object).err().unwrap_or_default();
    found.as_slice().iter().map(|error| error.message.clone()).collect()
}

/// Updates the definitions. A current one, as after a first installation, is not written: the API server takes seconds to
/// process it.
pub async fn apply_definitions() -> Result<(), HookError> {
    let api = Api::<CustomResourceDefinition>::all(daemon::client::connect().await?);
    let definitions = api::crds::all().map_err(|error| HookError::Definitions(error.to_string()))?;
    for definition in definitions {
        let name = definition.name_any();
        let live = api.get_opt(&name).await.map_err(call(format!("cannot read the definition {name}")))?;
        if live.is_some_and(|live| is_current(&live, &definition)) {
            tracing::info!(name, "definition is up to date");
            continue;
        }
        api.patch(&name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&definition))
            .await
            .map_err(call(format!("cannot apply the definition {name}")))?;
        tracing::info!(name, "definition was updated");
    }
    Ok(())
}

/// Applies the definitions of the importer where nobody else has brought them.
pub async fn apply_importer_definitions() -> Result<(), HookError> {
    let api = Api::<CustomResourceDefinition>::all(daemon::client::connect().await?);
    let is_cdi_installed = read(&api, CDI).await?.is_some();
    for definition in api::crds::importer().map_err(|error| HookError::Definitions(error.to_string()))? {
        let name = definition.name_any();
        let live = read(&api, &name).await?;
        if let Some(live) = live
            && (is_cdi_installed || !is_ours(&live) || is_current(&live, &definition))
        {
            tracing::info!(name, "definition exists and is left as it is");
            continue;
        }
        api.patch(&name, &PatchParams::apply(IMPORTER_MANAGER).force(), &Patch::Apply(&definition))
            .await
            .map_err(call(format!("cannot apply the definition {name}")))?;
        tracing::info!(name, "definition was applied");
    }
    Ok(())
}

/// Returns true for a definition that the importer brought and CDI has not taken over.
fn is_ours(live: &CustomResourceDefinition) -> bool {
    let is_of_cdi = |key: &String| key == CDI_LABEL || key.starts_with(CDI_OPERATOR);
    live.labels().contains_key(label::DEFINITION) && !live.labels().keys().any(is_of_cdi)
}

async fn read(api: &Api<CustomResourceDefinition>, name: &str) -> Result<Option<CustomResourceDefinition>, HookError> {
    api.get_opt(name).await.map_err(call(format!("cannot read the definition {name}")))
}

/// Deletes the definitions that have no objects. The objects of users must not be deleted with them.
pub(super) async fn delete_definitions(client: &Client) -> Result<(), HookError> {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    let generated = |error: api::crds::CrdError| HookError::Definitions(error.to_string());
    let mut definitions = api::crds::all().map_err(generated)?;
    if read(&api, CDI).await?.is_none() {
        for definition in api::crds::importer().map_err(generated)? {
            let live = read(&api, &definition.name_any()).await?;
            definitions.extend(live.is_some_and(|live| is_ours(&live)).then_some(definition));
        }
    }
    for definition in definitions {
        let name = definition.name_any();
        let objects = Api::<DynamicObject>::all_with(client.clone(), &resource(&definition));
        match objects.list_metadata(&ListParams::default().limit(1)).await {
            Ok(found) if !found.items.is_empty() => {
                tracing::info!(name, "definition has objects and stays");
                continue;
            }
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(call(format!("cannot list objects of the definition {name}"))(error)),
        }
        match api.delete(&name, &DeleteParams::default()).await {
            Ok(_) => tracing::info!(name, "definition was deleted"),
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(call(format!("cannot delete the definition {name}"))(error)),
        }
    }
    Ok(())
}

/// Returns the resource of a definition in its stored version.
fn resource(definition: &CustomResourceDefinition) -> ApiResource {
    let spec = &definition.spec;
    let version = spec.versions.iter().find(|version| version.storage).map_or("", |version| &version.name);
    ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk(&spec.group, version, &spec.names.kind),
        &spec.names.plural,
    )
}

/// Returns true if a definition in the cluster is current. The schemas must be equal; in other fields the API server sets
/// defaults.
fn is_current(live: &CustomResourceDefinition, wanted: &CustomResourceDefinition) -> bool {
    let (live_names, names) = (&live.spec.names, &wanted.spec.names);
    live.spec.versions == wanted.spec.versions
        && live.spec.scope == wanted.spec.scope
        && live_names.short_names == names.short_names
        && live_names.categories == names.categories
        && wanted.labels().iter().all(|(key, value)| live.labels().get(key) == Some(value))
        && wanted.annotations().iter().all(|(key, value)| live.annotations().get(key) == Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_is_validated_like_by_the_webhook() {
        for text in ["{}", r#"{"memBalloonStatsPeriod": 0}"#, "no JSON", r#"{"memBalloonStatsPeriod": "often"}"#] {
            assert!(check_configuration(text).is_ok(), "{text}");
        }
        let refusal =
            check_configuration(r#"{"imagePullPolicy": "Never ever", "hypervisors": [{"name": "xen"}]}"#).unwrap_err();
        let refusal = refusal.to_string();
        assert!(refusal.contains("imagePullPolicy \"Never ever\" is none of"), "{refusal}");
        assert!(refusal.contains("; spec.configuration.hypervisors is not supported yet"), "{refusal}");
    }

    #[test]
    fn rules_of_the_webhook_for_changes_apply_to_a_configuration() {
        for (text, message) in [
            (r#"{"tlsConfiguration": {"ciphers": ["TLS_AES_128_GCM_SHA256"]}}"#, "cannot specify ciphers when"),
            (
                r#"{"tlsConfiguration": {"minTLSVersion": "VersionTLS12", "ciphers": ["fast"]}}"#,
                "fast is not a valid cipher",
            ),
            (
                r#"{"developerConfiguration": {"featureGates": ["HostDisk"], "disabledFeatureGates": ["HostDisk"]}}"#,
                r#"feature gate "HostDisk" exists on both"#,
            ),
            (r#"{"migrations": {"maxDowntimeMs": 100}}"#, "maxDowntimeMs cannot be modified without enabling"),
            (
                r#"{"seccompConfiguration": {"virtualMachineInstanceProfile": {}}}"#,
                "virtualMachineInstanceProfile.customProfile needs to be set",
            ),
            (
                r#"{"virtTemplateDeployment": {"enabled": true},
                    "developerConfiguration": {"disabledFeatureGates": ["Template"]}}"#,
                "VirtTemplateDeployment cannot be enabled",
            ),
            (
                r#"{"roleAggregationStrategy": "Manual",
                    "developerConfiguration": {"disabledFeatureGates": ["OptOutRoleAggregation"]}}"#,
                "RoleAggregationStrategy cannot be set to Manual",
            ),
            (r#"{"additionalGuestMemoryOverheadRatio": "0.5"}"#, "cannot be smaller than 1.0"),
        ] {
            let refusal = check_configuration(text).unwrap_err().to_string();
            assert!(refusal.contains(message), "{text}: {refusal}");
        }
        for text in [
            r#"{"tlsConfiguration": {"minTLSVersion": "VersionTLS12", "ciphers": ["TLS_AES_128_GCM_SHA256"]}}"#,
            r#"{"migrations": {"maxDowntimeMs": 100},
                "developerConfiguration": {"featureGates": ["MigrationDowntimeTuning"]}}"#,
            r#"{"roleAggregationStrategy": "Manual", "virtTemplateDeployment": {"enabled": false}}"#,
        ] {
            assert!(check_configuration(text).is_ok(), "{text}: {:?}", check_configuration(text));
        }
    }

    #[test]
    fn objects_of_a_definition_are_listed_in_its_stored_version() {
        let all = api::crds::all().unwrap();
        let of = |kind: &str| resource(all.iter().find(|definition| definition.spec.names.kind == kind).unwrap());
        let vm = of("VirtualMachine");
        assert_eq!((vm.api_version.as_str(), vm.plural.as_str()), ("kubevirt.io/v1", "virtualmachines"));
        assert_eq!(of("VirtualMachineInstancePreset").api_version, "kubevirt.io/v1alpha3");
    }

    #[test]
    fn keys_that_do_not_exist_are_named() {
        for (text, expected) in [
            ("{}", vec![]),
            (r#"{"migrations": {"progressTimeout": 60}}"#, vec![]),
            ("no JSON", vec![]),
            (
                r#"{"migrations": {"parallelMigrationPerCluster": 3}, "gates": []}"#,
                vec![
                    "spec.configuration.gates in body is a forbidden property",
                    "spec.configuration.migrations.parallelMigrationPerCluster in body is a forbidden property",
                ],
            ),
        ] {
            let mut found = unknown_keys(text);
            found.sort();
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn definition_that_cdi_took_over_is_not_ours() {
        let ours = api::crds::importer().unwrap().remove(0);
        assert!(is_ours(&ours));
        for label in ["cdi.kubevirt.io", "operator.cdi.kubevirt.io", "operator.cdi.kubevirt.io/updateVersion"] {
            let mut taken = ours.clone();
            taken.metadata.labels.get_or_insert_default().insert(label.to_owned(), String::new());
            assert!(!is_ours(&taken), "{label}");
        }
        let unlabelled = CustomResourceDefinition { metadata: Default::default(), ..ours };
        assert!(!is_ours(&unlabelled));
    }

    #[test]
    fn definition_is_current_when_only_defaults_of_the_server_differ() {
        let wanted = api::crds::all().unwrap().remove(0);
        let mut live = wanted.clone();
        live.metadata.uid = Some("u1".into());
        live.metadata.labels.get_or_insert_default().insert("a".into(), "b".into());
        live.spec.names.list_kind = Some("List".into());
        assert!(is_current(&live, &wanted));
        let mut older = live.clone();
        older.spec.versions.truncate(1);
        assert!(!is_current(&older, &wanted));
        let mut unlabelled = live.clone();
        unlabelled.metadata.labels = None;
        assert!(!is_current(&unlabelled, &wanted));
        // As Helm 3 leaves those of a former release.
        live.metadata.annotations = None;
        assert!(!is_current(&live, &wanted));
    }
}
