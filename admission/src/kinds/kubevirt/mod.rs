//! The KubeVirt object: there is only one, its configuration is valid and supported, and it is not deleted while workloads need
//! it.

mod certificates;
mod host_devices;
mod ignored;
mod unsupported;

use api::{
    FeatureGate, KubeVirt,
    config::ClusterConfig,
    constants::{GROUP, VERSION, finalizer},
    duration,
    kubevirt::{
        configuration::{KubeVirtConfiguration, SeccompConfiguration, TlsConfiguration},
        migrations::MigrationConfiguration,
        spec::{ComponentConfig, KubeVirtSpec, KubeVirtWorkloadUpdateStrategy},
        uninstall::UninstallStrategy,
    },
};
use kube::ResourceExt;

use super::policy;
use crate::{
    context::{Context, Decision, DenialForm, FieldErrors, Interrupt, ObjectQuery, request},
    rules::scheduling,
};

/// Returns the refused fields of the KubeVirt object with their reasons, for documents.
#[must_use]
pub fn unsupported_fields() -> Vec<(String, &'static str)> {
    unsupported::fields()
}

/// Returns the fields of the KubeVirt object that are stored without effect, with their reasons, for documents.
#[must_use]
pub fn ignored_fields() -> Vec<(&'static str, &'static str)> {
    ignored::fields()
}

/// Returns the settings of a KubeVirt object that have no effect, each with its reason.
#[must_use]
pub fn ignored_settings(spec: &KubeVirtSpec) -> Vec<String> {
    ignored::settings(spec)
}

/// Returns the feature of a gate whose feature is refused, for documents.
#[must_use]
pub fn refused_feature(gate: FeatureGate) -> Option<&'static str> {
    ignored::refused_feature(gate)
}

const PLURAL: &str = "kubevirts";
/// Refusal of a deletion that would remove no workloads.
const NOT_HELD: &str = "virt-controller has not added the finalizer kubevirt.io/foregroundDeleteKubeVirt yet, without which the workloads would remain. Repeat the request.";
const CONFIGURATION: &str = "spec.configuration";

/// Field that places components, and the kind of workload that runs them.
struct Place {
    field: &'static str,
    workload: &'static str,
}

const INFRA: Place = Place { field: "spec.infra", workload: "Deployment" };
const WORKLOADS: Place = Place { field: "spec.workloads", workload: "DaemonSet" };

/// Names of cipher suites in Go, up to TLS 1.2 and of TLS 1.3.
const CIPHERS: [&str; 25] = [
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
];

fn resource(context: &Context<'_>) -> Result<(), Interrupt> {
    let resource = &context.request.resource;
    if resource.group == GROUP && resource.resource == PLURAL && request::is_served(resource) {
        return Ok(());
    }
    Err(Interrupt::failed(400, format!("expect resource to be '{GROUP}/{VERSION}, Resource={PLURAL}'")))
}

/// Serves `/kubevirt-validate-create`.
pub(crate) fn validate_create(context: &Context<'_>) -> Result<Decision, Interrupt> {
    resource(context)?;
    let new: KubeVirt = context.object()?;
    let known = ObjectQuery::first(GROUP, VERSION, PLURAL, None, 1);
    if !context.lookups.list(&known)?.is_empty() {
        return Err(Interrupt::failed(400, "Kubevirt is already created"));
    }
    let mut errors = configuration_errors(&new);
    // Launcher pods would be refused.
    validate_placement(&WORKLOADS, new.spec.workloads.as_ref(), &mut errors);
    Ok(context.decide(errors, warnings(&new.spec, &KubeVirtSpec::default())))
}

/// Serves `/kubevirt-validate-update`.
pub(crate) fn validate_update(context: &Context<'_>) -> Result<Decision, Interrupt> {
    resource(context)?;
    let new: KubeVirt = context.object()?;
    let old: KubeVirt = context.old_object()?.unwrap_or_else(|| KubeVirt::new("", KubeVirtSpec::default()));
    let mut errors = FieldErrors::new();
    // Creation has fewer rules. A stored invalid spec must not block labels, finalizers and upgrades.
    if new.spec != old.spec {
        errors = update_errors(&new.spec, &old.spec);
        if errors.is_empty() {
            errors = configuration_errors(&new);
        }
    }
    Ok(Decision::from_errors_as(DenialForm::Full, errors, warnings(&new.spec, &old.spec)))
}

