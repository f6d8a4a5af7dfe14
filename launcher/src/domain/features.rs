//! Hypervisor features, clock and timers.

use std::path::{Component, Path};

use api::{
    VirtualMachineInstance, dedicated, tsc,
    vmi::features::{FeatureHyperv, FeatureState},
};

use super::{DomainError, given, on_off, xml::Element, yes_no};

fn is_on(enabled: Option<bool>) -> bool {
    enabled.unwrap_or(true)
}

/// Renders the `<features>` element. A VMI without features has none, not even ACPI, except those that follow from its CPUs.
/// Enlightenments of Hyper-V are features of KVM: an emulated guest starts without them.
pub(super) fn features(vmi: &VirtualMachineInstance, kvm: bool) -> Result<Element, DomainError> {
    // libvirt selects version 2 under emulation, which has 8 vCPUs at most.
    let gic = vmi.spec.is_arm64().then(|| Element::new("gic").with("version", "3"));
    let element = Element::new("features").children(gic);
    let cpu = vmi.spec.domain.cpu.as_ref();
    let pmu = cpu.and_then(|cpu| cpu.realtime.as_ref()).map(|_| Element::new("pmu").with("state", "off"));
    // KVM's guest learns that its vCPUs are not preempted.
    let hint =
        (kvm && dedicated::is_dedicated(&vmi.spec.domain)).then(|| Element::new("hint-dedicated").with("state", "on"));
    let Some(features) = &vmi.spec.domain.features else {
        return Ok(element.children(hint.map(|hint| Element::new("kvm").child(hint))).children(pmu));
    };
    let apic = features.apic.as_ref().filter(|apic| is_on(apic.enabled));
    let has_smm = features.smm.as_ref().is_some_and(FeatureState::is_enabled);
    let hidden = features.kvm.as_ref().map(|kvm| Element::new("hidden").with("state", on_off(kvm.hidden)));
    let of_kvm = (hidden.is_some() || hint.is_some()).then(|| Element::new("kvm").children(hidden).children(hint));
    let spinlock = features.pvspinlock.as_ref().map(FeatureState::is_enabled);
    let mut element = element
        .children(features.acpi.is_enabled().then(|| Element::new("acpi")))
        .children(apic.map(|apic| Element::new("apic").with_some("eoi", apic.end_of_interrupt.then_some("on"))))
        .children(has_smm.then(|| Element::new("smm").with("state", "on")))
        .children(of_kvm)
        .children(spinlock.map(|on| Element::new("pvspinlock").with("state", on_off(on))))
        .children(pmu);
    if let Some(hyperv) = &features.hyperv {
        let enlightenments = enlightenments(hyperv)?;
        element = element.children(kvm.then_some(enlightenments));
    } else if kvm && features.hyperv_passthrough.as_ref().is_some_and(|passthrough| is_on(passthrough.enabled)) {
        element = element.child(Element::new("hyperv").with("mode", "passthrough"));
    }
    // A port of x86.
    Ok(element.children((!vmi.spec.is_arm64()).then(|| Element::new("vmport").with("state", "off"))))
}

