//! Reports of the launcher.

use protocol::GuestPanic;

use super::*;

#[test]
fn sync_is_repeated_at_growing_intervals_after_an_io_error() {
    let mut observed = live();
    observed.apply_report(state(Lifecycle::Paused, "ioError"), at(100));
    settle(&mut observed);
    assert!(decide(&observed, at(109)).effects.is_empty());
    let mut now = 110;
    for wait in [20, 40, 80, 160, 180, 180] {
        assert_eq!(names(&decide(&observed, at(now))), ["sync"]);
        observed.begin(&Effect::Call(Arc::new(sync(1))), at(now));
        observed.apply_answer(&sync(observed.facts.fingerprint), 1, Ok(answered(false)), at(now));
        assert_eq!(decide(&observed, at(now)).wake_at, Some(Duration::from_secs(now + wait)));
        now += wait;
    }
    observed.apply_report(state(Lifecycle::Running, ""), at(now));
    settle(&mut observed);
    assert!(decide(&observed, at(now)).effects.is_empty());
}

#[test]
fn a_permanent_failure_of_the_launcher_fails_the_vmi_with_its_message() {
    let mut observed = prepared("Scheduled", Lifecycle::NoDomain, "");
    observed.report.as_mut().unwrap().failure = "no firmware".into();
    let decision = decide(&observed, at(0));
    assert_eq!(names(&decision), ["write"]);
    let status = written(&decision).unwrap();
    assert_eq!(status.phase, Some(Phase::Failed));
    assert_eq!(status.condition("Synchronized").unwrap().message.as_deref(), Some("no firmware"));
}

#[test]
fn an_older_version_of_the_object_is_ignored() {
    let mut observed = live();
    let mut newer = (*observed.vmi).clone();
    newer.metadata.resource_version = Some("20".into());
    observed.apply_object(Arc::new(newer), NODE);
    let mut older = vmi("Scheduling");
    older.metadata.resource_version = Some("9".into());
    observed.apply_object(Arc::new(older), NODE);
    assert_eq!(observed.facts.phase, Phase::Running);
}

#[test]
fn an_io_pause_soon_after_another_waits_longer_and_a_later_one_starts_at_the_first_interval() {
    let paused = || state(Lifecycle::Paused, "ioError");
    let running = || state(Lifecycle::Running, "unpaused");
    let retry_at = |observed: &Observed| observed.io_pause.map(|pause| pause.retry_at.as_secs());
    let mut observed = live();
    observed.apply_report(paused(), at(100));
    assert_eq!(retry_at(&observed), Some(110));
    let fingerprint = observed.facts.fingerprint;
    observed.apply_answer(&sync(fingerprint), 1, Ok(answered(false)), at(110));
    observed.apply_report(running(), at(110));
    settle(&mut observed);
    assert!(!names(&decide(&observed, at(140))).contains(&"sync"), "it runs");
    observed.apply_report(paused(), at(112));
    assert_eq!(retry_at(&observed), Some(132), "the second attempt waits longer");
    observed.apply_report(running(), at(140));
    observed.apply_report(paused(), at(180));
    assert_eq!(retry_at(&observed), Some(190), "another error");
}

#[test]
fn events_name_the_disks_that_paused_a_guest() {
    let mut observed = live();
    let mut vmi = (*observed.vmi).clone();
    vmi.spec.volumes = serde_json::from_value(json!([{"name": "root"}, {"name": "data"}, {"name": "idle"}])).unwrap();
    observed.apply_object(Arc::new(vmi), NODE);
    let mut report = state(Lifecycle::Paused, "ioError");
    report.disk_errors = [("data", true), ("root", false), ("unknown", true)]
        .map(|(volume, no_space)| protocol::DiskError { volume: volume.into(), no_space })
        .to_vec();
    observed.apply_report(report, at(100));
    let io_errors = |observed: &Observed| -> Vec<String> {
        let desired = status::desired(observed, at(100));
        let list = desired.into_iter().flat_map(|desired| desired.events);
        list.filter(|event| event.reason == "IOerror").map(|event| event.message).collect()
    };
    assert_eq!(
        io_errors(&observed),
        ["VM Paused due to IO error at the volume: root", "VM Paused due to not enough space on volume: data",]
    );
    settle(&mut observed);
    assert!(io_errors(&observed).is_empty(), "once");
}

