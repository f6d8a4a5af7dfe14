//! VMIs: defaults on creation, protection of the fields that components write, rules.

use api::{
    FeatureGate, VirtualMachineInstance, VmiPhase,
    config::ClusterConfig,
    constants::{self, annotation, finalizer, label},
    vmi::{
        cpu::CpuTopology,
        memory::MemoryStatus,
        status::{VirtualMachineInstancePhaseTransitionTimestamp, VirtualMachineInstanceStatus},
    },
};
use json_patch::{Patch, jsonptr::PointerBuf};
use k8s_openapi::api::authentication::v1::UserInfo;

use super::{host_disk, preset};
use crate::{
    context::{
        AdmissionRequest, Context, Decision, FieldErrors, Generated, Interrupt, Outcome, TrustedUsers, decode, patch,
        semantic,
    },
    defaults::{self, DefaultNetworkError, trace},
    rules::{self, unsupported},
};

/// Key in the user's extra fields with the node that the token is bound to.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// Serves `/virtualmachineinstances-mutate`: sets defaults on creation and keeps the status on changes.
pub(crate) fn mutate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let is_component = context.is_component();
    if context.is_create() {
        return context.patched::<VirtualMachineInstance>(|vmi| {
            rules::resources::validate_amounts("spec", &vmi.spec).into_result()?;
            let presets = preset::in_namespace(context, vmi)?;
            let warnings = preset::apply(vmi, &presets).map_err(|error| Interrupt::failed(422, error.to_string()))?;
            set_defaults(vmi, context.config, is_component, context.generated())
                .map_err(|error| Interrupt::failed(400, error.to_string()))?;
            trace::of_new(&mut vmi.metadata, context.trace, context.is_controller());
            Ok(warnings)
        });
    }
    // Only an object can be patched.
    decode::members(&context.request.object)?;
    let patch = keep_status(context.request, is_component);
    Ok(Outcome::Allowed { patch, warnings: vec![] }.into())
}

/// Serves `/virtualmachineinstances-validate-create`.
pub(crate) fn validate_create(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let vmi: VirtualMachineInstance = context.object()?;
    let installation = context.trusted.namespace();
    let mut errors = rules::metadata::validate_namespace(&vmi.metadata, context.namespace(), installation);
    let is_component = context.is_component();
    errors.extend(create_errors(&vmi, context.config, is_component));
    host_disk::validate_right_of(context, "spec", &vmi.spec, None, &mut errors)?;
    let warnings = if is_component { vec![] } else { rules::cloud_init::warnings("spec", &vmi.spec) };
    Ok(context.decide(errors, warnings))
}

/// Serves `/virtualmachineinstances-validate-update`.
pub(crate) fn validate_update(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let vmi: VirtualMachineInstance = context.object()?;
    let Some(old) = context.old_object::<VirtualMachineInstance>()? else { return Ok(context.allowed()) };
    let errors = update_errors(&vmi, &old, context.config, context.trusted, &context.request.user_info);
    Ok(context.decide(errors, vec![]))
}

/// Sets the defaults of a new VMI's spec. Fails if the cluster's default network is not allowed.
pub fn default_spec(
    spec: &mut api::VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    generated: &Generated,
) -> Result<(), DefaultNetworkError> {
    defaults::spec(spec, config)?;
    defaults::vmi::set(spec, config, generated);
    rules::live_update::set_maximums(spec, config);
    Ok(())
}

/// Sets the defaults of a new VMI. Removes a status that a user sent.
pub(crate) fn set_defaults(
    vmi: &mut VirtualMachineInstance,
    config: &ClusterConfig,
    is_component: bool,
    generated: &Generated,
) -> Result<(), DefaultNetworkError> {
    default_spec(&mut vmi.spec, config, generated)?;

    let metadata = &mut vmi.metadata;
    defaults::observed_version(metadata);
    defaults::pci_topology(&vmi.spec, metadata);
    let is_isolated = vmi.spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.isolate_emulator_thread);
    if let Some(value) = config.even_cpus.as_ref().filter(|_| is_isolated && config.enabled(FeatureGate::AlignCPUs)) {
        let key = annotation::EMULATOR_THREAD_COMPLETE_TO_EVEN_PARITY.to_owned();
        metadata.annotations.get_or_insert_default().insert(key, value.clone());
    }
    let finalizers = metadata.finalizers.get_or_insert_default();
    if !finalizers.iter().any(|name| name == finalizer::VMI) {
        finalizers.push(finalizer::VMI.to_owned());
    }

    let sent = vmi.status.take().filter(|_| is_component);
    vmi.status = Some(first_status(&vmi.spec, sent.unwrap_or_default(), config, generated));
    Ok(())
}

