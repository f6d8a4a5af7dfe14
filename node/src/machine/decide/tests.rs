//! What is decided, by tables of what is known.

use std::sync::Arc;

use api::VirtualMachineInstance;
use protocol::{GuestPanic, Lifecycle, MachineState};
use serde_json::json;

use super::*;
use crate::machine::{
    host::{ConnectError, NetworkFailure},
    state::{Failure, Outcome, Stage},
};

const NODE: &str = "n1";

fn vmi(phase: &str) -> VirtualMachineInstance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "m", "namespace": "ns", "uid": "u", "resourceVersion": "1"},
        "spec": {"domain": {"devices": {}}, "terminationGracePeriodSeconds": 60},
        "status": {"phase": phase, "activePods": {"pod-1": NODE}},
    }))
    .unwrap()
}

fn at(seconds: u64) -> Now {
    Now {
        since_start: Duration::from_secs(seconds),
        wall: jiff::Timestamp::from_second(1_800_000_000 + seconds as i64).unwrap(),
    }
}

fn state(lifecycle: Lifecycle, reason: &str) -> MachineState {
    let mut state = MachineState { reason: reason.into(), acpi: true, ..MachineState::default() };
    state.set_lifecycle(lifecycle);
    state
}

/// A machine with a connection, greeted and with its network.
fn prepared(phase: &str, lifecycle: Lifecycle, reason: &str) -> Machine {
    let mut machine = Machine::new(Arc::new(vmi(phase)), NODE);
    machine.link = Link::Up { connection: 1, greeted: true, networked: true, synced: None };
    machine.hear(state(lifecycle, reason), at(0));
    machine
}

/// The same, recorded as running and settled.
fn live() -> Machine {
    let mut machine = prepared("Running", Lifecycle::Running, "booted");
    machine.link = Link::Up { connection: 1, greeted: true, networked: true, synced: Some(machine.facts.fingerprint) };
    settle(&mut machine);
    machine
}

/// Takes the status that is wanted as written.
fn settle(machine: &mut Machine) {
    if let Some(wanted) = status::wanted(machine, at(0)) {
        let mut written = (*machine.vmi).clone();
        written.status = Some(wanted.status);
        machine.see(Arc::new(written), NODE);
    }
    machine.guest_changed_at = None;
}

fn deleting(machine: &mut Machine) {
    let mut vmi = (*machine.vmi).clone();
    vmi.metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
    machine.see(Arc::new(vmi), NODE);
}

/// The effects by name, writes aside.
fn names(decision: &Decision) -> Vec<&'static str> {
    decision
        .effects
        .iter()
        .map(|effect| match effect {
            Effect::Connect { .. } => "connect",
            Effect::Hello => "hello",
            Effect::SetUpNetwork => "network",
            Effect::Sync { .. } => "sync",
            Effect::Shutdown { .. } => "shutdown",
            Effect::Kill => "kill",
            Effect::Finish => "finish",
            Effect::Write(..) => "write",
            Effect::Read => "read",
            Effect::Announce(announcement) => announcement.reason,
            Effect::Retire => "retire",
        })
        .collect()
}

fn written(decision: &Decision) -> Option<&VirtualMachineInstanceStatus> {
    decision.effects.iter().find_map(|effect| match effect {
        Effect::Write(status, _) => Some(&**status),
        _ => None,
    })
}

#[test]
fn a_scheduled_machine_waits_for_its_launchers_socket() {
    let machine = Machine::new(Arc::new(vmi("Scheduling")), NODE);
    assert_eq!(machine.stage(), Stage::Waiting);
    let decision = decide(&machine, at(0));
    assert_eq!(decision.effects, [Effect::Connect { pod: "pod-1".into(), within: CONNECT_WAIT }]);
    let other = Machine::new(Arc::new(vmi("Scheduling")), "n2");
    assert!(decide(&other, at(0)).effects.is_empty(), "its pod is on another node");
}

#[test]
fn nothing_but_hello_is_said_to_a_launcher_that_has_not_answered_to_the_machines_uid() {
    let mut machine = Machine::new(Arc::new(vmi("Scheduling")), NODE);
    machine.learn(Outcome::Connected(Ok(1)), NODE, at(0));
    assert_eq!(names(&decide(&machine, at(0))), ["hello"]);
}

