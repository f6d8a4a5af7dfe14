//! Live migration: each role, state of the migration and report of the launcher.

use protocol::{AbortMigrationRequest, MigrateRequest, MigrationMode, MigrationReport, MigrationStep};
use serde_json::Value;

use super::*;
use crate::vmi::{
    calls::PrepareMigration,
    migration::{source, target},
    migration_facts::Route,
    observed::{Failure, REQUEST},
};

const SOURCE: &str = NODE;
const TARGET: &str = "n2";

/// Returns the migration in the status, with more fields.
fn state(more: Value) -> Value {
    let mut state =
        json!({"migrationUid": "m1", "sourceNode": SOURCE, "targetNode": TARGET, "targetPod": "launcher-2"});
    state.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    state
}

/// Returns fields of a migration whose target is ready.
fn ready(more: Value) -> Value {
    let mut fields = json!({"targetNodeAddress": "10.0.0.2", "targetDirectMigrationNodePorts": {"8188": 0}});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    state(fields)
}

/// Returns fields of a migration that has begun.
fn begun(more: Value) -> Value {
    let mut fields = json!({"startTimestamp": "2027-01-15T08:00:00Z", "mode": "PreCopy"});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ready(fields)
}

fn with_migration(vmi: &VirtualMachineInstance, owner: &str, state: &Value) -> Arc<VirtualMachineInstance> {
    let mut vmi = vmi.clone();
    let labels = [("kubevirt.io/nodeName", owner), ("kubevirt.io/migrationTargetNodeName", TARGET)];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
    vmi.metadata.labels = Some(labels.into());
    let status = vmi.status.as_mut().unwrap();
    status.node_name = Some(owner.to_owned());
    status.active_pods = [("pod-1", SOURCE), ("pod-2", TARGET)].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    status.migration_state = Some(serde_json::from_value(state.clone()).unwrap());
    Arc::new(vmi)
}

fn migrate() -> MigrateRequest {
    MigrateRequest { migration: "m1".into(), ..MigrateRequest::default() }
}

fn prepare() -> PrepareMigration {
    PrepareMigration { migration: "m1".into(), ..PrepareMigration::default() }
}

fn moving(step: MigrationStep) -> MigrationReport {
    let mut report = MigrationReport { migration: "m1".into(), begin: 1, ..MigrationReport::default() };
    report.set_step(step);
    report
}

/// Returns a running VMI of this node with a migration.
fn source(state: &Value, report: Option<MigrationReport>) -> Observed {
    let mut observed = live();
    let vmi = with_migration(&observed.vmi, SOURCE, state);
    observed.apply_object(vmi, NODE);
    let mut known = observed.report.clone().unwrap();
    match report.as_ref().map(MigrationReport::step) {
        Some(MigrationStep::Releasing) => {
            (known.lifecycle, known.reason) = (Lifecycle::Paused.into(), "migration".into())
        }
        Some(MigrationStep::Moved) => (known.lifecycle, known.reason) = (Lifecycle::Shutoff.into(), "migrated".into()),
        _ => {}
    }
    known.migration = report;
    observed.apply_report(known, at(1));
    observed.guest_changed_at = None;
    observed
}

/// Returns the VMI on the target's node, whose launcher has answered Hello.
fn target(state: &Value, networked: bool, report: Option<MigrationReport>) -> Observed {
    let mut observed = Observed::new(with_migration(&vmi("Running"), SOURCE, state), TARGET);
    observed.endpoint = Some(([10, 0, 0, 2].into(), 8188));
    observed.link =
        Link::Up { connection: 1, greeted: true, features: all_features(), networked, synced: None, results_from: 0 };
    observed.prepared_migration = report.as_ref().map(|report| report.migration.clone());
    let copies = report.as_ref().is_some_and(|report| [2, 4].contains(&report.step));
    let mut known = super::state(if copies { Lifecycle::Paused } else { Lifecycle::NoDomain }, "");
    known.migration = report;
    observed.apply_report(known, at(1));
    observed
}

fn relays(observed: &mut Observed, decision: &Decision) {
    for effect in decision.effects.iter().filter(|effect| matches!(effect, Effect::Relay(_))) {
        observed.begin(effect, at(1));
    }
}

fn state_of(decision: &Decision) -> api::vmi::migration::VirtualMachineInstanceMigrationState {
    *written(decision).unwrap().migration_state.clone().unwrap()
}

#[test]
fn source_follows_the_status_and_its_launcher() {
    use MigrationStep::{Copying, Moved, NotMoved, Releasing};
    let none = || json!({});
    let aborted = || json!({"abortRequested": true});
    let failed = json!({"failed": true, "completed": true, "endTimestamp": "2027-01-15T08:00:01Z"});
    let rows: &[(Value, Option<MigrationStep>, &[&str])] = &[
        (state(none()), None, &[]),
        (state(aborted()), None, &["write"]),
        (ready(none()), None, &["relay", "migrate"]),
        (ready(aborted()), None, &["write"]),
        (ready(none()), Some(Copying), &["write", "relay"]),
        (begun(none()), Some(Copying), &["relay"]),
        (begun(aborted()), Some(Copying), &["relay", "abort"]),
        (begun(none()), Some(Releasing), &["relay"]),
        (begun(none()), Some(Moved), &["relay"]),
        (begun(none()), Some(NotMoved), &["write"]),
        // The launcher has lost the migration, and the domain runs.
        (begun(none()), None, &["write"]),
        (begun(failed.clone()), Some(NotMoved), &[]),
        (begun(failed), None, &[]),
    ];
    for (state, step, expected) in rows {
        let observed = source(state, step.map(moving));
        assert_eq!(names(&decide(&observed, at(5))), *expected, "{state} {step:?}");
    }
    let stranger = MigrationReport { migration: "m0".into(), ..moving(NotMoved) };
    let observed = source(&ready(none()), Some(stranger));
    assert_eq!(names(&decide(&observed, at(5))), ["relay", "migrate"], "the migration before");
}

