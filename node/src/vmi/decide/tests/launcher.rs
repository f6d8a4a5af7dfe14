//! Connection, start, shutdown and release of a launcher.

use api::SavedMemoryPhase;

use super::*;
use crate::{
    launcher::LauncherError,
    vmi::{
        launcher_volumes::LauncherVolumes,
        observed::Failure,
        request::{Refusal, Request, admit},
    },
};

#[test]
fn a_scheduled_vmi_waits_for_the_socket_of_its_launcher() {
    let observed = Observed::new(Arc::new(vmi("Scheduling")), NODE);
    assert_eq!(observed.stage(), Stage::Waiting);
    let decision = decide(&observed, at(0));
    assert_eq!(decision.effects, [Effect::Connect { pod: "pod-1".into(), within: CONNECT_WAIT }]);
    let other = Observed::new(Arc::new(vmi("Scheduling")), "n2");
    assert_eq!(names(&decide(&other, at(0))), ["retire"], "the VMI is on another node");
}

#[test]
fn only_hello_is_called_before_the_launcher_accepts_the_uid() {
    let mut observed = Observed::new(Arc::new(vmi("Scheduling")), NODE);
    observed.apply_outcome(Outcome::Connected(Ok(1)), NODE, at(0));
    assert_eq!(names(&decide(&observed, at(0))), ["hello"]);
}

#[test]
fn launcher_that_refuses_a_save_is_asked_until_it_is_given_up() {
    let mut observed = live();
    let mut vmi = (*observed.vmi).clone();
    vmi.spec.volumes = serde_json::from_value(json!([{"name": "c", "memoryDump": {"claimName": "c"}}])).unwrap();
    let memory = json!({"claimName": "c", "fileName": "m-1.memory.save", "phase": "Saving"});
    vmi.status.as_mut().unwrap().hibernation = serde_json::from_value(memory).unwrap();
    observed.apply_object(Arc::new(vmi), NODE);
    let mut volumes = LauncherVolumes::default();
    volumes.volumes.mounted.insert("c".into());
    observed.volumes = Some(volumes);
    observed.note_save(at(0));
    assert!(names(&decide(&observed, at(0))).contains(&"save"));
    let request = SaveMemoryRequest { volume: "c".into(), file: "m-1.memory.save".into() };
    observed.begin(&Effect::Call(Arc::new(request.clone())), at(0));
    let refusal =
        LauncherError::Refused { call: "SaveMemory", message: "the domain is busy".into(), irrecoverable: false };
    assert!(!names(&decide(&observed, at(301))).contains(&"save"), "the answer is awaited");
    observed.apply_answer(&request, 1, Err(refusal), at(1));
    let failed = |decision: &Decision| {
        let memory = written(decision).and_then(|status| status.hibernation.clone());
        memory.is_some_and(|memory| memory.phase == SavedMemoryPhase::SaveFailed)
    };
    let decision = decide(&observed, at(299));
    assert!(names(&decision).contains(&"save") && !failed(&decision));
    assert!(decision.wake_at.is_some_and(|at| at <= Duration::from_secs(300)));
    let decision = decide(&observed, at(300));
    assert!(!names(&decision).contains(&"save") && failed(&decision));
}

#[test]
fn nothing_is_started_twice() {
    let mut observed = Observed::new(Arc::new(vmi("Scheduling")), NODE);
    type Step = fn(&mut Observed);
    let steps: [(Step, &[&str]); 4] = [
        (|_| {}, &["connect"]),
        (|observed| drop(observed.apply_outcome(Outcome::Connected(Ok(1)), NODE, at(0))), &["hello"]),
        (|observed| drop(observed.apply_answer(&Hello, 1, Ok(all_features()), at(0))), &["network"]),
        (|observed| drop(observed.apply_answer(&SetUpNetwork::default(), 1, Ok(<_>::default()), at(0))), &[]),
    ];
    for (step, expected) in steps {
        step(&mut observed);
        let decision = decide(&observed, at(0));
        assert_eq!(names(&decision), expected);
        for effect in &decision.effects {
            observed.begin(effect, at(0));
        }
        assert!(decide(&observed, at(0)).effects.is_empty());
    }
    observed.apply_report(state(Lifecycle::NoDomain, ""), at(0));
    assert_eq!(names(&decide(&observed, at(0))), ["sync"]);
}

