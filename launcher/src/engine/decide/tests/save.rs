use std::sync::Arc;

use protocol::Lifecycle;
use serde_json::json;

use super::{Table, read, to_save, to_start, wanted};
use crate::{
    domain::Domain,
    engine::model::{Action, Input, JobInput, Request, RequestError, RequestId, SaveRecord, Wanted},
    hypervisor::HypervisorError,
};

/// libvirt's error of a call to a domain that does not run.
const OPERATION_INVALID: u32 = 55;
/// libvirt's error of a call that has waited for another one.
const OPERATION_TIMEOUT: u32 = 68;

fn save(table: &mut Table) -> Vec<String> {
    table.request(Request::SaveMemory { volume: "claim".into(), file: "a.memory.save".into() })
}

/// A worker whose libvirt writes the memory of a paused guest.
fn writing() -> Table {
    let mut table = Table::live();
    assert_eq!(save(&mut table), ["record save"]);
    assert_eq!(table.take(to_save(JobInput::SaveRecorded(Ok(())))), ["pause for save"]);
    assert_eq!(table.take(to_save(JobInput::Paused(Ok(())))), ["save"]);
    table
}

#[test]
fn save_waits_for_the_end_of_actions_on_the_guest() {
    let mut table = Table::live();
    assert_eq!(table.act(Action::Reset), ["reset"]);
    assert_eq!(save(&mut table), [""; 0]);
    assert!(matches!(table.last_answer(), Some(Err(RequestError::Conflict { .. }))));
    table.take(Input::Acted(RequestId(1), Ok(())));
    assert_eq!(save(&mut table), ["record save"]);
}

#[test]
fn save_waits_for_the_thaw_of_the_guest() {
    let mut table = Table::live();
    table.state.base.published.file_systems = "frozen".into();
    assert_eq!(save(&mut table), [""; 0]);
    assert_eq!(table.last_answer(), Some(Err(RequestError::Frozen)));
    table.state.base.published.file_systems = "thawed".into();
    assert_eq!(save(&mut table), ["record save"]);
}

/// A worker that finds the record of a save, and no domain yet.
fn restarted() -> Table {
    let mut table = Table::new(false);
    let save = Some(SaveRecord { volume: "claim".into(), file: "a.memory.save".into() });
    table.take(Input::Begin { adopting: true, start_daemon: true, simulate_crash: false, migration: None, save });
    table.take(Input::DaemonStarted(None, Ok(())));
    table.take(Input::Timer);
    table.take(Input::Connected(Ok(true)));
    table
}

fn shown(table: &Table) -> (bool, String) {
    let save = table.state.base.published.memory_save.clone().unwrap_or_default();
    (save.ended, save.failure)
}

fn libvirt(code: u32, message: &str) -> HypervisorError {
    HypervisorError::Libvirt { code, message: message.into() }
}

/// Lets the guest of a failed save go on.
fn goes_on(table: &mut Table) {
    assert_eq!(table.after(1), ["pause for save"], "it waits for what libvirt does");
    assert_eq!(table.take(to_save(JobInput::Paused(Ok(())))), ["discard memory"]);
    assert_eq!(table.take(to_save(JobInput::MemoryDiscarded(Ok(())))), ["run unsaved guest"]);
    assert_eq!(table.take(to_save(JobInput::Resumed(Ok(())))), ["forget save", "read"]);
    assert!(table.state.job.is_none());
}

/// A VMI whose guest starts from saved memory.
fn restored() -> Arc<Wanted> {
    let mut wanted = (*wanted("m", &json!({}))).clone();
    let memory = json!({"claimName": "claim", "fileName": "a.memory.save", "phase": "Restoring"});
    wanted.vmi.status = serde_json::from_value(json!({"hibernation": memory})).unwrap();
    Arc::new(wanted)
}

/// A worker that is to start such a guest, and whose libvirt has restored it.
fn restoring() -> Table {
    let mut table = Table::connected();
    assert_eq!(table.request(Request::Sync(restored())), ["prepare"]);
    assert_eq!(table.take(to_start(JobInput::Prepared(Ok(Box::new(Domain::default()))))), ["serve"]);
    table.take(to_start(JobInput::Served(Ok(()))));
    assert_eq!(table.take(to_start(JobInput::Defined(Ok(())))), ["restore"]);
    table
}

#[test]
fn a_save_ends_the_domain_when_its_file_is_whole() {
    let mut table = writing();
    assert_eq!(table.last_answer(), Some(Ok(false)));
    assert_eq!(save(&mut table), [""; 0], "it is in progress");
    assert_eq!(table.take(to_save(JobInput::MemorySaved(Ok(())))), ["keep memory"]);
    table.take(read(Lifecycle::Shutoff, "saved"));
    assert_eq!(table.state.base.published.lifecycle(), Lifecycle::Running, "the file is not synced");
    table.take(to_save(JobInput::MemoryKept(Ok(()))));
    assert_eq!(shown(&table), (true, String::new()));
    assert_eq!(table.state.base.published.lifecycle(), Lifecycle::Shutoff);
    assert_eq!(table.state.base.published.reason, "saved");
}