#[test]
fn nothing_is_started_twice() {
    let mut machine = Machine::new(Arc::new(vmi("Scheduling")), NODE);
    for (outcome, expected) in [
        (None, vec!["connect"]),
        (Some(Outcome::Connected(Ok(1))), vec!["hello"]),
        (Some(Outcome::Greeted(1, Ok(()))), vec!["network"]),
        (Some(Outcome::Network(1, Ok(crate::network::PodNetwork::default()))), vec![]),
    ] {
        if let Some(outcome) = outcome {
            machine.learn(outcome, NODE, at(0));
        }
        let decision = decide(&machine, at(0));
        assert_eq!(names(&decision), expected);
        for effect in &decision.effects {
            machine.begin(effect, at(0));
        }
        assert!(decide(&machine, at(0)).effects.is_empty());
    }
    machine.hear(state(Lifecycle::NoDomain, ""), at(0));
    assert_eq!(names(&decide(&machine, at(0))), ["sync"]);
}

#[test]
fn what_happens_to_a_prepared_machine_follows_phase_and_domain() {
    use Lifecycle::{NoDomain, Paused, Running, Shutoff, ShuttingDown, Unspecified};
    let rows: &[(&str, Lifecycle, &str, &[&str])] = &[
        ("Scheduling", NoDomain, "", &["sync"]),
        ("Scheduled", NoDomain, "", &["sync"]),
        ("Scheduled", Unspecified, "", &[]),
        ("Scheduling", Running, "booted", &["write", "sync"]),
        // A start that failed in libvirt leaves a domain that never ran.
        ("Scheduled", Shutoff, "failed", &["sync"]),
        // One that ran is never started a second time.
        ("Running", NoDomain, "", &[]),
        ("Running", Shutoff, "shutdown", &["write"]),
        ("Running", Shutoff, "crashed", &["write"]),
        ("Running", ShuttingDown, "user", &["write"]),
        ("Running", Paused, "user", &["write", "sync"]),
        ("Succeeded", Shutoff, "shutdown", &["finish"]),
        ("Failed", NoDomain, "", &["kill"]),
        ("Failed", Running, "", &["kill", "Deleted"]),
    ];
    for (phase, lifecycle, reason, expected) in rows {
        let machine = prepared(phase, *lifecycle, reason);
        assert_eq!(names(&decide(&machine, at(5))), *expected, "{phase} {lifecycle:?} {reason}");
    }
}

#[test]
fn a_settled_machine_causes_no_effect() {
    let machine = live();
    assert_eq!(machine.stage(), Stage::Live);
    assert_eq!(decide(&machine, at(0)), Decision::default());
    assert_eq!(decide(&machine, at(100_000)), Decision::default());
}

#[test]
fn a_changed_spec_is_synchronized_once() {
    let mut machine = live();
    let mut vmi = (*machine.vmi).clone();
    vmi.metadata.annotations.get_or_insert_default().insert("a".into(), "b".into());
    machine.see(Arc::new(vmi), NODE);
    let decision = decide(&machine, at(1));
    assert_eq!(names(&decision), ["sync"]);
    machine.begin(&decision.effects[0], at(1));
    machine.learn(Outcome::Synced(1, machine.facts.fingerprint, Ok(false)), NODE, at(2));
    assert!(decide(&machine, at(2)).effects.is_empty());
}

#[test]
fn failed_synchronizations_back_off_up_to_a_minute() {
    let mut machine = prepared("Scheduled", Lifecycle::NoDomain, "");
    let mut now = 0;
    let mut waits = Vec::new();
    for _ in 0..9 {
        let decision = decide(&machine, at(now));
        assert!(names(&decision).contains(&"sync"), "{now}: {decision:?}");
        machine.begin(&Effect::Sync { fingerprint: 1 }, at(now));
        let refused =
            crate::launcher::LauncherError::Refused { call: "Sync", message: "no disk".into(), irrecoverable: false };
        machine.learn(Outcome::Synced(1, 1, Err(refused)), NODE, at(now));
        settle(&mut machine);
        let wake = decide(&machine, at(now)).wake_at.unwrap().as_secs();
        waits.push(wake - now);
        now = wake;
    }
    assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
}

