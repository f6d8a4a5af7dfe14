//! Resource claims for devices and networks (`resource.k8s.io`).

use std::collections::{BTreeMap, BTreeSet};

use api::{FeatureGate, VirtualMachineInstanceSpec, config::ClusterConfig};

use super::gates;
use crate::context::{FieldErrors, names};

fn text(value: Option<&String>) -> &str {
    value.map(String::as_str).unwrap_or_default()
}

/// Validates networks with resource claims.
pub(super) fn validate_networks(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let claimed = || {
        spec.networks
            .iter()
            .enumerate()
            .filter_map(|(index, network)| Some((index, network, network.resource_claim.as_ref()?)))
    };
    if claimed().next().is_none() {
        return;
    }
    let list = format!("{root}.networks");
    if !gates::are_on("networks[].resourceClaim", &list, config, errors) {
        return;
    }
    if spec.networks.iter().any(|network| network.multus.is_some()) {
        errors.invalid(list, "mixing Multus and DRA resourceClaim networks in the same VMI is not supported");
        return;
    }
    let mut seen = BTreeSet::new();
    for (index, network, claim) in claimed() {
        let interface = spec.domain.devices.interfaces.iter().find(|interface| interface.name == network.name);
        if interface.is_some_and(|interface| interface.sriov.is_none() && interface.binding.is_none()) {
            errors.invalid(
                format!("{root}.domain.devices.interfaces"),
                format!("DRA network \"{}\" requires an SR-IOV or binding plugin interface", network.name),
            );
        }
        let path = format!("{list}[{index}]");
        let (name, request) = (text(claim.claim_name.as_ref()), text(claim.request_name.as_ref()));
        if name.is_empty() {
            errors.required(format!("{path}.resourceClaim.claimName"), "claimName is required for DRA network");
        }
        if request.is_empty() {
            errors.required(format!("{path}.resourceClaim.requestName"), "requestName is required for DRA network");
        }
        if !name.is_empty() && !spec.resource_claims.iter().any(|known| known.name == name) {
            errors.not_found(
                format!("{path}.resourceClaim.claimName"),
                format!("network references resourceClaim \"{name}\" which is not defined in spec.resourceClaims"),
            );
        }
        if !name.is_empty() && !request.is_empty() && !seen.insert((name, request)) {
            errors.duplicate(path, format!("duplicate claimName/requestName combination \"{name}/{request}\""));
        }
    }
}

/// Validates resource claims, and GPUs and host devices that use them.
pub(super) fn validate(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    validate_claims(root, spec, errors);
    let kinds = [
        Kind {
            list: "gpus",
            label: "GPU",
            plural: "GPUs",
            devices: spec
                .domain
                .devices
                .gpus
                .iter()
                .map(|gpu| Device::new(&gpu.device_name, &gpu.claim_name, &gpu.request_name))
                .collect(),
        },
        Kind {
            list: "hostDevices",
            label: "HostDevice",
            plural: "HostDevices",
            devices: spec
                .domain
                .devices
                .host_devices
                .iter()
                .map(|device| Device::new(&device.device_name, &device.claim_name, &device.request_name))
                .collect(),
        },
    ];
    let mut requests: Vec<Request<'_>> = kinds.iter().flat_map(|kind| kind.check(root, config, errors)).collect();
    let known = |claim: &str| spec.resource_claims.iter().any(|known| known.name == claim);
    let unknown = requests.iter().any(|request| !known(request.claim));
    if config.enabled(FeatureGate::NetworkDevicesWithDRA) {
        requests.extend(network_requests(root, spec));
    }
    validate_shared_requests(&requests, errors);
    if unknown {
        errors.invalid(
            format!("{root}.resourceClaims"),
            "vmi.spec.resourceClaims must specify all claims used in vmi.spec.domain.devices.gpus and vmi.spec.domain.devices.hostDevices",
        );
    }
}

fn validate_claims(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let mut seen = BTreeSet::new();
    for (index, claim) in spec.resource_claims.iter().enumerate() {
        let path = format!("{root}.resourceClaims[{index}]");
        let name = format!("{path}.name");
        if claim.name.is_empty() {
            errors.required(name.clone(), format!("{name} is a required field"));
        } else {
            if !seen.insert(&claim.name) {
                errors.duplicate(name.clone(), format!("duplicate resourceClaims name \"{}\"", claim.name));
            }
            let problems = names::label_errors(&claim.name);
            if !problems.is_empty() {
                let message =
                    format!("{name} does not conform to the kubernetes DNS_LABEL rules: {}", problems.join(", "));
                errors.invalid(name, message);
            }
        }
        match (&claim.resource_claim_name, &claim.resource_claim_template_name) {
            (Some(_), Some(_)) => errors.invalid(
                path.clone(),
                "at most one of resourceClaimName or resourceClaimTemplateName may be specified",
            ),
            (None, None) => {
                errors.invalid(path.clone(), "must specify one of: resourceClaimName, resourceClaimTemplateName");
            }
            _ => {}
        }
        for (field, value) in [
            ("resourceClaimName", &claim.resource_claim_name),
            ("resourceClaimTemplateName", &claim.resource_claim_template_name),
        ] {
            for error in value.iter().flat_map(|value| names::subdomain_errors(value)) {
                errors.invalid(format!("{path}.{field}"), error);
            }
        }
    }
}

