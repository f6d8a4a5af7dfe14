use super::*;

fn preset(name: &str, domain: Value) -> VirtualMachineInstancePreset {
    let mut domain = domain;
    domain.as_object_mut().unwrap().entry("devices").or_insert(json!({}));
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstancePreset",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"os": "windows"}}, "domain": domain},
    }))
    .unwrap()
}

fn vmi(domain: Value) -> VirtualMachineInstance {
    let mut domain = domain;
    domain.as_object_mut().unwrap().entry("devices").or_insert(json!({}));
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "m", "labels": {"os": "windows"}},
        "spec": {"domain": domain},
    }))
    .unwrap()
}

/// Returns the VMI's domain after a preset, without fields that are always written, and true if the preset is recorded.
fn applied(domain: Value, preset_domain: Value) -> (Value, bool) {
    let mut vmi = vmi(domain);
    let warnings = apply(&mut vmi, &[preset("p", preset_domain)]).unwrap();
    let recorded = vmi.metadata.annotations.clone().unwrap_or_default();
    let recorded = recorded.get("virtualmachinepreset.kubevirt.io/p").is_some_and(|value| value == "kubevirt.io/v1");
    assert_eq!(warnings, if recorded { vec![DEPRECATED.to_owned()] } else { vec![] });
    let mut domain = serde_json::to_value(&vmi.spec.domain).unwrap();
    for field in ["devices", "resources"] {
        if domain[field] == json!({}) {
            domain.as_object_mut().unwrap().remove(field);
        }
    }
    (domain, recorded)
}

#[test]
fn groups_are_applied_unless_the_vmi_has_them() {
    for group in [
        json!({"resources": {"requests": {"memory": "1Gi"}}}),
        json!({"cpu": {"cores": 2}}),
        json!({"firmware": {"serial": "s"}}),
        json!({"clock": {"utc": {}}}),
        json!({"clock": {"timer": {"hpet": {"present": false}}}}),
        json!({"features": {"acpi": {}, "smm": {}}}),
        json!({"devices": {"watchdog": {"name": "w", "i6300esb": {}}}}),
        json!({"ioThreadsPolicy": "shared"}),
    ] {
        assert_eq!(applied(json!({}), group.clone()), (group, true));
    }
}

#[test]
fn other_fields_of_a_preset_are_not_applied() {
    let rest = json!({
        "devices": {"disks": [{"name": "d"}], "rng": {}}, "machine": {"type": "q35"}, "memory": {"guest": "1Gi"},
        "resources": {"limits": {"memory": "1Gi"}},
    });
    assert_eq!(applied(json!({}), rest), (json!({}), false));
}

#[test]
fn fields_of_the_vmi_take_precedence() {
    for (own, preset_domain, recorded) in [
        (json!({"cpu": {"cores": 1}}), json!({"cpu": {"cores": 2}}), false),
        (json!({"cpu": {"cores": 2}}), json!({"cpu": {"cores": 2}}), true),
        (
            json!({"resources": {"requests": {"cpu": "1"}}}),
            json!({"resources": {"requests": {"memory": "1Gi"}}}),
            false,
        ),
        (
            json!({"resources": {"requests": {"memory": "1024Mi"}}}),
            json!({"resources": {"requests": {"memory": "1Gi"}}}),
            true,
        ),
        (json!({"clock": {"utc": {}}}), json!({"clock": {"timezone": "Europe/Rome"}}), false),
        (json!({"ioThreadsPolicy": "auto"}), json!({"ioThreadsPolicy": "shared"}), false),
    ] {
        assert_eq!(applied(own.clone(), preset_domain), (own, recorded));
    }
    // A clock without timers gets timers, and keeps its base.
    assert_eq!(
        applied(
            json!({"clock": {"utc": {}}}),
            json!({"clock": {"timezone": "Europe/Rome", "timer": {"pit": {"tickPolicy": "delay"}}}})
        ),
        (json!({"clock": {"utc": {}, "timer": {"pit": {"tickPolicy": "delay"}}}}), true)
    );
}