#[test]
fn the_file_tells_how_a_domain_has_ended() {
    let incomplete = || Err("the file holds no complete memory".to_owned());
    // The reason that libvirt gives, the file, and what is published.
    for (reason, kept, published, failure) in [
        ("saved", Ok(()), "saved", ""),
        // libvirt's daemon was killed after the file was complete.
        ("crashed", Ok(()), "saved", ""),
        ("unknown", Ok(()), "saved", ""),
        ("daemon", Ok(()), "saved", ""),
        ("crashed", incomplete(), "crashed", "the domain has ended"),
        ("destroyed", incomplete(), "destroyed", "the domain has ended"),
        ("saved", Err("input/output error".to_owned()), "failed", "input/output error"),
    ] {
        let row = format!("{reason} {kept:?}");
        for (worker, mut table) in [("same", writing()), ("later", restarted())] {
            assert_eq!(table.take(read(Lifecycle::Shutoff, reason)), ["keep memory"], "{row} {worker}");
            table.take(to_save(JobInput::MemoryKept(kept.clone())));
            assert_eq!(table.state.base.published.lifecycle(), Lifecycle::Shutoff, "{row} {worker}");
            assert_eq!(table.state.base.published.reason, published, "{row} {worker}");
            assert_eq!(shown(&table), (true, failure.into()), "{row} {worker}");
        }
    }
    let mut table = Table::live();
    save(&mut table);
    table.take(read(Lifecycle::Shutoff, "crashed"));
    assert_eq!(shown(&table), (true, "the domain has ended".into()), "the guest was not paused");
}

#[test]
fn a_guest_that_was_not_saved_goes_on_after_its_file_is_empty() {
    let killed = || HypervisorError::Disconnected("killed".into());
    for (error, failure) in [
        (libvirt(1, "no space"), "cannot save the guest's memory: no space"),
        // virt-handler asks again.
        (killed(), ""),
        (HypervisorError::Busy, ""),
        (libvirt(OPERATION_TIMEOUT, "another job"), ""),
    ] {
        for mut table in [writing(), {
            let mut table = Table::live();
            save(&mut table);
            table.take(to_save(JobInput::SaveRecorded(Ok(()))));
            table
        }] {
            let is_writing = table.state.job.as_ref().unwrap().progress() == "saving the guest's memory";
            let result = Err(error.clone());
            table.take(to_save(if is_writing { JobInput::MemorySaved(result) } else { JobInput::Paused(result) }));
            assert_eq!(shown(&table), (false, String::new()), "the domain is looked at first");
            table.take(read(Lifecycle::Paused, "user"));
            goes_on(&mut table);
            assert_eq!(shown(&table), (!failure.is_empty(), failure.to_owned()), "{error}");
            assert_eq!(table.state.base.published.memory_save.is_none(), failure.is_empty(), "{error}");
        }
    }
}

#[test]
fn a_guest_that_is_not_to_go_on_yet_stays_paused() {
    let mut table = writing();
    table.take(to_save(JobInput::MemorySaved(Err(HypervisorError::Disconnected("killed".into())))));
    table.take(Input::DomainChanged { closed: true, crashed: false });
    assert!(!table.after(1).contains(&"pause for save".to_owned()), "libvirt is away");
    table.take(Input::Connected(Ok(true)));
    table.take(read(Lifecycle::Paused, "user"));
    table.take(read(Lifecycle::Paused, "user"));
    assert_eq!(table.state.base.published.reason, "save", "virt-handler shows no pause by the user");
    assert_eq!(table.after(1), ["pause for save"]);
    // libvirt still writes for a former worker.
    let busy = libvirt(OPERATION_TIMEOUT, "another job");
    assert_eq!(table.take(to_save(JobInput::Paused(Err(busy)))), ["read"]);
    table.take(read(Lifecycle::Paused, "user"));
    goes_on(&mut table);
}

#[test]
fn a_file_that_cannot_be_emptied_is_not_taken_for_saved_memory_later() {
    let mut table = writing();
    table.take(to_save(JobInput::MemorySaved(Err(libvirt(1, "no space")))));
    table.take(read(Lifecycle::Paused, "user"));
    table.after(1);
    table.take(to_save(JobInput::Paused(Ok(()))));
    let discarded = to_save(JobInput::MemoryDiscarded(Err("input/output error".into())));
    assert_eq!(table.take(discarded), ["forget save", "run unsaved guest"]);
    table.take(to_save(JobInput::Resumed(Ok(()))));
    assert_eq!(shown(&table), (true, "cannot empty the file of the guest's memory: input/output error".into()));
}