#[test]
fn source_requests_an_abort_again_after_its_failure() {
    let failed = |mode: MigrationMode| {
        let mut report = MigrationReport { abort_failure: "busy".into(), ..moving(MigrationStep::Copying) };
        report.set_mode(mode);
        report
    };
    for (report, is_repeated) in [
        (moving(MigrationStep::Copying), false),
        (failed(MigrationMode::PreCopy), true),
        (failed(MigrationMode::PausedCopy), true),
        (failed(MigrationMode::PostCopy), false),
    ] {
        let mut observed = source(&begun(json!({"abortRequested": true})), Some(report.clone()));
        let abort = AbortMigrationRequest { migration: "m1".into() };
        observed.begin(&Effect::Call(Arc::new(abort.clone())), at(5));
        observed.apply_answer(&abort, 1, Ok(Done {}), at(5));
        assert!(!names(&decide(&observed, at(9))).contains(&"abort"), "{report:?}");
        assert_eq!(names(&decide(&observed, at(10))).contains(&"abort"), is_repeated, "{report:?}");
    }
}

#[test]
fn source_begins_once_no_call_is_in_progress() {
    let mut observed = source(&ready(json!({})), None);
    let rows = [(RECORD, true), (SYNC, false), (HandVolumes::SLOT, false), (REQUEST, false), ("of a later row", false)];
    for (slot, begins) in rows {
        observed.busy = [slot].into();
        assert_eq!(names(&decide(&observed, at(5))).contains(&"migrate"), begins, "{slot}");
    }
}

#[test]
fn migrations_that_have_not_begun_wait_for_the_next_virt_handler() {
    use MigrationStep::{Copying, Prepared};
    let none = || json!({});
    let mut called = source(&ready(none()), None);
    called.begin(&Effect::Call(Arc::new(migrate())), at(4));
    let mut restarted = target(&ready(none()), true, Some(moving(Copying)));
    restarted.prepared_migration = None;
    let rows: [(Observed, &[&str]); 6] = [
        (source(&ready(none()), None), &[]),
        (called, &["relay"]),
        (source(&begun(none()), Some(moving(Copying))), &["relay"]),
        (target(&state(none()), true, None), &[]),
        // It was prepared late, and its address is not published.
        (target(&state(none()), true, Some(moving(Prepared))), &["relay"]),
        (restarted, &["relay", "write", "prepare"]),
    ];
    for (number, (mut observed, expected)) in rows.into_iter().enumerate() {
        observed.draining = true;
        assert_eq!(names(&decide(&observed, at(5))), expected, "{number}");
    }
    let mut waiting = source(&ready(none()), None);
    let decision = decide(&waiting, at(5));
    relays(&mut waiting, &decision);
    waiting.draining = true;
    assert_eq!(decide(&waiting, at(5)).effects, [Effect::Relay(None)], "nothing keeps the process");
}

#[test]
fn source_writes_the_failure_and_its_reason_once() {
    let aborted = MigrationReport { aborted: true, failure: "cancelled".into(), ..moving(MigrationStep::NotMoved) };
    let failed = MigrationReport { failure: "no route".into(), ..moving(MigrationStep::NotMoved) };
    for (state, report, reason, abort_status) in [
        (begun(json!({"abortRequested": true})), Some(aborted), "Live migration has been aborted", Some("Succeeded")),
        (begun(json!({})), Some(failed), "no route", None),
        (begun(json!({})), None, "virt-launcher has restarted", None),
        (state(json!({"abortRequested": true})), None, "Live migration has been aborted", Some("Succeeded")),
    ] {
        let mut observed = source(&state, report);
        let decision = decide(&observed, at(5));
        let shown = state_of(&decision);
        assert!(shown.failed && shown.completed && shown.end_timestamp.is_some(), "{shown:?}");
        assert_eq!((shown.failure_reason.as_deref(), shown.abort_status.as_deref()), (Some(reason), abort_status));
        let mut vmi = (*observed.vmi).clone();
        vmi.status = written(&decision).cloned();
        observed.apply_object(Arc::new(vmi), NODE);
        assert_eq!(names(&decide(&observed, at(5))), [""; 0], "{reason}");
    }
    let mut old = source(&ready(json!({})), None);
    if let Link::Up { features, .. } = &mut old.link {
        features.remove(&Feature::LiveMigration);
    }
    let reason = state_of(&decide(&old, at(5))).failure_reason;
    assert_eq!(reason.as_deref(), Some("virt-launcher does not support live-migration"));
}