#[test]
fn applying_twice_changes_nothing_more() {
    let presets = [preset("a", json!({"cpu": {"cores": 2}})), preset("b", json!({"ioThreadsPolicy": "shared"}))];
    let mut once = vmi(json!({}));
    apply(&mut once, &presets).unwrap();
    let mut twice = once.clone();
    apply(&mut twice, &presets).unwrap();
    assert_eq!(once, twice);
    assert_eq!(once.metadata.annotations.unwrap().len(), 2);
}

#[test]
fn presets_apply_if_they_match_and_the_vmi_does_not_exclude_them() {
    let mut other = vmi(json!({}));
    other.metadata.labels = None;
    assert_eq!(apply(&mut other, &[preset("p", json!({"cpu": {"cores": 2}}))]), Ok(vec![]));
    assert_eq!(other.spec.domain.cpu, None);

    let mut all = preset("p", json!({"cpu": {"cores": 2}}));
    all.spec.selector = Default::default();
    apply(&mut other, &[all]).unwrap();
    assert!(other.spec.domain.cpu.is_some());

    let mut excluded = vmi(json!({}));
    excluded.metadata.annotations = Some([(annotation::EXCLUDE_PRESETS.to_owned(), "true".to_owned())].into());
    assert_eq!(apply(&mut excluded, &[preset("p", json!({"cpu": {"cores": 2}}))]), Ok(vec![]));
    assert_eq!(excluded.spec.domain.cpu, None);
}

#[test]
fn conflicting_presets_are_refused() {
    let conflict = |one: Value, two: Value| {
        apply(&mut vmi(json!({})), &[preset("b", two), preset("a", one)]).map_err(|error| error.to_string())
    };
    assert_eq!(
        conflict(json!({"ioThreadsPolicy": "auto"}), json!({"ioThreadsPolicy": "shared"})),
        Err("VirtualMachinePresets cannot be applied due to conflicts: presets 'b' and 'a' conflict: \
             spec.ioThreadsPolicy: shared != auto"
            .to_owned())
    );
    assert_eq!(
        conflict(
            json!({"resources": {"requests": {"memory": "1Gi", "cpu": "1"}}}),
            json!({"resources": {"requests": {"memory": "2Gi"}}})
        ),
        Err("VirtualMachinePresets cannot be applied due to conflicts: presets 'b' and 'a' conflict: \
             spec.resources.requests[memory]: 2Gi != 1Gi"
            .to_owned())
    );
    for (one, two) in [
        (json!({"cpu": {"cores": 1}}), json!({"cpu": {"cores": 2}})),
        (json!({"firmware": {"serial": "a"}}), json!({"firmware": {"serial": "b"}})),
        (json!({"clock": {"utc": {}}}), json!({"clock": {"timezone": "UTC"}})),
        (json!({"clock": {"timer": {"hpet": {}}}}), json!({"clock": {"timer": {"rtc": {}}}})),
        (json!({"features": {}}), json!({"features": {"smm": {}}})),
        (json!({"devices": {"watchdog": {"name": "a"}}}), json!({"devices": {"watchdog": {"name": "b"}}})),
    ] {
        assert!(conflict(one.clone(), two.clone()).is_err(), "{one} {two}");
    }
    for (one, two) in [
        (json!({"cpu": {"cores": 1}}), json!({"cpu": {"cores": 1}})),
        (json!({"clock": {"utc": {}}}), json!({"clock": {"timer": {"rtc": {}}}})),
        (json!({"resources": {"requests": {"memory": "1Gi"}}}), json!({"resources": {"requests": {"cpu": "1"}}})),
    ] {
        assert!(conflict(one.clone(), two.clone()).is_ok(), "{one} {two}");
    }
}

#[test]
fn invalid_selector_is_refused() {
    let mut odd = preset("p", json!({}));
    odd.spec.selector =
        serde_json::from_value(json!({"matchExpressions": [{"key": "a", "operator": "Near"}]})).unwrap();
    let refusal = apply(&mut vmi(json!({})), &[odd]).unwrap_err().to_string();
    assert_eq!(refusal, "cannot read the selector of preset 'p': \"Near\" is not a valid label selector operator");
}
