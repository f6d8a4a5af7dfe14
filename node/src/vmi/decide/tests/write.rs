//! Writes of the status.

use super::*;

#[test]
fn the_launcher_is_released_only_after_the_end_was_recorded() {
    let mut observed = live();
    deleting(&mut observed);
    observed.apply_report(state(Lifecycle::Shutoff, "shutdown"), at(10));
    let decision = decide(&observed, at(10));
    assert_eq!(names(&decision), ["write"]);
    assert_eq!(written(&decision).unwrap().phase, Some(Phase::Succeeded));
    settle(&mut observed);
    assert_eq!(names(&decide(&observed, at(11))), ["finish"]);
}

#[test]
fn the_answer_to_a_write_does_not_restore_a_missing_object() {
    let mut observed = live();
    observed.busy.insert(RECORD);
    observed.object = ObjectState::Unverified;
    observed.apply_outcome(Outcome::Written(Ok(observed.vmi.clone()), Vec::new()), NODE, at(1));
    assert_eq!(names(&decide(&observed, at(1))), ["read"]);
}

#[test]
fn a_lost_vmi_fails_after_its_limit_and_not_before() {
    let mut met = live();
    met.apply_disconnect(1, at(100));
    assert_eq!(names(&decide(&met, at(129))), ["connect"]);
    assert_eq!(decide(&met, at(129)).wake_at, Some(Duration::from_secs(130)));
    let lost = decide(&met, at(130));
    assert_eq!(written(&lost).unwrap().phase, Some(Phase::Failed));

    let never_met = Observed::new(Arc::new(vmi("Running")), NODE);
    assert!(written(&decide(&never_met, at(179))).is_none());
    assert_eq!(written(&decide(&never_met, at(180))).unwrap().phase, Some(Phase::Failed));

    let mut no_pod = Observed::new(Arc::new(vmi("Running")), NODE);
    no_pod.apply_outcome(Outcome::Connected(Err(ConnectError::NoPod)), NODE, at(5));
    assert!(written(&decide(&no_pod, at(34))).is_none());
    assert_eq!(written(&decide(&no_pod, at(35))).unwrap().phase, Some(Phase::Failed));
}

#[test]
fn changes_by_the_guest_are_written_after_they_settled_and_not_too_often() {
    let mut observed = live();
    let mut connected = state(Lifecycle::Running, "booted");
    connected.guest_agent_connected = true;
    observed.apply_report(connected.clone(), at(100));
    assert!(decide(&observed, at(100)).effects.is_empty());
    let decision = decide(&observed, at(101));
    assert_eq!(names(&decision), ["write"]);
    let mut next = (*observed.vmi).clone();
    next.status = written(&decision).cloned();
    observed.begin(&decision.effects[0], at(101));
    observed.apply_outcome(Outcome::Written(Ok(Arc::new(next)), Vec::new()), NODE, at(101));
    connected.memory_current = 1 << 30;
    observed.apply_report(connected, at(102));
    assert!(decide(&observed, at(104)).effects.is_empty());
    assert_eq!(decide(&observed, at(104)).wake_at, Some(Duration::from_secs(111)));
    assert_eq!(names(&decide(&observed, at(111))), ["write"]);
}

#[test]
fn a_failed_write_is_retried_later_and_a_conflict_reads_first() {
    let mut observed = prepared("Scheduling", Lifecycle::Running, "booted");
    observed.link = Link::Up {
        connection: 1,
        greeted: true,
        features: all_features(),
        networked: true,
        synced: Some(observed.facts.fingerprint),
        results_from: 0,
    };
    let write = crate::vmi::records::WriteError::Other("server is away".into());
    observed.apply_outcome(Outcome::Written(Err(write), Vec::new()), NODE, at(10));
    assert!(decide(&observed, at(10)).effects.is_empty());
    assert_eq!(names(&decide(&observed, at(11))), ["write"]);
    observed.apply_outcome(Outcome::Written(Err(crate::vmi::records::WriteError::Conflict), Vec::new()), NODE, at(12));
    assert_eq!(names(&decide(&observed, at(12))), ["read"]);
}

#[test]
fn conflicts_in_a_row_are_followed_by_short_pauses() {
    let mut observed = live();
    // Others write the object as well, as during a migration.
    for (second, wait) in [(10, 0), (11, 0), (12, 0), (13, 1), (20, 2), (30, 4)] {
        let conflict = Outcome::Written(Err(crate::vmi::records::WriteError::Conflict), Vec::new());
        observed.apply_outcome(conflict, NODE, at(second));
        let decision = decide(&observed, at(second));
        let expected = (wait > 0).then(|| Duration::from_secs(second + wait));
        assert_eq!((names(&decision).is_empty(), decision.wake_at), (wait > 0, expected), "{second}");
    }
}

#[test]
fn each_change_of_the_spec_brings_writes() {
    let mut observed = live();
    let written = |observed: &mut Observed| {
        observed.apply_outcome(Outcome::Written(Ok(observed.vmi.clone()), Vec::new()), NODE, at(100));
    };
    let is_due =
        |observed: &Observed| observed.paced.saturating_sub(WRITE_INTERVAL * WRITE_BURST) <= at(100).since_start;
    while is_due(&observed) {
        written(&mut observed);
    }
    let mut changed = (*observed.vmi).clone();
    changed.spec.volumes.push(api::vmi::volumes::Volume { name: "data".into(), ..Default::default() });
    observed.apply_object(Arc::new(changed), NODE);
    for _ in 0..3 {
        assert!(is_due(&observed));
        written(&mut observed);
    }
    assert!(!is_due(&observed));
    // The same spec again.
    observed.apply_object(observed.vmi.clone(), NODE);
    assert!(!is_due(&observed));
}

#[test]
fn changes_by_the_guest_during_a_write_are_written_with_the_next() {
    let mut observed = live();
    let mut connected = state(Lifecycle::Running, "booted");
    connected.guest_agent_connected = true;
    observed.apply_report(connected.clone(), at(100));
    let decision = decide(&observed, at(101));
    observed.begin(&decision.effects[0], at(101));
    connected.memory_current = 1 << 30;
    observed.apply_report(connected, at(102));
    let mut next = (*observed.vmi).clone();
    next.status = written(&decision).cloned();
    observed.apply_outcome(Outcome::Written(Ok(Arc::new(next)), Vec::new()), NODE, at(103));
    assert!(decide(&observed, at(104)).effects.is_empty());
    assert_eq!(names(&decide(&observed, at(113))), ["write"]);
}