#[test]
fn annotations_of_tests_make_a_migration_fail_or_wait() {
    let annotate = |observed: &mut Observed, key: &str, node: &str| {
        let mut vmi = (*observed.vmi).clone();
        vmi.metadata.annotations.get_or_insert_default().insert(key.to_owned(), String::new());
        observed.apply_object(Arc::new(vmi), node);
    };
    let fail = "kubevirt.io/func-test-force-launcher-migration-failure";
    for (state, reported, step, fails) in [
        (state(json!({})), true, None, false),
        (ready(json!({})), true, None, true),
        // virt-handler has restarted, and does not know yet that the launcher copies.
        (ready(json!({})), false, None, false),
        (ready(json!({})), true, Some(MigrationStep::Copying), false),
        (begun(json!({})), true, Some(MigrationStep::Copying), false),
    ] {
        let mut observed = source(&state, step.map(moving));
        observed.reported = reported;
        annotate(&mut observed, fail, SOURCE);
        observed.guest_changed_at = None;
        let decision = decide(&observed, at(5));
        let shown = written(&decision).and_then(|status| status.migration_state.clone());
        assert_eq!(shown.as_ref().is_some_and(|shown| shown.failed), fails, "{state} {step:?}");
        if let Some(shown) = shown.filter(|shown| shown.failed) {
            let reason = "Failed migration to satisfy functional test condition";
            assert_eq!(shown.failure_reason.as_deref(), Some(reason));
            assert!(shown.start_timestamp.is_some() && !names(&decision).contains(&"migrate"));
        }
    }
    let mut waiting = target(&state(json!({})), true, None);
    annotate(&mut waiting, "kubevirt.io/func-test-block-migration-target-preparation", TARGET);
    assert_eq!(names(&decide(&waiting, at(2))), [""; 0]);
}

#[test]
fn refused_migration_fails_with_the_message_of_the_launcher() {
    let mut observed = source(&ready(json!({})), None);
    observed.begin(&Effect::Call(Arc::new(migrate())), at(5));
    assert!(!names(&decide(&observed, at(5))).contains(&"migrate"), "once");
    let refused = |message: &str| crate::launcher::LauncherError::Refused {
        call: "Migrate",
        message: message.into(),
        irrecoverable: false,
    };
    for second in [5, 6, 8, 12, 20] {
        observed.apply_answer(&migrate(), 1, Err(refused("a dump is written")), at(second));
        assert!(!names(&decide(&observed, at(second))).contains(&"migrate"), "{second}");
    }
    assert!(names(&decide(&observed, at(36))).contains(&"migrate"));
    observed.apply_answer(&migrate(), 1, Err(refused("a dump is written")), at(36));
    let decision = decide(&observed, at(36));
    assert_eq!(names(&decision), ["write"]);
    assert_eq!(state_of(&decision).failure_reason.as_deref(), Some("a dump is written"));
}

#[test]
fn addresses_that_no_other_node_can_have_are_never_dialled() {
    for address in [
        "127.0.0.1",
        "169.254.169.254",
        "168.63.129.16",
        "224.0.0.1",
        "0.0.0.0",
        "::1",
        "fe80::1",
        "fd00:ec2::254",
        "::ffff:169.254.169.254",
    ] {
        let named = json!({"targetNodeAddress": address});
        let decision = decide(&source(&ready(named.clone()), None), at(5));
        assert_eq!(names(&decision), ["write"], "{address}");
        let shown = state_of(&decision);
        assert!(shown.failed && shown.failure_reason.unwrap().contains(address), "{address}");
        // The target names it afterwards.
        let mut begun = source(&begun(json!({})), Some(moving(MigrationStep::Copying)));
        let decision = decide(&begun, at(5));
        relays(&mut begun, &decision);
        let later = with_migration(&begun.vmi, SOURCE, &self::begun(named));
        begun.apply_object(later, NODE);
        assert_eq!(decide(&begun, at(5)).effects, [Effect::Relay(None)], "{address}");
    }
}

#[test]
fn domain_that_moves_is_left_alone_and_follows_its_spec_afterwards() {
    let mut observed = source(&begun(json!({})), Some(moving(MigrationStep::Copying)));
    let mut vmi = (*observed.vmi).clone();
    vmi.metadata.annotations.get_or_insert_default().insert("a".into(), "b".into());
    observed.apply_object(Arc::new(vmi), NODE);
    assert_eq!(names(&decide(&observed, at(5))), ["relay"]);
    assert!(matches!(
        crate::vmi::request::admit(&observed, crate::vmi::Request::Pause),
        Err(crate::vmi::Refusal::Migrating)
    ));
    let mut vmi = (*observed.vmi).clone();
    let state = vmi.status.as_mut().unwrap().migration_state.as_mut().unwrap();
    (state.failed, state.completed) = (true, true);
    observed.apply_object(Arc::new(vmi), NODE);
    assert_eq!(names(&decide(&observed, at(5))), ["sync"]);
}

#[test]
fn deletion_aborts_the_migration_and_shuts_the_guest_down() {
    let mut observed = source(&begun(json!({})), Some(moving(MigrationStep::Copying)));
    deleting(&mut observed);
    let decision = decide(&observed, at(5));
    assert_eq!(names(&decision), ["relay", "abort", "shutdown", "ShuttingDown"]);
    for step in [MigrationStep::Releasing, MigrationStep::Moved] {
        let mut gone = source(&begun(json!({})), Some(moving(step)));
        deleting(&mut gone);
        assert_eq!(names(&decide(&gone, at(5))), ["relay"], "the target takes the guest over, and stops it");
    }
}

