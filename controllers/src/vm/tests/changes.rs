//! Changes of a VM whose VMI runs, and records of starts.

use api::{config::RolloutStrategy, fields};

use super::*;

/// The VM of the tests at generation 3 with its spec changed, and the VMI started at generation 2.
fn changed(change: &Value) -> (VirtualMachine, VirtualMachineInstance, Vec<Arc<StartRevision>>) {
    let spec = json!({"runStrategy": "Always", "template": {"spec": {"nodeSelector": {"disk": "fast"}}}});
    let first = vm(&spec, &json!({"runStrategy": "Always"}));
    let vmi = instance(&first, "Running");
    let starts = records(&decided(&first, None));
    let mut next = serde_json::to_value(first).unwrap();
    json_patch::merge(&mut next["spec"], change);
    next["metadata"]["generation"] = json!(3);
    (serde_json::from_value(next).unwrap(), vmi, starts)
}

fn vmi_patch(decision: &Decision) -> Value {
    let patch = decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind: Kind::Instance, patch, .. } => Some(patch.clone()),
        _ => None,
    });
    patch.unwrap_or(Value::Null)
}

fn with_rollout(
    vm: &VirtualMachine,
    vmi: &VirtualMachineInstance,
    starts: &[Arc<StartRevision>],
    rollout: RolloutStrategy,
) -> Decision {
    let config = ClusterConfig { vm_rollout_strategy: rollout, ..ClusterConfig::default() };
    decide(&Observed { starts: starts.to_vec(), ..observed(vm, Some(vmi), None, &config) }).unwrap()
}

#[test]
fn observed_generation_and_placement_follow_the_template() {
    let raised = json!({"metadata": {"annotations": {"kubevirt.io/vm-generation": "3"}}});
    let tolerations = json!([{"key": "k", "operator": "Exists"}]);
    let (live, stage) = (RolloutStrategy::LiveUpdate, RolloutStrategy::Stage);
    // change, rollout strategy, patch of the VMI, observed generation, requires a restart
    let table: [(Value, RolloutStrategy, Value, i64, bool); 8] = [
        (json!({"runStrategy": "RerunOnFailure"}), live, raised, 3, false),
        (json!({"template": {"metadata": {"labels": {"key": "v"}}}}), live, Value::Null, 2, false),
        (json!({"template": {"metadata": {"annotations": {"key": "v"}}}}), live, Value::Null, 2, false),
        (json!({"template": {"spec": {"hostname": "other"}}}), live, Value::Null, 2, true),
        (
            json!({"template": {"spec": {"nodeSelector": {"disk": null}, "tolerations": tolerations}}}),
            live,
            json!({"spec": {"nodeSelector": null, "tolerations": tolerations}}),
            2,
            false,
        ),
        (
            json!({"template": {"spec": {"affinity": {"podAffinity": {}}}}}),
            live,
            json!({"spec": {"affinity": {"podAffinity": {}}}}),
            2,
            false,
        ),
        // A VMI that waits for a restart gets everything then.
        (
            json!({"template": {"spec": {"hostname": "other", "nodeSelector": {"disk": "slow"}}}}),
            live,
            Value::Null,
            2,
            true,
        ),
        (json!({"template": {"spec": {"nodeSelector": {"disk": "slow"}}}}), stage, Value::Null, 2, true),
    ];
    for (change, rollout, patch, generation, restart) in table {
        let (vm, vmi, starts) = changed(&change);
        let decision = with_rollout(&vm, &vmi, &starts, rollout);
        assert_eq!(vmi_patch(&decision), patch, "{change}");
        let status = status_patch(&decision);
        assert_eq!(status["observedGeneration"], generation, "{change}");
        assert_eq!(status["desiredGeneration"], 3);
        assert_eq!(status["conditions"].to_string().contains("RestartRequired"), restart, "{change} {status}");
    }
}