/// Serves `/kubevirt-validate-delete`.
pub(crate) fn validate_delete(context: &Context<'_>) -> Result<Decision, Interrupt> {
    resource(context)?;
    let Some(object) = context.old_object::<KubeVirt>()? else { return Ok(context.allowed()) };
    if object.metadata.deletion_timestamp.is_some() {
        return Ok(context.allowed());
    }
    let strategy = UninstallStrategy::of(&object.spec);
    // virt-controller needs the finalizer to remove the workloads.
    let is_held = object.finalizers().iter().any(|name| name == finalizer::KUBEVIRT);
    if strategy == UninstallStrategy::RemoveWorkloads && is_held {
        return Ok(context.allowed());
    }
    let queries = strategy.concerned().iter().map(|workload| {
        let query = ObjectQuery::first(GROUP, VERSION, workload.plural(), None, 1);
        (query, workload)
    });
    let queries: Vec<_> = queries.collect();
    context.lookups.require(queries.iter().map(|(query, _)| query))?;
    for (query, workload) in &queries {
        if context.lookups.list(query)?.is_empty() {
            continue;
        }
        let message =
            if strategy == UninstallStrategy::RemoveWorkloads { NOT_HELD.to_owned() } else { workload.refusal() };
        return Err(Interrupt::failed(400, message));
    }
    Ok(context.allowed())
}

/// Returns the errors of a configuration: fields that are invalid or not supported.
pub fn configuration_errors(object: &KubeVirt) -> FieldErrors {
    let mut errors = FieldErrors::new();
    if let Err(error) = ClusterConfig::from_kubevirt(object) {
        errors.invalid(CONFIGURATION, format!("{CONFIGURATION}: {error}"));
    }
    unsupported::field_errors(&object.spec.configuration, &mut errors);
    if let Some(permitted) = &object.spec.configuration.permitted_host_devices {
        host_devices::field_errors(permitted, &mut errors);
    }
    if let Some(migrations) = &object.spec.configuration.migrations {
        validate_migrations(migrations, &mut errors);
    }
    validate_workload_updates(&object.spec.workload_update_strategy, &mut errors);
    certificates::validate_lifetimes(&object.spec.certificate_rotate_strategy, &mut errors);
    errors
}

/// Rejects negative limits of migrations, as [`policy`] does.
fn validate_migrations(migrations: &MigrationConfiguration, errors: &mut FieldErrors) {
    let is_negative = |seconds: Option<i64>| seconds.is_some_and(|seconds| seconds < 0);
    for (field, negative) in [
        ("bandwidthPerMigration", migrations.bandwidth_per_migration.as_ref().is_some_and(policy::is_negative)),
        ("completionTimeoutPerGiB", is_negative(migrations.completion_timeout_per_gib)),
        ("progressTimeout", is_negative(migrations.progress_timeout)),
        ("utilityVolumesTimeout", is_negative(migrations.utility_volumes_timeout)),
    ] {
        if negative {
            let field = format!("{CONFIGURATION}.migrations.{field}");
            errors.invalid(field.clone(), format!("{field} must not be negative"));
        }
    }
}

/// Methods to move VMIs to a new launcher. `LiveMigrate` applies to VMIs that can migrate, `Evict` to the others.
const UPDATE_METHODS: [&str; 2] = ["LiveMigrate", "Evict"];

/// Validates the workload update strategy.
fn validate_workload_updates(strategy: &KubeVirtWorkloadUpdateStrategy, errors: &mut FieldErrors) {
    let methods = strategy.workload_update_methods.iter().enumerate();
    for (index, method) in methods.filter(|(_, method)| !UPDATE_METHODS.contains(&method.as_str())) {
        let field = format!("spec.workloadUpdateStrategy.workloadUpdateMethods[{index}]");
        errors.not_supported(
            field.clone(),
            format!("{field}: unsupported method {method}, must be one of {}", UPDATE_METHODS.join(", ")),
        );
    }
    if let Some(Err(error)) = strategy.batch_eviction_interval.as_deref().map(duration::parse) {
        let field = "spec.workloadUpdateStrategy.batchEvictionInterval";
        errors.invalid(field, format!("{field}: {error}"));
    }
}

