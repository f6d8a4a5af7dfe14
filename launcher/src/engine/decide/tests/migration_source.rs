use std::sync::Arc;

use protocol::{Lifecycle, MigrateRequest, MigrationMode, MigrationReport, MigrationStep};

use super::{Table, read, to_out, wanted};
use crate::{
    domain::parse::{DomainConfig, MemoryDevice},
    engine::{
        jobs::Job,
        model::{Action, Input, JobInput, MigrationEnd, MigrationLimits, MigrationRecord, Request, Stage},
    },
    hypervisor::{HypervisorError, Progress},
};

pub(super) fn options(name: &str) -> MigrateRequest {
    MigrateRequest { migration: name.into(), ..MigrateRequest::default() }
}

pub(super) fn migrate(table: &mut Table, request: MigrateRequest) -> Vec<String> {
    table.request(Request::Migrate(Arc::new(request)))
}

/// A worker whose domain is being copied.
fn copying(request: MigrateRequest) -> Table {
    let mut table = Table::live();
    assert_eq!(migrate(&mut table, request), ["open migration"]);
    assert_eq!(table.take(to_out(JobInput::MigrationOpened(Ok(())))), ["await departure", "set downtime", "migrate"]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    table
}

pub(super) fn report(table: &Table) -> MigrationReport {
    table.state.base.published.migration.clone().unwrap_or_default()
}

pub(super) fn shown(table: &Table) -> (MigrationStep, String, bool) {
    let report = report(table);
    (report.step(), report.failure.clone(), report.aborted)
}

fn no_domain() -> Input {
    Input::Read(Err(HypervisorError::NoDomain), None)
}

fn failed(message: &str) -> Result<(), HypervisorError> {
    Err(HypervisorError::Libvirt { code: 1, message: message.into() })
}

/// The failure of libvirt's call with a message.
fn call_failed(message: &str) -> String {
    format!("Live migration failed error encountered during MigrateToURI3 libvirt api call: {message}")
}

fn progress(remaining: u64) -> Input {
    to_out(JobInput::ProgressRead(Ok(Some(Progress { total: 1000, processed: 5, remaining, ..Progress::default() }))))
}

pub(super) const NOT_MOVED: MigrationStep = MigrationStep::NotMoved;

#[test]
fn a_domain_moves_and_its_guest_is_released_only_after_its_end() {
    let mut table = copying(options("a"));
    assert_eq!(shown(&table).0, MigrationStep::Copying);
    assert!(report(&table).begin > 1_700_000_000_000_000_000);
    // The event of the end comes before the call returns.
    table.take(Input::DomainChanged { closed: false, crashed: false });
    assert_eq!(table.take(read(Lifecycle::Shutoff, "migrated")), [""; 0]);
    assert_eq!((table.state.base.stage, table.state.base.published.lifecycle()), (Stage::Live, Lifecycle::Running));
    assert_eq!(table.take(to_out(JobInput::Migrated(Ok(())))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Shutoff, "migrated")), ["save migration", "release"]);
    assert_eq!(shown(&table).0, MigrationStep::Releasing);
    // Repeated until the target has answered.
    assert_eq!(table.take(to_out(JobInput::Released(Err("no answer".into())))), [""; 0]);
    assert_eq!(table.after(1), ["release"]);
    assert_eq!(table.after(1), [""; 0], "one at a time");
    assert_eq!(table.take(to_out(JobInput::Released(Ok(true)))), ["save migration", "attend"]);
    assert_eq!(shown(&table), (MigrationStep::Moved, String::new(), false));
    let published = &table.state.base.published;
    assert_eq!((published.lifecycle(), published.reason.as_str()), (Lifecycle::Shutoff, "migrated"));
    assert!(report(&table).end >= report(&table).begin && table.state.job.is_none());
    table.act(Action::Finish);
    assert!(table.state.base.finished);
}

