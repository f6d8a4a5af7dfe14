//! Machines: defaults on creation, protection of what the components write, rules.

use api::{
    VirtualMachineInstance, VmiPhase,
    config::ClusterConfig,
    constants::{self, annotation, finalizer, label},
    gates,
    vmi::{
        cpu::CpuTopology,
        memory::MemoryStatus,
        status::{VirtualMachineInstancePhaseTransitionTimestamp, VirtualMachineInstanceStatus},
    },
};
use serde_json::{Value, json};

use crate::{
    TrustedUsers,
    causes::Causes,
    defaults::{self, Fresh},
    preset, read,
    review::{AdmissionReview, Request, UserInfo},
    rules, semantic, unsupported,
    webhook::{Context, Stop},
};

/// Key of a user's extra facts that holds the node its token is bound to.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// The webhook that sets defaults on creation, and keeps the status on changes.
pub(crate) fn mutate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let is_component = context.is_component();
    if context.is_create() {
        return context.patched::<VirtualMachineInstance>(|machine| {
            let presets = preset::of(context, machine)?;
            let warnings = preset::apply(machine, &presets).map_err(|message| Stop::refused(422, message))?;
            set_defaults(machine, context.config, is_component, context.fresh())
                .map_err(|message| Stop::refused(400, message))?;
            Ok(warnings)
        });
    }
    // A patch is for an object: the API server sends nothing else.
    read::members(&context.request.object)?;
    Ok(AdmissionReview::patched(&context.request.uid, &keep_status(context.request, is_component), vec![]))
}

/// The webhook that checks a new machine.
pub(crate) fn validate_create(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let machine: VirtualMachineInstance = context.object()?;
    Ok(context.verdict(&create_causes(&machine, context.config, context.is_component()), vec![]))
}

/// The webhook that checks a change of a machine.
pub(crate) fn validate_update(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let machine: VirtualMachineInstance = context.object()?;
    let Some(old) = context.old_object::<VirtualMachineInstance>()? else { return Ok(context.allowed()) };
    let causes = update_causes(&machine, &old, context.config, context.trusted, &context.request.user_info);
    Ok(context.verdict(&causes, vec![]))
}

/// Sets the defaults of a machine that is being made. A status sent by anyone but a component is dropped.
pub fn set_defaults(
    machine: &mut VirtualMachineInstance,
    config: &ClusterConfig,
    is_component: bool,
    fresh: &Fresh,
) -> Result<(), String> {
    defaults::spec(&mut machine.spec, config)?;
    defaults::machine::set(&mut machine.spec, config, fresh);

    let metadata = &mut machine.metadata;
    defaults::observed_version(metadata);
    if has_pcie_hotplug(&machine.spec) {
        metadata
            .annotations
            .get_or_insert_default()
            .entry(annotation::PCI_TOPOLOGY_VERSION.to_owned())
            .or_insert_with(|| annotation::PCI_TOPOLOGY_V3.to_owned());
    }
    let finalizers = metadata.finalizers.get_or_insert_default();
    if !finalizers.iter().any(|name| name == finalizer::VMI) {
        finalizers.push(finalizer::VMI.to_owned());
    }

    let sent = machine.status.take().filter(|_| is_component);
    machine.status = Some(first_status(&machine.spec, sent.unwrap_or_default(), config, fresh));
    Ok(())
}

/// Whether the board has PCI Express slots that take devices while the guest runs.
pub(crate) fn has_pcie_hotplug(spec: &api::VirtualMachineInstanceSpec) -> bool {
    let arch = matches!(spec.architecture.as_deref(), None | Some("" | "amd64" | "arm64"));
    let board = spec.domain.machine.as_ref().map(|machine| machine.type_.as_str());
    arch && board.is_none_or(|board| board.contains("q35") || board.starts_with("virt"))
}

fn first_status(
    spec: &api::VirtualMachineInstanceSpec,
    mut status: VirtualMachineInstanceStatus,
    config: &ClusterConfig,
    fresh: &Fresh,
) -> VirtualMachineInstanceStatus {
    let guest = spec.domain.memory.as_ref().and_then(|memory| memory.guest.as_ref());
    // What is no amount is refused where the user wrote it; copies would be refused beside it.
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
    if !config.enabled(gates::ROOT) {
        status.runtime_user = constants::NON_ROOT_UID;
    }
    if status.phase.as_ref() != Some(&VmiPhase::Pending) {
        status.phase = Some(VmiPhase::Pending);
        status.phase_transition_timestamps.push(VirtualMachineInstancePhaseTransitionTimestamp {
            phase: Some(VmiPhase::Pending),
            phase_transition_timestamp: Some(fresh.now.clone()),
        });
    }
    status
}

