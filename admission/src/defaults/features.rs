//! Defaults of hypervisor features: a feature without `enabled` is on, and enlightenments enable the ones they require.

use api::vmi::{
    clock::Timer,
    cpu::{Cpu, CpuFeature},
    features::{FeatureHyperv, FeatureState, Features},
};

/// Spinlock retries if the enlightenment is on without a number.
const SPINLOCK_RETRIES: u32 = 4096;

/// Sets the defaults of features. Returns true if all required features are on now.
pub(super) fn set(features: &mut Features, acpi: bool) -> bool {
    features.acpi.enabled.get_or_insert(acpi);
    if let Some(apic) = &mut features.apic {
        apic.enabled.get_or_insert(true);
    }
    for state in [&mut features.smm, &mut features.pvspinlock] {
        on(state);
    }
    features.hyperv.as_mut().is_none_or(enlightenments)
}

/// Sets timers without `present` to present.
pub(super) fn timers(timer: &mut Timer) {
    let present = [
        timer.hpet.as_mut().map(|timer| &mut timer.present),
        timer.hyperv.as_mut().map(|timer| &mut timer.present),
        timer.kvm.as_mut().map(|timer| &mut timer.present),
        timer.pit.as_mut().map(|timer| &mut timer.present),
        timer.rtc.as_mut().map(|timer| &mut timer.present),
    ];
    for present in present.into_iter().flatten() {
        present.get_or_insert(true);
    }
}

/// Requires VMX, which the enlightened VMCS needs.
pub(super) fn require_vmx(cpu: &mut Cpu, features: Option<&Features>) {
    let evmcs = features.and_then(|features| features.hyperv.as_ref()).and_then(|hyperv| hyperv.evmcs.as_ref());
    if !evmcs.is_some_and(FeatureState::is_enabled) {
        return;
    }
    match cpu.features.iter_mut().find(|feature| feature.name == "vmx") {
        Some(vmx) => vmx.policy = Some("require".to_owned()),
        None => {
            cpu.features.push(CpuFeature { name: "vmx".to_owned(), policy: Some("require".to_owned()) });
        }
    }
}

fn on(state: &mut Option<FeatureState>) {
    if let Some(state) = state {
        state.enabled.get_or_insert(true);
    }
}

fn enlightenments(hyperv: &mut FeatureHyperv) -> bool {
    for state in [
        &mut hyperv.evmcs,
        &mut hyperv.frequencies,
        &mut hyperv.ipi,
        &mut hyperv.reenlightenment,
        &mut hyperv.relaxed,
        &mut hyperv.reset,
        &mut hyperv.runtime,
        &mut hyperv.synic,
        &mut hyperv.vapic,
        &mut hyperv.vpindex,
    ] {
        on(state);
    }
    if let Some(spinlocks) = &mut hyperv.spinlocks
        && *spinlocks.enabled.get_or_insert(true)
    {
        spinlocks.spinlocks.get_or_insert(SPINLOCK_RETRIES);
    }
    if let Some(timer) = &mut hyperv.synictimer {
        timer.enabled.get_or_insert(true);
        on(&mut timer.direct);
    }
    if let Some(flush) = &mut hyperv.tlbflush {
        flush.enabled.get_or_insert(true);
        on(&mut flush.direct);
        on(&mut flush.extended);
    }
    if let Some(vendor) = &mut hyperv.vendorid {
        vendor.enabled.get_or_insert(true);
    }

    // Each requires the next. The first one that is explicitly off ends the chain; the rules report it.
    let enabled = |state: &Option<FeatureState>| state.as_ref().is_some_and(FeatureState::is_enabled);
    let timer = hyperv.synictimer.as_ref().is_some_and(|timer| timer.enabled.unwrap_or(true));
    let flush = hyperv.tlbflush.as_ref().is_some_and(|flush| flush.enabled.unwrap_or(true));
    let turned_on = |state: &mut Option<FeatureState>| *state.get_or_insert_default().enabled.get_or_insert(true);
    if enabled(&hyperv.evmcs) && !turned_on(&mut hyperv.vapic) {
        return false;
    }
    if (enabled(&hyperv.ipi) || flush) && !turned_on(&mut hyperv.vpindex) {
        return false;
    }
    if timer && !turned_on(&mut hyperv.synic) {
        return false;
    }
    !enabled(&hyperv.synic) || turned_on(&mut hyperv.vpindex)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn enlightenments_enable_their_dependencies() {
        let mut features: Features = serde_json::from_value(json!({
            "hyperv": {"synictimer": {"direct": {}}, "spinlocks": {}, "evmcs": {}}
        }))
        .unwrap();
        set(&mut features, true);
        assert_eq!(
            serde_json::to_value(&features).unwrap()["hyperv"],
            json!({
                "evmcs": {"enabled": true},
                "spinlocks": {"enabled": true, "spinlocks": 4096},
                "synic": {"enabled": true},
                "synictimer": {"direct": {"enabled": true}, "enabled": true},
                "vapic": {"enabled": true},
                "vpindex": {"enabled": true},
            })
        );
        let mut cpu = Cpu::default();
        require_vmx(&mut cpu, Some(&features));
        assert_eq!(cpu.features[0].name, "vmx");
    }

    #[test]
    fn disabled_features_stay_disabled() {
        let mut features: Features =
            serde_json::from_value(json!({"hyperv": {"synic": {}, "vpindex": {"enabled": false}}})).unwrap();
        set(&mut features, true);
        assert_eq!(features.hyperv.unwrap().vpindex.unwrap().enabled, Some(false));
        let mut features: Features =
            serde_json::from_value(json!({"hyperv": {"evmcs": {}, "vapic": {"enabled": false}, "ipi": {}}})).unwrap();
        assert!(!set(&mut features, true));
        assert!(features.hyperv.unwrap().vpindex.is_none());
    }
}
