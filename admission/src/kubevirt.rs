//! The object that configures the installation: there is one, it makes sense, and it does not go while machines need
//! it, when it says so.

mod certificates;
mod host_devices;
mod unsupported;

use api::{
    KubeVirt,
    config::ClusterConfig,
    constants::{GROUP, VERSION},
    duration, gates,
    kubevirt::{
        configuration::{KubeVirtConfiguration, SeccompConfiguration, TlsConfiguration},
        spec::{ComponentConfig, KubeVirtSpec, KubeVirtWorkloadUpdateStrategy},
    },
};

use crate::{
    causes::Causes,
    neighbours::Wanted,
    policy,
    review::AdmissionReview,
    rules::scheduling,
    webhook::{self, Context, Stop},
};

const PLURAL: &str = "kubevirts";
const CONFIGURATION: &str = "spec.configuration";

/// Names of cipher suites as Go has them, up to TLS 1.2 and of TLS 1.3.
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

fn resource(context: &Context<'_>) -> Result<(), Stop> {
    let resource = &context.request.resource;
    if resource.group == GROUP && resource.resource == PLURAL && webhook::is_served(resource) {
        return Ok(());
    }
    Err(Stop::refused(400, format!("expect resource to be '{GROUP}/{VERSION}, Resource={PLURAL}'")))
}

/// The webhook that checks a new object: it is the only one.
pub(crate) fn validate_create(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    resource(context)?;
    let new: KubeVirt = context.object()?;
    let known = Wanted::first(GROUP, VERSION, PLURAL, None, 1);
    if !context.neighbours.list(&known)?.is_empty() {
        return Err(Stop::refused(400, "Kubevirt is already created"));
    }
    Ok(context.verdict(&usable(&new), vec![]))
}

/// The webhook that checks a change.
pub(crate) fn validate_update(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    resource(context)?;
    let new: KubeVirt = context.object()?;
    let old: KubeVirt = context.old_object()?.unwrap_or_else(|| KubeVirt::new("", KubeVirtSpec::default()));
    let mut causes = Causes::new();
    // What was let in before, as by a creation that sees fewer rules, must not hold up labels, finalizers and upgrades.
    if new.spec != old.spec {
        causes = update_causes(&new.spec, &old.spec);
        if causes.is_empty() {
            causes = usable(&new);
        }
    }
    Ok(context.verdict_in_full(&causes, warnings(&new.spec, &old.spec)))
}

/// The webhook that checks a deletion.
pub(crate) fn validate_delete(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    resource(context)?;
    let Some(object) = context.old_object::<KubeVirt>()? else { return Ok(context.allowed()) };
    let strategy = object.spec.uninstall_strategy.as_deref().unwrap_or_default();
    let deployed = object.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Deployed");
    if ["", "RemoveWorkloads"].contains(&strategy) || !deployed {
        return Ok(context.allowed());
    }
    let workloads = [
        ("virtualmachineinstances", "Virtual Machine Instances"),
        ("virtualmachines", "Virtual Machines"),
        ("virtualmachineinstancereplicasets", "Virtual Machine Instance Replica Sets"),
    ]
    .map(|(plural, name)| (Wanted::first(GROUP, VERSION, plural, None, 1), name));
    context.neighbours.need(workloads.iter().map(|(wanted, _)| wanted))?;
    for (wanted, name) in &workloads {
        if !context.neighbours.list(wanted)?.is_empty() {
            return Err(Stop::refused(
                400,
                format!(
                    "Rejecting the uninstall request, since there are still {name} present. Either delete all KubeVirt related workloads or change the uninstall strategy before uninstalling KubeVirt."
                ),
            ));
        }
    }
    Ok(context.allowed())
}

/// Why the processes cannot use the configuration, or do not carry it out.
pub fn usable(object: &KubeVirt) -> Causes {
    let mut causes = Causes::new();
    if let Err(error) = ClusterConfig::from_kubevirt(object) {
        causes.invalid(CONFIGURATION, format!("{CONFIGURATION}: {error}"));
    }
    unsupported::causes(&object.spec, &mut causes);
    if let Some(permitted) = &object.spec.configuration.permitted_host_devices {
        host_devices::causes(permitted, &mut causes);
    }
    workload_updates(&object.spec.workload_update_strategy, &mut causes);
    certificates::lives(&object.spec.certificate_rotate_strategy, &mut causes);
    causes
}

