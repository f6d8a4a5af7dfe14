//! The container `compute`: command, environment, probes.

use api::{
    VirtualMachineInstance,
    constants::{annotation, component, label},
    vmi::spec::Probe as VmiProbe,
};
use k8s_openapi::{
    api::core::v1::{
        Capabilities, Container, ContainerPort, EnvVar, EnvVarSource, ExecAction, ObjectFieldSelector, Probe,
        SecurityContext,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{Inputs, RenderError, metadata, resources::PodResources, some, volumes::Mounts};
use crate::pod_parts;

/// Seconds before the first probe, added to the requested delay.
const PROBE_DELAY: i32 = 10;
/// Label of VMIs with the log verbosity of their launchers.
const VERBOSITY_LABEL: &str = "logVerbosity";
/// Default verbosity of launchers, which is not passed.
const DEFAULT_VERBOSITY: u64 = 2;
/// Verbosity from which on libvirt logs everything.
const LIBVIRT_VERBOSITY: u64 = 6;

/// Filters of libvirt's log that show everything but the noise of its objects, messages and events.
const LIBVIRT_DEBUG: &str = "3:object 3:json 3:event 3:rpc 1:*";

pub(super) fn compute(
    inputs: &Inputs<'_>,
    resources: PodResources,
    mounts: &Mounts,
    grace: i64,
) -> Result<Container, RenderError> {
    let spec = &inputs.instance.spec;
    let verbosity = verbosity(inputs)?;
    Ok(Container {
        name: component::COMPUTE_CONTAINER.to_owned(),
        image: Some(inputs.launcher_image.to_owned()),
        image_pull_policy: Some(inputs.config.image_pull_policy.clone()),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        // One list, in which tools look for the launcher's settings.
        command: Some(command(inputs, grace, verbosity)),
        env: Some(environment(inputs, mounts, verbosity)),
        ports: some(ports(inputs)),
        readiness_probe: spec.readiness_probe.as_ref().map(|probe| convert_probe(inputs.instance, probe)),
        liveness_probe: spec.liveness_probe.as_ref().map(|probe| convert_probe(inputs.instance, probe)),
        security_context: Some(SecurityContext {
            // The default, which clients read without asking whether it is there.
            privileged: Some(false),
            capabilities: Some(Capabilities {
                add: Some(vec!["NET_BIND_SERVICE".to_owned()]),
                drop: Some(vec!["ALL".to_owned()]),
            }),
            ..pod_parts::container_security()
        }),
        resources: Some(resources.requirements),
        volume_mounts: some(mounts.mounts.clone()),
        volume_devices: some(mounts.devices.clone()),
        ..Container::default()
    })
}

/// Returns the log verbosity of the launcher: that of the VMI, else that of the cluster.
fn verbosity(inputs: &Inputs<'_>) -> Result<u64, RenderError> {
    match inputs.instance.metadata.labels.as_ref().and_then(|labels| labels.get(VERBOSITY_LABEL)) {
        Some(text) => text.parse().map_err(|_| RenderError::Verbosity(text.clone())),
        None => Ok(inputs.config.verbosity(component::VIRT_LAUNCHER, None)),
    }
}

fn command(inputs: &Inputs<'_>, grace: i64, verbosity: u64) -> Vec<String> {
    let meta = &inputs.instance.metadata;
    let architecture = inputs.instance.spec.architecture.as_deref().unwrap_or(&inputs.config.default_architecture);
    let mut arguments = vec!["/usr/bin/virt-launcher-monitor".to_owned()];
    let mut add = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    add("--name", meta.name.clone().unwrap_or_default());
    add("--uid", meta.uid.clone().unwrap_or_default());
    add("--namespace", meta.namespace.clone().unwrap_or_default());
    add("--grace-period-seconds", grace.saturating_add(super::GRACE_PADDING).to_string());
    let firmware = &inputs.config.arch(architecture).ovmf_path;
    if !firmware.is_empty() {
        add("--ovmf-path", firmware.clone());
    }
    if inputs.config.use_emulation {
        arguments.push("--allow-emulation".to_owned());
    }
    let domain = &inputs.instance.spec.domain;
    if domain.locks_memory() || domain.cpu.as_ref().is_some_and(|cpu| cpu.realtime.is_some()) {
        arguments.push("--await-limits".to_owned());
    }
    if let Some(filters) = libvirt_log_filters(&inputs.instance.metadata, verbosity) {
        // One argument, so that a user's text cannot become an option.
        arguments.push(format!("--libvirt-log-filters={filters}"));
    }
    let keeps = |(key, value): (&String, &String)| {
        key.starts_with(annotation::KEEP_LAUNCHER_ALIVE) && (value.is_empty() || value.starts_with("true"))
    };
    if meta.annotations.iter().flatten().any(keeps) {
        arguments.push("--keep-after-failure".to_owned());
    }
    if metadata::has_proxy(inputs.instance) {
        arguments.push("--end-proxy".to_owned());
    }
    // With any value.
    if meta.annotations.iter().flatten().any(|(key, _)| key == annotation::LAUNCHER_FAIL_FAST) {
        arguments.push("--simulate-crash".to_owned());
    }
    arguments
}

/// Returns libvirt's log filters: those of the annotation, or filters for nearly everything if a label or the verbosity
/// requires it.
fn libvirt_log_filters(meta: &ObjectMeta, verbosity: u64) -> Option<&str> {
    let named = meta.annotations.as_ref().and_then(|all| all.get(annotation::LIBVIRT_LOG_FILTERS)).map(String::as_str);
    let debug = meta.labels.as_ref().and_then(|all| all.get(label::DEBUG_LOGS));
    let debug = debug.is_some_and(|value| value.eq_ignore_ascii_case("true")) || verbosity >= LIBVIRT_VERBOSITY;
    named.filter(|filters| !filters.is_empty()).or(debug.then_some(LIBVIRT_DEBUG))
}

fn environment(inputs: &Inputs<'_>, mounts: &Mounts, verbosity: u64) -> Vec<EnvVar> {
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
    let said = inputs.instance.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(VERBOSITY_LABEL));
    if said || verbosity != DEFAULT_VERBOSITY {
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

/// Returns the ports of the interface on the primary network. The pod has no ports on the others.
fn ports(inputs: &Inputs<'_>) -> Vec<ContainerPort> {
    let spec = &inputs.instance.spec;
    let is_primary = |name: &str| spec.networks.iter().any(|network| network.name == name && network.is_primary());
    let interfaces = spec.domain.devices.interfaces.iter();
    interfaces
        .filter(|interface| is_primary(&interface.name))
        .flat_map(|interface| &interface.ports)
        .map(|port| ContainerPort {
            name: port.name.clone().filter(|name| !name.is_empty()),
            container_port: port.port,
            protocol: Some(port.protocol.clone().filter(|name| !name.is_empty()).unwrap_or_else(|| "TCP".to_owned())),
            ..ContainerPort::default()
        })
        .collect()
}

/// Returns a probe of the guest as a probe of the container. A program in the container runs probes of the guest agent.
fn convert_probe(instance: &VirtualMachineInstance, probe: &VmiProbe) -> Probe {
    let by_agent = guest_agent_command(instance, probe);
    // The time limit applies to the guest's program; starting it takes a little longer.
    let is_wrapped = by_agent.as_deref().is_some_and(|command| Some(command) != guest_command(probe));
    let timeout = probe.timeout_seconds.filter(|seconds| *seconds >= 1).unwrap_or(1);
    let at_least_one = |value: Option<i32>, default: i32| Some(value.filter(|value| *value >= 1).unwrap_or(default));
    Probe {
        initial_delay_seconds: Some(probe.initial_delay_seconds.unwrap_or(0).saturating_add(PROBE_DELAY)),
        timeout_seconds: Some(if is_wrapped { timeout.saturating_add(1) } else { timeout }),
        period_seconds: at_least_one(probe.period_seconds, 10),
        success_threshold: at_least_one(probe.success_threshold, 1),
        failure_threshold: at_least_one(probe.failure_threshold, 3),
        http_get: probe.http_get.clone(),
        tcp_socket: probe.tcp_socket.clone(),
        exec: by_agent.map(|command| ExecAction { command: Some(command) }),
        ..Probe::default()
    }
}

/// Returns the command of a probe.
fn guest_command(probe: &VmiProbe) -> Option<&[String]> {
    probe.exec.as_ref()?.command.as_deref()
}

/// Returns the container's command for a probe of the guest agent.
fn guest_agent_command(instance: &VirtualMachineInstance, probe: &VmiProbe) -> Option<Vec<String>> {
    let metadata = &instance.metadata;
    let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
    let domain = format!("{}_{}", namespace.unwrap_or_default(), name.unwrap_or_default());
    let timeout = probe.timeout_seconds.filter(|seconds| *seconds >= 1).unwrap_or(1).to_string();
    let words = ["virt-probe", "--domainName", &domain, "--timeoutSeconds", &timeout].map(str::to_owned);
    let mut command = Vec::from(words);
    if probe.guest_agent_ping.is_some() {
        command.push("--guestAgentPing".to_owned());
        return Some(command);
    }
    let asked = guest_command(probe)?;
    let (program, arguments) = asked.split_first()?;
    if program == "virt-probe" {
        return Some(asked.to_vec());
    }
    command.extend(["--command".to_owned(), program.clone(), "--".to_owned()]);
    command.extend_from_slice(arguments);
    Some(command)
}