#[test]
fn observed_generation_without_annotation_or_own_record_is_that_of_the_named_record() {
    const KEY: &str = "kubevirt.io/vm-generation";
    let (same, other) =
        (json!({"runStrategy": "RerunOnFailure"}), json!({"template": {"spec": {"hostname": "other"}}}));
    let (own, adopted) = ("revision-start-vm-vm-uid-2", "revision-start-vm-other-uid-7");
    let expanded = "revision-start-vm-vm-uid-2-expanded";
    // Change, annotation of the VMI, name of its record, owner of the record; annotation that is written, observed generation.
    for (change, annotated, name, owner, written, generation) in [
        (&same, None, own, "vm", Some("3"), Some(3)),
        (&same, Some("2b3c"), own, "vm", Some("3"), Some(3)),
        (&other, Some("2"), own, "vm", None, Some(2)),
        (&other, Some("2b3c"), own, "vm", Some("2"), Some(2)),
        (&other, None, own, "vm", Some("2"), Some(2)),
        (&other, None, expanded, "vm", Some("2"), Some(2)),
        (&other, None, "record", "vm", None, None),
        (&same, Some("7"), adopted, "another", Some("3"), Some(3)),
        (&same, None, adopted, "another", Some("3"), Some(3)),
        (&other, Some("7"), adopted, "another", None, Some(7)),
        (&other, None, adopted, "another", Some("7"), Some(7)),
        // The record was deleted.
        (&same, Some("7"), adopted, "", None, Some(7)),
        (&same, None, adopted, "", Some("7"), Some(7)),
    ] {
        let (vm, mut vmi, starts) = changed(change);
        let annotations = vmi.metadata.annotations.get_or_insert_default();
        annotations.remove(KEY);
        annotations.extend(annotated.map(|value| (KEY.to_owned(), value.to_owned())));
        vmi.status.as_mut().unwrap().virtual_machine_revision_name = Some(name.to_owned());
        let mut record = (*starts[0]).clone();
        record.metadata.name = Some(name.to_owned());
        let record = Some(Arc::new(record));
        let decision = decide(&Observed {
            starts: record.clone().filter(|_| owner == "vm").into_iter().collect(),
            named_start: record.filter(|_| !owner.is_empty()),
            ..observed(&vm, Some(&vmi), None, &ClusterConfig::default())
        })
        .unwrap();
        let row = format!("{change} {annotated:?} {name} {owner}");
        assert_eq!(vmi_patch(&decision)["metadata"]["annotations"][KEY], json!(written), "{row}");
        let status = status_patch(&decision);
        assert_eq!(status["observedGeneration"], json!(generation), "{row}");
        // The record of another VM requires no restart.
        let requires = status["conditions"].to_string().contains("RestartRequired");
        assert_eq!(requires, *change == other && owner == "vm", "{row}");
    }
}

#[test]
fn running_vmi_follows_the_size_of_the_template() {
    let template = json!({"domain": {"cpu": {"sockets": 1}, "memory": {"guest": "1Gi"}}});
    let first =
        vm(&json!({"runStrategy": "Always", "template": {"spec": template}}), &json!({"runStrategy": "Always"}));
    let starts = records(&decided(&first, None));
    let running = |status: &Value| {
        let mut vmi = serde_json::to_value(instance(&first, "Running")).unwrap();
        let spec =
            json!({"architecture": "amd64", "domain": {"cpu": {"maxSockets": 4}, "memory": {"maxGuest": "4Gi"}}});
        let size = json!({
            "currentCPUTopology": {"sockets": 1}, "memory": {"guestRequested": "1Gi", "guestCurrent": "1Gi"},
        });
        json_patch::merge(&mut vmi, &json!({"spec": spec, "status": size}));
        json_patch::merge(&mut vmi["status"], status);
        serde_json::from_value::<VirtualMachineInstance>(vmi).unwrap()
    };
    let (plain, migrating) = (json!({}), json!({"migrationState": {"startTimestamp": "2030-01-01T00:00:00Z"}}));
    let grown = json!({"domain": {"cpu": {"sockets": 2}, "memory": {"guest": "2Gi"}}});
    let more_cores = json!({"domain": {"cpu": {"sockets": 2, "cores": 2}}});
    let too_many = json!({"domain": {"cpu": {"sockets": 5}, "memory": {"guest": "2Gi"}}});
    let placed = json!({"nodeSelector": {"a": "b"}});
    let tolerated = json!({"tolerations": [{"key": "k"}]});
    let (live, stage) = (RolloutStrategy::LiveUpdate, RolloutStrategy::Stage);
    // Change of the template, status of the VMI, strategy; change of the VMI's spec, a condition of the VM with its text.
    for (change, status, rollout, patch, shown) in [
        (&json!({}), &plain, live, Value::Null, ""),
        (&grown, &plain, live, grown.clone(), ""),
        (&grown, &plain, stage, Value::Null, "a non-live-updatable field was changed in the template spec"),
        (&more_cores, &plain, live, Value::Null, "a non-live-updatable field was changed in the template spec"),
        // A start would give the VMI the one socket that it has.
        (&json!({"domain": {"cpu": {"sockets": null}}}), &plain, live, Value::Null, ""),
        // Memory follows, although the sockets wait for a restart.
        (
            &too_many,
            &plain,
            live,
            json!({"domain": {"memory": {"guest": "2Gi"}}}),
            "CPU sockets updated in template spec to a value higher than what's available",
        ),
        (&grown, &migrating, live, Value::Null, "CPU hotplug is not allowed while VMI is migrating"),
        (&placed, &migrating, live, Value::Null, "Node affinity should not be changed during VMI migration"),
        (&tolerated, &migrating, live, Value::Null, "tolerations should not be changed during VMI migration"),
    ] {
        let mut next = serde_json::to_value(&first).unwrap();
        json_patch::merge(&mut next["spec"]["template"]["spec"], change);
        let vm: VirtualMachine = serde_json::from_value(next).unwrap();
        let decision = with_rollout(&vm, &running(status), &starts, rollout);
        assert_eq!(vmi_patch(&decision)["spec"], patch, "{change}");
        let conditions = status_patch(&decision)["conditions"].to_string();
        let is_plain = !conditions.contains("RestartRequired") && !conditions.contains("Failure");
        assert!(if shown.is_empty() { is_plain } else { conditions.contains(shown) }, "{change} {conditions}");
    }
}