/// Returns the errors of a changed spec.
pub fn update_errors(new: &KubeVirtSpec, old: &KubeVirtSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    for patch in &new.customize_components.patches {
        if serde_json::from_str::<serde_json::Value>(&patch.patch).is_err() {
            errors.not_supported("", format!("patch {:?} is not valid JSON", patch.patch));
        }
    }
    certificates::validate_relations(&new.certificate_rotate_strategy, &mut errors);
    let configuration = &new.configuration;
    validate_overhead_ratio(configuration, &mut errors);
    validate_gated_fields(configuration, &old.configuration, &mut errors);
    if configuration.tls_configuration != old.configuration.tls_configuration
        && let Some(tls) = &configuration.tls_configuration
    {
        validate_ciphers(tls, &mut errors);
    }
    for (place, new, old) in [(&INFRA, &new.infra, &old.infra), (&WORKLOADS, &new.workloads, &old.workloads)] {
        if new != old {
            validate_placement(place, new.as_ref(), &mut errors);
        }
    }
    if configuration.seccomp_configuration != old.configuration.seccomp_configuration
        && let Some(seccomp) = &configuration.seccomp_configuration
    {
        validate_seccomp_profile(seccomp, &mut errors);
    }
    if new.infra.as_ref().is_some_and(|infra| infra.replicas == Some(0)) {
        errors.invalid("", "infra replica count can't be 0");
    }
    let (listed, disabled) = gate_lists(configuration);
    if (listed, disabled) != gate_lists(&old.configuration) {
        for gate in listed.iter().filter(|gate| disabled.contains(gate)) {
            errors.forbidden(
                format!("{CONFIGURATION}.developerConfiguration.featureGates"),
                format!("feature gate \"{gate}\" exists on both \"FeatureGates\" and \"DisabledFeatureGates\""),
            );
        }
    }
    errors
}

fn gate_lists(configuration: &KubeVirtConfiguration) -> (&[String], &[String]) {
    configuration
        .developer_configuration
        .as_ref()
        .map(|developer| (developer.feature_gates.as_slice(), developer.disabled_feature_gates.as_slice()))
        .unwrap_or_default()
}

fn validate_overhead_ratio(configuration: &KubeVirtConfiguration, errors: &mut FieldErrors) {
    let Some(ratio) = configuration.additional_guest_memory_overhead_ratio.as_deref() else { return };
    match ratio.parse::<f64>() {
        Err(_) => errors.not_supported(
            "",
            format!("ratio provided, {ratio}, cannot be parsed into float: strconv.ParseFloat: parsing \"{ratio}\": invalid syntax"),
        ),
        Ok(number) if number >= 1.0 => {}
        Ok(_) => errors.not_supported("", format!("ratio provided, {ratio}, cannot be smaller than 1.0")),
    }
}

/// Validates fields that need a feature gate, which can be enabled in the same change.
fn validate_gated_fields(new: &KubeVirtConfiguration, old: &KubeVirtConfiguration, errors: &mut FieldErrors) {
    let (listed, disabled) = gate_lists(new);
    let on = |gate: FeatureGate| gate.enabled(listed, disabled);
    let templates = new.virt_template_deployment.as_ref().is_some_and(|deployment| deployment.enabled == Some(true));
    if templates && !on(FeatureGate::Template) {
        errors.invalid(
            format!("{CONFIGURATION}.virtTemplateDeployment.enabled"),
            "VirtTemplateDeployment cannot be enabled without enabling the Template feature gate",
        );
    }
    let roles = new.role_aggregation_strategy.as_deref().unwrap_or_default();
    if !["", "AggregateToDefault"].contains(&roles) && !on(FeatureGate::OptOutRoleAggregation) {
        errors.invalid(
            format!("{CONFIGURATION}.roleAggregationStrategy"),
            "RoleAggregationStrategy cannot be set to Manual without enabling the OptOutRoleAggregation feature gate",
        );
    }
    let downtime =
        |from: &KubeVirtConfiguration| from.migrations.as_ref().and_then(|migrations| migrations.max_downtime_ms);
    let tunable = on(FeatureGate::MigrationStallDetection) || on(FeatureGate::MigrationDowntimeTuning);
    if downtime(new).is_some() && downtime(new) != downtime(old) && !tunable {
        errors
            .invalid(format!("{CONFIGURATION}.migrationConfiguration.maxDowntimeMs"), policy::downtime_without_gate());
    }
}

fn validate_ciphers(tls: &TlsConfiguration, errors: &mut FieldErrors) {
    let field = format!("{CONFIGURATION}.tlsConfiguration.ciphers");
    let version = tls.min_tls_version.as_deref().unwrap_or_default();
    if !tls.ciphers.is_empty() && ["", "VersionTLS13"].contains(&version) {
        let message = format!(
            "You cannot specify ciphers when {CONFIGURATION}.tlsConfiguration.minTLSVersion is empty or VersionTLS13"
        );
        return errors.not_supported(&field, message);
    }
    for (index, cipher) in tls.ciphers.iter().enumerate().filter(|(_, cipher)| !CIPHERS.contains(&cipher.as_str())) {
        errors.not_supported(format!("{field}#{index}"), format!("{cipher} is not a valid cipher"));
    }
}

