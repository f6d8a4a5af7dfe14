use protocol::{Lifecycle, MigrationStep};
use serde_json::json;

use super::{Table, read, to_in, wanted};
use crate::{
    domain::Domain,
    engine::model::{Action, Input, JobInput, MigrationEnd, MigrationRecord, Request, Stage},
    hypervisor::HypervisorError,
};

fn prepare(table: &mut Table, name: &str) -> Vec<String> {
    table.request(Request::PrepareMigration { migration: name.into(), wanted: wanted("m", &json!({})) })
}

/// A worker that waits for a domain.
fn prepared() -> Table {
    let mut table = Table::connected();
    assert_eq!(prepare(&mut table, "a"), ["prepare target"]);
    assert_eq!(table.take(to_in(JobInput::Prepared(Ok(Box::default())))), ["serve"]);
    assert_eq!(table.take(to_in(JobInput::Served(Ok(())))), ["open migration"]);
    assert_eq!(table.last_answer(), None);
    assert_eq!(table.take(to_in(JobInput::MigrationOpened(Ok(())))), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    assert_eq!(step(&table), MigrationStep::Prepared);
    table
}

/// Shows this state of the domain.
fn shows(table: &mut Table, lifecycle: Lifecycle, reason: &'static str) -> Vec<String> {
    table.take(Input::DomainChanged { closed: false, crashed: false });
    table.take(read(lifecycle, reason))
}

/// A worker to which the domain has come.
fn complete() -> Table {
    let mut table = prepared();
    shows(&mut table, Lifecycle::Paused, "migration");
    shows(&mut table, Lifecycle::Paused, "user");
    table
}

fn step(table: &Table) -> MigrationStep {
    table.state.base.published.migration.as_ref().map_or(MigrationStep::Unspecified, |report| report.step())
}

fn release(table: &mut Table, paused: bool) -> Vec<String> {
    table.request(Request::Release { paused })
}

fn no_domain() -> Input {
    Input::Read(Err(HypervisorError::NoDomain), None)
}

#[test]
fn a_domain_arrives_and_runs_only_after_its_release() {
    let mut table = prepared();
    shows(&mut table, Lifecycle::Paused, "migration");
    assert_eq!(step(&table), MigrationStep::Copying);
    // libvirt has not completed the arrival.
    assert_eq!(release(&mut table, false), ["read"]);
    table.take(read(Lifecycle::Paused, "migration"));
    assert_eq!(table.last_answer().unwrap().unwrap_err().to_string(), "the domain is still arriving");
    shows(&mut table, Lifecycle::Paused, "user");
    assert_eq!(table.after(29), [""; 0], "it does not run by itself");
    assert_eq!(release(&mut table, false), ["read"]);
    let effects = table.take(read(Lifecycle::Paused, "user"));
    assert_eq!(effects, ["attend", "save migration", "run after migration"]);
    assert_eq!((table.last_answer(), step(&table)), (None, MigrationStep::Copying));
    // Repeated until it runs.
    table.take(to_in(JobInput::Resumed(Err(HypervisorError::Busy))));
    assert_eq!(table.after(1), ["run after migration"]);
    assert_eq!(table.take(to_in(JobInput::Resumed(Ok(())))), ["read"]);
    let connected = |is: bool| match read(Lifecycle::Running, "unpaused") {
        Input::Read(facts, _) => Input::Read(facts, Some(is)),
        other => other,
    };
    let effects = table.take(connected(false));
    assert_eq!(effects, ["attend", "save migration"]);
    assert_eq!((table.last_answer(), step(&table)), (Some(Ok(true)), MigrationStep::Moved));
    assert!(table.state.job.is_none() && table.state.base.stage == Stage::Live && !table.state.base.adopting);
    // The answer may be lost.
    assert_eq!(release(&mut table, false), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(true)));
    assert_eq!(prepare(&mut table, "a"), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    // Its clock has stood still. The guest agent sets it.
    assert!(!table.take(connected(false)).contains(&"set clock".to_owned()));
    assert!(table.take(connected(true)).contains(&"set clock".to_owned()));
    table.take(Input::ClockSet);
    assert!(!table.take(connected(true)).contains(&"set clock".to_owned()));
    // From now on as if it had been started here.
    assert_eq!(table.sync(), ["serve"]);
}

#[test]
fn a_repeated_release_does_not_resume_the_guest_twice() {
    let mut table = complete();
    release(&mut table, false);
    release(&mut table, false);
    let run = "run after migration".to_owned();
    assert!(table.take(read(Lifecycle::Paused, "user")).contains(&run));
    assert!(!table.take(read(Lifecycle::Paused, "user")).contains(&run), "the attempt is in progress");
    table.take(to_in(JobInput::Resumed(Ok(()))));
    table.take(read(Lifecycle::Running, "unpaused"));
    assert_eq!((table.last_answer(), step(&table)), (Some(Ok(true)), MigrationStep::Moved));
}

#[test]
fn a_guest_paused_by_the_user_is_not_resumed() {
    let mut table = complete();
    release(&mut table, true);
    let effects = table.take(read(Lifecycle::Paused, "user"));
    assert_eq!(effects, ["attend", "save migration", "save migration"]);
    assert_eq!((table.last_answer(), step(&table)), (Some(Ok(true)), MigrationStep::Moved));
}

#[test]
fn a_release_without_domain_is_answered_with_no() {
    for mut table in [prepared(), Table::connected()] {
        release(&mut table, false);
        table.take(no_domain());
        assert_eq!(table.last_answer(), Some(Ok(false)));
    }
    // An unknown state is no answer.
    let mut table = prepared();
    release(&mut table, false);
    table.take(Input::Read(Err(HypervisorError::Timeout("state")), None));
    assert!(table.last_answer().unwrap().is_err());
}

#[test]
fn nothing_else_changes_a_domain_that_arrives() {
    for (mut table, progress) in [(prepared(), "waiting for the domain"), (complete(), "waiting for the domain")] {
        for request in
            [Request::Act(Action::Unpause), Request::Act(Action::Pause), Request::Sync(wanted("m", &json!({})))]
        {
            assert_eq!(table.request(request), [""; 0]);
            let refusal = table.last_answer().unwrap().unwrap_err().to_string();
            assert_eq!(refusal, format!("the domain is busy: migration to this node is in progress ({progress})"));
        }
    }
    let mut table = Table::live();
    prepare(&mut table, "a");
    assert_eq!(table.last_answer().unwrap().unwrap_err().to_string(), "a domain runs in this pod");
}

#[test]
fn another_migration_replaces_one_that_has_not_begun() {
    let mut table = prepared();
    assert_eq!(prepare(&mut table, "a"), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    assert_eq!(prepare(&mut table, "b"), ["prepare target"]);
    let mut table = complete();
    prepare(&mut table, "b");
    assert!(table.last_answer().unwrap().unwrap_err().to_string().contains("migration to this node is in progress"));
}

#[test]
fn a_domain_that_does_not_arrive_leaves_nothing() {
    for end in [no_domain(), read(Lifecycle::Shutoff, "failed")] {
        let mut table = prepared();
        shows(&mut table, Lifecycle::Paused, "migration");
        table.take(Input::DomainChanged { closed: false, crashed: false });
        assert_eq!(table.take(end), ["save migration", "attend"]);
        assert_eq!((step(&table), table.state.base.stage), (MigrationStep::NotMoved, Stage::Ended));
        table.act(Action::Finish);
        assert!(table.state.base.finished);
    }
    // On request.
    let mut table = prepared();
    table.request(Request::AbortMigration("a".into()));
    assert_eq!((table.last_answer(), step(&table)), (Some(Ok(false)), MigrationStep::NotMoved));
    let mut table = complete();
    assert_eq!(table.request(Request::AbortMigration("a".into())), ["destroy gently"]);
    table.take(Input::Destroyed(Ok(())));
    table.take(read(Lifecycle::Shutoff, "destroyed"));
    assert_eq!(step(&table), MigrationStep::NotMoved);
    assert!(table.state.base.published.migration.unwrap().aborted);
}

#[test]
fn the_launcher_can_be_stopped_at_any_step() {
    let mut table = prepared();
    table.act(Action::Terminate { grace: 30 });
    assert!(table.state.base.finished);
    for action in [Action::Kill, Action::Shutdown { grace: 30 }] {
        let mut table = complete();
        assert_eq!(table.act(action), ["destroy gently"], "a guest that is not released cannot shut down");
        table.take(Input::Destroyed(Ok(())));
        table.take(no_domain());
        assert_eq!((table.last_answer(), step(&table)), (Some(Ok(false)), MigrationStep::NotMoved));
    }
}

#[test]
fn a_preparation_that_fails_can_be_repeated() {
    let mut table = Table::connected();
    prepare(&mut table, "a");
    let error = crate::engine::model::RequestError::retryable("no image");
    table.take(to_in(JobInput::Prepared(Err(error))));
    assert_eq!(table.last_answer().unwrap().unwrap_err().to_string(), "no image");
    assert_eq!(prepare(&mut table, "a"), ["prepare target"]);
    table.take(to_in(JobInput::Prepared(Ok(Box::<Domain>::default()))));
    table.take(to_in(JobInput::Served(Ok(()))));
    table.take(to_in(JobInput::MigrationOpened(Err(crate::engine::model::RequestError::retryable("full")))));
    assert!(table.last_answer().unwrap().is_err() && table.state.job.is_none());
}

#[test]
fn a_restarted_worker_keeps_what_has_arrived() {
    let restarted = |step: MigrationStep| {
        let record = MigrationRecord {
            migration: "a".into(),
            direction: MigrationEnd::Target,
            step: step.into(),
            paused: false,
            failure: String::new(),
            aborted: false,
            begin: 1,
            end: 0,
            post_copy: false,
            limits: None,
        };
        let mut table = Table::restarted(record);
        table.take(Input::Timer);
        table.take(Input::Connected(Ok(true)));
        table
    };
    let mut table = restarted(MigrationStep::Prepared);
    assert_eq!(table.take(read(Lifecycle::Paused, "user")), ["attend"]);
    assert_eq!(step(&table), MigrationStep::Copying);
    // virt-handler's request starts the services.
    assert_eq!(prepare(&mut table, "a"), ["serve"]);
    table.take(to_in(JobInput::Served(Ok(()))));
    assert_eq!(table.last_answer(), Some(Ok(false)));
    release(&mut table, false);
    assert!(table.take(read(Lifecycle::Paused, "user")).contains(&"run after migration".to_owned()));
    // A released guest runs without another release.
    let mut table = restarted(MigrationStep::Releasing);
    assert_eq!(table.take(read(Lifecycle::Paused, "user")), ["attend", "run after migration"]);
    // Its end is that of the VMI.
    let mut table = restarted(MigrationStep::Releasing);
    table.take(no_domain());
    assert_eq!((table.state.base.stage, table.state.base.published.lifecycle()), (Stage::Ended, Lifecycle::Shutoff));
}

#[test]
fn tags_of_devices_are_written_when_the_domain_is_first_seen() {
    for (devices, tagged) in [
        (json!({"interfaces": [{"name": "default", "masquerade": {}, "tag": "lan"}]}), true),
        (json!({"interfaces": [{"name": "default", "masquerade": {}}]}), false),
    ] {
        let mut table = Table::connected();
        let wanted = wanted("m", &json!({"devices": devices}));
        table.request(Request::PrepareMigration { migration: "a".into(), wanted });
        table.take(to_in(JobInput::Prepared(Ok(Box::default()))));
        table.take(to_in(JobInput::Served(Ok(()))));
        table.take(to_in(JobInput::MigrationOpened(Ok(()))));
        let mut writes = || shows(&mut table, Lifecycle::Paused, "migration").contains(&"tag target".to_owned());
        assert_eq!((writes(), writes()), (tagged, false), "{devices}");
    }
}