#[test]
fn values_that_the_vmi_has_need_no_restart() {
    let domain = json!({"cpu": {"sockets": 1, "model": "host-model"}, "memory": {"guest": "1Gi"}});
    let template = json!({"spec": {"domain": domain, "hostname": "first"}});
    let first = vm(&json!({"runStrategy": "Always", "template": template}), &json!({"runStrategy": "Always"}));
    let config = ClusterConfig { vm_rollout_strategy: RolloutStrategy::LiveUpdate, ..ClusterConfig::default() };
    let mut vmi = instance(&first, "Running");
    vmi.spec = start::defaulted_spec(&observed(&first, None, None, &config), &Chosen::default(), false).unwrap();
    let starts = records(&decided(&first, None));
    let filled_in = serde_json::to_value(&vmi.spec).unwrap();
    let (machine, max_sockets) =
        (filled_in["domain"]["machine"].clone(), filled_in["domain"]["cpu"]["maxSockets"].clone());
    assert!(machine["type"].is_string() && max_sockets.is_number(), "{filled_in}");
    for (change, required) in [
        (json!({}), false),
        (filled_in, false),
        (json!({"domain": {"cpu": {"maxSockets": max_sockets}, "machine": machine}}), false),
        (json!({"domain": {"cpu": {"maxSockets": 77}, "machine": machine}}), true),
        (json!({"domain": {"cpu": {"maxSockets": max_sockets}}, "hostname": "other"}), true),
        (json!({"domain": {"machine": {"type": "pc"}}}), true),
        // That of the cluster is the same, and another is not.
        (json!({"domain": {"cpu": {"model": null}}}), false),
        (json!({"domain": {"cpu": {"model": "Skylake"}}}), true),
        (json!({"hostname": null}), true),
    ] {
        let mut next = serde_json::to_value(&first).unwrap();
        json_patch::merge(&mut next["spec"]["template"]["spec"], &change);
        next["metadata"]["generation"] = json!(3);
        let next: VirtualMachine = serde_json::from_value(next).unwrap();
        let decision =
            decide(&Observed { starts: starts.to_vec(), ..observed(&next, Some(&vmi), None, &config) }).unwrap();
        let conditions = status_patch(&decision)["conditions"].to_string();
        assert_eq!(conditions.contains("RestartRequired"), required, "{change} {conditions}");
    }
}

#[test]
fn size_that_was_changed_live_needs_no_restart_for_values_that_the_vmi_has() {
    let domain = json!({
        "cpu": {"sockets": 1}, "memory": {"guest": "1Gi"},
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},
    });
    let template = json!({"spec": {"domain": domain}});
    let first = vm(&json!({"runStrategy": "Always", "template": template}), &json!({"runStrategy": "Always"}));
    let config = ClusterConfig { vm_rollout_strategy: RolloutStrategy::LiveUpdate, ..ClusterConfig::default() };
    let mut vmi = instance(&first, "Running");
    vmi.spec = start::defaulted_spec(&observed(&first, None, None, &config), &Chosen::default(), false).unwrap();
    let starts = records(&decided(&first, None));
    // The maxima are those of the start, and the requests have grown.
    let mut live = serde_json::to_value(&vmi.spec).unwrap();
    assert_eq!(
        (&live["domain"]["cpu"]["maxSockets"], &live["domain"]["memory"]["maxGuest"]),
        (&json!(4), &json!("4Gi"))
    );
    let size = json!({"domain": {
        "cpu": {"sockets": 2}, "memory": {"guest": "2Gi"}, "resources": {"requests": {"cpu": "200m", "memory": "2Gi"}},
    }});
    json_patch::merge(&mut live, &size);
    vmi.spec = serde_json::from_value(live.clone()).unwrap();
    let grown = json!({"domain": {"cpu": {"sockets": 2}, "memory": {"guest": "2048Mi"}}});
    for (change, required) in [
        (json!({}), false),
        (live, false),
        (json!({"domain": {"cpu": {"model": "host-model"}}}), false),
        (json!({"domain": {"cpu": {"model": "Skylake"}}}), true),
        (json!({"domain": {"cpu": {"maxSockets": 4}, "memory": {"maxGuest": "4096Mi"}}}), false),
        (json!({"domain": {"cpu": {"maxSockets": 8}}}), true),
        (json!({"domain": {"memory": {"maxGuest": "8Gi"}}}), true),
        (size, false),
        (json!({"domain": {"resources": {"requests": {"cpu": "300m"}}}}), true),
        (json!({"domain": {"resources": {"requests": {"memory": null}}}}), true),
    ] {
        let mut next = serde_json::to_value(&first).unwrap();
        json_patch::merge(&mut next["spec"]["template"]["spec"], &grown);
        json_patch::merge(&mut next["spec"]["template"]["spec"], &change);
        let next: VirtualMachine = serde_json::from_value(next).unwrap();
        let decision =
            decide(&Observed { starts: starts.to_vec(), ..observed(&next, Some(&vmi), None, &config) }).unwrap();
        let conditions = status_patch(&decision)["conditions"].to_string();
        assert_eq!(conditions.contains("RestartRequired"), required, "{change} {conditions}");
    }
}