/// Applies the rules of Kubernetes for pods, with its messages. (The reference sends a dry run of a workload to the API server;
/// virt-api has no right to create workloads.) Operators of tolerations are limited by the schema already.
fn validate_placement(place: &Place, component: Option<&ComponentConfig>, errors: &mut FieldErrors) {
    let Some(placement) = component.and_then(|component| component.node_placement.as_ref()) else { return };
    let mut operators = placement.tolerations.iter().filter_map(|toleration| toleration.operator.as_deref());
    if operators.any(|operator| !["", "Equal", "Exists"].contains(&operator)) {
        let field = format!("{}.nodePlacement.tolerations.operator", place.field);
        errors.schema(format!("{field} in body should be one of [Equal Exists]"));
        return;
    }
    let found = scheduling::validate_placement(
        "spec.template.spec",
        placement.affinity.as_ref(),
        &placement.node_selector,
        &placement.tolerations,
    );
    let messages: Vec<&str> = found.as_slice().iter().map(|error| error.message.as_str()).collect();
    let text = match messages.as_slice() {
        [] => return,
        [one] => (*one).to_owned(),
        more => format!("[{}]", more.join(", ")),
    };
    errors.invalid("", format!("{}.apps \"placement-validation-webhook\" is invalid: {text}", place.workload));
}

fn validate_seccomp_profile(seccomp: &SeccompConfiguration, errors: &mut FieldErrors) {
    let Some(profile) = &seccomp.virtual_machine_instance_profile else { return };
    let path = format!("{CONFIGURATION}.seccompConfiguration.virtualMachineInstanceProfile.customProfile");
    let Some(custom) = &profile.custom_profile else {
        errors.invalid(path.clone(), format!("{path} needs to be set"));
        return;
    };
    if custom.localhost_profile.is_some() && custom.runtime_default_profile == Some(true) {
        let (local, default) = (format!("{path}.localhostProfile"), format!("{path}.runtimeDefaultProfile"));
        errors.invalid(local.clone(), format!("{local} cannot be set when {default} is set"));
        errors.invalid(default.clone(), format!("{default} cannot be set when {local} is set"));
    }
}

/// Returns the warning about a gate that is enabled and whose feature is refused.
fn refused_gate(gate: FeatureGate) -> Option<String> {
    let feature = ignored::refused_feature(gate)?;
    Some(format!("feature gate {gate} has no effect, since its feature is not supported yet: {feature}"))
}

/// Returns warnings about feature gates that are listed without effect.
fn gate_warnings(configuration: &KubeVirtConfiguration) -> Vec<String> {
    let (enabled, disabled) = gate_lists(configuration);
    let warning = |(name, enabled): (&String, bool)| match FeatureGate::parse(name) {
        Some(gate) => gate.warning().or_else(|| refused_gate(gate).filter(|_| enabled)),
        None => {
            let nearest = FeatureGate::nearest(name).map(|gate| format!(": did you mean {gate}?"));
            Some(format!("feature gate {name} does not exist and has no effect{}", nearest.unwrap_or_default()))
        }
    };
    let listed = enabled.iter().map(|name| (name, true)).chain(disabled.iter().map(|name| (name, false)));
    listed.filter_map(warning).collect()
}

