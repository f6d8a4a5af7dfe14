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
    request(&mut table, "claim", "c");
    table.take(to_dump(JobInput::MemoryDumped(Err(HypervisorError::Disconnected("killed".into())))));
    assert_eq!(shown(&table), (String::new(), false, String::new()), "virt-handler asks again");
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