#[test]
fn effects_for_a_prepared_vmi_follow_phase_and_domain() {
    use Lifecycle::{NoDomain, Paused, Running, Shutoff, ShuttingDown, Unspecified};
    let rows: &[(&str, Lifecycle, &str, &[&str])] = &[
        ("Scheduling", NoDomain, "", &["sync"]),
        ("Scheduled", NoDomain, "", &["sync"]),
        ("Scheduled", Unspecified, "", &[]),
        ("Scheduling", Running, "booted", &["write", "sync"]),
        // A failed start leaves a domain that never ran.
        ("Scheduled", Shutoff, "failed", &["sync"]),
        // A domain that ran is never started again.
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
        let observed = prepared(phase, *lifecycle, reason);
        assert_eq!(names(&decide(&observed, at(5))), *expected, "{phase} {lifecycle:?} {reason}");
    }
}

/// Only a start creates files: a guest that runs has them, and one that arrives finds those of its source.
#[test]
fn files_of_host_disks_are_created_before_each_attempt_of_a_start() {
    let with_disk = |mut observed: Observed| {
        let mut vmi = (*observed.vmi).clone();
        let disk = json!({"path": "/d/a.img", "type": "DiskOrCreate", "capacity": "1Gi"});
        vmi.spec.volumes = serde_json::from_value(json!([{"name": "d", "hostDisk": disk}])).unwrap();
        observed.apply_object(Arc::new(vmi), NODE);
        observed
    };
    let mut observed = with_disk(prepared("Scheduled", Lifecycle::NoDomain, ""));
    assert_eq!(names(&decide(&observed, at(5))), ["host-disks"]);
    let refused =
        || Err(LauncherError::Refused { call: "host-disks", message: "no space".into(), irrecoverable: false });
    let events = observed.apply_answer(&CreateHostDisks, 1, refused(), at(5));
    assert_eq!(events, [Event::warning("SyncFailed", "no space")]);
    assert_eq!(names(&decide(&observed, at(60))), ["write", "host-disks"]);
    let tolerated = observed.apply_answer(&CreateHostDisks, 1, Ok(vec!["smaller".into()]), at(60));
    assert_eq!(tolerated, [Event::normal("ToleratedSmallPV", "smaller")]);
    assert!(names(&decide(&observed, at(60))).ends_with(&["sync"]));
    let failed = Err(LauncherError::Refused { call: "Sync", message: "no file".into(), irrecoverable: false });
    observed.apply_answer(&sync(1), 1, failed, at(60));
    assert!(names(&decide(&observed, at(120))).ends_with(&["host-disks"]));
    let running = with_disk(prepared("Scheduled", Lifecycle::Running, "booted"));
    assert!(!names(&decide(&running, at(5))).contains(&"host-disks"));
}

#[test]
fn a_settled_vmi_causes_no_effect() {
    let observed = live();
    assert_eq!(observed.stage(), Stage::Live);
    assert_eq!(decide(&observed, at(0)), Decision::default());
    assert_eq!(decide(&observed, at(100_000)), Decision::default());
}

#[test]
fn a_changed_spec_is_synchronized_once() {
    let mut observed = live();
    let mut vmi = (*observed.vmi).clone();
    vmi.metadata.annotations.get_or_insert_default().insert("a".into(), "b".into());
    observed.apply_object(Arc::new(vmi), NODE);
    let decision = decide(&observed, at(1));
    assert_eq!(names(&decision), ["sync"]);
    observed.begin(&decision.effects[0], at(1));
    observed.apply_answer(&sync(observed.facts.fingerprint), 1, Ok(answered(false)), at(2));
    assert!(decide(&observed, at(2)).effects.is_empty());
}

#[test]
fn running_domain_gets_the_interfaces_that_its_pod_has() {
    for (lifecycle, sent) in [(Lifecycle::NoDomain, &["default", "lan"][..]), (Lifecycle::Running, &["default"])] {
        let mut observed = prepared("Scheduled", lifecycle, "");
        let interfaces = json!([{"name": "default", "masquerade": {}}, {"name": "lan", "masquerade": {}}]);
        let mut vmi = (*observed.vmi).clone();
        vmi.spec.domain.devices.interfaces = serde_json::from_value(interfaces).unwrap();
        observed.apply_object(Arc::new(vmi), NODE);
        let nics = vec![protocol::Nic { name: "default".into(), ..Default::default() }];
        observed.network = Some(Arc::new(crate::network::PodNetwork { nics: nics.clone(), ..Default::default() }));
        let sync = Sync::of(&observed);
        let names: Vec<_> = sync.vmi.spec.domain.devices.interfaces.iter().map(|known| known.name.as_str()).collect();
        assert_eq!((names.as_slice(), &sync.nics, sync.fingerprint), (sent, &nics, observed.facts.fingerprint));
    }
}