#[test]
fn layout_of_the_pci_buses_is_kept_in_a_template_without_one() {
    const VERSION: &str = "kubevirt.io/pci-topology-version";
    const COUNT: &str = "kubevirt.io/pci-interface-slot-count";
    for (template, chosen, kept) in [
        (json!({}), json!({VERSION: "v3"}), json!({VERSION: "v3"})),
        (json!({}), json!({VERSION: "v2", COUNT: "6"}), json!({VERSION: "v2", COUNT: "6"})),
        (json!({"other": "x"}), json!({VERSION: "v3"}), json!({VERSION: "v3"})),
        (json!({VERSION: "v2", COUNT: "6"}), json!({VERSION: "v3"}), Value::Null),
        (json!({}), json!({COUNT: "6"}), Value::Null),
        (json!({}), json!({}), Value::Null),
    ] {
        let change = json!({"template": {"metadata": {"annotations": template}}});
        let mut first = with_strategy("Always", &json!({"runStrategy": "Always"}));
        json_patch_spec(&mut first, &change);
        let starts = records(&decided(&first, None));
        let mut vmi = instance(&first, "Running");
        let annotations: BTreeMap<String, String> = serde_json::from_value(chosen.clone()).unwrap();
        vmi.metadata.annotations.as_mut().unwrap().extend(annotations);
        let decision = with_rollout(&first, &vmi, &starts, RolloutStrategy::LiveUpdate);
        let patch = decision.effects.iter().find_map(|effect| match effect {
            Effect::Patch { kind: Kind::VirtualMachine, subresource: None, patch, .. } => Some(patch.clone()),
            _ => None,
        });
        let patch = patch.unwrap_or_default();
        assert_eq!(patch["spec"]["template"]["metadata"]["annotations"], kept, "{template} {chosen}");
        // It is no change that the VMI lacks.
        if !kept.is_null() {
            json_patch_spec(&mut first, &patch["spec"]);
            first.metadata.generation = Some(3);
            let decision = with_rollout(&first, &vmi, &starts, RolloutStrategy::LiveUpdate);
            let generation = vmi_patch(&decision)["metadata"]["annotations"]["kubevirt.io/vm-generation"].clone();
            assert_eq!(generation, "3", "{template} {chosen}");
            assert!(!status_patch(&decision)["conditions"].to_string().contains("RestartRequired"));
        }
    }
}