/// The ways in which machines get a new launcher. `LiveMigrate` is for machines that can move, of which there are none yet.
const UPDATE_METHODS: [&str; 2] = ["LiveMigrate", "Evict"];

/// How machines get a new launcher.
fn workload_updates(strategy: &KubeVirtWorkloadUpdateStrategy, causes: &mut Causes) {
    let methods = strategy.workload_update_methods.iter().enumerate();
    for (index, method) in methods.filter(|(_, method)| !UPDATE_METHODS.contains(&method.as_str())) {
        let field = format!("spec.workloadUpdateStrategy.workloadUpdateMethods[{index}]");
        causes.not_supported(field.clone(), format!("{field} is none of {}: {method}", UPDATE_METHODS.join(", ")));
    }
    if let Some(Err(error)) = strategy.batch_eviction_interval.as_deref().map(duration::parse) {
        let field = "spec.workloadUpdateStrategy.batchEvictionInterval";
        causes.invalid(field, format!("{field}: {error}"));
    }
}

/// What is wrong with a changed spec.
pub fn update_causes(new: &KubeVirtSpec, old: &KubeVirtSpec) -> Causes {
    let mut causes = Causes::new();
    for patch in &new.customize_components.patches {
        if serde_json::from_str::<serde_json::Value>(&patch.patch).is_err() {
            causes.not_supported("", format!("patch \"{}\" is not valid JSON", patch.patch));
        }
    }
    certificates::relations(&new.certificate_rotate_strategy, &mut causes);
    let configuration = &new.configuration;
    overhead_ratio(configuration, &mut causes);
    gated(configuration, &old.configuration, &mut causes);
    if configuration.tls_configuration != old.configuration.tls_configuration
        && let Some(tls) = &configuration.tls_configuration
    {
        ciphers(tls, &mut causes);
    }
    for (what, new, old) in [("Deployment", &new.infra, &old.infra), ("DaemonSet", &new.workloads, &old.workloads)] {
        if new != old {
            placement(what, new.as_ref(), &mut causes);
        }
    }
    if configuration.seccomp_configuration != old.configuration.seccomp_configuration
        && let Some(seccomp) = &configuration.seccomp_configuration
    {
        seccomp_profile(seccomp, &mut causes);
    }
    if new.infra.as_ref().is_some_and(|infra| infra.replicas == Some(0)) {
        causes.invalid("", "infra replica count can't be 0");
    }
    let (listed, disabled) = gate_lists(configuration);
    if (listed, disabled) != gate_lists(&old.configuration) {
        for gate in listed.iter().filter(|gate| disabled.contains(gate)) {
            causes.forbidden(
                format!("{CONFIGURATION}.developerConfiguration.featureGates"),
                format!("feature gate \"{gate}\" exists on both \"FeatureGates\" and \"DisabledFeatureGates\""),
            );
        }
    }
    causes
}

fn gate_lists(configuration: &KubeVirtConfiguration) -> (&[String], &[String]) {
    configuration
        .developer_configuration
        .as_ref()
        .map(|developer| (developer.feature_gates.as_slice(), developer.disabled_feature_gates.as_slice()))
        .unwrap_or_default()
}

fn overhead_ratio(configuration: &KubeVirtConfiguration, causes: &mut Causes) {
    let Some(ratio) = configuration.additional_guest_memory_overhead_ratio.as_deref() else { return };
    match ratio.parse::<f64>() {
        Err(_) => causes.not_supported(
            "",
            format!("ratio provided, {ratio}, cannot be parsed into float: strconv.ParseFloat: parsing \"{ratio}\": invalid syntax"),
        ),
        Ok(number) if number >= 1.0 => {}
        Ok(_) => causes.not_supported("", format!("ratio provided, {ratio}, cannot be smaller than 1.0")),
    }
}

