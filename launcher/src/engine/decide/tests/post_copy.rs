use std::{sync::Arc, time::Duration};

use protocol::{Lifecycle, MigrateRequest, MigrationMode, MigrationStep};

use super::{Table, read, to_in, to_out, wanted};
use crate::{
    engine::model::{Action, Input, JobInput, MigrationEnd, MigrationRecord, Request, Stage},
    hypervisor::{DomainFacts, HypervisorError, Progress},
};

fn failed(message: &str) -> Result<(), HypervisorError> {
    Err(HypervisorError::Libvirt { code: 1, message: message.into() })
}

fn progress(remaining: u64) -> Input {
    to_out(JobInput::ProgressRead(Ok(Some(Progress { total: 1000, remaining, ..Progress::default() }))))
}

fn shown(table: &Table) -> (MigrationStep, MigrationMode, String) {
    let report = table.state.base.published.migration.clone().unwrap_or_default();
    (report.step(), report.mode(), report.failure)
}

fn tick(table: &mut Table, milliseconds: u64) -> Vec<String> {
    table.now += Duration::from_millis(milliseconds);
    table.take(Input::Timer)
}

/// A worker whose migration has exceeded its time limit.
fn late() -> Table {
    let request = MigrateRequest {
        migration: "a".into(),
        completion_timeout_per_gb: 10,
        allow_workload_disruption: true,
        post_copy: true,
        progress_timeout: 150,
        ..MigrateRequest::default()
    };
    let mut table = Table::live();
    table.request(Request::Migrate(Arc::new(request)));
    table.take(to_out(JobInput::MigrationOpened(Ok(()))));
    assert_eq!(table.after(10), ["read progress"]);
    assert_eq!(table.take(progress(500)), ["abort migration"]);
    table
}

/// A worker with the job that can switch.
fn ready() -> Table {
    let mut table = late();
    table.take(to_out(JobInput::MigrationAborted(Ok(()))));
    assert_eq!(table.take(to_out(JobInput::Migrated(failed("canceled by client")))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Running, "migrationCanceled")), ["attend", "migrate for post-copy"]);
    table
}

/// A worker whose guest runs at the target.
fn switched() -> Table {
    let mut table = ready();
    assert_eq!(tick(&mut table, 100), ["start post-copy"]);
    table.take(to_out(JobInput::PostCopyStarted(Ok(()))));
    table.take(Input::DomainChanged { closed: false, crashed: false });
    assert_eq!(table.take(read(Lifecycle::Paused, "postcopy")), ["attend"]);
    assert_eq!(shown(&table), (MigrationStep::Copying, MigrationMode::PostCopy, String::new()));
    table
}

/// A worker whose connection to the guest in post-copy is broken.
fn broken() -> Table {
    let mut table = switched();
    assert_eq!(table.take(to_out(JobInput::Migrated(failed("broken")))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Paused, "postcopyFailed")), ["attend", "release"]);
    table
}

#[test]
fn guest_that_takes_too_long_leaves_before_its_memory() {
    let mut table = ready();
    // Repeated until the domain shows the switch: libvirt's job may not have begun.
    assert_eq!(tick(&mut table, 100), ["start post-copy"]);
    assert_eq!(table.take(to_out(JobInput::PostCopyStarted(failed("no job")))), ["read progress"]);
    assert_eq!(table.take(to_out(JobInput::ProgressRead(Ok(None)))), [""; 0]);
    assert_eq!(tick(&mut table, 100), ["start post-copy"]);
    assert_eq!(table.take(to_out(JobInput::PostCopyStarted(Ok(())))), [""; 0]);
    table.take(Input::DomainChanged { closed: false, crashed: false });
    table.take(read(Lifecycle::Paused, "postcopy"));
    // No limit ends it.
    assert_eq!(tick(&mut table, 100), ["read progress"]);
    for _ in 0..400 {
        table.take(progress(400));
        let effects = table.after(1);
        assert!(effects.contains(&"read progress".to_owned()), "{effects:?}");
        if effects.contains(&"read".to_owned()) {
            table.take(read(Lifecycle::Paused, "postcopy"));
        }
    }
    table.take(progress(3));
    table.take(Input::DomainChanged { closed: false, crashed: false });
    table.take(read(Lifecycle::Shutoff, "migrated"));
    assert_eq!(table.take(to_out(JobInput::Migrated(Ok(())))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Shutoff, "migrated")), ["save migration", "release"]);
    table.take(to_out(JobInput::Released(Ok(true))));
    assert_eq!(shown(&table), (MigrationStep::Moved, MigrationMode::PostCopy, String::new()));
}