#[test]
fn a_later_worker_lets_the_guest_of_an_interrupted_save_go_on() {
    let mut table = restarted();
    let sync = table.request(Request::Sync(wanted("m", &json!({}))));
    assert_eq!(sync, [""; 0], "a guest that may be saved is not started");
    assert!(table.last_answer().unwrap().is_err());
    assert_eq!(save(&mut table), [""; 0]);
    table.take(read(Lifecycle::Paused, "user"));
    table.take(read(Lifecycle::Paused, "user"));
    goes_on(&mut table);
    assert_eq!(table.state.base.published.memory_save, None, "virt-handler asks again");
}

#[test]
fn a_guest_that_does_not_run_is_not_saved() {
    let mut table = Table::connected();
    assert_eq!(save(&mut table), [""; 0]);
    assert!(table.last_answer().unwrap().is_err());
    let mut table = Table::live();
    table.take(read(Lifecycle::Paused, "user"));
    assert_eq!(save(&mut table), [""; 0]);
    let mut table = Table::live();
    save(&mut table);
    table.take(to_save(JobInput::SaveRecorded(Err("no space".into()))));
    assert_eq!(shown(&table), (true, "cannot record the save of the guest's memory: no space".into()));
}

#[test]
fn saved_memory_is_marked_before_the_guest_runs() {
    let mut table = restoring();
    assert_eq!(table.take(to_start(JobInput::Created(Ok(())))), ["mark memory"]);
    assert_eq!(table.state.base.published.memory_restore, None);
    assert_eq!(table.take(to_start(JobInput::MemoryMarked(Ok(true)))), ["run restored guest"]);
    assert_eq!(table.take(to_start(JobInput::Resumed(Ok(())))), ["free memory", "read"]);
    let effects = table.take(read(Lifecycle::Running, "unpaused"));
    assert!(!effects.contains(&"run restored guest".to_owned()), "{effects:?}");
    assert!(table.state.base.published.memory_restore.as_ref().unwrap().ended);
    assert_eq!(table.last_answer(), Some(Ok(true)));
}

#[test]
fn a_mark_is_taken_back_only_if_no_guest_can_have_run() {
    let killed = || HypervisorError::Disconnected("killed".into());
    // The first to mark the file, and the error of the resume.
    for (is_first, error, is_taken_back) in [
        (true, libvirt(OPERATION_INVALID, "domain is not running"), true),
        (true, HypervisorError::NoDomain, true),
        // libvirt had begun.
        (true, libvirt(38, "cannot send monitor command"), false),
        (true, killed(), false),
        (true, HypervisorError::Timeout("resume"), false),
        // A former worker may have resumed the guest.
        (false, libvirt(OPERATION_INVALID, "domain is not running"), false),
    ] {
        let mut table = restoring();
        table.take(to_start(JobInput::Created(Ok(()))));
        table.take(to_start(JobInput::MemoryMarked(Ok(is_first))));
        let effects = table.take(to_start(JobInput::Resumed(Err(error.clone()))));
        assert_eq!(effects == ["unmark memory"], is_taken_back, "{error} {effects:?}");
        assert!(!effects.contains(&"free memory".to_owned()), "{error}");
        if is_taken_back {
            table.take(to_start(JobInput::MemoryUnmarked(Ok(()))));
            let failure = &table.state.base.published.failure;
            assert!(failure.contains("ended before it ran, and its saved memory is kept: "), "{failure}");
        }
    }
}

#[test]
fn a_failed_restore_ends_the_start_and_keeps_the_memory() {
    let mut table = restoring();
    let error = HypervisorError::SavedMemory("the guest was resumed from it before".into());
    let effects = table.take(to_start(JobInput::Created(Err(error))));
    assert!(!effects.contains(&"mark memory".to_owned()));
    let expected = "cannot resume the guest from saved memory: the guest was resumed from it before";
    assert_eq!(table.state.base.published.failure, expected);
    let mut table = restoring();
    table.take(to_start(JobInput::Created(Ok(()))));
    let effects = table.take(to_start(JobInput::MemoryMarked(Err("input/output error".into()))));
    assert!(!effects.contains(&"run restored guest".to_owned()), "{effects:?}");
    assert_eq!(table.state.base.published.failure, "cannot mark the saved memory as resumed: input/output error");
}

#[test]
fn a_later_worker_completes_the_restore_of_a_former_one() {
    for (lifecycle, reason, effects) in
        [(Lifecycle::Paused, "migration", &["pause for copy"][..]), (Lifecycle::Running, "unpaused", &["mark memory"])]
    {
        let mut table = Table::live();
        table.take(read(lifecycle, reason));
        assert_eq!(table.request(Request::Sync(restored())), effects, "{reason}");
        if lifecycle == Lifecycle::Paused {
            assert_eq!(table.take(to_start(JobInput::Paused(Ok(())))), ["mark memory"]);
            assert_eq!(table.take(to_start(JobInput::MemoryMarked(Ok(false)))), ["run restored guest"]);
        } else {
            assert_eq!(table.take(to_start(JobInput::MemoryMarked(Ok(false)))), ["free memory", "read"]);
        }
    }
}