#[test]
fn guest_that_has_moved_is_lost_only_with_its_target() {
    use MigrationStep::{Moved, Releasing};
    for (step, target_is_alive, kept, lost) in
        [(Moved, true, 290, 302), (Moved, false, 25, 32), (Releasing, true, 290, 302), (Releasing, false, 25, 32)]
    {
        let mut observed = source(&begun(json!({})), Some(moving(step)));
        if !target_is_alive {
            let mut vmi = (*observed.vmi).clone();
            vmi.status.as_mut().unwrap().active_pods.remove("pod-2");
            observed.apply_object(Arc::new(vmi), NODE);
        }
        // The launcher may end meanwhile.
        observed.apply_disconnect(1, at(2));
        assert_eq!(written(&decide(&observed, at(kept))), None, "{target_is_alive}");
        let decision = decide(&observed, at(lost));
        let status = written(&decision).unwrap();
        assert_eq!(status.phase, Some(Phase::Failed), "{target_is_alive}");
        assert!(status.migration_state.as_ref().unwrap().failed);
    }
}

#[test]
fn progress_is_written_every_two_seconds_and_changes_nothing_else() {
    let report = MigrationReport { total: 100, processed: 10, ..moving(MigrationStep::Copying) };
    let mut observed = source(&begun(json!({})), Some(report.clone()));
    let first = decide(&observed, at(5));
    relays(&mut observed, &first);
    let [Effect::WriteProgress(text), Effect::Relay(_)] = first.effects.as_slice() else { panic!("{first:?}") };
    let mut expected = json!({"migration": "m1", "total": 100, "processed": 10, "remaining": 0, "rate": 0});
    let written: Value = serde_json::from_str(text).unwrap();
    let minute = at(5).wall.as_second() / 60 * 60;
    expected["time"] = json!(jiff::Timestamp::from_second(minute).unwrap());
    assert_eq!(written, expected);
    let fingerprint = observed.facts.fingerprint;
    observed.begin(&first.effects[0], at(5));
    let mut vmi = (*observed.vmi).clone();
    vmi.metadata.annotations.get_or_insert_default().insert("ferrovirt.io/migration-progress".into(), text.clone());
    observed.apply_outcome(Outcome::ProgressWritten(Ok(Arc::new(vmi))), NODE, at(5));
    assert_eq!(observed.facts.fingerprint, fingerprint);
    // A transfer that stands still shows a sign of life in the next minute.
    let still = decide(&observed, at(8));
    let seconds = 60 - at(8).wall.as_second() % 60;
    assert_eq!((names(&still), still.wake_at), (vec![], Some(Duration::from_secs(8 + seconds.unsigned_abs()))));
    assert_eq!(names(&decide(&observed, at(70))), ["progress"]);
    let mut known = observed.report.clone().unwrap();
    known.migration = Some(MigrationReport { processed: 50, ..report });
    observed.apply_report(known, at(6));
    let waiting = decide(&observed, at(6));
    assert_eq!((names(&waiting), waiting.wake_at), (vec![], Some(Duration::from_secs(7))));
    assert_eq!(names(&decide(&observed, at(7))), ["progress"]);
}

