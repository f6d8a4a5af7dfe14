use protocol::{GuestPanic, Lifecycle};

use super::{Table, decide, read};
use crate::{
    engine::model::{Effect, Input, Link, Stage},
    guest_agent::GuestFacts,
    hypervisor::{DiskFailure, DomainFacts, HypervisorError},
};

const CHANGED: Input = Input::DomainChanged { closed: false, crashed: false };

#[test]
fn reads_decide_the_stage() {
    for (facts, stage, effects) in [
        (read(Lifecycle::Running, "unpaused"), Stage::Live, &["attend"][..]),
        (read(Lifecycle::Shutoff, "shutdown"), Stage::Ended, &["attend", "attend"]),
        (read(Lifecycle::Shutoff, "crashed"), Stage::Ended, &["attend", "log last lines", "attend"]),
        (read(Lifecycle::Crashed, "panicked"), Stage::Ended, &["attend", "attend"]),
        (Input::Read(Err(HypervisorError::NoDomain), None), Stage::Ended, &["attend"]),
        (Input::Read(Err(HypervisorError::Timeout("state")), None), Stage::Live, &[]),
        (Input::Read(Err(HypervisorError::Disconnected("x".into())), None), Stage::Live, &["disconnect"]),
    ] {
        let mut table = Table::live();
        assert_eq!(table.take(CHANGED), ["read"]);
        let label = format!("{facts:?}");
        assert_eq!(table.take(facts), effects, "{label}");
        assert_eq!(table.state.base.stage, stage, "{label}");
    }
}

#[test]
fn a_domain_is_read_by_one_call_at_a_time() {
    let mut table = Table::live();
    assert_eq!(table.take(CHANGED), ["read"]);
    assert_eq!(table.take(CHANGED), [""; 0]);
    assert_eq!(table.take(CHANGED), [""; 0]);
    assert_eq!(table.take(read(Lifecycle::Running, "booted")), ["attend", "read"]);
    assert_eq!(table.take(read(Lifecycle::Running, "booted")), ["attend"]);
    assert_eq!(table.after(30), ["read"], "an event may have been missed");
}

#[test]
fn a_lost_connection_is_made_again() {
    let mut table = Table::live();
    assert_eq!(table.take(Input::DomainChanged { closed: true, crashed: false }), ["disconnect"]);
    assert_eq!(table.take(Input::Timer), ["connect"]);
    table.take(Input::Connected(Err(HypervisorError::Timeout("open"))));
    assert!(matches!(table.state.base.link, Link::Down { .. }));
    assert_eq!(table.take(Input::Timer), [""; 0], "after a pause only");
    assert_eq!(table.after(1), ["connect"]);
    assert_eq!(table.take(Input::Connected(Ok(true))), ["read"]);
}

#[test]
fn each_kernel_crash_is_recorded_before_the_domain_is_read() {
    let mut table = Table::live();
    // The first guest writes a dump of its own, and goes on.
    for (number, kind, lifecycle) in [(1, "", Lifecycle::Running), (2, "hyper-v", Lifecycle::Crashed)] {
        assert_eq!(table.take(Input::DomainChanged { closed: false, crashed: true }), ["read crash", "read"]);
        let panic = GuestPanic { kind: kind.into(), values: Vec::new() };
        table.take(Input::Crash(panic.clone()));
        table.take(read(lifecycle, "panicked"));
        let published = &table.state.base.published;
        assert_eq!((published.guest_panics, &published.guest_panic), (number, &Some(panic)));
        assert_eq!(table.take(Input::DomainChanged { closed: false, crashed: true }), ["read"], "too soon");
        table.take(read(lifecycle, "panicked"));
        table.after(1);
    }
    assert_eq!(table.take(CHANGED), ["read"]);
}