#[test]
fn a_running_guest_survives_a_rejected_sync() {
    let refusal = || crate::launcher::LauncherError::Refused {
        call: "Sync",
        message: "cannot be read".into(),
        irrecoverable: true,
    };
    for (mut observed, phase) in [(live(), None), (prepared("Scheduled", Lifecycle::NoDomain, ""), Some(Phase::Failed))]
    {
        observed.apply_answer(&sync(0), 1, Err(refusal()), at(10));
        let status = status::desired(&observed, at(10)).unwrap().status;
        assert_eq!(status.condition("Synchronized").unwrap().message.as_deref(), Some("cannot be read"));
        match phase {
            Some(phase) => assert_eq!(status.phase, Some(phase)),
            None => assert_eq!(status.phase, Some(Phase::Running)),
        }
    }
}

#[test]
fn a_running_guest_survives_a_network_that_a_restarted_virt_handler_rejects() {
    let failure = || crate::launcher::LauncherError::Refused {
        call: "network",
        message: "that many ports are not supported".into(),
        irrecoverable: true,
    };
    let mut observed = Observed::new(Arc::new(vmi("Running")), NODE);
    observed.apply_outcome(Outcome::Connected(Ok(1)), NODE, at(1));
    observed.apply_answer(&Hello, 1, Ok(all_features()), at(1));
    observed.apply_answer(&SetUpNetwork::default(), 1, Err(failure()), at(1));
    let phase = |decision: &Decision| written(decision).and_then(|status| status.phase.clone());
    assert_eq!(phase(&decide(&observed, at(1))), Some(Phase::Running), "before the first report");
    observed.apply_report(state(Lifecycle::Running, "booted"), at(2));
    let decision = decide(&observed, at(3));
    assert_eq!(phase(&decision), Some(Phase::Running));
    assert!(names(&decision).contains(&"network"), "retried");
    let mut starting = prepared("Scheduled", Lifecycle::NoDomain, "");
    starting.apply_answer(&SetUpNetwork::default(), 1, Err(failure()), at(1));
    assert_eq!(phase(&decide(&starting, at(1))), Some(Phase::Failed));
}

#[test]
fn a_panic_of_the_guest_kernel_is_one_event() {
    for (kind, values, text) in [
        ("", &[] as &[&str], "GuestPanicked (details unavailable)"),
        ("tdx", &[], "GuestPanicked: type=tdx"),
        ("hyper-v", &["0xd1", "0x0"], "GuestPanicked: '0xd1', '0x0'"),
    ] {
        let values = values.iter().map(|value| (*value).to_owned()).collect();
        let mut crashed = state(Lifecycle::Crashed, "panicked");
        crashed.guest_panic = Some(GuestPanic { kind: kind.to_owned(), values });
        let mut observed = live();
        assert_eq!(observed.apply_report(crashed.clone(), at(100)), [Event::warning("GuestPanicked", text)]);
        assert!(observed.apply_report(crashed.clone(), at(101)).is_empty());
        observed.apply_report(state(Lifecycle::Running, "booted"), at(102));
        assert!(observed.apply_report(crashed.clone(), at(103)).is_empty(), "withdrawn and repeated");
        let mut observed = prepared("Failed", Lifecycle::Crashed, "panicked");
        (observed.report, observed.panics) = (None, None);
        assert!(observed.apply_report(crashed, at(100)).is_empty(), "reported before the restart");
    }
}

#[test]
fn each_panic_of_a_guest_that_goes_on_is_an_event() {
    let panicked = |number: u32, lifecycle, reason| LauncherState {
        guest_panic: (number > 0).then(GuestPanic::default),
        guest_panics: number,
        ..state(lifecycle, reason)
    };
    let runs = |number| panicked(number, Lifecycle::Running, "booted");
    let ended = |number| panicked(number, Lifecycle::Shutoff, "crashed");
    let mut observed = live();
    // The guest can report any number of panics, and a restarted launcher counts anew.
    for (second, number, events) in [(100, 1, 1), (101, 1, 0), (109, 2, 0), (110, 3, 1), (120, 0, 0), (130, 1, 1)] {
        assert_eq!(observed.apply_report(runs(number), at(second)).len(), events, "{number} at {second}");
    }
    for (first, events, next) in [(runs(2), 0, 1), (ended(2), 1, 0)] {
        let mut restarted = live();
        (restarted.report, restarted.panics) = (None, None);
        assert_eq!(restarted.apply_report(first, at(200)).len(), events, "of a restarted virt-handler");
        assert_eq!(restarted.apply_report(ended(3), at(201)).len(), next);
    }
}