#[test]
fn mac_address_of_a_plugged_interface_is_written_to_the_template_once() {
    const MARK: &str = "ferrovirt.io/interfaces-without-mac";
    let (mut interfaces, mut networks) =
        (vec![json!({"name": "default", "masquerade": {}})], vec![json!({"name": "default", "pod": {}})]);
    let mut vm = with_strategy("Always", &json!({"runStrategy": "Always"}));
    let spec = |interfaces: &[Value], networks: &[Value]| {
        let spec = json!({"domain": {"devices": {"interfaces": interfaces}}, "networks": networks});
        json!({"template": {"spec": spec}})
    };
    json_patch_spec(&mut vm, &spec(&interfaces, &networks));
    let starts = records(&decided(&vm, None));
    let mut vmi = instance(&vm, "Running");
    interfaces.push(json!({"name": "lan", "bridge": {}}));
    networks.push(json!({"name": "lan", "multus": {"networkName": "n"}}));
    json_patch_spec(&mut vm, &spec(&interfaces, &networks));
    let mut settle = |vm: &VirtualMachine, shown: &Value| {
        let shown = json!({"status": {"interfaces": [{"name": "default", "infoSource": "domain"}, shown]}});
        let mut next = serde_json::to_value(&vmi).unwrap();
        json_patch::merge(&mut next, &shown);
        let seen = serde_json::from_value(next.clone()).unwrap();
        let decision = with_rollout(vm, &seen, &starts, RolloutStrategy::LiveUpdate);
        let mut written = Value::Null;
        for effect in &decision.effects {
            match effect {
                Effect::Patch { kind: Kind::VirtualMachine, subresource: None, patch, resource_version, .. } => {
                    assert_eq!(resource_version.as_deref(), Some("3"));
                    written =
                        patch["spec"]["template"]["spec"]["domain"]["devices"]["interfaces"][1]["macAddress"].clone();
                }
                Effect::Patch { kind: Kind::Instance, patch, .. } => json_patch::merge(&mut next, patch),
                _ => {}
            }
        }
        assert!(!status_patch(&decision)["conditions"].to_string().contains("RestartRequired"), "{decision:?}");
        vmi = serde_json::from_value(next.clone()).unwrap();
        // Hibernation reads it.
        assert_eq!(next["metadata"]["annotations"]["ferrovirt.io/interfaces-changed"], "true");
        (written, next["metadata"]["annotations"][MARK].clone(), next["spec"].clone())
    };
    let in_pod = json!({"name": "lan", "infoSource": "multus-status", "mac": "02:00:00:00:00:0a"});
    let mut in_domain = in_pod.clone();
    in_domain["infoSource"] = json!("domain, multus-status");
    let (written, mark, plugged) = settle(&vm, &in_pod);
    assert_eq!((written, mark), (Value::Null, json!("lan")));
    assert_eq!(settle(&vm, &in_pod), (Value::Null, json!("lan"), plugged.clone()));
    // The spec of the VMI, and so the networks of its pods, stay.
    assert_eq!(settle(&vm, &in_domain), (json!("02:00:00:00:00:0a"), Value::Null, plugged.clone()));
    let mut kept = vm.clone();
    interfaces[1]["macAddress"] = json!("02:00:00:00:00:0a");
    json_patch_spec(&mut kept, &spec(&interfaces, &networks));
    for template in [&kept, &vm] {
        assert_eq!(settle(template, &in_domain), (Value::Null, Value::Null, plugged.clone()));
    }
}