/// A disk of 1,000 parts, one a second.
#[test]
fn second_job_copies_its_disks_first() {
    let mut table = ready();
    let mut attempt = |remaining: u64| {
        let effects = tick(&mut table, 1000);
        assert!(effects.contains(&"start post-copy".to_owned()), "{effects:?}");
        if effects.contains(&"read".to_owned()) {
            table.take(read(Lifecycle::Running, "migrationCanceled"));
        }
        let effects = table.take(to_out(JobInput::PostCopyStarted(failed("no job"))));
        if effects == ["read progress"] {
            assert_eq!(table.take(progress(remaining)), [""; 0], "its downtime is not changed");
        }
        effects
    };
    for remaining in (1..1000).rev() {
        assert_eq!(attempt(remaining), ["read progress"], "{remaining}");
    }
    for second in 1..150 {
        assert_eq!(attempt(1), ["read progress"], "no progress for {second} s");
    }
    assert_eq!(attempt(1), ["abort migration"]);
}

#[test]
fn first_job_that_ends_by_itself_needs_no_second_one() {
    let mut table = late();
    table.take(to_out(JobInput::MigrationAborted(failed("there is no job"))));
    table.take(to_out(JobInput::Migrated(Ok(()))));
    assert_eq!(table.take(read(Lifecycle::Shutoff, "migrated")), ["save migration", "release"]);
    // An abort on request goes before post-copy.
    let mut table = late();
    table.request(Request::AbortMigration("a".into()));
    table.take(to_out(JobInput::Migrated(failed("canceled by client"))));
    table.take(read(Lifecycle::Running, "migrationCanceled"));
    assert_eq!(shown(&table).0, MigrationStep::NotMoved);
    assert!(table.state.base.published.migration.as_ref().is_some_and(|report| report.aborted));
    assert!(table.state.job.is_none());
}

#[test]
fn request_to_abort_goes_before_the_second_job() {
    let no_job = || HypervisorError::Libvirt { code: 55, message: "no job is active on the domain".into() };
    let mut table = late();
    table.take(to_out(JobInput::MigrationAborted(Err(no_job()))));
    assert_eq!(table.after(1), ["abort migration", "read progress"]);
    table.take(progress(400));
    assert_eq!(table.request(Request::AbortMigration("a".into())), [""; 0], "one at a time");
    table.take(to_out(JobInput::MigrationAborted(Err(no_job()))));
    assert_eq!(table.after(1), ["abort migration", "read progress"]);
    // A failure for good is shown, and the limit acts again.
    table.take(to_out(JobInput::MigrationAborted(failed("not supported"))));
    assert!(table.state.base.published.migration.as_ref().is_some_and(|report| !report.abort_failure.is_empty()));
    assert_eq!(table.take(progress(300)), ["abort migration"]);
    // Between the two jobs.
    let mut table = late();
    table.take(to_out(JobInput::MigrationAborted(Ok(()))));
    assert_eq!(table.take(to_out(JobInput::Migrated(failed("canceled by client")))), ["read"]);
    assert_eq!(table.request(Request::AbortMigration("a".into())), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    table.take(read(Lifecycle::Running, "migrationCanceled"));
    assert_eq!(shown(&table).0, MigrationStep::NotMoved);
    assert!(table.state.base.published.migration.as_ref().is_some_and(|report| report.aborted));
    // The second job has not begun: it does not switch meanwhile.
    let mut table = ready();
    table.request(Request::AbortMigration("a".into()));
    table.take(to_out(JobInput::MigrationAborted(Err(no_job()))));
    assert_eq!(tick(&mut table, 100), ["abort migration", "read progress"]);
}

#[test]
fn second_job_that_fails_before_the_switch_leaves_the_guest_here() {
    let mut table = ready();
    assert_eq!(table.take(to_out(JobInput::Migrated(failed("Postcopy is not supported")))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Paused, "migration")), ["attend", "run after migration"]);
    assert_eq!(table.take(to_out(JobInput::Resumed(Ok(())))), ["read"]);
    table.take(read(Lifecycle::Running, "unpaused"));
    let (step, mode, failure) = shown(&table);
    assert_eq!((step, mode), (MigrationStep::NotMoved, MigrationMode::PreCopy));
    assert!(failure.contains("Postcopy is not supported"), "{failure}");
}

