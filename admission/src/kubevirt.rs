//! The object that configures the installation: there is one, it makes sense, and it does not go while machines need
//! it, when it says so.

mod host_devices;

use std::time::Duration;

use api::{
    KubeVirt,
    config::ClusterConfig,
    constants::{GROUP, VERSION},
    duration, gates,
    kubevirt::{
        configuration::{KubeVirtConfiguration, SeccompConfiguration, TlsConfiguration},
        spec::{CertConfig, ComponentConfig, KubeVirtCertificateRotateStrategy, KubeVirtSpec},
    },
};

use crate::{
    causes::Causes,
    neighbours::Wanted,
    review::AdmissionReview,
    rules::scheduling,
    webhook::{self, Context, Stop},
};

const PLURAL: &str = "kubevirts";
const CONFIGURATION: &str = "spec.configuration";
const DAY: Duration = Duration::from_secs(24 * 3600);
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

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
    let mut causes = update_causes(&new.spec, &old.spec);
    if causes.is_empty() {
        causes = usable(&new);
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

/// Whether the processes can use the configuration.
fn usable(object: &KubeVirt) -> Causes {
    let mut causes = Causes::new();
    if let Err(error) = ClusterConfig::from_kubevirt(object) {
        causes.invalid(CONFIGURATION, format!("{CONFIGURATION}: {error}"));
    }
    // Nodes are not told to merge pages.
    if object.spec.configuration.ksm_configuration.is_some() {
        let field = format!("{CONFIGURATION}.ksmConfiguration");
        causes.not_supported(field.clone(), format!("{field} is not supported yet"));
    }
    if let Some(permitted) = &object.spec.configuration.permitted_host_devices {
        host_devices::causes(permitted, &mut causes);
    }
    causes
}

/// What is wrong with a changed spec.
pub fn update_causes(new: &KubeVirtSpec, old: &KubeVirtSpec) -> Causes {
    let mut causes = Causes::new();
    for patch in &new.customize_components.patches {
        if serde_json::from_str::<serde_json::Value>(&patch.patch).is_err() {
            causes.not_supported("", format!("patch \"{}\" is not valid JSON", patch.patch));
        }
    }
    certificates(&new.certificate_rotate_strategy, &mut causes);
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

fn certificates(strategy: &KubeVirtCertificateRotateStrategy, causes: &mut Causes) {
    let Some(own) = &strategy.self_signed else { return };
    let intervals = [&own.ca_rotate_interval, &own.cert_rotate_interval, &own.ca_overlap_interval];
    if intervals.into_iter().any(Option::is_some) && (own.ca.is_some() || own.server.is_some()) {
        causes.not_supported(
            "",
            "caRotateInterval, certRotateInterval and caOverlapInterval are deprecated and conflict with CertConfig defined rotation parameters",
        );
    }
    let read = |text: Option<&String>| text.and_then(|text| duration::parse(text).ok());
    let times = |config: Option<&CertConfig>, default: Duration| {
        let whole = read(config.and_then(|config| config.duration.as_ref())).unwrap_or(default);
        let renew = read(config.and_then(|config| config.renew_before.as_ref())).unwrap_or(whole / 5);
        (whole, renew)
    };
    let (ca, ca_renew) = times(own.ca.as_ref(), WEEK);
    let (server, server_renew) = times(own.server.as_ref(), DAY);
    let field = |which: &str, what: &str| format!("spec.certificateRotationStrategy.selfSigned.{which}.{what}");
    let mut refuse = |bad: bool, sentence: &str, relation: String| {
        if bad {
            causes.invalid("", format!("{sentence} ({relation})"));
        }
    };
    refuse(
        ca < ca_renew,
        "CA RenewBefore cannot exceed Duration",
        format!("{} < {}", field("ca", "duration"), field("ca", "renewBefore")),
    );
    refuse(
        server < server_renew,
        "Cert RenewBefore cannot exceed Duration",
        format!("{} < {}", field("server", "duration"), field("server", "renewBefore")),
    );
    refuse(
        server > ca,
        "Certificate duration cannot exceed CA",
        format!("{} > {}", field("server", "duration"), field("ca", "duration")),
    );
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
    if downtime(new).is_some() && downtime(new) != downtime(old) && !on("MigrationStallDetection") {
        causes.invalid(
            format!("{CONFIGURATION}.migrationConfiguration.maxDowntimeMs"),
            "maxDowntimeMs cannot be modified without enabling the MigrationStallDetection feature gate",
        );
    }
}

fn ciphers(tls: &TlsConfiguration, causes: &mut Causes) {
    let field = format!("{CONFIGURATION}.tlsConfiguration.ciphers");
    let version = tls.min_tls_version.as_deref().unwrap_or_default();
    if !tls.ciphers.is_empty() && ["", "VersionTLS13"].contains(&version) {
        let message = format!(
            "You cannot specify ciphers when {CONFIGURATION}.tlsConfiguration.minTLSVersion is empty or VersionTLS13"
        );
        causes.not_supported(field, message);
        return;
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

/// Sentences shown to whoever changes the object.
pub fn warnings(new: &KubeVirtSpec, old: &KubeVirtSpec) -> Vec<String> {
    let mut warnings = Vec::new();
    let lists = gate_lists(&new.configuration);
    if lists != gate_lists(&old.configuration) {
        let listed = lists.0.iter().chain(lists.1);
        warnings.extend(listed.filter_map(|gate| gates::warning(gate)).filter(|text| !text.is_empty()));
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
    use serde_json::json;

    use super::*;

    #[test]
    fn a_configuration_that_nobody_carries_out_is_refused_by_name() {
        for (configuration, refused) in [
            (json!({}), vec![]),
            (json!({"ksmConfiguration": {"nodeLabelSelector": {}}}), vec!["spec.configuration.ksmConfiguration"]),
            (
                json!({"permittedHostDevices": {"mediatedDevices": [{"mdevNameSelector": "a", "resourceName": "v.org/a"}]}}),
                vec!["spec.configuration.permittedHostDevices.mediatedDevices"],
            ),
        ] {
            let spec = serde_json::from_value(json!({"configuration": configuration})).unwrap();
            let causes = usable(&KubeVirt::new("kubevirt", spec));
            let fields: Vec<&str> = causes.as_slice().iter().map(|cause| cause.field.as_str()).collect();
            assert_eq!(fields, refused);
        }
    }
}