/// Fields that need a gate, which may be opened in the same change.
fn gated(new: &KubeVirtConfiguration, old: &KubeVirtConfiguration, causes: &mut Causes) {
    let (listed, disabled) = gate_lists(new);
    let on = |gate: &str| gates::enabled(gate, listed, disabled);
    let templates = new.virt_template_deployment.as_ref().is_some_and(|deployment| deployment.enabled == Some(true));
    if templates && !on("Template") {
        causes.invalid(
            format!("{CONFIGURATION}.virtTemplateDeployment.enabled"),
            "VirtTemplateDeployment cannot be enabled without enabling the Template feature gate",
        );
    }
    let roles = new.role_aggregation_strategy.as_deref().unwrap_or_default();
    if !["", "AggregateToDefault"].contains(&roles) && !on("OptOutRoleAggregation") {
        causes.invalid(
            format!("{CONFIGURATION}.roleAggregationStrategy"),
            "RoleAggregationStrategy cannot be set to Manual without enabling the OptOutRoleAggregation feature gate",
        );
    }
    let downtime =
        |from: &KubeVirtConfiguration| from.migrations.as_ref().and_then(|migrations| migrations.max_downtime_ms);
    let tunable = on(policy::STALL_DETECTION) || on(policy::DOWNTIME_TUNING);
    if downtime(new).is_some() && downtime(new) != downtime(old) && !tunable {
        causes
            .invalid(format!("{CONFIGURATION}.migrationConfiguration.maxDowntimeMs"), policy::downtime_without_gate());
    }
}

fn ciphers(tls: &TlsConfiguration, causes: &mut Causes) {
    let field = format!("{CONFIGURATION}.tlsConfiguration.ciphers");
    let version = tls.min_tls_version.as_deref().unwrap_or_default();
    if !tls.ciphers.is_empty() && ["", "VersionTLS13"].contains(&version) {
        let message = format!(
            "You cannot specify ciphers when {CONFIGURATION}.tlsConfiguration.minTLSVersion is empty or VersionTLS13"
        );
        causes.not_supported(&field, message);
    }
    for (index, cipher) in tls.ciphers.iter().enumerate().filter(|(_, cipher)| !CIPHERS.contains(&cipher.as_str())) {
        causes.not_supported(format!("{field}#{index}"), format!("{cipher} is not a valid cipher"));
    }
}

/// The rules Kubernetes has for pods, in its words. (The reference system lets the API server try to make a workload;
/// virt-api cannot be given the right to make workloads.)
fn placement(what: &str, component: Option<&ComponentConfig>, causes: &mut Causes) {
    let Some(placement) = component.and_then(|component| component.node_placement.as_ref()) else { return };
    let found = scheduling::placement(
        "spec.template.spec",
        placement.affinity.as_ref(),
        &placement.node_selector,
        &placement.tolerations,
    );
    let messages: Vec<&str> = found.as_slice().iter().map(|cause| cause.message.as_str()).collect();
    let text = match messages.as_slice() {
        [] => return,
        [one] => (*one).to_owned(),
        more => format!("[{}]", more.join(", ")),
    };
    causes.invalid("", format!("{what}.apps \"placement-validation-webhook\" is invalid: {text}"));
}

fn seccomp_profile(seccomp: &SeccompConfiguration, causes: &mut Causes) {
    let Some(profile) = &seccomp.virtual_machine_instance_profile else { return };
    let path = format!("{CONFIGURATION}.seccompConfiguration.virtualMachineInstanceProfile.customProfile");
    let Some(custom) = &profile.custom_profile else {
        causes.invalid(path.clone(), format!("{path} needs to be set"));
        return;
    };
    if custom.localhost_profile.is_some() && custom.runtime_default_profile == Some(true) {
        let (local, default) = (format!("{path}.localhostProfile"), format!("{path}.runtimeDefaultProfile"));
        causes.invalid(local.clone(), format!("{local} cannot be set when {default} is set"));
        causes.invalid(default.clone(), format!("{default} cannot be set when {local} is set"));
    }
}