/// The patch that puts the old status back when a user changes it. The kind has no status subresource, so this is
/// what protects the status.
pub fn keep_status(request: &Request, is_component: bool) -> Vec<Value> {
    let new = request.object.get("status").filter(|status| !status.is_null());
    let old = request.old_object.get("status").filter(|status| !status.is_null());
    if is_component || new == old {
        return vec![];
    }
    match (new, old) {
        (Some(_), Some(old)) => vec![json!({"op": "replace", "path": "/status", "value": old})],
        (None, Some(old)) => vec![json!({"op": "add", "path": "/status", "value": old})],
        (Some(_), None) => vec![json!({"op": "remove", "path": "/status"})],
        (None, None) => vec![],
    }
}

/// What is wrong with a machine that is being made.
pub fn create_causes(machine: &VirtualMachineInstance, config: &ClusterConfig, is_component: bool) -> Causes {
    let mut causes = rules::discontinued(&machine.spec, "spec", config);
    causes.extend(rules::spec("spec", &machine.spec, config));
    causes.extend(rules::devices::not_permitted("spec", &machine.spec, config));
    causes.extend(rules::volumes::mapped(&machine.spec));
    causes.extend(rules::resources::mandatory_memory(&machine.spec));
    causes.extend(rules::metadata::causes("metadata", &machine.metadata, config, is_component));
    causes.extend(rules::grace::annotations("metadata", &machine.metadata, &machine.spec, config));
    causes.extend(rules::hyperv::causes(&machine.spec));
    causes.extend(rules::architecture::causes(&machine.spec));
    causes.or_else(|causes| {
        unsupported::spec("spec", &machine.spec, causes);
        rules::metadata::unsupported("metadata", &machine.metadata, causes);
    })
}

/// What is wrong with the change of a machine. The first group that finds something answers.
pub fn update_causes(
    machine: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    config: &ClusterConfig,
    trusted: &TrustedUsers,
    user: &UserInfo,
) -> Causes {
    let mut causes = Causes::new();
    if trusted.is_handler(user) && config.enabled("NodeRestriction") {
        node_restriction(machine, old, user, &mut causes);
        if !causes.is_empty() {
            return causes;
        }
    }
    let is_component = trusted.contains(user);
    if !semantic::equal(&machine.spec, &old.spec) {
        if is_component {
            causes.extend(rules::hotplug::causes(machine, old, config));
        } else {
            causes.not_supported("", "update of VMI object is restricted");
        }
        if !causes.is_empty() {
            return causes;
        }
    }
    if !is_component {
        let reserved = |machine: &VirtualMachineInstance| {
            let labels = machine.metadata.labels.clone().unwrap_or_default();
            label::RESERVED_ON_VMI.map(|name| labels.get(name).cloned())
        };
        if reserved(machine) != reserved(old) {
            causes.not_supported(
                "",
                "modification of the following reserved kubevirt.io/ labels on a VMI object is prohibited",
            );
        }
    }
    causes
}

/// The agent of a node writes only the machines of its node.
fn node_restriction(
    machine: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    user: &UserInfo,
    causes: &mut Causes,
) {
    let Some(node) = user.extra.get(NODE_NAME).and_then(|nodes| nodes.first()).filter(|node| !node.is_empty()) else {
        causes.invalid("", "Node restriction failed, virt-handler service account is missing node name");
        return;
    };
    let of = |machine: &VirtualMachineInstance| machine.status.clone().unwrap_or_default();
    let target = |status: &VirtualMachineInstanceStatus| {
        status.migration_state.as_ref().and_then(|state| state.target_node.clone()).filter(|node| !node.is_empty())
    };
    let (old_status, new_status) = (of(old), of(machine));
    let old_target = target(&old_status);
    if old_status.node_name.as_ref() != Some(node) && old_target.as_ref() != Some(node) {
        causes.invalid("", "Node restriction, virt-handler is only allowed to modify VMIs it owns");
    } else if old_target.is_none() && target(&new_status).is_some() {
        causes.invalid("", "Node restriction, virt-handler is not allowed to set target node");
    }
}