#[test]
fn target_prepares_publishes_and_takes_over() {
    use MigrationStep::{Copying, Moved, NotMoved, Prepared};
    let none = || json!({});
    let down = Observed::new(with_migration(&vmi("Running"), SOURCE, &state(none())), TARGET);
    assert_eq!(decide(&down, at(0)).effects, [Effect::Connect { pod: "pod-2".into(), within: CONNECT_WAIT }]);
    assert_eq!(names(&decide(&target(&state(none()), false, None), at(2))), ["network"]);
    assert_eq!(names(&decide(&target(&state(none()), true, None), at(2))), ["prepare"]);
    let mut partly = target(&state(none()), false, None);
    let vmi = Arc::make_mut(&mut partly.vmi);
    vmi.spec.domain.devices.interfaces = serde_json::from_value(json!([{"name": "lan", "bridge": {}}])).unwrap();
    vmi.spec.networks = serde_json::from_value(json!([{"name": "lan", "multus": {"networkName": "n"}}])).unwrap();
    let shown = json!([{"name": "lan", "infoSource": "multus-status"}]);
    vmi.status.as_mut().unwrap().interfaces = serde_json::from_value(shown).unwrap();
    let failure = crate::network::InterfaceFailure { name: "lan".into(), message: "no link".into(), permanent: true };
    let network = crate::network::PodNetwork { failures: vec![failure], ..Default::default() };
    partly.apply_answer(&SetUpNetwork::default(), 1, Ok(network), at(2));
    assert_eq!(names(&decide(&partly, at(2))), ["prepare"], "the domain that arrives lacks the interface");
    let mut restarted = target(&ready(none()), true, Some(moving(Copying)));
    restarted.prepared_migration = None;
    assert_eq!(names(&decide(&restarted, at(2))), ["relay", "write", "prepare"]);
    let open = |observed: &mut Observed| {
        let decision = decide(observed, at(2));
        assert!(written(&decision).is_some() || observed.facts.migration.as_ref().unwrap().endpoint.is_some());
        let expected = Route::Target { migration: "m1".into(), source_node: SOURCE.into(), pod: "pod-2".into() };
        assert!(decision.effects.contains(&Effect::Relay(Some(expected))), "{decision:?}");
        relays(observed, &decision);
        decide(observed, at(2))
    };
    let shown = state_of(&open(&mut target(&state(none()), true, Some(moving(Prepared)))));
    assert_eq!(shown.target_node_address.as_deref(), Some("10.0.0.2"));
    assert_eq!(shown.target_direct_migration_node_ports, [("8188".to_owned(), 0)].into());
    let published = open(&mut target(&ready(none()), true, Some(moving(Prepared))));
    assert_eq!(names(&published), [""; 0]);
    // A restarted virt-handler with another address.
    let mut moved = target(&ready(none()), true, Some(moving(Prepared)));
    moved.endpoint = Some(([10, 0, 0, 3].into(), 8188));
    assert_eq!(state_of(&open(&mut moved)).target_node_address.as_deref(), Some("10.0.0.3"));
    assert!(state_of(&open(&mut target(&begun(none()), true, Some(moving(Copying))))).target_node_domain_detected);
    // The source learns there that nothing has arrived.
    assert_eq!(names(&open(&mut target(&begun(none()), true, Some(moving(NotMoved))))), [""; 0]);

    let mut arrived = target(&begun(json!({"targetMemoryOverhead": "300Mi"})), true, Some(moving(Moved)));
    let decision = decide(&arrived, at(2));
    let [Effect::Relay(_), Effect::Write(desired)] = decision.effects.as_slice() else { panic!("{decision:?}") };
    assert_eq!(desired.status.node_name.as_deref(), Some(TARGET));
    assert_eq!(desired.metadata.labels.get("kubevirt.io/nodeName"), Some(&Some(TARGET.to_owned())));
    let shown = desired.status.migration_state.as_ref().unwrap();
    assert!(shown.end_timestamp.is_some() && shown.target_node_domain_ready_timestamp.is_some() && !shown.completed);
    assert_eq!(desired.status.memory.as_ref().unwrap().memory_overhead.as_ref().unwrap().0, "300Mi");
    // The owner brings the domain in line with the spec, then completes the migration.
    relays(&mut arrived, &decision);
    let mut vmi = with_migration(&arrived.vmi, TARGET, &state(none()));
    Arc::make_mut(&mut vmi).status = Some(desired.status.clone());
    arrived.apply_object(vmi, TARGET);
    assert_eq!(arrived.role, Role::Owner);
    settle_on(&mut arrived, TARGET);
    assert_eq!(names(&decide(&arrived, at(3))), ["sync"], "the connections stay");
    arrived.apply_answer(&sync(arrived.facts.fingerprint), 1, Ok(answered(false)), at(3));
    let decision = decide(&arrived, at(3));
    let Some(Effect::Write(desired)) = decision.effects.first() else { panic!("{decision:?}") };
    assert!(desired.status.migration_state.as_ref().unwrap().completed);
    assert_eq!(desired.metadata.labels.get("kubevirt.io/migrationTargetNodeName"), Some(&None));
}

/// Applies the desired status as written, up to the end of the migration.
fn settle_on(observed: &mut Observed, node: &str) {
    let desired = status::desired(observed, at(3)).unwrap();
    let mut written = (*observed.vmi).clone();
    written.status = Some(desired.status);
    observed.apply_object(Arc::new(written), node);
    observed.guest_changed_at = None;
}

#[test]
fn target_of_a_failed_migration_ends_its_launcher_and_its_part() {
    let failed = begun(json!({"failed": true, "completed": true, "endTimestamp": "2027-01-15T08:00:01Z"}));
    let mut observed = target(&failed, true, Some(moving(MigrationStep::Copying)));
    let decision = decide(&observed, at(2));
    assert_eq!(names(&decision), ["write", "kill"]);
    let Some(Effect::Write(desired)) = decision.effects.first() else { panic!("{decision:?}") };
    assert_eq!(desired.metadata.labels.get("kubevirt.io/migrationTargetNodeName"), Some(&None));
    assert_eq!(Some(&desired.status), observed.vmi.status.as_ref());
    observed.begin(&Effect::Call(Arc::new(KillRequest {})), at(2));
    observed.apply_answer(&KillRequest {}, 1, Ok(Done {}), at(2));
    observed.apply_report(super::state(Lifecycle::Shutoff, "destroyed"), at(2));
    // Without the label this node has no part in the VMI.
    let mut vmi = (*observed.vmi).clone();
    vmi.metadata.labels.as_mut().unwrap().remove("kubevirt.io/migrationTargetNodeName");
    observed.apply_object(Arc::new(vmi), TARGET);
    assert_eq!((observed.role, names(&decide(&observed, at(2)))), (Role::None, vec!["finish"]));
    observed.begin(&Effect::Call(Arc::new(FinishRequest {})), at(2));
    observed.apply_answer(&FinishRequest {}, 1, Ok(Done {}), at(2));
    assert_eq!(names(&decide(&observed, at(2))), ["retire"]);
}