#[test]
fn the_guest_agent_is_asked_again_after_a_change_of_the_domain() {
    let mut table = Table::live();
    let mut changes = |lifecycle: Lifecycle, reason: &'static str, link: &str| {
        table.take(CHANGED);
        let Input::Read(Ok(facts), _) = read(lifecycle, reason) else { unreachable!() };
        let interface = format!("<interface><link state='{link}'/><alias name='ua-lan'/></interface></devices>");
        let facts = DomainFacts { xml: facts.xml.replace("</devices>", &interface), ..facts };
        let (state, effects) = decide(&table.state, table.now, Input::Read(Ok(facts), None));
        table.state = state;
        effects.iter().any(|effect| matches!(effect, Effect::AttendGuestAgent { changed: true, .. }))
    };
    for (lifecycle, reason, link, expected) in [
        (Lifecycle::Running, "booted", "up", true),
        (Lifecycle::Running, "booted", "up", false),
        (Lifecycle::Running, "booted", "down", true),
        (Lifecycle::Running, "booted", "down", false),
        (Lifecycle::Paused, "user", "down", true),
        (Lifecycle::Running, "unpaused", "down", true),
    ] {
        assert_eq!(changes(lifecycle, reason, link), expected, "{lifecycle:?} {link}");
    }
}

#[test]
fn the_published_state_follows_the_domain_and_the_guest_agent() {
    let mut table = Table::live();
    let facts =
        Box::new(GuestFacts { file_systems: "thawed".into(), silences: 2, online_vcpus: 1, ..GuestFacts::default() });
    assert!(table.state.base.published.guest_agent_connected);
    table.take(Input::GuestFacts(facts.clone()));
    let published = &table.state.base.published;
    assert_eq!((published.file_systems.as_str(), published.silences, published.online_vcpus), ("thawed", 2, 1));
    // An event about the connection is newer than the XML.
    let Input::Read(Ok(facts_of_domain), _) = read(Lifecycle::Paused, "ioError") else { unreachable!() };
    let disk_errors = vec![("vda".to_owned(), DiskFailure::NoSpace)];
    table.take(CHANGED);
    table.take(Input::Read(Ok(DomainFacts { disk_errors, ..facts_of_domain }), Some(false)));
    let published = &table.state.base.published;
    assert!(!published.guest_agent_connected && published.file_systems.is_empty());
    assert_eq!(published.online_vcpus, 0);
    assert_eq!((published.disk_errors[0].volume.as_str(), published.disk_errors[0].no_space), ("root", true));
    assert_eq!((published.lifecycle(), published.reason.as_str()), (Lifecycle::Paused, "ioError"));
    table.take(Input::GuestFacts(facts));
    assert_eq!(table.state.base.published.file_systems, "");
}

#[test]
fn a_later_worker_knows_that_an_ended_domain_had_acpi() {
    let mut table = Table::live();
    table.take(CHANGED);
    let Input::Read(Ok(facts), _) = read(Lifecycle::Shutoff, "destroyed") else { unreachable!() };
    table.take(Input::Read(Ok(DomainFacts { xml: String::new(), ..facts }), None));
    assert_eq!(table.state.base.stage, Stage::Ended);
    assert!(table.state.base.published.acpi);
}

#[test]
fn a_domain_that_cannot_go_on_is_ended_with_the_reason() {
    let mut table = Table::live();
    assert_eq!(table.take(Input::Lost("no TPM".into())), ["destroy gently"]);
    assert_eq!(table.take(Input::Lost("no TPM again".into())), [""; 0]);
    table.take(CHANGED);
    table.take(Input::Destroyed(Ok(())));
    table.take(read(Lifecycle::Shutoff, "destroyed"));
    assert_eq!(table.state.base.stage, Stage::Ended);
    assert_eq!(table.state.base.published.failure, "no TPM");
    // One that has ended keeps its own reason, and none that has not begun is lost.
    for mut table in [table, Table::new(false)] {
        let before = table.state.base.published.failure.clone();
        assert_eq!(table.take(Input::Lost("late".into())), [""; 0]);
        assert_eq!(table.state.base.published.failure, before);
    }
}
