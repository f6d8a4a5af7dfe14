use std::sync::Arc;

use protocol::Lifecycle;
use serde_json::json;

use super::{Table, read, to_save, to_start, wanted};
use crate::{
    domain::Domain,
    engine::model::{JobInput, Request, Wanted},
    hypervisor::HypervisorError,
};

fn save(table: &mut Table) -> Vec<String> {
    table.request(Request::SaveMemory { volume: "claim".into(), file: "a.memory.save".into() })
}

fn shown(table: &Table) -> (bool, String) {
    let save = table.state.base.published.memory_save.clone().unwrap_or_default();
    (save.ended, save.failure)
}

/// A VMI whose guest starts from saved memory.
fn restored() -> Arc<Wanted> {
    let mut wanted = (*wanted("m", &json!({}))).clone();
    let memory = json!({"claimName": "claim", "fileName": "a.memory.save", "phase": "Restoring"});
    wanted.vmi.status = serde_json::from_value(json!({"hibernation": memory})).unwrap();
    Arc::new(wanted)
}

#[test]
fn a_save_ends_the_domain_and_a_failed_one_does_not() {
    let mut table = Table::live();
    assert_eq!(save(&mut table), ["save"]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    assert_eq!(save(&mut table), [""; 0], "it is in progress");
    table.take(to_save(JobInput::MemorySaved(Ok(()))));
    assert_eq!(shown(&table), (true, String::new()));
    table.take(read(Lifecycle::Shutoff, "saved"));
    assert_eq!(table.state.base.published.reason, "saved");
    let mut table = Table::live();
    save(&mut table);
    let error = HypervisorError::Libvirt { code: 1, message: "no space".into() };
    table.take(to_save(JobInput::MemorySaved(Err(error.clone()))));
    assert_eq!(shown(&table), (false, String::new()), "the domain is looked at first");
    table.take(read(Lifecycle::Running, "saveCanceled"));
    assert_eq!(shown(&table), (true, "cannot save the guest's memory: no space".into()));
    let mut table = Table::live();
    save(&mut table);
    table.take(to_save(JobInput::MemorySaved(Err(error))));
    table.take(read(Lifecycle::Shutoff, "saved"));
    assert_eq!(shown(&table), (true, String::new()), "a former worker has saved it");
    let mut table = Table::live();
    save(&mut table);
    table.take(to_save(JobInput::MemorySaved(Err(HypervisorError::Disconnected("killed".into())))));
    assert_eq!(shown(&table), (false, String::new()), "virt-handler asks again");
    for (reason, failure) in [("saved", ""), ("crashed", "the domain has ended")] {
        let mut table = Table::live();
        save(&mut table);
        table.take(read(Lifecycle::Shutoff, reason));
        assert_eq!(shown(&table), (true, failure.into()));
    }
}

#[test]
fn a_guest_that_does_not_run_is_not_saved() {
    let mut table = Table::connected();
    assert_eq!(save(&mut table), [""; 0]);
    assert!(table.last_answer().unwrap().is_err());
    let mut table = Table::live();
    table.take(read(Lifecycle::Paused, "user"));
    assert_eq!(save(&mut table), [""; 0]);
}

#[test]
fn saved_memory_is_marked_before_the_guest_runs() {
    let mut table = Table::connected();
    assert_eq!(table.request(Request::Sync(restored())), ["prepare"]);
    assert_eq!(table.take(to_start(JobInput::Prepared(Ok(Box::new(Domain::default()))))), ["serve"]);
    table.take(to_start(JobInput::Served(Ok(()))));
    assert_eq!(table.take(to_start(JobInput::Defined(Ok(())))), ["restore"]);
    assert_eq!(table.take(to_start(JobInput::Created(Ok(())))), ["consume"]);
    assert_eq!(table.state.base.published.memory_restore, None);
    assert_eq!(table.take(to_start(JobInput::MemoryConsumed(Ok(())))), ["run restored guest"]);
    assert_eq!(table.take(to_start(JobInput::Resumed(Ok(())))), ["read"]);
    let effects = table.take(read(Lifecycle::Running, "unpaused"));
    assert!(!effects.contains(&"run restored guest".to_owned()), "{effects:?}");
    assert!(table.state.base.published.memory_restore.as_ref().unwrap().ended);
    assert_eq!(table.last_answer(), Some(Ok(true)));
}

#[test]
fn a_failed_restore_ends_the_start_and_keeps_the_memory() {
    let mut table = Table::connected();
    table.request(Request::Sync(restored()));
    table.take(to_start(JobInput::Prepared(Ok(Box::new(Domain::default())))));
    table.take(to_start(JobInput::Served(Ok(()))));
    table.take(to_start(JobInput::Defined(Ok(()))));
    let error = HypervisorError::SavedMemory("the guest was resumed from it before".into());
    let effects = table.take(to_start(JobInput::Created(Err(error))));
    assert!(!effects.contains(&"consume".to_owned()));
    let expected = "cannot resume the guest from saved memory: the guest was resumed from it before";
    assert_eq!(table.state.base.published.failure, expected);
}

#[test]
fn a_later_worker_completes_the_restore_of_a_former_one() {
    for (lifecycle, reason, effects) in
        [(Lifecycle::Paused, "migration", &["pause for copy"][..]), (Lifecycle::Running, "unpaused", &["consume"])]
    {
        let mut table = Table::live();
        table.take(read(lifecycle, reason));
        assert_eq!(table.request(Request::Sync(restored())), effects, "{reason}");
        if lifecycle == Lifecycle::Paused {
            assert_eq!(table.take(to_start(JobInput::Paused(Ok(())))), ["consume"]);
            assert_eq!(table.take(to_start(JobInput::MemoryConsumed(Ok(())))), ["run restored guest"]);
        } else {
            assert_eq!(table.take(to_start(JobInput::MemoryConsumed(Ok(())))), ["read"]);
        }
    }
}