#[test]
fn a_deleted_machine_is_asked_repeatedly_and_forced_when_its_time_is_over() {
    let mut machine = live();
    deleting(&mut machine);
    let first = decide(&machine, at(100));
    assert_eq!(names(&first), ["shutdown", "ShuttingDown"]);
    assert_eq!(first.effects[0], Effect::Shutdown { grace: 60 });
    machine.begin(&first.effects[0], at(100));
    assert!(decide(&machine, at(100)).effects.is_empty());
    machine.learn(Outcome::Signalled(Ok(())), NODE, at(100));
    assert!(decide(&machine, at(104)).effects.is_empty());
    let second = decide(&machine, at(105));
    assert_eq!(second.effects, [Effect::Shutdown { grace: 55 }]);
    machine.begin(&second.effects[0], at(105));
    machine.learn(Outcome::Signalled(Ok(())), NODE, at(105));
    machine.hear(state(Lifecycle::ShuttingDown, "user"), at(106));
    let waiting = decide(&machine, at(150));
    assert!(waiting.effects.is_empty(), "a guest that shuts down is left alone");
    assert_eq!(waiting.wake_at, Some(Duration::from_secs(162)));
    assert_eq!(names(&decide(&machine, at(162))), ["kill", "Deleted"]);
}

#[test]
fn a_launcher_that_did_not_answer_to_the_machines_uid_is_never_told_to_end_it() {
    for phase in ["Running", "Failed"] {
        let mut machine = prepared(phase, Lifecycle::Running, "");
        machine.link = Link::Up { connection: 1, greeted: false, networked: false, synced: None };
        machine.busy.hello = true;
        deleting(&mut machine);
        assert!(!names(&decide(&machine, at(0))).iter().any(|name| ["shutdown", "kill", "finish"].contains(name)));
        machine.presence = Presence::Deleted(Duration::ZERO);
        assert!(decide(&machine, at(29)).effects.is_empty());
        assert_eq!(names(&decide(&machine, at(30))), ["retire"]);
    }
}

#[test]
fn without_grace_the_machine_is_stopped_at_once() {
    let mut machine = live();
    machine.facts.grace = 0;
    machine.facts.deleting = true;
    assert_eq!(names(&decide(&machine, at(0))), ["kill", "Deleted"]);
}

#[test]
fn a_machine_deleted_before_its_start_is_released() {
    let mut machine = prepared("Scheduling", Lifecycle::NoDomain, "");
    deleting(&mut machine);
    assert_eq!(names(&decide(&machine, at(0))), ["kill"]);
    machine.begin(&Effect::Kill, at(0));
    machine.learn(Outcome::Signalled(Ok(())), NODE, at(0));
    assert_eq!(names(&decide(&machine, at(0))), ["finish"]);
    machine.begin(&Effect::Finish, at(0));
    machine.learn(Outcome::Finished(Ok(())), NODE, at(0));
    machine.lose(1, at(1));
    assert!(decide(&machine, at(1)).effects.is_empty());
    machine.presence = Presence::Deleted(Duration::from_secs(2));
    assert_eq!(names(&decide(&machine, at(2))), ["retire"]);
}

#[test]
fn the_launcher_is_released_only_after_the_end_was_recorded() {
    let mut machine = live();
    deleting(&mut machine);
    machine.hear(state(Lifecycle::Shutoff, "shutdown"), at(10));
    let decision = decide(&machine, at(10));
    assert_eq!(names(&decision), ["write"]);
    assert_eq!(written(&decision).unwrap().phase, Some(Phase::Succeeded));
    settle(&mut machine);
    assert_eq!(names(&decide(&machine, at(11))), ["finish"]);
}

#[test]
fn an_object_that_is_no_longer_shown_is_asked_for_before_its_machine_is_stopped() {
    let mut machine = live();
    machine.presence = Presence::Unseen;
    assert_eq!(names(&decide(&machine, at(0))), ["read"]);
    machine.learn(Outcome::Read(Ok(None)), NODE, at(1));
    assert_eq!(names(&decide(&machine, at(1))), ["shutdown", "ShuttingDown"]);
}