#[test]
fn refused_change_of_the_template_shows_and_waits() {
    const MARK: &str = "ferrovirt.io/interfaces-without-mac";
    let mut vm = with_strategy("Always", &json!({"runStrategy": "Always"}));
    let interfaces = json!([{"name": "default", "masquerade": {}}, {"name": "lan", "bridge": {}}]);
    let networks = json!([{"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "n"}}]);
    let spec = json!({"domain": {"devices": {"interfaces": interfaces}}, "networks": networks});
    json_patch_spec(&mut vm, &json!({"template": {"spec": spec}}));
    let starts = records(&decided(&vm, None));
    let mut plugged = serde_json::to_value(instance(&vm, "Running")).unwrap();
    let lan = json!({"name": "lan", "infoSource": "domain, multus-status", "mac": "02:00:00:00:00:0a"});
    let shown = json!([{"name": "default", "infoSource": "domain"}, lan]);
    let change = json!({"metadata": {"annotations": {MARK: "lan"}}, "status": {"interfaces": shown}});
    json_patch::merge(&mut plugged, &change);
    let vmi: VirtualMachineInstance = serde_json::from_value(plugged).unwrap();
    let failure = Failure {
        reason: "FailedTemplateUpdate",
        message: "denied".to_owned(),
        retry_at: "2030-01-01T00:01:10Z".parse().unwrap(),
        attempts: 1,
    };
    let config = ClusterConfig::default();
    for failure in [None, Some(&failure)] {
        let observed = Observed { starts: starts.to_vec(), ..observed(&vm, Some(&vmi), failure, &config) };
        let decision = decide(&observed).unwrap();
        let reason = decision.effects.iter().find_map(|effect| match effect {
            Effect::Patch { kind: Kind::VirtualMachine, subresource: None, options, .. } => options.failure_reason,
            _ => None,
        });
        assert_eq!(reason, failure.is_none().then_some("FailedTemplateUpdate"));
        // Its interface waits for as long.
        let unmarked = vmi_patch(&decision)["metadata"]["annotations"].get(MARK).is_some();
        assert_eq!(unmarked, failure.is_none(), "{decision:?}");
        let conditions = status_patch(&decision)["conditions"].to_string();
        let shows = conditions.contains("Failure while updating the template: denied");
        assert_eq!(shows, failure.is_some(), "{conditions}");
        let wait = std::time::Duration::from_secs(10);
        assert_eq!(decision.wake_after.filter(|_| failure.is_some()), failure.map(|_| wait));
    }
}

/// Applies a merge patch to the spec of a VM.
fn json_patch_spec(vm: &mut VirtualMachine, change: &Value) {
    let mut spec = serde_json::to_value(&vm.spec).unwrap();
    json_patch::merge(&mut spec, change);
    vm.spec = serde_json::from_value(spec).unwrap();
}

#[test]
fn updated_vmi_is_settled() {
    for change in [json!({"runStrategy": "RerunOnFailure"}), json!({"template": {"spec": {"nodeSelector": null}}})] {
        let (mut vm, mut vmi, starts) = changed(&change);
        let decision = with_rollout(&vm, &vmi, &starts, RolloutStrategy::LiveUpdate);
        let mut next = serde_json::to_value(&vmi).unwrap();
        json_patch::merge(&mut next, &vmi_patch(&decision));
        vmi = serde_json::from_value(next).unwrap();
        let mut status = serde_json::to_value(&vm.status).unwrap();
        json_patch::merge(&mut status, &status_patch(&decision));
        vm.status = serde_json::from_value(status).unwrap();
        let decision = with_rollout(&vm, &vmi, &starts, RolloutStrategy::LiveUpdate);
        assert_eq!(decision, Decision::settled(), "{change}");
    }
}

#[test]
fn refused_change_of_a_vmi_shows_and_waits() {
    let (vm, vmi, starts) = changed(&json!({"runStrategy": "RerunOnFailure"}));
    let failure = Failure {
        reason: "FailedUpdateError",
        message: "denied".to_owned(),
        retry_at: "2030-01-01T00:01:10Z".parse().unwrap(),
        attempts: 1,
    };
    let config = ClusterConfig::default();
    let observed = Observed { starts: starts.to_vec(), ..observed(&vm, Some(&vmi), Some(&failure), &config) };
    let decision = decide(&observed).unwrap();
    assert_eq!(vmi_patch(&decision), Value::Null);
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(10)));
    let conditions = status_patch(&decision)["conditions"].to_string();
    assert!(conditions.contains("Failure while updating VMI: denied"), "{conditions}");
}

#[test]
fn start_is_recorded_after_its_vmi_is_created() {
    let vm = with_strategy("Always", &Value::Null);
    let decision = decided(&vm, None);
    let [Effect::Create { object: vmi, .. }, Effect::Create { kind: Kind::ControllerRevision, object, options, .. }] =
        decision.effects.as_slice()
    else {
        panic!("{decision:?}")
    };
    let name = "revision-start-vm-vm-uid-2";
    assert_eq!(object["metadata"]["name"], name);
    assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], "vm-uid");
    assert_eq!(object["revision"], 2);
    assert_eq!(object["data"]["spec"], serde_json::to_value(&vm.spec).unwrap());
    assert!(options.existing_will_do);
    assert_eq!(vmi["status"]["virtualMachineRevisionName"], name);
}

#[test]
fn next_start_replaces_the_record_of_the_former() {
    let vm = with_strategy("Always", &Value::Null);
    let start = |generation: i64| {
        let name = format!("revision-start-vm-vm-uid-{generation}");
        let metadata = serde_json::from_value(json!({"name": name, "namespace": "d"})).unwrap();
        Arc::new(StartRevision { metadata, template: None, data_volumes: Vec::new() })
    };
    let config = ClusterConfig::default();
    // recorded generations, deleted records, created records
    let table: [(&[i64], &[&str], usize); 3] =
        [(&[], &[], 1), (&[2], &[], 0), (&[1, 2], &["revision-start-vm-vm-uid-1"], 0)];
    for (kept, gone, made) in table {
        let starts: Vec<Arc<StartRevision>> = kept.iter().copied().map(start).collect();
        let decision = decide(&Observed { starts: starts.to_vec(), ..observed(&vm, None, None, &config) }).unwrap();
        let deleted = decision.effects.iter().filter_map(|effect| match effect {
            Effect::Delete { kind: Kind::ControllerRevision, name, .. } => Some(name.as_str()),
            _ => None,
        });
        assert_eq!(deleted.collect::<Vec<_>>(), gone, "{kept:?}");
        let creations = decision
            .effects
            .iter()
            .filter(|effect| matches!(effect, Effect::Create { kind: Kind::ControllerRevision, .. }));
        assert_eq!(creations.count(), made, "{kept:?}");
        assert!(creates(&decision));
        // Nothing is deleted while it runs.
        let running = instance(&vm, "Running");
        let decision =
            decide(&Observed { starts: starts.to_vec(), ..observed(&vm, Some(&running), None, &config) }).unwrap();
        assert!(!decision.effects.iter().any(|effect| matches!(effect, Effect::Delete { .. })));
    }
}