fn first_status(
    spec: &api::VirtualMachineInstanceSpec,
    mut status: VirtualMachineInstanceStatus,
    config: &ClusterConfig,
    generated: &Generated,
) -> VirtualMachineInstanceStatus {
    let guest = spec.domain.memory.as_ref().and_then(|memory| memory.guest.as_ref());
    // A malformed amount is rejected where the user wrote it; copies in the status would be rejected, too.
    if let Some(guest) = guest.filter(|guest| defaults::is_amount(guest)) {
        let memory = status.memory.get_or_insert_with(MemoryStatus::default);
        memory.guest_at_boot = Some(guest.clone());
        memory.guest_current = Some(guest.clone());
        memory.guest_requested = Some(guest.clone());
    }
    if let Some(cpu) = &spec.domain.cpu {
        status.current_cpu_topology.get_or_insert(CpuTopology {
            sockets: cpu.sockets,
            cores: cpu.cores,
            threads: cpu.threads,
        });
    }
    if !config.enabled(FeatureGate::Root) {
        status.runtime_user = constants::NON_ROOT_UID;
    }
    if status.phase.as_ref() != Some(&VmiPhase::Pending) {
        status.phase = Some(VmiPhase::Pending);
        status.phase_transition_timestamps.push(VirtualMachineInstancePhaseTransitionTimestamp {
            phase: Some(VmiPhase::Pending),
            phase_transition_timestamp: Some(generated.now.clone()),
        });
    }
    status
}

/// Returns the patch that restores the status if a user changed it. The kind has no status subresource that would protect
/// the status.
fn keep_status(request: &AdmissionRequest, is_component: bool) -> Patch {
    let new = request.object.get("status").filter(|status| !status.is_null());
    let old = request.old_object.get("status").filter(|status| !status.is_null());
    if is_component || new == old {
        return Patch::default();
    }
    let path = PointerBuf::from_tokens(["status"]);
    Patch(match (new, old) {
        (Some(_), Some(old)) => vec![patch::replace(path, old.clone())],
        (None, Some(old)) => vec![patch::add(path, old.clone())],
        (Some(_), None) => vec![patch::remove(path)],
        (None, None) => vec![],
    })
}

/// Returns the errors of a new VMI.
pub fn create_errors(vmi: &VirtualMachineInstance, config: &ClusterConfig, is_component: bool) -> FieldErrors {
    let mut errors = rules::discontinued(&vmi.spec, "spec", config);
    errors.extend(rules::validate_spec("spec", &vmi.spec, config));
    errors.extend(rules::devices::validate_permitted("spec", &vmi.spec, config));
    errors.extend(rules::firmware::validate_uuid("spec", &vmi.spec));
    errors.extend(rules::volumes::validate_mapping(&vmi.spec));
    errors.extend(rules::resources::validate_mandatory_memory(&vmi.spec));
    errors.extend(rules::metadata::validate("metadata", &vmi.metadata, config, is_component));
    errors.extend(rules::grace::validate_annotations("metadata", &vmi.metadata, &vmi.spec, config));
    errors.extend(rules::hyperv::validate(&vmi.spec));
    errors.extend(rules::architecture::validate(&vmi.spec));
    errors.or_else(|errors| {
        unsupported::spec("spec", &vmi.spec, config, errors);
        rules::metadata::validate_supported("metadata", &vmi.metadata, errors);
    })
}