#[test]
fn the_answer_to_a_write_does_not_bring_back_an_object_that_has_gone() {
    let mut machine = live();
    machine.busy.record = true;
    machine.presence = Presence::Unseen;
    machine.learn(Outcome::Written(Ok(machine.vmi.clone()), Vec::new()), NODE, at(1));
    assert_eq!(names(&decide(&machine, at(1))), ["read"]);
}

#[test]
fn a_machine_that_belongs_to_another_node_now_is_let_go_untouched() {
    let mut machine = live();
    machine.presence = Presence::Unseen;
    let mut moved = (*machine.vmi).clone();
    moved.metadata.labels.get_or_insert_default().insert("kubevirt.io/nodeName".into(), "n2".into());
    machine.learn(Outcome::Read(Ok(Some(Arc::new(moved)))), NODE, at(1));
    assert_eq!(names(&decide(&machine, at(1))), ["retire"]);
}

#[test]
fn a_lost_machine_fails_after_its_limit_and_not_before() {
    let mut met = live();
    met.lose(1, at(100));
    assert_eq!(names(&decide(&met, at(129))), ["connect"]);
    assert_eq!(decide(&met, at(129)).wake_at, Some(Duration::from_secs(130)));
    let lost = decide(&met, at(130));
    assert_eq!(written(&lost).unwrap().phase, Some(Phase::Failed));

    let never_met = Machine::new(Arc::new(vmi("Running")), NODE);
    assert!(written(&decide(&never_met, at(179))).is_none());
    assert_eq!(written(&decide(&never_met, at(180))).unwrap().phase, Some(Phase::Failed));

    let mut no_pod = Machine::new(Arc::new(vmi("Running")), NODE);
    no_pod.learn(Outcome::Connected(Err(ConnectError::NoPod)), NODE, at(5));
    assert!(written(&decide(&no_pod, at(34))).is_none());
    assert_eq!(written(&decide(&no_pod, at(35))).unwrap().phase, Some(Phase::Failed));
}

#[test]
fn a_machine_that_waits_for_its_pod_is_never_failed_by_the_agent() {
    for phase in ["Scheduling", "Scheduled"] {
        let mut machine = Machine::new(Arc::new(vmi(phase)), NODE);
        machine.learn(Outcome::Connected(Err(ConnectError::NoSocket)), NODE, at(5));
        assert!(written(&decide(&machine, at(100_000))).is_none());
    }
}

#[test]
fn refused_connections_are_tried_again_at_growing_intervals_and_shown_after_a_while() {
    let mut machine = live();
    machine.lose(1, at(100));
    let mut waits = Vec::new();
    let mut now = at(101);
    while now.since_start < Duration::from_secs(112) {
        let decision = decide(&machine, now);
        assert!(written(&decision).is_none() || now.since_start >= Duration::from_secs(111), "{now:?}");
        machine.learn(Outcome::Connected(Err(ConnectError::Refused("nobody listens".into()))), NODE, now);
        let Link::Down { retry_at, .. } = machine.link else { panic!("there is no connection") };
        waits.push((retry_at - now.since_start).as_millis());
        now.since_start = retry_at;
    }
    assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 3200, 3200]);
    let status = written(&decide(&machine, now)).unwrap().clone();
    assert_eq!(status.condition("Synchronized").unwrap().message.as_deref(), Some("nobody listens"));
    assert_eq!(status.phase, Some(Phase::Running));
}

#[test]
fn an_io_error_is_tried_again_at_growing_intervals() {
    let mut machine = live();
    machine.hear(state(Lifecycle::Paused, "ioError"), at(100));
    settle(&mut machine);
    assert!(decide(&machine, at(109)).effects.is_empty());
    let mut now = 110;
    for wait in [20, 40, 80, 160, 180, 180] {
        assert_eq!(names(&decide(&machine, at(now))), ["sync"]);
        machine.begin(&Effect::Sync { fingerprint: 1 }, at(now));
        machine.learn(Outcome::Synced(1, machine.facts.fingerprint, Ok(false)), NODE, at(now));
        assert_eq!(decide(&machine, at(now)).wake_at, Some(Duration::from_secs(now + wait)));
        now += wait;
    }
    machine.hear(state(Lifecycle::Running, ""), at(now));
    settle(&mut machine);
    assert!(decide(&machine, at(now)).effects.is_empty());
}