#[test]
fn failure_is_counted_before_its_vmi_is_deleted() {
    for strategy in ["Always", "RerunOnFailure"] {
        let vm = with_strategy(strategy, &json!({"runStrategy": strategy}));
        let decision = decided(&vm, Some(&instance(&vm, "Failed")));
        let [Effect::Patch { subresource: Some("status"), patch, .. }, Effect::Delete { kind: Kind::Instance, .. }] =
            decision.effects.as_slice()
        else {
            panic!("{decision:?}")
        };
        assert_eq!(patch["status"]["startFailure"]["consecutiveFailCount"], 1, "{strategy}");
        assert_eq!(patch["status"]["printableStatus"], "CrashLoopBackOff", "{strategy}");
    }
}

#[test]
fn volumes_are_listed_without_snapshot_support() {
    let status = status_patch(&decided(&with_strategy("Halted", &Value::Null), None));
    let reason = "Snapshot is not supported for this volumeSource type [cd]";
    assert_eq!(status["volumeSnapshotStatuses"], json!([{"name": "cd", "enabled": false, "reason": reason}]));
}

#[test]
fn annotations_for_backups_and_deschedulers_reach_the_vmi() {
    let (skip, evict) = ("kubevirt.io/skip-backup-hooks", "descheduler.alpha.kubernetes.io/evict");
    // annotations of the VM, of its template, of the VMI, patch of the VMI
    let table = [
        (json!({skip: "true"}), json!({}), json!({}), json!({"metadata": {"annotations": {skip: "true"}}})),
        (json!({skip: "true"}), json!({}), json!({skip: "true"}), Value::Null),
        (json!({skip: "false"}), json!({skip: "true"}), json!({skip: "false"}), Value::Null),
        (json!({}), json!({skip: "true"}), json!({skip: "true"}), Value::Null),
        (json!({}), json!({}), json!({skip: "true"}), json!({"metadata": {"annotations": {skip: null}}})),
        (json!({}), json!({evict: "true"}), json!({}), json!({"metadata": {"annotations": {evict: "true"}}})),
        (json!({evict: "true"}), json!({}), json!({}), Value::Null),
    ];
    for (own, template, known, patch) in table {
        let template = json!({"metadata": {"annotations": template}});
        let mut vm = vm(&json!({"runStrategy": "Always", "template": template}), &json!({"runStrategy": "Always"}));
        vm.metadata.annotations = serde_json::from_value(own.clone()).unwrap();
        let mut vmi = instance(&vm, "Running");
        let annotations = vmi.metadata.annotations.get_or_insert_default();
        annotations.remove(skip);
        annotations.remove(evict);
        annotations
            .extend(serde_json::from_value::<std::collections::BTreeMap<String, String>>(known.clone()).unwrap());
        for rollout in [RolloutStrategy::LiveUpdate, RolloutStrategy::Stage] {
            assert_eq!(vmi_patch(&with_rollout(&vm, &vmi, &[], rollout)), patch, "{own} {template} {known}");
        }
    }
}

/// A VM whose VMI has volume `a` on a claim, and which then names another one.
fn moved_volume(strategy: Option<&str>) -> (VirtualMachine, VirtualMachineInstance, Vec<Arc<StartRevision>>) {
    let volumes = |claim: &str| json!([{"name": "a", "persistentVolumeClaim": {"claimName": claim}}]);
    let template =
        json!({"spec": {"volumes": volumes("old"), "domain": {"devices": {"disks": [{"name": "a", "disk": {}}]}}}});
    let spec = json!({"runStrategy": "Always", "template": template, "updateVolumesStrategy": strategy});
    let mut first = vm(&spec, &json!({"runStrategy": "Always"}));
    let (vmi, starts) = (instance(&first, "Running"), records(&decided(&first, None)));
    first.spec.template.spec.as_mut().unwrap().volumes = serde_json::from_value(volumes("new")).unwrap();
    (first, vmi, starts)
}

