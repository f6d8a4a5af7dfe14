//! Readiness and liveness probes.

use api::{
    VirtualMachineInstanceSpec,
    vmi::{network::Network, spec::Probe},
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::context::{FieldErrors, PathText, names};

/// Validates the probes.
pub(super) fn validate(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    // kubelet asks the address of the pod, which is on this network.
    let has_primary = spec.networks.iter().any(Network::is_primary);
    let probes = [("readinessProbe", &spec.readiness_probe), ("livenessProbe", &spec.liveness_probe)];
    let probes = probes.into_iter().filter_map(|(name, probe)| Some((name, probe.as_ref()?)));
    for (name, probe) in probes.clone() {
        validate_handler(format_args!("{root}.{name}"), probe, errors);
    }
    for (name, probe) in probes.clone().filter(|_| !has_primary) {
        for (handler, set) in [("httpGet", probe.http_get.is_some()), ("tcpSocket", probe.tcp_socket.is_some())] {
            if set {
                let field = format!("{root}.{name}.{handler}");
                let message = format!("{field} is only allowed if the Pod Network is attached");
                errors.invalid(field, message);
            }
        }
    }
    for (name, probe) in probes {
        validate_values(format_args!("{root}.{name}"), probe, errors);
    }
}

fn validate_handler(path: PathText<'_>, probe: &Probe, errors: &mut FieldErrors) {
    let handlers =
        [probe.http_get.is_some(), probe.tcp_socket.is_some(), probe.exec.is_some(), probe.guest_agent_ping.is_some()];
    match handlers.iter().filter(|set| **set).count() {
        0 => errors.required(
            path,
            format!("either {path}.tcpSocket, {path}.exec or {path}.httpGet must be set if a {path} is specified"),
        ),
        1 => {}
        _ => errors.invalid(path, format!("{path} must have exactly one probe type set")),
    }
}

fn validate_values(path: PathText<'_>, probe: &Probe, errors: &mut FieldErrors) {
    let ports = [
        ("httpGet", probe.http_get.as_ref().map(|get| &get.port)),
        ("tcpSocket", probe.tcp_socket.as_ref().map(|socket| &socket.port)),
    ];
    for (handler, port) in ports {
        let valid = match port {
            None => true,
            Some(IntOrString::Int(port)) => (1..=65535).contains(port),
            Some(IntOrString::String(name)) => names::is_port_name(name),
        };
        if !valid {
            errors.invalid(format!("{path}.{handler}.port"), "Port field must be in range 0 < x < 65536.");
        }
    }
    if probe.exec.as_ref().is_some_and(|exec| exec.command.as_ref().is_none_or(Vec::is_empty)) {
        errors.required(format!("{path}.exec.command"), format!("{path}.exec.command must not be empty"));
    }
    for (field, value) in [
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("periodSeconds", probe.period_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("successThreshold", probe.success_threshold),
        ("failureThreshold", probe.failure_threshold),
    ] {
        if value.is_some_and(|value| value < 0) {
            let field = format!("{path}.{field}");
            let message = format!("{field} must be greater than or equal to 0");
            errors.invalid(field, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::rules::testing::*;

    #[test]
    fn probe_has_one_handler() {
        accepts(json!({"readinessProbe": {"tcpSocket": {"port": 22}}}));
        accepts(json!({"livenessProbe": {"httpGet": {"port": "http", "path": "/"}}}));
        refuses(
            json!({"readinessProbe": {}}),
            "spec.readinessProbe",
            "must be set if a spec.readinessProbe is specified",
        );
        refuses(
            json!({"livenessProbe": {"httpGet": {"port": 80}, "tcpSocket": {"port": 22}}}),
            "spec.livenessProbe",
            "must have exactly one probe type set",
        );
    }

    #[test]
    fn network_probes_need_the_primary_network_of_the_pod() {
        let on = |is_default: bool| {
            json!({
                "domain": {"devices": {"interfaces": [{"name": "default", "bridge": {}}]}},
                "networks": [{"name": "default", "multus": {"networkName": "n", "default": is_default}}],
                "readinessProbe": {"tcpSocket": {"port": 22}},
            })
        };
        accepts(on(true));
        let field = "spec.readinessProbe.tcpSocket";
        refuses(on(false), field, "is only allowed if the Pod Network is attached");
        refuses(
            json!({
                "domain": {"devices": {"interfaces": []}},
                "networks": [],
                "readinessProbe": {"tcpSocket": {"port": 22}},
            }),
            field,
            "is only allowed if the Pod Network is attached",
        );
    }

    #[test]
    fn ports_and_times_are_in_range() {
        refuses(json!({"readinessProbe": {"tcpSocket": {"port": 0}}}), "spec.readinessProbe.tcpSocket.port", "range");
        refuses(
            json!({"readinessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": -1}}),
            "spec.readinessProbe.periodSeconds",
            "greater than or equal to 0",
        );
    }
}