#[test]
fn a_guest_is_released_once_libvirt_has_decided_and_qemu_has_ended() {
    let mut table = copying(options("a"));
    assert_eq!(table.take(to_out(JobInput::Departed(Err("no log".into())))), [""; 0], "libvirt reports the end");
    assert_eq!(shown(&table).0, MigrationStep::Copying);
    assert_eq!(table.after(1), ["read progress"]);
    assert_eq!(table.take(to_out(JobInput::Departed(Ok(())))), ["save migration", "release"]);
    assert_eq!(shown(&table).0, MigrationStep::Releasing);
    // Later reports of libvirt change nothing.
    assert_eq!(table.take(progress(3)), [""; 0]);
    assert_eq!(table.take(to_out(JobInput::Migrated(failed("monitor is gone")))), [""; 0]);
    table.take(Input::DomainChanged { closed: false, crashed: false });
    assert_eq!(table.take(read(Lifecycle::Shutoff, "crashed")), [""; 0]);
    assert_eq!(table.take(to_out(JobInput::Departed(Ok(())))), [""; 0]);
    // The end is certain, so a target that does not answer is waited for.
    for _ in 0..40 {
        table.take(to_out(JobInput::Released(Err("no answer".into()))));
        assert!(table.after(1).contains(&"release".to_owned()));
    }
    table.take(to_out(JobInput::Released(Ok(true))));
    assert_eq!(shown(&table), (MigrationStep::Moved, String::new(), false));
    // A domain that was to be destroyed is not released.
    let mut table = copying(options("a"));
    table.act(Action::Kill);
    assert_eq!(table.take(to_out(JobInput::Departed(Ok(())))), [""; 0]);
}

#[test]
fn a_calm_guest_is_stopped_for_a_short_time_and_any_other_as_long_as_permitted() {
    let progress =
        |iteration| to_out(JobInput::ProgressRead(Ok(Some(Progress { total: 1, iteration, ..Progress::default() }))));
    // The last one is of libvirt's next count.
    let iterations = [1, 3, 4, 7, 1];
    for (longest, iterations, expected) in [
        (900, iterations, [50, 50, 200, 900, 900]),
        (0, iterations, [50, 50, 200, 300, 300]),
        (100, iterations, [50, 50, 100, 100, 100]),
        (20, iterations, [20, 20, 20, 20, 20]),
        // One takes long: the first one of much memory, or each on a busy node.
        (900, [1, 1, 1, 1, 1], [50, 50, 50, 50, 50]),
        (900, [2, 2, 2, 2, 2], [50, 50, 200, 200, 900]),
        (900, [1, 1, 2, 2, 2], [50, 50, 50, 50, 200]),
    ] {
        let mut table = copying(MigrateRequest { max_downtime_ms: longest, ..options("a") });
        for (iteration, expected) in iterations.into_iter().zip(expected) {
            table.after(1);
            table.take(progress(iteration));
            let found = match &table.state.job {
                Some(Job::MigrationSource(out)) => out.downtime,
                _ => 0,
            };
            assert_eq!(found, expected, "{longest} {iterations:?} {iteration}");
        }
    }
}

#[test]
fn plugged_memory_that_qemu_cannot_move_keeps_the_guest_at_its_source() {
    let gibibyte = 1 << 30;
    for (software_emulation, size, current, moves) in [
        (true, 3 * gibibyte, gibibyte, false),
        (true, gibibyte, gibibyte, true),
        (true, 3 * gibibyte, 0, true),
        (false, 3 * gibibyte, gibibyte, true),
    ] {
        let mut table = Table::live();
        let device = MemoryDevice { size, current, ..MemoryDevice::default() };
        table.state.base.active = Arc::new(DomainConfig {
            memory: Some(gibibyte),
            memory_device: Some(device),
            software_emulation,
            ..DomainConfig::default()
        });
        let effects = migrate(&mut table, options("a"));
        assert_eq!(effects == ["open migration"], moves, "{effects:?}");
        if !moves {
            assert_eq!(table.last_answer(), Some(Ok(false)));
            let (step, failure, aborted) = shown(&table);
            assert_eq!((step, aborted), (NOT_MOVED, false));
            assert!(failure.contains("plugged memory"), "{failure}");
            assert_eq!((table.state.base.stage, report(&table).end > 0), (Stage::Live, true));
        }
    }
}