#[test]
fn another_migration_to_this_node_begins_with_nothing_known() {
    // A launcher that was to receive the domain ends first.
    let mut observed = target(&begun(json!({})), true, Some(moving(MigrationStep::Prepared)));
    let next = with_migration(&observed.vmi, SOURCE, &state(json!({"migrationUid": "m2"})));
    observed.apply_object(next, TARGET);
    assert_eq!(names(&decide(&observed, at(2))), ["kill"]);
    observed.begin(&Effect::Call(Arc::new(KillRequest {})), at(2));
    observed.apply_answer(&KillRequest {}, 1, Ok(Done {}), at(2));
    assert_eq!(names(&decide(&observed, at(2))), ["finish"]);
    observed.finished = true;
    assert_eq!(names(&decide(&observed, at(2))), ["retire"]);
    // The domain comes back to a node that it left.
    let mut left = live();
    let back = json!({"migrationUid": "m2", "sourceNode": "n3", "targetNode": TARGET});
    left.apply_object(with_migration(&left.vmi, "n3", &back), TARGET);
    assert_eq!(names(&decide(&left, at(2))), ["retire"]);
}

#[test]
fn target_that_cannot_be_prepared_fails_the_migration() {
    let mut observed = target(&state(json!({})), true, None);
    for second in 0..6 {
        let refused = crate::launcher::LauncherError::Refused {
            call: "PrepareMigration",
            message: "no disk".into(),
            irrecoverable: false,
        };
        assert_eq!(names(&decide(&observed, at(100 * (second + 1)))), ["prepare"], "{second}");
        observed.apply_answer(&prepare(), 1, Err(refused), at(100 * (second + 1)));
    }
    let shown = state_of(&decide(&observed, at(700)));
    assert_eq!(shown.failure_reason.as_deref(), Some("failed to prepare the migration target: no disk"));
    let mut old = target(&state(json!({})), true, None);
    if let Link::Up { features, .. } = &mut old.link {
        features.clear();
    }
    let reason = state_of(&decide(&old, at(5))).failure_reason;
    assert_eq!(reason.as_deref(), Some("virt-launcher does not support live-migration"));
}

#[test]
fn launcher_of_a_guest_that_left_ends() {
    let moved = begun(json!({"endTimestamp": "2027-01-15T08:00:01Z"}));
    let left = |lifecycle, reason: &str| {
        let mut observed = prepared("Running", lifecycle, reason);
        let vmi = with_migration(&observed.vmi, TARGET, &moved);
        observed.apply_object(vmi, NODE);
        observed.note_role(at(10));
        assert_eq!(observed.role, Role::MigrationSource);
        observed
    };
    assert_eq!(names(&decide(&left(Lifecycle::Shutoff, "migrated"), at(10))), ["finish"]);
    let running = left(Lifecycle::Running, "");
    assert_eq!(names(&decide(&running, at(20))), [""; 0], "the report of the end is under way");
    assert_eq!(names(&decide(&running, at(41))), ["kill"], "never two guests");
    assert_eq!(names(&decide(&running, at(131))), ["retire"]);
    let mut gone = left(Lifecycle::Shutoff, "migrated");
    gone.apply_disconnect(1, at(11));
    gone.apply_outcome(Outcome::Connected(Err(ConnectError::NoPod)), NODE, at(12));
    assert_eq!(names(&decide(&gone, at(12))), ["retire"]);
}

#[test]
fn launcher_gets_the_options_of_the_status() {
    let options = json!({
        "bandwidthPerMigration": "64Mi", "completionTimeoutPerGiB": 20, "progressTimeout": 30, "maxDowntimeMs": 500,
        "allowAutoConverge": true, "unsafeMigrationOverride": true, "allowWorkloadDisruption": true,
    });
    let mut vmi =
        (*with_migration(&vmi("Running"), SOURCE, &state(json!({"migrationConfiguration": options})))).clone();
    vmi.status.as_mut().unwrap().migrated_volumes = serde_json::from_value(json!([{"volumeName": "root"}])).unwrap();
    let request = source::request(&vmi, "m1");
    assert_eq!((request.bandwidth, request.completion_timeout_per_gb, request.progress_timeout), (64 << 20, 20, 30));
    assert_eq!((request.max_downtime_ms, request.post_copy), (500, false));
    assert!(request.auto_converge && request.allow_unsafe && request.allow_workload_disruption);
    assert_eq!((request.copied_volumes, request.destinations), (vec!["root".to_owned()], vec![]));
    for (limit, connections) in [("64Mi", 1), ("512Mi", 2), ("100Gi", 4), ("0", 4)] {
        let options = json!({"bandwidthPerMigration": limit, "allowPostCopy": true});
        let state = vmi.status.as_mut().unwrap().migration_state.as_mut().unwrap();
        state.migration_configuration = serde_json::from_value(options).unwrap();
        let request = source::request(&vmi, "m1");
        assert_eq!((request.memory_connections, request.post_copy), (connections, true), "{limit}");
    }
    vmi.spec.domain.resources.limits = serde_json::from_value(json!({"cpu": "2"})).unwrap();
    assert_eq!(source::request(&vmi, "m1").memory_connections, 1);
    vmi.status.as_mut().unwrap().migration_state = None;
    let request = source::request(&vmi, "m1");
    assert_eq!((request.bandwidth, request.completion_timeout_per_gb), (0, 150));
}