#[test]
fn interface_whose_setup_fails_holds_up_no_other_change() {
    let mut observed = live();
    let mut vmi = (*observed.vmi).clone();
    vmi.spec.domain.devices.interfaces = serde_json::from_value(json!([{"name": "lan", "bridge": {}}])).unwrap();
    vmi.spec.networks = serde_json::from_value(json!([{"name": "lan", "multus": {"networkName": "n"}}])).unwrap();
    let shown = json!([{"name": "lan", "infoSource": "multus-status"}]);
    vmi.status.as_mut().unwrap().interfaces = serde_json::from_value(shown).unwrap();
    observed.apply_object(Arc::new(vmi), NODE);
    let refused = || Err(LauncherError::Refused { call: "network", message: "no bridge".into(), irrecoverable: true });
    let message = "failed to configure vmi network: no bridge";
    for (now, events) in [(1, vec![Event::warning("NicHotplug", message)]), (2, vec![]), (4, vec![])] {
        assert!(names(&decide(&observed, at(now))).contains(&"network"), "{now}");
        assert_eq!(observed.apply_answer(&SetUpNetwork::default(), 1, refused(), at(now)), events, "{now}");
        // Something else changes.
        observed.facts.fingerprint += 1;
        let next = names(&decide(&observed, at(now)));
        assert!(next.contains(&"sync") && !next.contains(&"network"), "{now}: {next:?}");
        observed.apply_answer(&sync(observed.facts.fingerprint), 1, Ok(answered(false)), at(now));
        let status = status::desired(&observed, at(now)).unwrap().status;
        assert_eq!(status.condition("Synchronized").unwrap().message.as_deref(), Some(message));
        let next = decide(&observed, at(now));
        assert!(!names(&next).contains(&"network") && next.wake_at == Some(Duration::from_secs(now * 2)), "{next:?}");
    }
    let nics = vec![protocol::Nic { name: "lan".into(), ..Default::default() }];
    let ready = crate::network::PodNetwork { nics, ..Default::default() };
    observed.apply_answer(&SetUpNetwork::default(), 1, Ok(ready), at(8));
    assert_eq!(observed.network_failure, None);
    // An interface that is removed again needs no setup.
    let failure = Failure { message: message.into(), count: 9, retry_at: Duration::MAX, permanent: false };
    observed.network_failure = Some(failure);
    observed.apply_answer(&sync(1), 1, Ok(answered(false)), at(8));
    assert_eq!(observed.network_failure, None);
}

fn failure(name: &str) -> crate::network::InterfaceFailure {
    crate::network::InterfaceFailure { name: name.into(), message: format!("no link of {name}"), permanent: true }
}