#[test]
fn a_guest_paused_by_the_user_stays_paused() {
    let mut table = Table::live();
    table.take(Input::DomainChanged { closed: false, crashed: false });
    table.take(read(Lifecycle::Paused, "user"));
    migrate(&mut table, options("a"));
    table.take(to_out(JobInput::MigrationOpened(Ok(()))));
    table.take(to_out(JobInput::Migrated(failed("no"))));
    // Not resumed after a failure.
    assert_eq!(table.take(read(Lifecycle::Paused, "user")), ["attend", "save migration"]);
    assert_eq!(shown(&table), (NOT_MOVED, call_failed("no"), false));
    migrate(&mut table, options("b"));
    table.take(to_out(JobInput::MigrationOpened(Ok(()))));
    table.take(to_out(JobInput::Migrated(Ok(()))));
    assert_eq!(table.take(read(Lifecycle::Shutoff, "migrated")), ["save migration", "release paused"]);
}

#[test]
fn a_guest_that_continues_from_saved_memory_without_running_stays_paused() {
    let mut table = Table::live();
    table.state.base.published.memory_restore = Some(protocol::MemoryFile::default());
    table.take(Input::DomainChanged { closed: false, crashed: false });
    table.take(read(Lifecycle::Paused, "migration"));
    migrate(&mut table, options("a"));
    table.take(to_out(JobInput::MigrationOpened(Ok(()))));
    table.take(to_out(JobInput::Migrated(failed("no"))));
    assert_eq!(table.take(read(Lifecycle::Paused, "migration")), ["attend", "save migration"]);
}

#[test]
fn the_guest_runs_again_after_a_failure() {
    let mut table = copying(options("a"));
    assert_eq!(table.take(to_out(JobInput::Migrated(failed("broken")))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Paused, "migration")), ["attend", "run after migration"]);
    // Repeated until it runs.
    assert_eq!(table.take(to_out(JobInput::Resumed(failed("busy")))), [""; 0]);
    assert_eq!(table.after(1), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Paused, "migration")), ["attend", "run after migration"]);
    assert_eq!(table.take(to_out(JobInput::Resumed(Ok(())))), ["read"]);
    assert_eq!(shown(&table).0, MigrationStep::Copying);
    assert_eq!(table.take(read(Lifecycle::Running, "unpaused")), ["attend", "save migration"]);
    assert_eq!(shown(&table), (NOT_MOVED, call_failed("broken"), false));
    assert_eq!(table.state.base.stage, Stage::Live);
    // It has ended, so it is not repeated; another one is possible.
    assert_eq!(migrate(&mut table, options("a")), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    assert_eq!(migrate(&mut table, options("b")), ["open migration"]);
    // Any other failure has its own words.
    let mut table = copying(options("a"));
    table.take(to_out(JobInput::Migrated(Err(HypervisorError::DestinationTooSmall("x".into())))));
    table.take(read(Lifecycle::Running, "booted"));
    assert!(shown(&table).1.starts_with("Volume migration cannot be performed"), "{}", shown(&table).1);
}

#[test]
fn a_read_that_fails_decides_nothing() {
    let mut table = copying(options("a"));
    table.take(to_out(JobInput::Migrated(failed("broken"))));
    let late = || Input::Read(Err(HypervisorError::Timeout("state")), None);
    assert_eq!(table.take(late()), [""; 0]);
    assert_eq!(shown(&table).0, MigrationStep::Copying, "the last known state is not that of now");
    assert_eq!(table.after(1), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Shutoff, "migrated")), ["save migration", "release"]);
}