#[test]
fn failed_pings_of_the_guest_agent_are_at_most_one_event_a_minute() {
    let mut observed = live();
    let mut report = state(Lifecycle::Running, "booted");
    observed.apply_report(report.clone(), at(100));
    let text = format!("GuestAgentPing probe failed for VMI {}", observed.vmi.metadata.name.as_deref().unwrap());
    let expected = vec![Event::warning("GuestAgentPingFailed", text)];
    // At most one a minute, independent of the launcher's count.
    for (second, silences, sent) in
        [(101, 1, true), (170, 1, false), (171, 2, true), (172, 3, false), (240, 0, false), (241, 1, true)]
    {
        report.silences = silences;
        let events = if sent { expected.clone() } else { Vec::new() };
        assert_eq!(observed.apply_report(report.clone(), at(second)), events, "{silences} at {second}");
    }
}

#[test]
fn sync_is_repeated_at_growing_intervals_while_items_fail() {
    let item = |needs_restart| protocol::ItemResult { name: "data".into(), needs_restart, ..Default::default() };
    let mut observed = live();
    let mut report = state(Lifecycle::Running, "booted");
    report.items = vec![item(true)];
    observed.apply_report(report.clone(), at(100));
    settle(&mut observed);
    assert_eq!(decide(&observed, at(100)), Decision::default(), "a restart has to come first");
    report.items.push(item(false));
    observed.apply_report(report.clone(), at(100));
    settle(&mut observed);
    let mut now = 110;
    for wait in [20, 40, 80] {
        assert!(decide(&observed, at(now - 1)).effects.is_empty());
        assert_eq!(names(&decide(&observed, at(now))), ["sync"]);
        observed.begin(&Effect::Call(Arc::new(sync(1))), at(now));
        observed.apply_answer(&sync(observed.facts.fingerprint), 1, Ok(answered(false)), at(now));
        observed.apply_report(report.clone(), at(now));
        now += wait;
    }
    report.items.clear();
    observed.apply_report(report, at(now));
    settle(&mut observed);
    assert!(decide(&observed, at(now)).effects.is_empty());
}

#[test]
fn restarted_launcher_changes_nothing_until_it_reports_the_results_of_its_sync() {
    let item = protocol::ItemResult { name: "data".into(), needs_restart: true, ..Default::default() };
    let report = |sequence: u64, items: Vec<protocol::ItemResult>| LauncherState {
        sequence,
        items,
        ..state(Lifecycle::Running, "booted")
    };
    let mut observed = live();
    observed.apply_report(report(7, vec![item.clone()]), at(100));
    settle(&mut observed);
    let shown = observed.vmi.condition("Synchronized").unwrap().clone();
    // The new worker adopts the domain, reports it, and answers Sync before its results arrive.
    observed.link = Link::Up {
        connection: 2,
        greeted: true,
        features: all_features(),
        networked: true,
        synced: None,
        results_from: 0,
    };
    observed.apply_report(report(1, Vec::new()), at(110));
    let fingerprint = observed.facts.fingerprint;
    let reply = SyncReply { state_sequence: 3, ..SyncReply::default() };
    assert_eq!(names(&decide(&observed, at(110))), ["sync"]);
    observed.apply_answer(&sync(fingerprint), 2, Ok(reply), at(111));
    observed.apply_report(report(2, Vec::new()), at(111));
    assert_eq!(decide(&observed, at(111)), Decision::default());
    assert_eq!(observed.vmi.condition("Synchronized"), Some(&shown));
    observed.apply_report(report(3, vec![item]), at(112));
    assert_eq!(decide(&observed, at(112)), Decision::default());
    observed.apply_report(report(4, Vec::new()), at(113));
    let decision = decide(&observed, at(113));
    let status = written(&decision).unwrap();
    assert!(status.condition("Synchronized").is_none());
}