#[test]
fn launcher_gets_the_modes_of_the_claims_to_which_volumes_move() {
    let vmi = with_migration(&vmi("Running"), SOURCE, &state(json!({})));
    for (info, expected) in [
        (json!({"volumeMode": "Block"}), Some(true)),
        (json!({"volumeMode": "Filesystem"}), Some(false)),
        // The default of Kubernetes.
        (json!({}), Some(false)),
        (Value::Null, None),
    ] {
        let mut vmi = (*vmi).clone();
        let moved =
            json!([{"volumeName": "data", "sourcePVCInfo": {"volumeMode": "Block"}, "destinationPVCInfo": info}]);
        vmi.status.as_mut().unwrap().migrated_volumes = serde_json::from_value(moved).unwrap();
        let request = source::request(&vmi, "m1");
        let found: Vec<(&str, bool)> =
            request.destinations.iter().map(|known| (known.volume.as_str(), known.block)).collect();
        assert_eq!(found, Vec::from_iter(expected.map(|block| ("data", block))), "{info}");
        assert_eq!(request.copied_volumes, ["data"]);
    }
}

#[test]
fn launcher_gets_the_claims_that_its_pod_has() {
    let moved = json!([{
        "volumeName": "data", "sourcePVCInfo": {"claimName": "old"}, "destinationPVCInfo": {"claimName": "new"},
    }]);
    let shown =
        |claim: &str| json!([{"name": "data", "target": "vda", "persistentVolumeClaimInfo": {"claimName": claim}}]);
    let ended = json!({"startTimestamp": "2027-01-15T08:00:00Z", "endTimestamp": "2027-01-15T08:00:01Z"});
    // Node, owner, state; volumes that move, claim in the status; claim for the launcher.
    for (node, owner, state, moved, entry, expected) in [
        (SOURCE, SOURCE, state(json!({})), &moved, "new", "old"),
        (SOURCE, SOURCE, state(json!({"failed": true, "endTimestamp": "2027-01-15T08:00:01Z"})), &moved, "new", "old"),
        (SOURCE, SOURCE, state(json!({})), &moved, "old", "old"),
        (TARGET, TARGET, ready(ended.clone()), &moved, "new", "new"),
        (SOURCE, SOURCE, state(json!({})), &json!([]), "new", "new"),
    ] {
        let mut vmi = (*with_migration(&vmi("Running"), owner, &state)).clone();
        let status = vmi.status.as_mut().unwrap();
        status.migrated_volumes = serde_json::from_value(moved.clone()).unwrap();
        status.volume_status = serde_json::from_value(shown(entry)).unwrap();
        let observed = Observed::new(Arc::new(vmi), node);
        let sent = target::for_owner(&observed);
        let info = sent.status.as_ref().unwrap().volume_status[0].persistent_volume_claim_info.as_ref().unwrap();
        assert_eq!(info.claim_name.as_deref(), Some(expected), "{node} {state} {moved} {entry}");
    }
}

/// Returns the lists of fields between two variables of the policy that limits the writes of virt-handlers.
fn permitted(from: &str, to: &str) -> Vec<BTreeSet<String>> {
    let policy =
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/ferrovirt/templates/node-restriction.yaml"));
    let expression = policy.split_once(from).unwrap().1.split_once(to).unwrap().0;
    let lists = expression.split('[').skip(1).map(|list| list.split_once(']').unwrap().0);
    lists.map(|list| list.split('"').skip(1).step_by(2).map(str::to_owned).collect()).collect()
}

/// Returns the fields that a write changes: of the status, and of the migration in it.
fn changed(observed: &Observed) -> [BTreeSet<String>; 2] {
    let decision = decide(observed, at(1_000));
    let after = written(&decision).unwrap_or_else(|| panic!("no write: {decision:?}"));
    let [before, after] = [observed.vmi.status.as_ref().unwrap(), after].map(|status| json!(status));
    let patch = daemon::merge_patch::diff(&before, &after).unwrap();
    let keys = |value: &Value| value.as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect();
    [keys(&patch), keys(&patch["migrationState"])]
}

