use protocol::{ItemKind, Lifecycle};
use serde_json::json;

use super::{Table, read, to_sync, wanted};
use crate::{
    domain::{DomainError, parse::parse},
    engine::model::{Action, Input, JobInput, Request, RequestError, Stage},
    hypervisor::HypervisorError,
};

fn compared(sizes: &[(&str, u64)], change: (&str, &str)) -> Input {
    let xml = include_str!("../../../domain/recorded/plain.xml").replacen(change.0, change.1, 1);
    let sizes = sizes.iter().map(|(volume, size)| ((*volume).to_owned(), *size)).collect();
    to_sync(JobInput::Compared { sizes, wanted: Ok(Box::new(parse(&xml))), left_out: Vec::new() })
}

/// Takes a Sync of a running domain to the comparison.
fn comparing() -> Table {
    let mut table = Table::live();
    assert_eq!(table.sync(), ["serve"]);
    assert_eq!(table.take(to_sync(JobInput::Served(Ok(())))), ["compare"]);
    table
}

#[test]
fn a_running_domain_as_wanted_is_left_alone() {
    let mut table = comparing();
    assert_eq!(table.take(compared(&[], ("", ""))), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    assert_eq!(table.state.base.published.items, []);
}

#[test]
fn disks_grow_one_after_the_other_and_a_failure_is_an_item() {
    let mut table = comparing();
    assert_eq!(table.take(compared(&[("root", 10), ("ci", 20)], ("", ""))), ["grow"]);
    let full = HypervisorError::Libvirt { code: 1, message: "no space".into() };
    assert_eq!(table.take(to_sync(JobInput::DiskGrown(Err(full)))), ["grow"]);
    assert_eq!(table.take(to_sync(JobInput::DiskGrown(Ok(true)))), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    let [item] = &table.state.base.published.items[..] else { panic!("{:?}", table.state.base.published.items) };
    assert_eq!((item.kind(), item.name.as_str(), item.needs_restart), (ItemKind::Volume, "root", false));
    assert_eq!(item.message, "cannot resize the disk to its claim: no space");
}

#[test]
fn a_transient_failure_fails_the_sync_and_keeps_the_items() {
    let mut table = comparing();
    table.take(compared(&[], ("sockets='1'", "sockets='2'")));
    assert_eq!(table.state.base.published.items.len(), 1);
    table.sync();
    table.take(to_sync(JobInput::Served(Ok(()))));
    table.take(compared(&[("root", 10)], ("", "")));
    table.take(to_sync(JobInput::DiskGrown(Err(HypervisorError::Busy))));
    assert_eq!(table.last_answer(), Some(Err(HypervisorError::Busy.into())));
    assert_eq!((table.state.base.published.items.len(), table.state.base.stage), (1, Stage::Live));
}

#[test]
fn what_cannot_be_changed_or_rendered_is_an_item() {
    let mut table = comparing();
    table.take(compared(&[], ("ua-ci", "ua-new")));
    let names: Vec<&str> = table.state.base.published.items.iter().map(|item| item.name.as_str()).collect();
    assert_eq!(names, ["ci", "new"]);
    for (error, item) in [
        (DomainError::NoMemory, Some((ItemKind::Other, ""))),
        (DomainError::NoNic("new".into()), Some((ItemKind::Interface, "new"))),
        (DomainError::NoNic("default".into()), None),
    ] {
        table.sync();
        table.take(to_sync(JobInput::Served(Ok(()))));
        table.take(to_sync(JobInput::Compared { sizes: Vec::new(), wanted: Err(error.clone()), left_out: Vec::new() }));
        let items = &table.state.base.published.items;
        assert_eq!(items.first().map(|item| (item.kind(), item.name.as_str())), item, "{error}");
    }
}

#[test]
fn a_domain_that_cannot_be_compared_in_time_is_compared_again() {
    let mut table = comparing();
    let left_out = vec![("root".to_owned(), "the size of its claim cannot be read yet".to_owned())];
    let compared = JobInput::Compared { sizes: vec![("ci".to_owned(), 20)], wanted: Err(DomainError::Late), left_out };
    assert_eq!(table.take(to_sync(compared)), ["grow"], "other disks grow");
    assert_eq!(table.take(to_sync(JobInput::DiskGrown(Ok(true)))), [""; 0]);
    let items = table.state.base.published.items.iter();
    let items: Vec<_> = items.map(|item| (item.kind(), item.name.as_str(), item.needs_restart)).collect();
    assert_eq!(items, [(ItemKind::Other, "", false), (ItemKind::Volume, "root", false)]);
}

#[test]
fn a_guest_that_is_stopped_by_a_disk_error_resumes_after_its_disks_have_grown() {
    let mut table = comparing();
    table.state.base.published.set_lifecycle(Lifecycle::Paused);
    table.state.base.published.reason = "ioError".into();
    assert_eq!(table.take(compared(&[("root", 10)], ("", ""))), ["grow"]);
    assert_eq!(table.take(to_sync(JobInput::DiskGrown(Ok(true)))), ["resume after error"]);
    assert_eq!(table.take(to_sync(JobInput::Resumed(Ok(())))), ["read"]);
    assert_eq!(table.last_answer(), None);
    table.take(read(Lifecycle::Running, "unpaused"));
    assert_eq!(table.last_answer(), Some(Ok(false)));
}

#[test]
fn a_domain_that_is_being_stopped_is_not_changed() {
    let mut table = Table::live();
    table.act(Action::Shutdown { grace: 30 });
    assert_eq!(table.sync(), ["serve"]);
    assert_eq!(table.take(to_sync(JobInput::Served(Ok(())))), [""; 0]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
}

#[test]
fn unsupported_fields_fail_a_start_for_good_and_a_running_domain_never() {
    let unsupported = || Request::Sync(wanted("m", &json!({"launchSecurity": {"sev": {}}})));
    let mut table = Table::connected();
    table.request(unsupported());
    assert!(matches!(table.last_answer(), Some(Err(RequestError::Unsupported(_)))));
    assert_eq!(table.state.base.stage, Stage::Ended);
    let mut table = Table::live();
    table.request(unsupported());
    table.take(to_sync(JobInput::Served(Ok(()))));
    table.take(compared(&[], ("", "")));
    assert!(matches!(table.last_answer(), Some(Err(RequestError::Unsupported(_)))));
    assert_eq!(table.state.base.stage, Stage::Live);
}

#[test]
fn a_second_sync_follows_the_first_and_the_newest_vmi_counts() {
    let mut table = comparing();
    for _ in 0..2 {
        assert_eq!(table.sync(), [""; 0]);
    }
    assert_eq!(table.take(compared(&[], ("", ""))), ["serve"], "the next begins");
    assert_eq!(table.answers, [(1, Ok(false))]);
    table.take(to_sync(JobInput::Served(Ok(()))));
    table.take(compared(&[], ("", "")));
    assert_eq!(table.answers, [(1, Ok(false)), (2, Ok(false)), (3, Ok(false))]);
}

#[test]
fn the_end_of_the_domain_answers_waiting_syncs() {
    let mut table = comparing();
    table.sync();
    table.take(Input::DomainChanged { closed: false, crashed: false });
    table.take(read(Lifecycle::Shutoff, "shutdown"));
    assert_eq!(table.answers, [(1, Err(RequestError::Ended)), (2, Err(RequestError::Ended))]);
    assert_eq!(table.take(compared(&[], ("", ""))), [""; 0]);
}