#[test]
fn other_claim_of_a_volume_is_a_move_or_a_restart() {
    let claim = json!({"metadata": {"name": "new"}, "spec": {}, "status": {"phase": "Bound"}});
    let claim: k8s_openapi::api::core::v1::PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
    let there = BTreeMap::from([("new".to_owned(), Arc::new(CachedClaim::from(claim)))]);
    let (live, stage) = (RolloutStrategy::LiveUpdate, RolloutStrategy::Stage);
    let generic = "a non-live-updatable field was changed in the template spec";
    // Strategy, rollout strategy, claims, in a migration; the VMI's claims change, a text of the VM's conditions.
    for (strategy, rollout, claims, is_migrated, moves, shown) in [
        (None, live, &there, false, false, generic),
        (Some("Replacement"), live, &there, false, false, generic),
        (Some("Migration"), stage, &there, false, false, generic),
        (Some("Migration"), live, &there, false, true, ""),
        (Some("Migration"), live, &NO_CLAIMS, false, false, ""),
        (
            Some("Migration"),
            live,
            &there,
            true,
            false,
            "error encountered while handling volumes update requests: volumes cannot be updated while the VMI is migrating",
        ),
    ] {
        let (vm, vmi, starts) = moved_volume(strategy);
        let config = ClusterConfig { vm_rollout_strategy: rollout, ..ClusterConfig::default() };
        let decision = decide(&Observed {
            starts: starts.to_vec(),
            claims: claims.clone(),
            is_migrated,
            ..observed(&vm, Some(&vmi), None, &config)
        })
        .unwrap();
        let patch = vmi_patch(&decision);
        let row = format!("{strategy:?} {rollout:?} {is_migrated}");
        assert_eq!(patch["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "new", moves, "{row} {patch}");
        assert_eq!(patch["status"]["migratedVolumes"].is_array(), moves, "{row} {patch}");
        let conditions = status_patch(&decision)["conditions"].to_string();
        let is_plain = !conditions.contains("RestartRequired") && !conditions.contains("Failure");
        assert!(if shown.is_empty() { is_plain } else { conditions.contains(shown) }, "{row} {conditions}");
    }
}

#[test]
fn vmi_that_has_moved_needs_no_restart() {
    let (vm, mut vmi, starts) = moved_volume(Some("Replacement"));
    vmi.spec.volumes.clone_from(&vm.spec.template.spec.as_ref().unwrap().volumes);
    let decision = with_rollout(&vm, &vmi, &starts, RolloutStrategy::LiveUpdate);
    let conditions = status_patch(&decision)["conditions"].to_string();
    assert!(!conditions.contains("RestartRequired"), "{conditions}");
}

#[test]
fn interrupted_move_blocks_the_start_until_somebody_decides() {
    let (mut vm, ..) = moved_volume(Some("Migration"));
    let state = json!({"volumeMigrationState": {"migratedVolumes": [
        {"volumeName": "a", "sourcePVCInfo": {"claimName": "old"}, "destinationPVCInfo": {"claimName": "new"}},
    ]}});
    let conditions = json!([{"type": "VolumesChange", "status": "True"}]);
    vm.status = serde_json::from_value(json!({"volumeUpdateState": state, "conditions": conditions})).unwrap();
    let decision = decided(&vm, None);
    assert!(!creates(&decision));
    assert!(status_patch(&decision)["conditions"].to_string().contains("ManualRecoveryRequired"));
    vm.spec.update_volumes_strategy = None;
    assert!(creates(&decided(&vm, None)));
}

/// A field that changes alone waits for the next start, unless its row names other effects.
#[test]
fn each_field_has_the_effect_of_its_row() {
    let full = include_str!("../../../../api/tests/data/virtualmachineinstance.json");
    let mut full: Value = serde_json::from_str::<Value>(full).unwrap()["spec"].take();
    let volume = full["volumes"][0].as_object_mut().unwrap();
    // A claim that is not plugged. A second source would hide it.
    volume.retain(|source, _| !["memoryDump", "dataVolume"].contains(&source.as_str()));
    volume["persistentVolumeClaim"]["hotpluggable"] = json!(false);
    let first = vm(&json!({"runStrategy": "Always", "template": {"spec": full}}), &json!({"runStrategy": "Always"}));
    let vmi = instance(&first, "Running");
    let starts = records(&decided(&first, None));
    let mut wrong = Vec::new();
    // A volume is plugged, and the only driver of a file system is required.
    let is_alone = |field: &&fields::Field| !field.path.contains("memoryDump") && !field.path.ends_with(".virtiofs");
    for field in fields::FIELDS.iter().filter(|field| field.refusal.is_none()).filter(is_alone) {
        let expected = match field.changes {
            [] => true,
            [fields::Change { effect: fields::Effect::Recorded, .. }] => false,
            // The effect depends on other fields.
            _ => continue,
        };
        let mut next = serde_json::to_value(&first).unwrap();
        let path = field.name().replace("[]", "/0").replace('.', "/");
        let (holder, key) =
            path.rsplit_once('/').map_or((String::new(), path.as_str()), |(holder, key)| (format!("/{holder}"), key));
        let holder = next["spec"]["template"]["spec"].pointer_mut(&holder).unwrap();
        match holder.pointer_mut(&format!("/{key}")).unwrap_or_else(|| panic!("{path}")) {
            Value::String(text) => text.push('x'),
            Value::Bool(is_on) => *is_on = !*is_on,
            Value::Number(number) => *number = number.as_u64().map_or(1, |number| number ^ 1).into(),
            _ => assert!(holder.as_object_mut().unwrap().remove(key).is_some()),
        }
        let vm: VirtualMachine = serde_json::from_value(next).unwrap();
        let status = status_patch(&with_rollout(&vm, &vmi, &starts, RolloutStrategy::LiveUpdate));
        if status["conditions"].to_string().contains("RestartRequired") != expected {
            wrong.push(field.path);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