fn enlightenments(hyperv: &FeatureHyperv) -> Result<Element, DomainError> {
    let state = |name, feature: &Option<FeatureState>| {
        feature.as_ref().map(|feature| Element::new(name).with("state", on_off(feature.is_enabled())))
    };
    let mut element =
        Element::new("hyperv").children(state("relaxed", &hyperv.relaxed)).children(state("vapic", &hyperv.vapic));
    if let Some(spinlocks) = &hyperv.spinlocks {
        let on = is_on(spinlocks.enabled);
        let retries = on.then(|| spinlocks.spinlocks.unwrap_or(4096).to_string());
        element = element.child(Element::new("spinlocks").with("state", on_off(on)).with_some("retries", retries));
    }
    element = element
        .children(state("vpindex", &hyperv.vpindex))
        .children(state("runtime", &hyperv.runtime))
        .children(state("synic", &hyperv.synic));
    if let Some(timer) = &hyperv.synictimer {
        element = element.child(
            Element::new("stimer").with("state", on_off(is_on(timer.enabled))).children(state("direct", &timer.direct)),
        );
    }
    element = element.children(state("reset", &hyperv.reset));
    if let Some(vendor) = &hyperv.vendorid {
        let on = is_on(vendor.enabled);
        let id = vendor.vendorid.as_deref().unwrap_or_default();
        if on && (id.is_empty() || id.len() > 12 || id.contains(',')) {
            let value = id.to_owned();
            return Err(DomainError::Unsupported { field: "spec.domain.features.hyperv.vendorid", value });
        }
        element =
            element.child(Element::new("vendor_id").with("state", on_off(on)).with_some("value", on.then_some(id)));
    }
    element = element
        .children(state("frequencies", &hyperv.frequencies))
        .children(state("reenlightenment", &hyperv.reenlightenment));
    if let Some(flush) = &hyperv.tlbflush {
        element = element.child(
            Element::new("tlbflush")
                .with("state", on_off(is_on(flush.enabled)))
                .children(state("direct", &flush.direct))
                .children(state("extended", &flush.extended)),
        );
    }
    Ok(element.children(state("ipi", &hyperv.ipi)).children(state("evmcs", &hyperv.evmcs)))
}

/// Renders the `<clock>` element, if the VMI has a clock or a TSC frequency.
pub(super) fn clock(vmi: &VirtualMachineInstance, zones: &Path, kvm: bool) -> Result<Option<Element>, DomainError> {
    let counter = tsc::frequency(vmi)
        .map(|frequency| Element::new("timer").with("name", "tsc").with("frequency", frequency.to_string()));
    let Some(clock) = &vmi.spec.domain.clock else {
        return Ok(counter.map(|counter| Element::new("clock").with("offset", "utc").child(counter)));
    };
    let mut element = Element::new("clock");
    if let Some(zone) = given(&clock.timezone) {
        // QEMU silently uses UTC for an unknown zone.
        if !is_zone(zones, zone) {
            return Err(DomainError::Unsupported { field: "spec.domain.clock.timezone", value: zone.to_owned() });
        }
        element = element.with("offset", "timezone").with("timezone", zone);
    } else {
        // Without an offset the guest's changes to its clock are lost at the next start.
        let adjustment = clock.utc.as_ref().map(|utc| match utc.offset_seconds {
            Some(seconds) => seconds.to_string(),
            None => "reset".to_owned(),
        });
        element = if clock.utc.as_ref().is_some_and(|utc| utc.offset_seconds.is_some()) {
            element.with("offset", "variable").with("basis", "utc").with_some("adjustment", adjustment)
        } else {
            element.with("offset", "utc").with_some("adjustment", adjustment)
        };
    }
    let Some(timer) = &clock.timer else { return Ok(Some(element.children(counter))) };
    let one = |name: &str, present: Option<bool>, policy: Option<&String>, track: Option<&String>| {
        Element::new("timer")
            .with("name", name)
            .with_some("tickpolicy", policy.filter(|p| !p.is_empty()))
            .with_some("track", track.filter(|t| !t.is_empty()))
            .with("present", yes_no(is_on(present)))
    };
    element = element
        .children(timer.rtc.as_ref().map(|t| one("rtc", t.present, t.tick_policy.as_ref(), t.track.as_ref())))
        .children(timer.pit.as_ref().map(|t| one("pit", t.present, t.tick_policy.as_ref(), None)))
        .children(timer.kvm.as_ref().map(|t| one("kvmclock", t.present, None, None)))
        .children(timer.hpet.as_ref().map(|t| one("hpet", t.present, t.tick_policy.as_ref(), None)))
        .children(timer.hyperv.as_ref().filter(|_| kvm).map(|t| one("hypervclock", t.present, None, None)))
        .children(counter);
    Ok(Some(element))
}

/// Accepts the name of a time zone in the directory, and no path outside of it.
fn is_zone(zones: &Path, name: &str) -> bool {
    let plain = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    plain && zones.join(name).is_file()
}