#[test]
fn running_guest_waits_only_for_the_interfaces_that_its_domain_has() {
    // A new connection: the domain, the failing interface, and the next effect.
    for (phase, lifecycle, failing, now, next) in [
        ("Running", Lifecycle::Running, "lan", 1, "sync"),
        ("Running", Lifecycle::Running, "default", 2, "network"),
        ("Scheduled", Lifecycle::NoDomain, "lan", 2, "write"),
    ] {
        let mut observed = prepared(phase, lifecycle, "");
        let mut vmi = (*observed.vmi).clone();
        let interfaces = json!([{"name": "default", "masquerade": {}}, {"name": "lan", "bridge": {}}]);
        vmi.spec.domain.devices.interfaces = serde_json::from_value(interfaces).unwrap();
        let networks = json!([{"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "n"}}]);
        vmi.spec.networks = serde_json::from_value(networks).unwrap();
        let shown =
            json!([{"name": "default", "infoSource": "domain"}, {"name": "lan", "infoSource": "multus-status"}]);
        vmi.status.as_mut().unwrap().interfaces = serde_json::from_value(shown).unwrap();
        observed.apply_object(Arc::new(vmi), NODE);
        if let Link::Up { networked, .. } = &mut observed.link {
            *networked = false;
        }
        let ready = ["default", "lan"].into_iter().filter(|name| *name != failing);
        let nics = ready.map(|name| protocol::Nic { name: name.into(), ..Default::default() }).collect();
        let network = crate::network::PodNetwork { nics, failures: vec![failure(failing)], ..Default::default() };
        let events = observed.apply_answer(&SetUpNetwork::default(), 1, Ok(network), at(1));
        let reason = if next == "sync" { "NicHotplug" } else { "SyncFailed" };
        let message = format!("failed to configure vmi network: no link of {failing}");
        assert_eq!(events, [Event::warning(reason, message)], "{phase} {failing}");
        assert_eq!(observed.failure.as_ref().is_some_and(|failure| failure.permanent), phase == "Scheduled");
        let calls = names(&decide(&observed, at(now)));
        assert_eq!(calls.last(), Some(&next), "{phase} {failing}: {calls:?}");
    }
}

#[test]
fn interface_that_was_set_up_before_is_kept_when_its_setup_fails() {
    let mut observed = live();
    let network = |names: &[&str], failing: &[&str]| crate::network::PodNetwork {
        nics: names.iter().map(|name| protocol::Nic { name: (*name).into(), ..Default::default() }).collect(),
        failures: failing.iter().map(|name| failure(name)).collect(),
        ..Default::default()
    };
    observed.network = Some(Arc::new(network(&["default", "lan"], &[])));
    observed.apply_answer(&SetUpNetwork::default(), 1, Ok(network(&["default"], &["lan", "new"])), at(1));
    let nics = observed.nics();
    assert_eq!(nics.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>(), ["default", "lan"]);
}

#[test]
fn failed_synchronizations_back_off_up_to_a_minute() {
    let mut observed = prepared("Scheduled", Lifecycle::NoDomain, "");
    let mut now = 0;
    let mut waits = Vec::new();
    for _ in 0..9 {
        let decision = decide(&observed, at(now));
        assert!(names(&decision).contains(&"sync"), "{now}: {decision:?}");
        observed.begin(&Effect::Call(Arc::new(sync(1))), at(now));
        let refused =
            crate::launcher::LauncherError::Refused { call: "Sync", message: "no disk".into(), irrecoverable: false };
        observed.apply_answer(&sync(1), 1, Err(refused), at(now));
        settle(&mut observed);
        let wake = decide(&observed, at(now)).wake_at.unwrap().as_secs();
        waits.push(wake - now);
        now = wake;
    }
    assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
}

#[test]
fn a_deleted_vmi_is_shut_down_repeatedly_and_killed_after_its_grace_period() {
    let mut observed = live();
    deleting(&mut observed);
    let first = decide(&observed, at(100));
    assert_eq!(names(&first), ["shutdown", "ShuttingDown"]);
    assert_eq!(first.effects[0], Effect::Call(Arc::new(ShutdownRequest { grace_period_seconds: 60 })));
    observed.begin(&first.effects[0], at(100));
    assert!(decide(&observed, at(100)).effects.is_empty());
    observed.apply_answer(&KillRequest {}, 1, Ok(Done {}), at(100));
    assert!(decide(&observed, at(104)).effects.is_empty());
    let second = decide(&observed, at(105));
    assert_eq!(second.effects, [Effect::Call(Arc::new(ShutdownRequest { grace_period_seconds: 55 }))]);
    observed.begin(&second.effects[0], at(105));
    observed.apply_answer(&KillRequest {}, 1, Ok(Done {}), at(105));
    observed.apply_report(state(Lifecycle::ShuttingDown, "user"), at(106));
    let waiting = decide(&observed, at(150));
    assert!(waiting.effects.is_empty(), "no request during a shutdown");
    assert_eq!(waiting.wake_at, Some(Duration::from_secs(162)));
    assert_eq!(names(&decide(&observed, at(162))), ["kill", "Deleted"]);
}

#[test]
fn a_launcher_that_did_not_accept_the_uid_never_ends_the_vmi() {
    for phase in ["Running", "Failed"] {
        let mut observed = prepared(phase, Lifecycle::Running, "");
        observed.link = Link::Up {
            connection: 1,
            greeted: false,
            features: all_features(),
            networked: false,
            synced: None,
            results_from: 0,
        };
        observed.busy.insert(Hello::SLOT);
        deleting(&mut observed);
        assert!(!names(&decide(&observed, at(0))).iter().any(|name| ["shutdown", "kill", "finish"].contains(name)));
        observed.object = ObjectState::Deleted(Duration::ZERO);
        assert!(decide(&observed, at(29)).effects.is_empty());
        assert_eq!(names(&decide(&observed, at(30))), ["retire"]);
    }
}

#[test]
fn without_a_grace_period_the_vmi_is_killed_at_once() {
    let mut observed = live();
    observed.facts.grace = 0;
    observed.facts.deleting = true;
    assert_eq!(names(&decide(&observed, at(0))), ["kill", "Deleted"]);
}

#[test]
fn a_grace_period_that_becomes_shorter_counts_from_the_first_request() {
    let mut observed = live();
    observed.facts.grace = 900;
    deleting(&mut observed);
    for effect in decide(&observed, at(100)).effects {
        observed.begin(&effect, at(100));
    }
    observed.apply_answer(&KillRequest {}, 1, Ok(Done {}), at(100));
    for (grace, now, expected) in [
        (900, 104, &[][..]),
        (60, 104, &[]),
        (60, 162, &["kill", "Deleted"]),
        (3, 106, &["kill", "Deleted"]),
        (0, 104, &["kill", "Deleted"]),
    ] {
        observed.facts.grace = grace;
        assert_eq!(names(&decide(&observed, at(now))), expected, "{grace} at {now}");
    }
}

#[test]
fn a_vmi_whose_pod_is_gone_has_no_grace_period() {
    // The pod was deleted by force: its containers run until kubelet ends them.
    let mut observed = live();
    observed.facts.grace = 900;
    deleting(&mut observed);
    for effect in decide(&observed, at(100)).effects {
        observed.begin(&effect, at(100));
    }
    observed.apply_answer(&KillRequest {}, 1, Ok(Done {}), at(100));
    observed.facts.phase = Phase::Failed;
    assert_eq!(names(&decide(&observed, at(101))), ["kill", "Deleted"]);
    // Its object can go before the final phase is seen.
    observed.facts.phase = Phase::Running;
    observed.object = ObjectState::Deleted(Duration::from_secs(101));
    assert!(!names(&decide(&observed, at(110))).contains(&"kill"));
    assert_eq!(names(&decide(&observed, at(114))), ["kill", "Deleted"]);
}

#[test]
fn a_vmi_deleted_before_its_start_is_released() {
    let mut observed = prepared("Scheduling", Lifecycle::NoDomain, "");
    deleting(&mut observed);
    assert_eq!(names(&decide(&observed, at(0))), ["kill"]);
    observed.begin(&Effect::Call(Arc::new(KillRequest {})), at(0));
    observed.apply_answer(&KillRequest {}, 1, Ok(Done {}), at(0));
    assert_eq!(names(&decide(&observed, at(0))), ["finish"]);
    observed.begin(&Effect::Call(Arc::new(FinishRequest {})), at(0));
    observed.apply_answer(&FinishRequest {}, 1, Ok(Done {}), at(0));
    observed.apply_disconnect(1, at(1));
    assert!(decide(&observed, at(1)).effects.is_empty());
    observed.object = ObjectState::Deleted(Duration::from_secs(2));
    assert_eq!(names(&decide(&observed, at(2))), ["retire"]);
}

#[test]
fn a_launcher_that_restarts_during_a_shutdown_gets_time_to_find_the_domain() {
    let mut observed = live();
    deleting(&mut observed);
    for effect in decide(&observed, at(100)).effects {
        observed.begin(&effect, at(100));
    }
    observed.apply_answer(&KillRequest {}, 1, Ok(Done {}), at(100));
    observed.apply_report(state(Lifecycle::NoDomain, ""), at(101));
    let waiting = decide(&observed, at(102));
    assert!(!names(&waiting).contains(&"kill"), "the guest still has its grace period: {waiting:?}");
    let mut found = observed.clone();
    found.apply_report(state(Lifecycle::Running, "booted"), at(103));
    assert!(names(&decide(&found, at(105))).contains(&"shutdown"));
    observed.object = ObjectState::Deleted(Duration::from_secs(102));
    assert!(decide(&observed, at(130)).effects.is_empty());
    assert_eq!(names(&decide(&observed, at(131))), ["kill"]);
}

#[test]
fn a_missing_object_is_read_before_its_vmi_is_stopped() {
    let mut observed = live();
    observed.object = ObjectState::Unverified;
    assert_eq!(names(&decide(&observed, at(0))), ["read"]);
    observed.apply_outcome(Outcome::Read(Ok(None)), NODE, at(1));
    assert_eq!(names(&decide(&observed, at(1))), ["shutdown", "ShuttingDown"]);
}

#[test]
fn a_vmi_of_another_node_is_left_alone() {
    let mut observed = live();
    observed.object = ObjectState::Unverified;
    let mut moved = (*observed.vmi).clone();
    moved.metadata.labels.get_or_insert_default().insert("kubevirt.io/nodeName".into(), "n2".into());
    observed.apply_outcome(Outcome::Read(Ok(Some(Arc::new(moved)))), NODE, at(1));
    assert_eq!(names(&decide(&observed, at(1))), ["retire"]);
}

#[test]
fn a_vmi_that_waits_for_its_pod_never_fails_here() {
    for phase in ["Scheduling", "Scheduled"] {
        let mut observed = Observed::new(Arc::new(vmi(phase)), NODE);
        observed.apply_outcome(Outcome::Connected(Err(ConnectError::NoSocket)), NODE, at(5));
        assert!(written(&decide(&observed, at(100_000))).is_none());
    }
}

#[test]
fn refused_connections_are_retried_at_growing_intervals_and_shown_after_a_while() {
    let mut observed = live();
    observed.apply_disconnect(1, at(100));
    let mut waits = Vec::new();
    let mut now = at(101);
    while now.since_start < Duration::from_secs(112) {
        let decision = decide(&observed, now);
        assert!(written(&decision).is_none() || now.since_start >= Duration::from_secs(111), "{now:?}");
        observed.apply_outcome(Outcome::Connected(Err(ConnectError::Refused("nobody listens".into()))), NODE, now);
        let Link::Down { retry_at, .. } = observed.link else { panic!("there is no connection") };
        waits.push((retry_at - now.since_start).as_millis());
        now.since_start = retry_at;
    }
    assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 3200, 3200]);
    let status = written(&decide(&observed, now)).unwrap().clone();
    assert_eq!(status.condition("Synchronized").unwrap().message.as_deref(), Some("nobody listens"));
    assert_eq!(status.phase, Some(Phase::Running));
}

#[test]
fn a_launcher_that_closes_its_connections_is_connected_at_growing_intervals() {
    let mut observed = live();
    let mut now = at(100);
    let (mut waits, mut events) = (Vec::new(), Vec::new());
    for connection in 1..=9 {
        observed.apply_outcome(Outcome::Connected(Ok(connection)), NODE, now);
        observed.apply_answer(&Hello, connection, Ok(all_features()), now);
        events.extend(observed.apply_answer(&sync(0), connection, Ok(answered(true)), now));
        observed.apply_disconnect(connection, now);
        let Link::Down { retry_at, .. } = observed.link else { panic!("there is a connection") };
        waits.push((retry_at - now.since_start).as_millis());
        now.since_start = retry_at;
    }
    assert_eq!(waits, [50, 100, 200, 400, 800, 1600, 3200, 6400, 6400]);
    assert_eq!(events, [Event::normal("Created", "VirtualMachineInstance defined.")], "once");
    // A connection that lasts resets the interval.
    observed.apply_outcome(Outcome::Connected(Ok(10)), NODE, now);
    now.since_start += Duration::from_secs(10);
    observed.apply_disconnect(10, now);
    let Link::Down { retry_at, .. } = observed.link else { panic!("there is a connection") };
    assert_eq!(retry_at - now.since_start, Duration::from_millis(50));
}

#[test]
fn requests_need_a_launcher_and_a_guest() {
    assert!(admit(&live(), Request::Pause).is_ok());
    let idle = prepared("Scheduled", Lifecycle::NoDomain, "");
    assert!(matches!(admit(&idle, Request::Reset), Err(Refusal::NotRunning)));
    let mut alone = live();
    alone.apply_disconnect(1, at(1));
    let refusal = admit(&alone, Request::Unpause).unwrap_err();
    assert_eq!(refusal.to_string(), "No command socket found for vmi u");
}

#[test]
fn a_permanent_failure_is_not_retried() {
    let mut observed = prepared("Scheduled", Lifecycle::NoDomain, "");
    observed.failure = Some(Failure { message: "bad".into(), count: 1, retry_at: Duration::ZERO, permanent: true });
    assert_eq!(names(&decide(&observed, at(10))), ["write"]);
}