#[test]
fn job_that_libvirt_has_lost_is_watched_to_its_end() {
    let mut table = switched();
    assert_eq!(table.take(to_out(JobInput::Migrated(failed("control is broken")))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Paused, "postcopy")), ["attend"]);
    assert_eq!(table.after(1), ["read progress"]);
    assert_eq!(table.take(progress(3)), [""; 0]);
    assert_eq!(table.after(1), ["read progress"]);
    assert_eq!(table.take(to_out(JobInput::ProgressRead(Ok(None)))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Shutoff, "migrated")), ["save migration", "release"]);
}

#[test]
fn broken_connection_ends_a_job_that_libvirt_does_not_end() {
    let breaks = |table: &mut Table| {
        table.take(Input::DomainChanged { closed: false, crashed: false });
        table.take(read(Lifecycle::Paused, "postcopyFailed"));
    };
    let asks = |table: &mut Table| {
        assert_eq!(table.take(read(Lifecycle::Paused, "postcopyFailed")), ["attend", "release"]);
    };
    // libvirt keeps a job that it has lost, with its statistics.
    let mut table = switched();
    table.take(to_out(JobInput::Migrated(failed("control is broken"))));
    table.take(read(Lifecycle::Paused, "postcopy"));
    assert_eq!(table.after(1), ["read progress"]);
    table.take(progress(3));
    breaks(&mut table);
    assert_eq!(table.after(1), ["read"]);
    asks(&mut table);
    // The target's daemon does not answer, so that the call does not return.
    let mut table = switched();
    breaks(&mut table);
    for _ in 0..9 {
        assert_eq!(table.after(1), ["read progress"]);
        table.take(progress(3));
    }
    assert_eq!(table.after(1), ["read"]);
    table.take(to_out(JobInput::Migrated(failed("late"))));
    asks(&mut table);
}

#[test]
fn guest_that_is_whole_at_the_target_is_left_and_one_that_is_lost_ends() {
    // The end of the job was lost.
    let mut table = broken();
    assert_eq!(table.take(to_out(JobInput::Released(Ok(true)))), ["destroy gently"]);
    assert_eq!(table.take(Input::Destroyed(Ok(()))), ["read"]);
    table.take(read(Lifecycle::Shutoff, "destroyed"));
    table.take(Input::Timer);
    table.take(read(Lifecycle::Shutoff, "destroyed"));
    table.take(to_out(JobInput::Released(Ok(true))));
    assert_eq!(shown(&table).0, MigrationStep::Moved);
    // The target has no domain, or does not answer.
    let mut gone = broken();
    assert_eq!(gone.take(to_out(JobInput::Released(Ok(false)))), ["destroy gently"]);
    let mut silent = broken();
    assert_eq!(
        silent.take(to_out(JobInput::Released(Err("arriving".into())))),
        [""; 0],
        "the guest never runs here again"
    );
    silent.now += Duration::from_secs(30);
    assert!(silent.take(Input::Timer).contains(&"release".to_owned()));
    assert_eq!(silent.take(to_out(JobInput::Released(Err("no answer".into())))), ["destroy gently"]);
    for (mut table, expected) in [(gone, "the target has no domain"), (silent, "its connection is broken")] {
        table.take(Input::Destroyed(Ok(())));
        // Also a read that was in progress.
        for _ in 0..3 {
            table.take(read(Lifecycle::Shutoff, "destroyed"));
            table.take(Input::Timer);
        }
        let (step, mode, failure) = shown(&table);
        assert_eq!((step, mode), (MigrationStep::NotMoved, MigrationMode::PostCopy));
        assert!(failure.contains(expected), "{failure}");
        assert_eq!(table.state.base.stage, Stage::Ended);
    }
}