#[test]
fn conflicts_are_refused_by_name_and_the_same_migration_is_a_success() {
    let mut table = copying(options("a"));
    assert_eq!(migrate(&mut table, options("a")), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    let requests = [
        Request::Migrate(Arc::new(options("b"))),
        Request::Act(Action::Pause),
        Request::Act(Action::Reset),
        Request::Sync(wanted("m", &serde_json::json!({}))),
        Request::PrepareMigration { migration: "c".into(), wanted: wanted("m", &serde_json::json!({})) },
        Request::DumpMemory { volume: "v".into(), file: "f".into() },
    ];
    for request in requests {
        let label = format!("{request:?}");
        assert_eq!(table.request(request), [""; 0], "{label}");
        let refusal = table.last_answer().unwrap().unwrap_err().to_string();
        let expected = "the domain is busy: migration to another node is in progress (copying the domain)";
        assert_eq!(refusal, expected, "{label}");
    }
    // A change of the running domain ends first.
    let mut table = Table::live();
    table.sync();
    migrate(&mut table, options("a"));
    assert!(table.last_answer().unwrap().unwrap_err().to_string().contains("change of the running domain"));
    let mut table = Table::connected();
    migrate(&mut table, options("a"));
    assert_eq!(table.last_answer().unwrap().unwrap_err().to_string(), "Domain not found.");
    let mut table = Table::live();
    migrate(&mut table, MigrateRequest { copied_volumes: vec!["other".into()], ..options("a") });
    assert_eq!(table.last_answer().unwrap().unwrap_err().to_string(), "the pod has no volume other");
}

#[test]
fn progress_is_published_and_limits_abort_or_pause() {
    let request = MigrateRequest {
        completion_timeout_per_gb: 10,
        allow_workload_disruption: true,
        max_downtime_ms: 500,
        ..options("a")
    };
    let mut table = copying(request);
    assert_eq!(table.after(1), ["read progress"]);
    assert_eq!(table.after(5), [""; 0], "one at a time");
    assert_eq!(table.take(progress(700)), [""; 0]);
    let published = report(&table);
    assert_eq!((published.total, published.processed, published.remaining), (1000, 5, 700));
    assert_eq!(table.after(5), ["read progress"]);
    assert_eq!(table.take(progress(600)), ["pause for copy"]);
    assert_eq!(report(&table).mode(), MigrationMode::PausedCopy);
    // Then the limit is twice as long.
    table.after(8);
    assert_eq!(table.take(progress(500)), [""; 0]);
    table.after(1);
    assert_eq!(table.take(progress(400)), ["abort migration"]);
    table.take(to_out(JobInput::MigrationAborted(Ok(()))));
    table.take(to_out(JobInput::Migrated(failed("canceled by client"))));
    assert_eq!(table.take(read(Lifecycle::Running, "migrationCanceled")), ["attend", "save migration"]);
    let failure = "Live migration is not completed after 20 seconds and has been aborted";
    assert_eq!(shown(&table), (NOT_MOVED, failure.into(), true));
}

#[test]
fn the_call_may_return_while_the_progress_is_read() {
    let mut table = copying(options("a"));
    assert_eq!(table.after(1), ["read progress"]);
    assert_eq!(table.take(to_out(JobInput::Migrated(Ok(())))), ["read"]);
    assert_eq!(table.take(progress(100)), [""; 0]);
    let effects = table.take(read(Lifecycle::Shutoff, "migrated"));
    assert!(effects.contains(&"release".to_owned()), "{effects:?}");
}

#[test]
fn an_abort_that_fails_lets_the_migration_go_on() {
    let mut table = copying(options("a"));
    let abort = |table: &mut Table, name: &str| table.request(Request::AbortMigration(name.into()));
    abort(&mut table, "b");
    assert_eq!(table.last_answer().unwrap().unwrap_err().to_string(), "there is no migration b");
    assert_eq!(abort(&mut table, "a"), ["abort migration"]);
    assert_eq!(abort(&mut table, "a"), [""; 0]);
    table.take(to_out(JobInput::MigrationAborted(failed("too late"))));
    assert_eq!(report(&table).abort_failure, "cannot abort the migration: too late");
    assert_eq!(table.after(1), ["read progress"], "not without another request");
    assert_eq!(abort(&mut table, "a"), ["abort migration"]);
    assert_eq!(report(&table).abort_failure, "");
    table.take(to_out(JobInput::MigrationAborted(failed("too late"))));
    table.take(to_out(JobInput::Migrated(Ok(()))));
    table.take(read(Lifecycle::Shutoff, "migrated"));
    abort(&mut table, "a");
    assert_eq!(table.last_answer().unwrap().unwrap_err().to_string(), "migration a has ended");
    table.take(to_out(JobInput::Released(Ok(true))));
    assert_eq!(shown(&table), (MigrationStep::Moved, String::new(), false));
    // An abort that succeeds.
    let mut table = copying(options("a"));
    abort(&mut table, "a");
    table.take(to_out(JobInput::MigrationAborted(Ok(()))));
    table.take(to_out(JobInput::Migrated(failed("canceled"))));
    table.take(read(Lifecycle::Running, "migrationCanceled"));
    assert_eq!(shown(&table), (NOT_MOVED, "Live migration has been aborted".into(), true));
    abort(&mut table, "a");
    assert_eq!(table.last_answer(), Some(Ok(false)), "it has no effect any more");
}

#[test]
fn an_abort_is_repeated_while_libvirt_cannot_carry_it_out_yet() {
    for error in [
        HypervisorError::Libvirt { code: 55, message: "no job is active on the domain".into() },
        HypervisorError::Disconnected("broken".into()),
        HypervisorError::Timeout("abort the migration"),
        HypervisorError::Busy,
    ] {
        let label = format!("{error:?}");
        let mut table = copying(options("a"));
        assert_eq!(table.request(Request::AbortMigration("a".into())), ["abort migration"]);
        assert_eq!(table.take(to_out(JobInput::MigrationAborted(Err(error)))), [""; 0], "{label}");
        assert_eq!(report(&table).abort_failure, "", "{label}");
        assert_eq!(table.after(1), ["abort migration", "read progress"], "{label}");
        table.take(progress(5));
        assert_eq!(table.after(1), ["read progress"], "one at a time: {label}");
        table.take(progress(4));
        table.take(to_out(JobInput::MigrationAborted(Ok(()))));
        assert_eq!(table.after(1), ["read progress"], "not after it has worked: {label}");
        table.take(to_out(JobInput::Migrated(failed("canceled"))));
        table.take(read(Lifecycle::Running, "migrationCanceled"));
        assert_eq!(shown(&table), (NOT_MOVED, "Live migration has been aborted".into(), true), "{label}");
    }
}

#[test]
fn a_domain_that_ends_otherwise_is_released_or_lost() {
    let ended = |reason| {
        let mut table = copying(options("a"));
        table.take(Input::DomainChanged { closed: false, crashed: false });
        table.take(read(Lifecycle::Shutoff, reason));
        table.take(to_out(JobInput::Migrated(failed("gone"))));
        assert_eq!(table.take(read(Lifecycle::Shutoff, reason)), ["save migration", "release"]);
        table
    };
    // The target has it all the same.
    let mut table = ended("crashed");
    table.take(to_out(JobInput::Released(Ok(true))));
    assert_eq!(table.state.base.published.reason, "migrated");
    // The target has nothing.
    for (reason, published) in [("crashed", "crashed"), ("migrated", "failed")] {
        let mut table = ended(reason);
        table.take(to_out(JobInput::Released(Ok(false))));
        assert_eq!((table.state.base.stage, table.state.base.published.reason.as_str()), (Stage::Ended, published));
        assert_eq!(shown(&table).0, NOT_MOVED);
    }
    // The target does not answer: only a domain that has migrated waits for it.
    for (reason, lost) in [("crashed", true), ("migrated", false)] {
        let mut table = ended(reason);
        table.after(40);
        table.take(to_out(JobInput::Released(Err("no answer".into()))));
        assert_eq!(table.state.base.stage == Stage::Ended, lost, "{reason}");
    }
}

#[test]
fn the_guest_can_be_ended_at_any_step() {
    // Shutdown aborts the migration first.
    let mut table = copying(options("a"));
    assert_eq!(table.act(Action::Shutdown { grace: 30 }), ["abort migration"]);
    table.take(to_out(JobInput::MigrationAborted(Ok(()))));
    table.take(to_out(JobInput::Migrated(failed("canceled"))));
    let effects = table.take(read(Lifecycle::Running, "migrationCanceled"));
    assert_eq!(effects, ["attend", "save migration", "shutdown"]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    // If it succeeds, there is nothing to shut down here.
    let mut table = copying(options("a"));
    table.act(Action::Terminate { grace: 30 });
    table.take(to_out(JobInput::Migrated(Ok(()))));
    table.take(read(Lifecycle::Shutoff, "migrated"));
    table.take(to_out(JobInput::Released(Ok(true))));
    assert_eq!((table.last_answer(), table.state.base.published.reason.as_str()), (Some(Ok(false)), "migrated"));
    // A destroyed domain is not released.
    let mut table = copying(options("a"));
    assert_eq!(table.act(Action::Kill), ["destroy gently"]);
    table.take(Input::Destroyed(Ok(())));
    table.take(read(Lifecycle::Shutoff, "destroyed"));
    table.take(to_out(JobInput::Migrated(failed("gone"))));
    assert_eq!(table.take(read(Lifecycle::Shutoff, "destroyed")), ["save migration", "attend"]);
    assert_eq!((table.last_answer(), table.state.base.published.reason.as_str()), (Some(Ok(false)), "destroyed"));
}

#[test]
fn a_restarted_worker_goes_on() {
    let record = |step: MigrationStep| MigrationRecord {
        migration: "a".into(),
        direction: MigrationEnd::Source,
        step: step.into(),
        paused: false,
        failure: String::new(),
        aborted: false,
        begin: 1,
        end: 0,
        post_copy: false,
        limits: None,
    };
    let adopted = |step| {
        let mut table = Table::restarted(record(step));
        table.take(Input::Timer);
        table.take(Input::Connected(Ok(true)));
        table
    };
    // libvirt's job goes on.
    let mut table = adopted(MigrationStep::Copying);
    table.take(read(Lifecycle::Running, "booted"));
    assert_eq!(table.after(1), ["read progress"]);
    assert_eq!(table.take(progress(10)), [""; 0]);
    assert_eq!(report(&table).remaining, 10);
    assert_eq!(table.after(1), ["read progress"]);
    assert_eq!(table.take(to_out(JobInput::ProgressRead(Ok(None)))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Paused, "migration")), ["attend", "run after migration"]);
    // It has ended: the domain has left, or libvirt does not know why it has ended.
    for input in [read(Lifecycle::Shutoff, "migrated"), read(Lifecycle::Shutoff, "unknown"), no_domain()] {
        let mut table = adopted(MigrationStep::Copying);
        let label = format!("{input:?}");
        table.take(input);
        assert_eq!(table.after(1), ["read"], "{label}");
        assert_eq!(table.take(read(Lifecycle::Shutoff, "unknown")), ["save migration", "release"], "{label}");
    }
    // The end is known.
    let table = Table::restarted(record(MigrationStep::Moved));
    assert_eq!((table.state.base.stage, table.state.base.published.reason.as_str()), (Stage::Ended, "migrated"));
    let mut table = adopted(MigrationStep::NotMoved);
    table.take(read(Lifecycle::Running, "booted"));
    assert_eq!(migrate(&mut table, options("a")), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
}

#[test]
fn a_restarted_worker_keeps_the_limits() {
    let limits = MigrationLimits { completion_timeout_per_gb: 10, max_downtime_ms: 500, ..MigrationLimits::default() };
    let downtime = &["set downtime"][..];
    for (allow_workload_disruption, post_copy, first, last) in [
        (false, false, downtime, "abort migration"),
        (true, false, downtime, "pause for copy"),
        // The job may be one from which the guest must not leave before the switch.
        (true, true, &[][..], "abort migration"),
    ] {
        let former = copying(options("a"));
        let record = MigrationRecord {
            begin: former.state.base.nanoseconds() - 6_000_000_000,
            limits: Some(MigrationLimits { allow_workload_disruption, post_copy, ..limits }),
            ..MigrationRecord::of(&report(&former), MigrationEnd::Source, false)
        };
        let mut table = Table::restarted(record);
        table.take(Input::Timer);
        table.take(Input::Connected(Ok(true)));
        table.take(read(Lifecycle::Running, "booted"));
        assert_eq!(table.after(1), ["read progress"]);
        assert_eq!(table.take(progress(700)), *first, "{post_copy}");
        table.after(1);
        assert_eq!(table.take(progress(600)), [""; 0], "{last}");
        table.after(3);
        assert_eq!(table.take(progress(500)), [last]);
    }
}