/// The fields of a GPU or host device that concern claims.
struct Device<'a> {
    name: &'a str,
    claim: &'a str,
    request: &'a str,
    has_claim: bool,
}

impl<'a> Device<'a> {
    fn new(name: &'a Option<String>, claim: &'a Option<String>, request: &'a Option<String>) -> Self {
        Self {
            name: text(name.as_ref()),
            claim: text(claim.as_ref()),
            request: text(request.as_ref()),
            has_claim: claim.is_some() || request.is_some(),
        }
    }

    fn is_claimed(&self) -> bool {
        self.name.is_empty() && self.has_claim
    }
}

struct Kind<'a> {
    list: &'static str,
    label: &'static str,
    plural: &'static str,
    devices: Vec<Device<'a>>,
}

/// A request of a claim by a device or network that names both.
struct Request<'a> {
    user: &'static str,
    index: usize,
    path: String,
    claim: &'a str,
    name: &'a str,
}

impl<'a> Kind<'a> {
    /// Validates the devices, and returns the requests of the valid ones. If the kind is refused as a whole, there are none, and
    /// the error is the only one.
    fn check(&self, root: &str, config: &ClusterConfig, errors: &mut FieldErrors) -> Vec<Request<'a>> {
        let Self { list, label, plural, devices } = self;
        let field = format_args!("{root}.domain.devices.{list}");
        let claimed = devices.iter().filter(|device| device.is_claimed()).count();
        if *list == "gpus" && claimed > 0 && claimed < devices.len() {
            errors.invalid(
                field,
                "vmi.spec.domain.devices.gpus contains both DRA and non-DRA GPUs; each GPU must be either DRA or non-DRA",
            );
            return Vec::new();
        }
        for _ in devices.iter().filter(|device| device.name.is_empty() && !device.has_claim) {
            errors.required(
                field,
                format!("vmi.spec.domain.devices.{list} contains {plural} without deviceName or claimRequest; each {label} must specify either a deviceName or a claimRequest"),
            );
        }
        for _ in devices.iter().filter(|device| !device.name.is_empty() && device.has_claim) {
            errors.invalid(
                field,
                format!("vmi.spec.domain.devices.{list} contains {plural} with both deviceName and claimRequest"),
            );
        }
        let row = format!("domain.devices.{list}[].claimName");
        if claimed > 0 && !gates::are_on(&row, field, config, errors) {
            return Vec::new();
        }
        let mut requests = Vec::new();
        for (index, device) in devices.iter().enumerate().filter(|(_, device)| device.is_claimed()) {
            let path = format!("{field}[{index}]");
            if device.claim.is_empty() {
                errors.required(format!("{path}.claimName"), format!("claimName is required for DRA {label}"));
            }
            if device.request.is_empty() {
                errors.required(format!("{path}.requestName"), format!("requestName is required for DRA {label}"));
            }
            if !device.claim.is_empty() && !device.request.is_empty() {
                requests.push(Request { user: self.plural, index, path, claim: device.claim, name: device.request });
            }
        }
        let mut seen = BTreeSet::new();
        for Request { path, claim, name, .. } in &requests {
            if !seen.insert((*claim, *name)) {
                errors.duplicate(path, format!("duplicate claimName/requestName pair \"{claim}/{name}\""));
            }
        }
        requests
    }
}

fn network_requests<'a>(root: &str, spec: &'a VirtualMachineInstanceSpec) -> Vec<Request<'a>> {
    let requests = spec.networks.iter().enumerate().filter_map(|(index, network)| {
        let claim = network.resource_claim.as_ref()?;
        let path = format!("{root}.networks[{index}]");
        let (claim, name) = (text(claim.claim_name.as_ref()), text(claim.request_name.as_ref()));
        Some(Request { user: "Networks", index, path, claim, name })
    });
    requests.filter(|request| !request.claim.is_empty() && !request.name.is_empty()).collect()
}

/// Rejects a request of a claim that two types of devices use.
fn validate_shared_requests(requests: &[Request<'_>], errors: &mut FieldErrors) {
    let mut users: BTreeMap<(&str, &str), (&str, usize)> = BTreeMap::new();
    for Request { user, index, path, claim, name } in requests {
        match users.get(&(*claim, *name)) {
            Some((other, at)) if other != user => errors.duplicate(
                path,
                format!(
                    "duplicate claimName/requestName pair \"{claim}/{name}\" between {other}[{at}] and {user}[{index}]"
                ),
            ),
            Some(_) => {}
            None => {
                users.insert((*claim, *name), (*user, *index));
            }
        }
    }
}