#[test]
fn what_the_guest_does_is_written_after_it_settled_and_not_too_often() {
    let mut machine = live();
    let mut agent = state(Lifecycle::Running, "booted");
    agent.guest_agent_connected = true;
    machine.hear(agent.clone(), at(100));
    assert!(decide(&machine, at(100)).effects.is_empty());
    let decision = decide(&machine, at(101));
    assert_eq!(names(&decision), ["write"]);
    let mut next = (*machine.vmi).clone();
    next.status = written(&decision).cloned();
    machine.begin(&decision.effects[0], at(101));
    machine.learn(Outcome::Written(Ok(Arc::new(next)), Vec::new()), NODE, at(101));
    agent.memory_current = 1 << 30;
    machine.hear(agent, at(102));
    assert!(decide(&machine, at(104)).effects.is_empty());
    assert_eq!(decide(&machine, at(104)).wake_at, Some(Duration::from_secs(111)));
    assert_eq!(names(&decide(&machine, at(111))), ["write"]);
}

#[test]
fn a_write_that_fails_is_tried_again_later_and_a_conflict_reads_first() {
    let mut machine = prepared("Scheduling", Lifecycle::Running, "booted");
    machine.link = Link::Up { connection: 1, greeted: true, networked: true, synced: Some(machine.facts.fingerprint) };
    let write = crate::machine::records::WriteError::Other("server is away".into());
    machine.learn(Outcome::Written(Err(write), Vec::new()), NODE, at(10));
    assert!(decide(&machine, at(10)).effects.is_empty());
    assert_eq!(names(&decide(&machine, at(11))), ["write"]);
    machine.learn(Outcome::Written(Err(crate::machine::records::WriteError::Conflict), Vec::new()), NODE, at(12));
    assert_eq!(names(&decide(&machine, at(12))), ["read"]);
}

#[test]
fn what_the_guest_does_while_a_write_is_under_way_is_written_with_the_next() {
    let mut machine = live();
    let mut agent = state(Lifecycle::Running, "booted");
    agent.guest_agent_connected = true;
    machine.hear(agent.clone(), at(100));
    let decision = decide(&machine, at(101));
    machine.begin(&decision.effects[0], at(101));
    agent.memory_current = 1 << 30;
    machine.hear(agent, at(102));
    let mut next = (*machine.vmi).clone();
    next.status = written(&decision).cloned();
    machine.learn(Outcome::Written(Ok(Arc::new(next)), Vec::new()), NODE, at(103));
    assert!(decide(&machine, at(104)).effects.is_empty());
    assert_eq!(names(&decide(&machine, at(113))), ["write"]);
}

#[test]
fn a_launcher_that_accepts_the_machine_and_hangs_up_again_and_again_is_met_at_growing_intervals() {
    let mut machine = live();
    let mut now = at(100);
    let (mut waits, mut told) = (Vec::new(), Vec::new());
    for connection in 1..=9 {
        machine.learn(Outcome::Connected(Ok(connection)), NODE, now);
        machine.learn(Outcome::Greeted(connection, Ok(())), NODE, now);
        told.extend(machine.learn(Outcome::Synced(connection, 0, Ok(true)), NODE, now));
        machine.lose(connection, now);
        let Link::Down { retry_at, .. } = machine.link else { panic!("there is a connection") };
        waits.push((retry_at - now.since_start).as_millis());
        now.since_start = retry_at;
    }
    assert_eq!(waits, [50, 100, 200, 400, 800, 1600, 3200, 6400, 6400]);
    assert_eq!(told, [Announcement::normal("Created", "VirtualMachineInstance defined.")], "once");
    // One that lasts makes up for those before it.
    machine.learn(Outcome::Connected(Ok(10)), NODE, now);
    now.since_start += Duration::from_secs(10);
    machine.lose(10, now);
    let Link::Down { retry_at, .. } = machine.link else { panic!("there is a connection") };
    assert_eq!(retry_at - now.since_start, Duration::from_millis(50));
}