#[test]
fn switched_guest_cannot_be_called_back() {
    let mut table = switched();
    assert_eq!(table.request(Request::AbortMigration("a".into())), ["abort migration"]);
    table.take(to_out(JobInput::MigrationAborted(failed("cannot abort migration in post-copy mode"))));
    assert!(table.state.base.published.migration.as_ref().is_some_and(|report| !report.abort_failure.is_empty()));
    assert_eq!(table.act(Action::Kill), ["destroy gently"]);
    table.take(Input::Destroyed(Ok(())));
    table.take(read(Lifecycle::Shutoff, "destroyed"));
    table.take(to_out(JobInput::Migrated(failed("the domain is gone"))));
    table.take(read(Lifecycle::Shutoff, "destroyed"));
    assert_eq!((shown(&table).0, table.state.base.stage), (MigrationStep::NotMoved, Stage::Ended));
}

#[test]
fn target_waits_for_the_second_job_once_and_is_released_when_the_memory_is_whole() {
    let options = serde_json::json!({"migrationConfiguration": {"allowPostCopy": true}});
    let shows = |table: &mut Table, lifecycle, reason| {
        table.take(Input::DomainChanged { closed: false, crashed: false });
        table.take(read(lifecycle, reason))
    };
    let gone = |table: &mut Table| {
        table.take(Input::DomainChanged { closed: false, crashed: false });
        table.take(Input::Read(Err(HypervisorError::NoDomain), None));
    };
    let mut table = arriving(&options);
    shows(&mut table, Lifecycle::Paused, "migration");
    gone(&mut table);
    assert_eq!(shown(&table).0, MigrationStep::Prepared);
    assert_eq!((table.state.base.stage, table.state.base.published.lifecycle()), (Stage::Waiting, Lifecycle::NoDomain));
    shows(&mut table, Lifecycle::Paused, "migration");
    shows(&mut table, Lifecycle::Running, "postcopy");
    assert_eq!(shown(&table).0, MigrationStep::Copying);
    // Its memory is still at the source, whose end would be that of the guest.
    for reason in ["postcopy", "postcopyFailed"] {
        table.request(Request::Release { paused: false });
        table.take(read(Lifecycle::Running, reason));
        assert_eq!(table.last_answer().unwrap().unwrap_err().to_string(), "the domain is still arriving");
    }
    let mut lost = Table { state: table.state.clone(), now: table.now, next: table.next, answers: Vec::new() };
    gone(&mut lost);
    assert_eq!(shown(&lost).0, MigrationStep::NotMoved);
    table.request(Request::Release { paused: false });
    table.take(read(Lifecycle::Running, "migrated"));
    assert_eq!((table.last_answer(), shown(&table).0), (Some(Ok(true)), MigrationStep::Moved));
    // The end of the first domain may be overlooked.
    let second = |lifecycle, reason| {
        let Input::Read(Ok(facts), None) = read(lifecycle, reason) else { panic!("not a domain") };
        let xml = facts.xml.replacen("id='1'", "id='2'", 1);
        Input::Read(Ok(DomainFacts { xml, ..facts }), None)
    };
    for shown_last in [second(Lifecycle::Paused, "migration"), read(Lifecycle::Running, "postcopy")] {
        let mut table = arriving(&options);
        shows(&mut table, Lifecycle::Paused, "migration");
        table.take(Input::DomainChanged { closed: false, crashed: false });
        table.take(shown_last);
        gone(&mut table);
        assert_eq!(shown(&table).0, MigrationStep::NotMoved);
    }
    // Without post-copy the first end is the last one.
    let mut table = arriving(&serde_json::json!({"migrationConfiguration": {"allowPostCopy": false}}));
    shows(&mut table, Lifecycle::Paused, "migration");
    gone(&mut table);
    assert_eq!(shown(&table).0, MigrationStep::NotMoved);
}