/// Returns the errors of a changed VMI: those of the first group of rules that finds any.
fn update_errors(
    vmi: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    config: &ClusterConfig,
    trusted: &TrustedUsers,
    user: &UserInfo,
) -> FieldErrors {
    let mut errors = FieldErrors::new();
    if trusted.is_handler(user) && config.enabled(FeatureGate::NodeRestriction) {
        validate_node_restriction(vmi, old, user, &mut errors);
        if !errors.is_empty() {
            return errors;
        }
    }
    let is_component = trusted.contains(user);
    if !semantic::equal(&vmi.spec, &old.spec) {
        if is_component {
            errors.extend(rules::hotplug::validate(vmi, old, config));
            errors = errors.or_else(|errors| unsupported::added_volumes("spec", &vmi.spec, &old.spec, errors));
        } else {
            errors.not_supported("spec", restricted(old));
        }
        if !errors.is_empty() {
            return errors;
        }
    }
    if !is_component {
        let reserved = |vmi: &VirtualMachineInstance| {
            let labels = vmi.metadata.labels.clone().unwrap_or_default();
            label::RESERVED_ON_VMI.map(|name| labels.get(name).cloned())
        };
        if reserved(vmi) != reserved(old) {
            errors.not_supported(
                "metadata.labels",
                "modification of the following reserved kubevirt.io/ labels on a VMI object is prohibited",
            );
        }
        if trace::is_set(&vmi.metadata, &old.metadata) {
            let message = format!("annotation {} of a VMI object cannot be set", annotation::TRACEPARENT);
            errors.not_supported("metadata.annotations", message);
        }
    }
    errors
}

/// Returns the message about a user's change of the spec, with the object to edit instead.
fn restricted(vmi: &VirtualMachineInstance) -> String {
    let owner = vmi.metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
    let instead = match owner {
        Some(owner) if owner.kind == "VirtualMachine" => format!("edit VM {} instead", owner.name),
        Some(owner) => format!("edit the template of {} {} instead", owner.kind, owner.name),
        None => "delete it and create it with the new spec".to_owned(),
    };
    format!("update of VMI object is restricted: {instead}")
}

/// Rejects writes of a virt-handler to VMIs of other nodes.
fn validate_node_restriction(
    vmi: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    user: &UserInfo,
    errors: &mut FieldErrors,
) {
    let Some(node) =
        user.extra.as_ref().and_then(|extra| extra.get(NODE_NAME)?.first()).filter(|node| !node.is_empty())
    else {
        errors.invalid("status", "Node restriction failed, virt-handler service account is missing node name");
        return;
    };
    let of = |vmi: &VirtualMachineInstance| vmi.status.clone().unwrap_or_default();
    let target = |status: &VirtualMachineInstanceStatus| {
        status.migration_state.as_ref().and_then(|state| state.target_node.clone()).filter(|node| !node.is_empty())
    };
    let (old_status, new_status) = (of(old), of(vmi));
    let old_target = target(&old_status);
    if old_status.node_name.as_ref() != Some(node) && old_target.as_ref() != Some(node) {
        errors.invalid("status", "Node restriction, virt-handler is only allowed to modify VMIs it owns");
    } else if old_target.is_none() && target(&new_status).is_some() {
        errors.invalid("status", "Node restriction, virt-handler is not allowed to set target node");
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
    use serde_json::json;

    use super::*;

    #[test]
    fn annotation_for_even_cpus_reaches_vmis_with_an_isolated_emulator_while_the_gate_is_on() {
        let generated = Generated { now: Time(Timestamp::UNIX_EPOCH), uuid: "u".into(), serial: "s".into() };
        let key = annotation::EMULATOR_THREAD_COMPLETE_TO_EVEN_PARITY;
        for (isolated, gates, value, expected) in [
            (true, vec!["AlignCPUs".to_owned()], Some("x"), Some("x")),
            (true, vec![], Some("x"), None),
            (false, vec!["AlignCPUs".to_owned()], Some("x"), None),
            (true, vec!["AlignCPUs".to_owned()], None, None),
        ] {
            let cpu = json!({"dedicatedCpuPlacement": true, "isolateEmulatorThread": isolated});
            let vmi = json!({"metadata": {}, "spec": {"domain": {"cpu": cpu, "devices": {}}}});
            let mut vmi: VirtualMachineInstance = serde_json::from_value(vmi).unwrap();
            let config =
                ClusterConfig { feature_gates: gates, even_cpus: value.map(Into::into), ..ClusterConfig::default() };
            set_defaults(&mut vmi, &config, false, &generated).unwrap();
            let found = vmi.metadata.annotations.unwrap_or_default().remove(key);
            assert_eq!(found.as_deref(), expected, "{isolated}");
        }
    }
}