#[test]
fn a_launcher_that_has_given_up_fails_the_machine_with_its_words() {
    let mut machine = prepared("Scheduled", Lifecycle::NoDomain, "");
    machine.report.as_mut().unwrap().failure = "no firmware".into();
    let decision = decide(&machine, at(0));
    assert_eq!(names(&decision), ["write"]);
    let status = written(&decision).unwrap();
    assert_eq!(status.phase, Some(Phase::Failed));
    assert_eq!(status.condition("Synchronized").unwrap().message.as_deref(), Some("no firmware"));
}

#[test]
fn requests_need_a_launcher_and_a_guest() {
    assert!(admit(&live(), Request::Pause).is_ok());
    let idle = prepared("Scheduled", Lifecycle::NoDomain, "");
    assert!(matches!(admit(&idle, Request::Reset), Err(Refusal::NotRunning)));
    let mut alone = live();
    alone.lose(1, at(1));
    let refusal = admit(&alone, Request::Unpause).unwrap_err();
    assert_eq!(refusal.to_string(), "No command socket found for vmi u");
}

#[test]
fn an_older_version_of_the_object_is_ignored() {
    let mut machine = live();
    let mut newer = (*machine.vmi).clone();
    newer.metadata.resource_version = Some("20".into());
    machine.see(Arc::new(newer), NODE);
    let mut older = vmi("Scheduling");
    older.metadata.resource_version = Some("9".into());
    machine.see(Arc::new(older), NODE);
    assert_eq!(machine.facts.phase, Phase::Running);
}

#[test]
fn a_failure_that_cannot_be_helped_is_not_tried_again() {
    let mut machine = prepared("Scheduled", Lifecycle::NoDomain, "");
    machine.failure = Some(Failure { message: "bad".into(), count: 1, retry_at: Duration::ZERO, hopeless: true });
    assert_eq!(names(&decide(&machine, at(10))), ["write"]);
}

#[test]
fn a_guest_that_stops_again_soon_waits_longer_and_one_that_ran_on_starts_anew() {
    let paused = || state(Lifecycle::Paused, "ioError");
    let running = || state(Lifecycle::Running, "unpaused");
    let retry_at = |machine: &Machine| machine.io_pause.map(|pause| pause.retry_at.as_secs());
    let mut machine = live();
    machine.hear(paused(), at(100));
    assert_eq!(retry_at(&machine), Some(110));
    let fingerprint = machine.facts.fingerprint;
    machine.learn(Outcome::Synced(1, fingerprint, Ok(false)), NODE, at(110));
    machine.hear(running(), at(110));
    settle(&mut machine);
    assert!(!names(&decide(&machine, at(140))).contains(&"sync"), "it runs");
    machine.hear(paused(), at(112));
    assert_eq!(retry_at(&machine), Some(132), "the second attempt waits longer");
    machine.hear(running(), at(140));
    machine.hear(paused(), at(180));
    assert_eq!(retry_at(&machine), Some(190), "that was another trouble");
}

#[test]
fn users_read_which_disk_stopped_a_guest() {
    let mut machine = live();
    let mut vmi = (*machine.vmi).clone();
    vmi.spec.volumes = serde_json::from_value(json!([{"name": "root"}, {"name": "data"}, {"name": "idle"}])).unwrap();
    machine.see(Arc::new(vmi), NODE);
    let mut report = state(Lifecycle::Paused, "ioError");
    report.disk_errors = [("data", true), ("root", false), ("unknown", true)]
        .map(|(volume, no_space)| protocol::DiskError { volume: volume.into(), no_space })
        .to_vec();
    machine.hear(report, at(100));
    let told = |machine: &Machine| -> Vec<String> {
        let wanted = status::wanted(machine, at(100));
        let list = wanted.into_iter().flat_map(|wanted| wanted.announcements);
        list.filter(|news| news.reason == "IOerror").map(|news| news.message).collect()
    };
    assert_eq!(
        told(&machine),
        ["VM Paused due to IO error at the volume: root", "VM Paused due to not enough space on volume: data",]
    );
    settle(&mut machine);
    assert!(told(&machine).is_empty(), "once");
}