fn operator_verbosity(spec: &KubeVirtSpec) -> Option<u64> {
    spec.configuration.developer_configuration.as_ref()?.log_verbosity.as_ref()?.virt_operator
}

/// Sentences shown to whoever changes the object.
pub fn warnings(new: &KubeVirtSpec, old: &KubeVirtSpec) -> Vec<String> {
    let mut warnings = Vec::new();
    let lists = gate_lists(&new.configuration);
    if lists != gate_lists(&old.configuration) {
        let listed = lists.0.iter().chain(lists.1);
        warnings.extend(listed.filter_map(|gate| gates::warning(gate)).filter(|text| !text.is_empty()));
    }
    // The chart writes there what it gave the components, and manifests of the reference have it.
    if new.image_pull_policy != old.image_pull_policy {
        warnings.push("spec.imagePullPolicy has no effect: the chart's value image.pullPolicy has.".to_owned());
    }
    // `virtctl adm log-verbosity --all` sets those of all processes that the reference has.
    if operator_verbosity(new).is_some() && operator_verbosity(new) != operator_verbosity(old) {
        let path = format!("{CONFIGURATION}.developerConfiguration.logVerbosity.virtOperator");
        warnings.push(format!("{path} has no effect: there is no such process."));
    }
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
    fn a_configuration_that_nobody_carries_out_is_refused_by_name() {
        for (configuration, refused) in [
            (json!({}), vec![]),
            (json!({"ksmConfiguration": {"nodeLabelSelector": {}}}), vec!["spec.configuration.ksmConfiguration"]),
            (
                json!({"mediatedDevicesConfiguration": {}, "permittedHostDevices": {"usb": [{"resourceName": "stick"}]}}),
                vec![
                    "spec.configuration.mediatedDevicesConfiguration",
                    "spec.configuration.permittedHostDevices.usb[0].resourceName",
                    "spec.configuration.permittedHostDevices.usb[0].selectors",
                ],
            ),
        ] {
            let spec = serde_json::from_value(json!({"configuration": configuration})).unwrap();
            let causes = usable(&KubeVirt::new("kubevirt", spec));
            let fields: Vec<&str> = causes.as_slice().iter().map(|cause| cause.field.as_str()).collect();
            assert_eq!(fields, refused);
        }
    }

    #[test]
    fn a_pull_policy_that_has_no_effect_is_warned_about() {
        let spec = |policy: Option<&str>| KubeVirtSpec {
            image_pull_policy: policy.map(str::to_owned),
            ..KubeVirtSpec::default()
        };
        assert_eq!(warnings(&spec(Some("Always")), &spec(Some("IfNotPresent"))).len(), 1);
        assert!(warnings(&spec(Some("Always")), &spec(Some("Always"))).is_empty());
    }

    #[test]
    fn the_verbosity_of_an_operator_is_let_through_and_warned_about() {
        let spec = |levels: Value| -> KubeVirtSpec {
            serde_json::from_value(json!({"configuration": {"developerConfiguration": {"logVerbosity": levels}}}))
                .unwrap()
        };
        // What `virtctl adm log-verbosity --all=3` writes.
        let all = json!({"virtAPI": 3, "virtController": 3, "virtHandler": 3, "virtLauncher": 3, "virtOperator": 3});
        assert!(usable(&KubeVirt::new("kubevirt", spec(all.clone()))).as_slice().is_empty());
        let path = "spec.configuration.developerConfiguration.logVerbosity.virtOperator";
        let warning = format!("{path} has no effect: there is no such process.");
        assert_eq!(warnings(&spec(all.clone()), &spec(json!({"virtAPI": 3}))), [warning]);
        assert!(warnings(&spec(all.clone()), &spec(all.clone())).is_empty());
        assert!(warnings(&spec(json!({})), &spec(all)).is_empty());
    }

    #[test]
    fn machines_with_an_older_launcher_are_evicted_or_left_alone() {
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
            let causes = usable(&KubeVirt::new("kubevirt", spec));
            let fields: Vec<&str> = causes.as_slice().iter().map(|cause| cause.field.as_str()).collect();
            assert_eq!(fields, refused);
        }
    }
}