/// Returns warnings about fields without effect.
pub fn warnings(new: &KubeVirtSpec, old: &KubeVirtSpec) -> Vec<String> {
    let mut warnings = Vec::new();
    if gate_lists(&new.configuration) != gate_lists(&old.configuration) {
        warnings.extend(gate_warnings(&new.configuration));
    }
    warnings.extend(ignored::warnings(new, old));
    if let Some(devices) = &new.configuration.mediated_devices_configuration {
        let path = "spec.configuration.mediatedDevicesConfiguration";
        if !devices.mediated_devices_types.is_empty() {
            warnings.push(format!("{path}.mediatedDevicesTypes is deprecated, use mediatedDeviceTypes"));
        }
        for (index, node) in devices.node_mediated_device_types.iter().enumerate() {
            if !node.mediated_devices_types.is_empty() {
                warnings.push(format!(
                    "{path}.nodeMediatedDeviceTypes[{index}].mediatedDevicesTypes is deprecated, use mediatedDeviceTypes"
                ));
            }
        }
    }
    if new.configuration.architecture_configuration.as_ref().is_some_and(|arch| arch.ppc64le.is_some()) {
        warnings.push(
            "spec.configuration.architectureConfiguration.ppc64le is deprecated and no longer supported.".to_owned(),
        );
    }
    warnings
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn unsupported_configuration_is_refused_by_field() {
        for (configuration, refused) in [
            (json!({}), vec![]),
            (json!({"ksmConfiguration": {"nodeLabelSelector": {}}, "mediatedDevicesConfiguration": {}}), vec![]),
            (
                json!({"hypervisors": [{"name": "xen"}], "permittedHostDevices": {"usb": [{"resourceName": "stick"}]}}),
                vec![
                    "spec.configuration.hypervisors",
                    "spec.configuration.permittedHostDevices.usb[0].resourceName",
                    "spec.configuration.permittedHostDevices.usb[0].selectors",
                ],
            ),
        ] {
            let spec = serde_json::from_value(json!({"configuration": configuration})).unwrap();
            let errors = configuration_errors(&KubeVirt::new("kubevirt", spec));
            let fields: Vec<&str> = errors.as_slice().iter().map(|error| error.field.as_str()).collect();
            assert_eq!(fields, refused);
        }
    }

    #[test]
    fn limits_of_migrations_are_not_negative() {
        for (migrations, refused) in [
            (json!({"bandwidthPerMigration": "0", "completionTimeoutPerGiB": 0, "progressTimeout": 0}), vec![]),
            (json!({"bandwidthPerMigration": "-1"}), vec!["bandwidthPerMigration"]),
            (
                json!({"completionTimeoutPerGiB": -1, "progressTimeout": -1, "utilityVolumesTimeout": -1}),
                vec!["completionTimeoutPerGiB", "progressTimeout", "utilityVolumesTimeout"],
            ),
        ] {
            let spec = serde_json::from_value(json!({"configuration": {"migrations": migrations}})).unwrap();
            let errors = configuration_errors(&KubeVirt::new("kubevirt", spec));
            let fields: Vec<&str> = errors.as_slice().iter().map(|error| error.field.as_str()).collect();
            let expected: Vec<String> =
                refused.iter().map(|name| format!("spec.configuration.migrations.{name}")).collect();
            assert_eq!(fields, expected);
        }
    }

    #[test]
    fn gates_of_unsupported_features_get_a_warning() {
        let text = refused_gate(FeatureGate::PasstBinding).unwrap();
        assert!(text.ends_with("its feature is not supported yet: passt"), "{text}");
        assert_eq!(refused_gate(FeatureGate::NodeRestriction), None);
    }

    #[test]
    fn verbosity_of_an_operator_gets_a_warning() {
        let spec = |levels: Value| -> KubeVirtSpec {
            serde_json::from_value(json!({"configuration": {"developerConfiguration": {"logVerbosity": levels}}}))
                .unwrap()
        };
        // Written by `virtctl adm log-verbosity --all=3`.
        let all = json!({"virtAPI": 3, "virtController": 3, "virtHandler": 3, "virtLauncher": 3, "virtOperator": 3});
        assert!(configuration_errors(&KubeVirt::new("kubevirt", spec(all.clone()))).as_slice().is_empty());
        let path = "spec.configuration.developerConfiguration.logVerbosity.virtOperator";
        let warning = format!("{path} has no effect: there is no such process");
        assert_eq!(warnings(&spec(all), &spec(json!({"virtAPI": 3}))), [warning]);
    }

    #[test]
    fn workload_update_methods_are_known() {
        let (methods, interval) =
            ("spec.workloadUpdateStrategy.workloadUpdateMethods", "spec.workloadUpdateStrategy.batchEvictionInterval");
        for (strategy, refused) in [
            (json!({}), vec![]),
            (json!({"workloadUpdateMethods": ["Evict"], "batchEvictionInterval": "1m0s"}), vec![]),
            (json!({"workloadUpdateMethods": ["LiveMigrate", "Evict"]}), vec![]),
            (json!({"workloadUpdateMethods": ["Evict", "Restart"]}), vec![format!("{methods}[1]")]),
            (json!({"batchEvictionInterval": "soon"}), vec![interval.to_owned()]),
        ] {
            let spec = serde_json::from_value(json!({"workloadUpdateStrategy": strategy})).unwrap();
            let errors = configuration_errors(&KubeVirt::new("kubevirt", spec));
            let fields: Vec<&str> = errors.as_slice().iter().map(|error| error.field.as_str()).collect();
            assert_eq!(fields, refused);
        }
    }
}
