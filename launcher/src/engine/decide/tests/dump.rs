use protocol::Lifecycle;

use super::{Table, read, to_dump};
use crate::{
    engine::model::{Action, Input, JobInput, Request},
    hypervisor::HypervisorError,
};

fn request(table: &mut Table, volume: &str, file: &str) -> Vec<String> {
    table.request(Request::DumpMemory { volume: volume.into(), file: file.into() })
}

fn shown(table: &Table) -> (String, bool, String) {
    let dump = table.state.base.published.memory_dump.clone().unwrap_or_default();
    (dump.file, dump.ended, dump.failure)
}

#[test]
fn a_dump_is_written_once_and_its_end_is_published() {
    let mut table = Table::live();
    assert_eq!(request(&mut table, "claim", "a"), ["dump"]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    assert_eq!(shown(&table), ("a".into(), false, String::new()));
    assert_eq!(request(&mut table, "claim", "a"), [""; 0], "it is in progress");
    request(&mut table, "claim", "b");
    assert!(table.last_answer().unwrap().unwrap_err().to_string().contains("memory dump is in progress"));
    table.act(Action::Pause);
    assert!(table.last_answer().unwrap().unwrap_err().to_string().contains("memory dump is in progress"));
    assert_eq!(table.take(to_dump(JobInput::MemoryDumped(Ok(())))), ["read"]);
    assert_eq!(shown(&table), ("a".into(), true, String::new()));
    assert_eq!(request(&mut table, "claim", "a"), [""; 0], "it is written");
    assert_eq!(request(&mut table, "claim", "b"), ["dump"]);
    table.take(to_dump(JobInput::MemoryDumped(Err(HypervisorError::Libvirt { code: 1, message: "no space".into() }))));
    assert_eq!(shown(&table), ("b".into(), true, "Domain memory dump failed: no space".into()));
}

/// libvirt's daemon ends during the dump.
fn interrupt(table: &mut Table) -> Vec<String> {
    table.take(to_dump(JobInput::MemoryDumped(Err(HypervisorError::Disconnected("killed".into())))))
}

#[test]
fn a_guest_that_a_dump_has_stopped_goes_on_once_qemu_lets_it() {
    let mut table = Table::live();
    request(&mut table, "claim", "a");
    assert_eq!(interrupt(&mut table), ["read"]);
    assert_eq!(table.take(Input::Read(Err(HypervisorError::Disconnected("killed".into())), None)), ["disconnect"]);
    assert_eq!(table.after(1), ["connect"]);
    assert_eq!(table.take(Input::Connected(Ok(true))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Paused, "dump")), ["attend"]);
    let mut attempt = |result| {
        assert_eq!(table.after(1), ["read"]);
        assert_eq!(table.take(read(Lifecycle::Paused, "dump")), ["attend", "run dumped guest"]);
        (table.take(to_dump(JobInput::Resumed(result))), shown(&table))
    };
    let refused = HypervisorError::Libvirt { code: 1, message: "There is a dump in process, please wait.".into() };
    for _ in 0..2 {
        assert_eq!(attempt(Err(refused.clone())), (vec![], ("a".into(), false, String::new())));
    }
    let asks_again = (String::new(), false, String::new());
    assert_eq!(attempt(Ok(())), (vec!["read".to_owned()], asks_again));
    assert_eq!(request(&mut table, "claim", "a"), ["dump"]);
}

#[test]
fn a_guest_that_the_user_has_paused_stays_paused_after_a_dump() {
    let mut table = Table::live();
    table.take(Input::DomainChanged { closed: false, crashed: false });
    table.take(read(Lifecycle::Paused, "user"));
    request(&mut table, "claim", "a");
    assert_eq!(interrupt(&mut table), ["read"]);
    assert_eq!(shown(&table), (String::new(), false, String::new()), "virt-handler asks again");
    assert_eq!(table.take(read(Lifecycle::Paused, "user")), ["attend"]);
    assert_eq!(table.after(1), [""; 0]);
    // The state that the dump began with may be that before a pause, or a disk error.
    for (reason, goes_on) in [("user", false), ("ioError", false), ("unknown", true)] {
        let mut table = Table::live();
        request(&mut table, "claim", "a");
        assert_eq!(interrupt(&mut table), ["read"]);
        assert_eq!(table.take(read(Lifecycle::Paused, reason)), ["attend"]);
        assert_eq!(table.after(1), ["read"]);
        table.take(read(Lifecycle::Paused, reason));
        assert_eq!(table.state.job.is_some(), goes_on, "{reason}");
        assert_eq!(shown(&table).0.is_empty(), !goes_on, "{reason}");
    }
}

#[test]
fn a_guest_that_a_former_worker_has_left_stopped_goes_on() {
    for (lifecycle, reason, effects) in [
        (Lifecycle::Paused, "dump", &["attend", "run dumped guest"][..]),
        // libvirt has written the dump, and resumed the guest.
        (Lifecycle::Running, "unpaused", &["attend"]),
    ] {
        let mut table = Table::live();
        table.take(Input::DomainChanged { closed: false, crashed: false });
        assert_eq!(table.take(read(Lifecycle::Paused, "dump")), ["attend"]);
        assert_eq!(table.after(1), ["read"]);
        assert_eq!(table.take(read(lifecycle, reason)), effects);
        assert_eq!(table.state.job.is_none(), lifecycle == Lifecycle::Running);
    }
}

#[test]
fn a_shutdown_goes_on_beside_a_dump_and_the_end_of_the_domain_ends_it() {
    let mut table = Table::live();
    request(&mut table, "claim", "a");
    assert_eq!(table.act(Action::Shutdown { grace: 30 }), ["shutdown"]);
    table.take(to_dump(JobInput::MemoryDumped(Ok(()))));
    assert_eq!(shown(&table), ("a".into(), true, String::new()));
    let mut table = Table::live();
    request(&mut table, "claim", "a");
    table.take(Input::DomainChanged { closed: false, crashed: false });
    table.take(read(Lifecycle::Shutoff, "crashed"));
    assert_eq!(shown(&table), ("a".into(), true, "the domain has ended".into()));
}

#[test]
fn nothing_is_written_without_a_guest_or_beside_the_volumes() {
    for (mut table, volume) in [(Table::connected(), "claim"), (Table::live(), "../x"), (Table::live(), "")] {
        assert_eq!(request(&mut table, volume, "a"), [""; 0], "{volume}");
        assert!(table.last_answer().unwrap().is_err());
    }
}