#[test]
fn a_guest_that_runs_outlives_a_synchronization_that_is_refused() {
    let refusal = || crate::launcher::LauncherError::Refused {
        call: "Sync",
        message: "cannot be read".into(),
        irrecoverable: true,
    };
    for (mut machine, phase) in [(live(), None), (prepared("Scheduled", Lifecycle::NoDomain, ""), Some(Phase::Failed))]
    {
        machine.learn(Outcome::Synced(1, 0, Err(refusal())), NODE, at(10));
        let status = status::wanted(&machine, at(10)).unwrap().status;
        assert_eq!(status.condition("Synchronized").unwrap().message.as_deref(), Some("cannot be read"));
        match phase {
            Some(phase) => assert_eq!(status.phase, Some(phase)),
            None => assert_eq!(status.phase, Some(Phase::Running)),
        }
    }
}

#[test]
fn a_guest_that_runs_outlives_a_network_that_an_agent_finds_fault_with_when_it_starts_again() {
    let failure = || NetworkFailure { message: "that many ports are not supported".into(), permanent: true };
    let mut machine = Machine::new(Arc::new(vmi("Running")), NODE);
    machine.learn(Outcome::Connected(Ok(1)), NODE, at(1));
    machine.learn(Outcome::Greeted(1, Ok(())), NODE, at(1));
    machine.learn(Outcome::Network(1, Err(failure())), NODE, at(1));
    let phase = |decision: &Decision| written(decision).and_then(|status| status.phase.clone());
    assert_eq!(phase(&decide(&machine, at(1))), Some(Phase::Running), "before the launcher has told anything");
    machine.hear(state(Lifecycle::Running, "booted"), at(2));
    let decision = decide(&machine, at(3));
    assert_eq!(phase(&decision), Some(Phase::Running));
    assert!(names(&decision).contains(&"network"), "tried again");
    let mut starting = prepared("Scheduled", Lifecycle::NoDomain, "");
    starting.learn(Outcome::Network(1, Err(failure())), NODE, at(1));
    assert_eq!(phase(&decide(&starting, at(1))), Some(Phase::Failed));
}

#[test]
fn a_crash_of_the_guests_kernel_is_told_once() {
    for (kind, values, text) in [
        ("", &[] as &[&str], "GuestPanicked (details unavailable)"),
        ("tdx", &[], "GuestPanicked: type=tdx"),
        ("hyper-v", &["0xd1", "0x0"], "GuestPanicked: '0xd1', '0x0'"),
    ] {
        let values = values.iter().map(|value| (*value).to_owned()).collect();
        let mut crashed = state(Lifecycle::Crashed, "panicked");
        crashed.guest_panic = Some(GuestPanic { kind: kind.to_owned(), values });
        let mut machine = live();
        assert_eq!(machine.hear(crashed.clone(), at(100)), [Announcement::warning("GuestPanicked", text)]);
        assert!(machine.hear(crashed.clone(), at(101)).is_empty());
        machine.hear(state(Lifecycle::Running, "booted"), at(102));
        assert!(machine.hear(crashed.clone(), at(103)).is_empty(), "taken back and told again");
        let mut machine = prepared("Failed", Lifecycle::Crashed, "panicked");
        machine.report = None;
        assert!(machine.hear(crashed, at(100)).is_empty(), "of the agent before this one");
    }
}

#[test]
fn a_guest_agent_that_ceases_to_answer_probes_is_told_a_time_a_minute() {
    let mut machine = live();
    let mut report = state(Lifecycle::Running, "booted");
    machine.hear(report.clone(), at(100));
    let text = format!("GuestAgentPing probe failed for VMI {}", machine.vmi.metadata.name.as_deref().unwrap());
    let told = vec![Announcement::warning("GuestAgentPingFailed", text)];
    // At most one a minute, however often the launcher counts.
    for (second, silences, news) in
        [(101, 1, true), (170, 1, false), (171, 2, true), (172, 3, false), (240, 0, false), (241, 1, true)]
    {
        report.silences = silences;
        let expected = if news { told.clone() } else { Vec::new() };
        assert_eq!(machine.hear(report.clone(), at(second)), expected, "{silences} at {second}");
    }
}
