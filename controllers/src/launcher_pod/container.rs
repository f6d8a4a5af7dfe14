//! The one container, `compute`.

use api::{
    constants::{annotation, component, label},
    vmi::spec::Probe as MachineProbe,
};
use k8s_openapi::{
    api::core::v1::{
        Capabilities, Container, ContainerPort, EnvVar, EnvVarSource, ObjectFieldSelector, Probe, SecurityContext,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{Inputs, LAUNCHER_UID, RenderError, resources::PodResources, some, volumes::Mounts};

/// Seconds that a launcher is given before the first probe, on top of what was asked for.
const PROBE_DELAY: i32 = 10;
/// Verbosity of launchers that needs no mention.
const DEFAULT_VERBOSITY: u64 = 2;

/// Filters of libvirt's log that show everything but the noise of its objects, messages and events.
const LIBVIRT_DEBUG: &str = "3:object 3:json 3:event 3:rpc 1:*";

pub(super) fn compute(
    inputs: &Inputs<'_>,
    resources: PodResources,
    mounts: &Mounts,
    grace: i64,
) -> Result<Container, RenderError> {
    let spec = &inputs.instance.spec;
    Ok(Container {
        name: component::COMPUTE_CONTAINER.to_owned(),
        image: Some(inputs.launcher_image.to_owned()),
        image_pull_policy: Some(inputs.config.image_pull_policy.clone()),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        command: Some(vec!["/usr/bin/virt-launcher-monitor".to_owned()]),
        args: Some(arguments(inputs, grace)),
        env: Some(environment(inputs, mounts)),
        ports: some(ports(inputs)),
        readiness_probe: spec
            .readiness_probe
            .as_ref()
            .map(|probe| convert_probe("readinessProbe", probe))
            .transpose()?,
        liveness_probe: spec.liveness_probe.as_ref().map(|probe| convert_probe("livenessProbe", probe)).transpose()?,
        security_context: Some(SecurityContext {
            run_as_user: Some(LAUNCHER_UID),
            run_as_group: Some(LAUNCHER_UID),
            run_as_non_root: Some(true),
            allow_privilege_escalation: Some(false),
            capabilities: Some(Capabilities {
                add: Some(vec!["NET_BIND_SERVICE".to_owned()]),
                drop: Some(vec!["ALL".to_owned()]),
            }),
            ..SecurityContext::default()
        }),
        resources: Some(resources.requirements),
        volume_mounts: some(mounts.mounts.clone()),
        volume_devices: some(mounts.devices.clone()),
        ..Container::default()
    })
}

fn arguments(inputs: &Inputs<'_>, grace: i64) -> Vec<String> {
    let meta = &inputs.instance.metadata;
    let architecture = inputs.instance.spec.architecture.as_deref().unwrap_or(&inputs.config.default_architecture);
    let mut arguments = Vec::new();
    let mut add = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    add("--name", meta.name.clone().unwrap_or_default());
    add("--uid", meta.uid.clone().unwrap_or_default());
    add("--namespace", meta.namespace.clone().unwrap_or_default());
    add("--grace-period-seconds", grace.saturating_add(super::GRACE_PADDING).to_string());
    let firmware = &inputs.config.arch(architecture).ovmf_path;
    if !firmware.is_empty() {
        add("--ovmf-path", firmware.clone());
    }
    if let Ok(limit) = api::quantity::units(&inputs.config.disk_verification_memory_limit) {
        add("--disk-memory-limit", limit.to_string());
    }
    if inputs.config.use_emulation {
        arguments.push("--allow-emulation".to_owned());
    }
    if let Some(filters) = libvirt_log_filters(&inputs.instance.metadata) {
        // One argument, whatever a user's text begins with.
        arguments.push(format!("--libvirt-log-filters={filters}"));
    }
    let keeps = |(key, value): (&String, &String)| {
        key.starts_with(annotation::KEEP_LAUNCHER_ALIVE) && (value.is_empty() || value.starts_with("true"))
    };
    if meta.annotations.iter().flatten().any(keeps) {
        arguments.push("--keep-after-failure".to_owned());
    }
    // Whatever its value.
    if meta.annotations.iter().flatten().any(|(key, _)| key == annotation::LAUNCHER_FAIL_FAST) {
        arguments.push("--simulate-crash".to_owned());
    }
    arguments
}

/// What libvirt logs besides warnings: what an annotation says, or nearly everything for the label that asks for it.
fn libvirt_log_filters(meta: &ObjectMeta) -> Option<&str> {
    let named = meta.annotations.as_ref().and_then(|all| all.get(annotation::LIBVIRT_LOG_FILTERS)).map(String::as_str);
    let debug = meta.labels.as_ref().and_then(|all| all.get(label::DEBUG_LOGS));
    let debug = debug.is_some_and(|value| value.eq_ignore_ascii_case("true")).then_some(LIBVIRT_DEBUG);
    named.filter(|filters| !filters.is_empty()).or(debug)
}

fn environment(inputs: &Inputs<'_>, mounts: &Mounts) -> Vec<EnvVar> {
    let variable =
        |name: &str, value: &str| EnvVar { name: name.to_owned(), value: Some(value.to_owned()), ..EnvVar::default() };
    let mut variables = vec![
        variable("XDG_CACHE_HOME", "/var/run/kubevirt-private"),
        variable("XDG_CONFIG_HOME", "/var/run/kubevirt-private"),
        variable("XDG_RUNTIME_DIR", "/var/run"),
    ];
    if !mounts.shared_paths.is_empty() {
        variables.push(variable("SHARED_FILESYSTEM_PATHS", &mounts.shared_paths.join(":")));
    }
    let labels = inputs.instance.metadata.labels.as_ref();
    let verbosity = labels
        .and_then(|labels| labels.get("logVerbosity"))
        .and_then(|text| text.parse::<u64>().ok())
        .unwrap_or_else(|| inputs.config.verbosity(component::VIRT_LAUNCHER, None));
    if verbosity != DEFAULT_VERBOSITY {
        variables.push(variable("VIRT_LAUNCHER_LOG_VERBOSITY", &verbosity.to_string()));
    }
    variables.push(EnvVar {
        name: "POD_NAME".to_owned(),
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector { field_path: "metadata.name".to_owned(), api_version: None }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    });
    variables
}

fn ports(inputs: &Inputs<'_>) -> Vec<ContainerPort> {
    let interfaces = inputs.instance.spec.domain.devices.interfaces.iter();
    interfaces
        .flat_map(|interface| &interface.ports)
        .map(|port| ContainerPort {
            name: port.name.clone().filter(|name| !name.is_empty()),
            container_port: port.port,
            protocol: Some(port.protocol.clone().filter(|name| !name.is_empty()).unwrap_or_else(|| "TCP".to_owned())),
            ..ContainerPort::default()
        })
        .collect()
}

fn convert_probe(field: &'static str, probe: &MachineProbe) -> Result<Probe, RenderError> {
    if probe.exec.is_some() || probe.guest_agent_ping.is_some() {
        // Refused at admission; these run inside the guest, which launchers of this version cannot do.
        return Err(RenderError::Unsupported(format!("spec.{field} by exec or guestAgentPing")));
    }
    let at_least_one = |value: Option<i32>, default: i32| Some(value.filter(|value| *value >= 1).unwrap_or(default));
    Ok(Probe {
        initial_delay_seconds: Some(probe.initial_delay_seconds.unwrap_or(0).saturating_add(PROBE_DELAY)),
        timeout_seconds: at_least_one(probe.timeout_seconds, 1),
        period_seconds: at_least_one(probe.period_seconds, 10),
        success_threshold: at_least_one(probe.success_threshold, 1),
        failure_threshold: at_least_one(probe.failure_threshold, 3),
        http_get: probe.http_get.clone(),
        tcp_socket: probe.tcp_socket.clone(),
        ..Probe::default()
    })
}