#[test]
fn nodes_write_only_what_the_policy_permits() {
    use MigrationStep::{Copying, Moved, NotMoved, Prepared};
    let steps = permitted("name: stateOfMigration", "name: statusByTarget");
    let [over, taking, arrived, leaving, awaited] = steps.as_slice() else { panic!("{steps:?}") };
    let by_target = permitted("name: statusByTarget", "validations:");
    let [taking_status, lost_status, target_status] = by_target.as_slice() else { panic!("{by_target:?}") };
    assert!(over.is_empty());
    let none = || json!({});
    let abort = || json!({"abortRequested": true});

    // The writes of a list need all of it, and nothing else.
    let check = |list: &BTreeSet<String>, writes: &[Observed]| {
        let all: Vec<_> = writes.iter().map(|observed| changed(observed)[1].clone()).collect();
        assert_eq!(all.iter().flatten().cloned().collect::<BTreeSet<String>>(), *list, "{all:?}");
    };
    let mut refused = target(&state(none()), true, None);
    refused.failure = Some(Failure { message: "no disk".into(), count: 9, retry_at: Duration::MAX, permanent: false });
    let mut elsewhere = target(&ready(none()), true, Some(moving(Prepared)));
    elsewhere.endpoint = Some(([10, 0, 0, 3].into(), 8189));
    let report = MigrationReport { cpus: vec![3], topology: "{}".into(), ..moving(Prepared) };
    let mut pinned = target(&state(none()), true, Some(report));
    let cpu = api::vmi::cpu::Cpu { dedicated_cpu_placement: true, ..api::vmi::cpu::Cpu::default() };
    Arc::make_mut(&mut pinned.vmi).spec.domain.cpu = Some(cpu);
    let awaited_writes = [
        pinned,
        target(&state(none()), true, Some(moving(Prepared))),
        refused,
        target(&state(none()), true, Some(moving(Copying))),
        elsewhere,
        target(&begun(none()), true, Some(moving(Copying))),
    ];
    check(awaited, &awaited_writes);
    for observed in &awaited_writes {
        assert!(changed(observed)[0].is_subset(target_status), "{:?}", changed(observed));
    }
    let mut report = MigrationReport { failure: "lost".into(), ..moving(NotMoved) };
    report.set_mode(protocol::MigrationMode::PostCopy);
    let mut lost = target(&begun(json!({"targetNodeDomainDetected": true})), true, Some(report));
    lost.note_role(at(2));
    let [status, migration] = changed(&lost);
    assert_eq!(status, *lost_status);
    assert!(migration.is_subset(awaited), "{migration:?}");
    let leaving_writes = [
        source(&ready(none()), Some(moving(Copying))),
        source(&begun(abort()), Some(MigrationReport { aborted: true, ..moving(NotMoved) })),
    ];
    check(leaving, &leaving_writes);

    let mut moved = target(&ready(json!({"targetMemoryOverhead": "300Mi"})), true, Some(moving(Moved)));
    let status = Arc::make_mut(&mut moved.vmi).status.as_mut().unwrap();
    status.evacuation_node_name = Some(SOURCE.into());
    status.launcher_container_image_version = Some("old".into());
    status.conditions.push(api::Condition { type_: "MigrationRequired".into(), ..api::Condition::default() });
    check(taking, std::slice::from_ref(&moved));
    assert_eq!(changed(&moved)[0], *taking_status);

    let ended = begun(
        json!({"endTimestamp": "2027-01-15T08:00:01Z", "targetNodeDomainReadyTimestamp": "2027-01-15T08:00:01Z"}),
    );
    let mut here = target(&ended, true, Some(moving(Moved)));
    here.apply_object(with_migration(&here.vmi, TARGET, &ended), TARGET);
    check(arrived, &[here]);
}

#[test]
fn target_decides_if_the_source_does_not() {
    use MigrationStep::{Copying, Moved, NotMoved, Prepared};
    let lost = |step| {
        let mut report = MigrationReport { failure: "lost".into(), ..moving(step) };
        report.set_mode(protocol::MigrationMode::PostCopy);
        report
    };
    // Report, the pod of the source is there; effects after 59 s and after 60 s, the VMI fails.
    type Row<'a> = (MigrationReport, bool, &'a [&'a str], &'a [&'a str], bool);
    let rows: &[Row<'_>] = &[
        (moving(Prepared), true, &[], &[], false),
        (moving(Prepared), false, &[], &["abort"], false),
        // Only the source may release a paused guest.
        (moving(Copying), true, &[], &[], false),
        (moving(Copying), false, &[], &["abort"], false),
        // The launcher decides about a guest in post-copy.
        (lost(Copying), true, &[], &[], false),
        (lost(Copying), false, &[], &[], false),
        (moving(NotMoved), true, &[], &["write"], false),
        (moving(NotMoved), false, &[], &["write"], false),
        (lost(NotMoved), true, &[], &["write"], true),
        (moving(Moved), true, &["write"], &["write"], false),
        (moving(Moved), false, &["write"], &["write"], false),
    ];
    for (report, source_is_there, early, late, fails) in rows {
        let shown = begun(json!({"targetNodeDomainDetected": true}));
        let mut observed = target(&shown, true, Some(report.clone()));
        if !source_is_there {
            let mut vmi = (*observed.vmi).clone();
            vmi.status.as_mut().unwrap().active_pods.remove("pod-1");
            observed.apply_object(Arc::new(vmi), TARGET);
        }
        observed.note_role(at(2));
        let decision = decide(&observed, at(2));
        relays(&mut observed, &decision);
        let name = format!("{report:?} {source_is_there}");
        observed.note_role(at(61));
        let waiting = decide(&observed, at(61));
        assert_eq!(names(&waiting), *early, "{name}");
        assert_eq!(waiting.wake_at.is_some(), early != late, "{name}");
        let decision = decide(&observed, at(62));
        assert_eq!(names(&decision), *late, "{name}");
        let Some(status) = written(&decision).filter(|_| report.step() == NotMoved) else { continue };
        let state = status.migration_state.as_ref().unwrap();
        assert!(state.failed && state.completed && state.failure_reason.is_some(), "{name}");
        assert_eq!(status.phase == Some(Phase::Failed), *fails, "{name}");
        assert_eq!(status.reason.as_deref(), fails.then_some("LostInPostCopy"), "{name}");
    }
    // A source whose pod is there again, as the search for it has shown, is waited for.
    let mut observed = target(&begun(json!({})), true, Some(moving(Copying)));
    let there = observed.vmi.clone();
    let mut vmi = (*there).clone();
    vmi.status.as_mut().unwrap().active_pods.remove("pod-1");
    observed.apply_object(Arc::new(vmi), TARGET);
    observed.note_role(at(2));
    observed.apply_object(there, TARGET);
    observed.note_role(at(3));
    assert_eq!(observed.source_gone_since, None);
}