#[test]
fn target_decides_alone_if_the_source_is_silent_after_the_switch() {
    use Lifecycle::{Paused, Running};
    let options = serde_json::json!({"migrationConfiguration": {"allowPostCopy": true}});
    let shows = |table: &mut Table, lifecycle, reason| {
        table.take(Input::DomainChanged { closed: false, crashed: false });
        table.take(read(lifecycle, reason))
    };
    // States of the domain, seconds of silence; effects then.
    type Row<'a> = (&'a [(Lifecycle, &'static str)], u64, &'a [&'a str]);
    let rows: &[Row<'_>] = &[
        (&[(Running, "postcopy")], 3600, &[]),
        (&[(Running, "postcopy"), (Running, "migrated")], 58, &[]),
        (&[(Running, "postcopy"), (Running, "migrated")], 60, &["save migration", "save migration"]),
        (&[(Running, "postcopy"), (Paused, "postcopyFailed")], 58, &[]),
        (&[(Running, "postcopy"), (Paused, "postcopyFailed")], 60, &["destroy gently"]),
        (&[(Running, "postcopy"), (Paused, "postcopyFailed"), (Running, "postcopy")], 3600, &[]),
        // The source may run this guest.
        (&[(Paused, "migration")], 3600, &[]),
        (&[(Paused, "migration"), (Paused, "user")], 3600, &[]),
    ];
    for (states, seconds, expected) in rows {
        for restarts in [false, true] {
            let mut table = arriving(&options);
            for (lifecycle, reason) in *states {
                shows(&mut table, *lifecycle, reason);
            }
            if restarts {
                table = restarted(&table);
                let (lifecycle, reason) = states.last().unwrap();
                table.take(read(*lifecycle, reason));
            }
            let effects = table.after(*seconds);
            let effects: Vec<_> =
                effects.iter().filter(|name| !["read", "set clock"].contains(&name.as_str())).collect();
            assert_eq!(effects, *expected, "{states:?} {seconds} {restarts}");
        }
    }
    let mut whole = arriving(&options);
    shows(&mut whole, Running, "postcopy");
    shows(&mut whole, Running, "migrated");
    whole.after(60);
    assert_eq!(shown(&whole), (MigrationStep::Moved, MigrationMode::PostCopy, String::new()));
    let mut lost = arriving(&options);
    shows(&mut lost, Running, "postcopy");
    shows(&mut lost, Paused, "postcopyFailed");
    lost.after(60);
    lost.take(Input::Destroyed(Ok(())));
    lost.take(read(Lifecycle::Shutoff, "destroyed"));
    lost.take(read(Lifecycle::Shutoff, "destroyed"));
    let expected = (MigrationStep::NotMoved, MigrationMode::PostCopy, "the guest was lost in post-copy".to_owned());
    assert_eq!(shown(&lost), expected);
    // The source has aborted the first job and does not begin the second one.
    let mut alone = arriving(&options);
    shows(&mut alone, Paused, "migration");
    alone.take(Input::DomainChanged { closed: false, crashed: false });
    alone.take(Input::Read(Err(HypervisorError::NoDomain), None));
    alone.after(118);
    assert_eq!(shown(&alone).0, MigrationStep::Prepared);
    alone.after(2);
    assert_eq!(shown(&alone).0, MigrationStep::NotMoved);
}

/// A worker that waits for a domain.
fn arriving(state: &serde_json::Value) -> Table {
    let mut table = Table::connected();
    let mut wanted = (*wanted("m", &serde_json::json!({}))).clone();
    wanted.vmi.status = serde_json::from_value(serde_json::json!({"migrationState": state})).unwrap();
    table.request(Request::PrepareMigration { migration: "a".into(), wanted: Arc::new(wanted) });
    table.take(to_in(JobInput::Prepared(Ok(Box::default()))));
    table.take(to_in(JobInput::Served(Ok(()))));
    table.take(to_in(JobInput::MigrationOpened(Ok(()))));
    table
}

/// A worker that follows this one, and is connected.
fn restarted(former: &Table) -> Table {
    let report = former.state.base.published.migration.as_ref().unwrap();
    let mut table = Table::restarted(MigrationRecord::of(report, MigrationEnd::Target, false));
    table.take(Input::Timer);
    table.take(Input::Connected(Ok(true)));
    table
}
