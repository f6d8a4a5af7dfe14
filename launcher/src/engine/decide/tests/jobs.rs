use protocol::{ItemKind, Lifecycle};

use super::{Table, read, to_dump, to_in, to_shutdown, to_start, to_sync};
use crate::{
    domain::Domain,
    engine::model::{Action, Input, JobInput, Request, RequestError, RequestId, Stage},
    hypervisor::HypervisorError,
};

fn domain() -> Input {
    to_start(JobInput::Prepared(Ok(Box::new(Domain {
        name: "d_m".into(),
        xml: "<domain/>".into(),
        acpi: true,
        ..Domain::default()
    }))))
}

/// Takes a start to the call that starts QEMU.
fn creating() -> Table {
    let mut table = Table::connected();
    table.sync();
    table.take(domain());
    table.take(to_start(JobInput::Served(Ok(()))));
    assert_eq!(table.take(to_start(JobInput::Defined(Ok(())))), ["create"]);
    table
}

#[test]
fn a_start_goes_step_by_step() {
    let mut table = Table::connected();
    for (input, effects) in [
        (domain(), &["serve"][..]),
        (to_start(JobInput::Served(Ok(()))), &["define"]),
        (to_start(JobInput::Defined(Ok(()))), &["create"]),
        // A domain that QEMU is starting is not read.
        (Input::DomainChanged { closed: false, crashed: false }, &[]),
        (to_start(JobInput::Created(Ok(()))), &["read"]),
        (read(Lifecycle::Running, "booted"), &["attend"]),
    ] {
        if table.next == 0 {
            assert_eq!(table.sync(), ["prepare"]);
        }
        assert_eq!(table.last_answer(), None);
        let label = format!("{input:?}");
        assert_eq!(table.take(input), effects, "{label}");
    }
    assert_eq!(table.last_answer(), Some(Ok(true)));
    assert!(table.state.job.is_none() && table.state.base.stage == Stage::Live);
}

#[test]
fn a_volume_without_which_a_domain_starts_is_an_item_to_attempt_again() {
    let mut table = Table::connected();
    table.sync();
    let left_out = vec![("data".to_owned(), "permission denied".to_owned())];
    table.take(to_start(JobInput::Prepared(Ok(Box::new(Domain { left_out, ..Domain::default() })))));
    for input in [JobInput::Served(Ok(())), JobInput::Defined(Ok(())), JobInput::Created(Ok(()))] {
        table.take(to_start(input));
    }
    table.take(read(Lifecycle::Running, "booted"));
    assert_eq!(table.last_answer(), Some(Ok(true)));
    let [item] = &table.state.base.published.items[..] else { panic!("{:?}", table.state.base.published.items) };
    let found = (item.kind(), item.name.as_str(), item.message.as_str(), item.needs_restart);
    assert_eq!(found, (ItemKind::Volume, "data", "permission denied", false));
}

#[test]
fn a_start_prepares_while_the_daemon_starts() {
    let mut table = Table::new(false);
    table.take(Input::DaemonStarted(Some(RequestId(0)), Ok(())));
    assert_eq!(table.sync(), ["prepare"]);
    assert_eq!(table.take(Input::Timer), ["connect"]);
    assert_eq!(table.take(domain()), [""; 0]);
    assert_eq!(table.take(Input::Connected(Ok(true))), ["warm up", "read"]);
    assert_eq!(table.take(Input::Read(Err(HypervisorError::NoDomain), None)), ["serve"]);
}

#[test]
fn a_start_whose_daemon_never_listens_fails_in_time() {
    let mut table = Table::new(false);
    table.take(Input::DaemonStarted(Some(RequestId(0)), Ok(())));
    table.sync();
    table.take(domain());
    table.take(Input::Timer);
    table.take(Input::Connected(Ok(false)));
    table.after(59);
    assert_eq!(table.last_answer(), None);
    table.after(1);
    let answer = table.last_answer().unwrap().unwrap_err();
    assert_eq!(answer.to_string(), "no connection to libvirt: libvirt's daemon did not start in time");
    assert_eq!(table.state.base.stage, Stage::Waiting, "virt-handler retries");
}

#[test]
fn a_failed_step_fails_the_start_and_the_next_sync_tries_again() {
    let failed = || HypervisorError::Libvirt { code: 1, message: "no".into() };
    let inputs: [fn() -> Input; 3] = [
        || to_start(JobInput::Created(Err(HypervisorError::Libvirt { code: 1, message: "no".into() }))),
        || Input::DomainChanged { closed: true, crashed: false },
        || Input::Timer,
    ];
    let mut table = creating();
    table.take(inputs[0]());
    assert_eq!(table.last_answer(), Some(Err(failed().into())));
    assert_eq!((table.state.base.stage, table.state.job.is_none()), (Stage::Waiting, true));
    assert_eq!(table.sync(), ["prepare"]);
    // A VMI that keeps failing for minutes fails for good.
    table.now += std::time::Duration::from_secs(300);
    table.take(to_start(JobInput::Prepared(Err(RequestError::retryable("no image")))));
    assert_eq!((table.state.base.stage, table.state.base.published.failure.as_str()), (Stage::Ended, "no image"));
}

#[test]
fn requests_to_end_abort_a_start_before_qemu_and_follow_it_afterwards() {
    for action in [Action::Kill, Action::Shutdown { grace: 5 }] {
        let mut table = Table::connected();
        table.sync();
        table.act(action);
        assert!(table.answers.contains(&(1, Err(RequestError::Ending))), "{action:?}");
        assert_eq!(table.last_answer(), Some(Ok(false)));
        assert_eq!(table.take(domain()), [""; 0], "the late result is ignored");
    }
    let mut table = creating();
    assert_eq!(table.act(Action::Kill), [""; 0]);
    table.sync();
    assert_eq!(table.last_answer(), Some(Err(RequestError::Ending)));
    table.take(to_start(JobInput::Created(Ok(()))));
    assert_eq!(table.take(read(Lifecycle::Running, "booted")), ["attend", "destroy gently"]);
    assert!(table.answers.contains(&(1, Ok(true))));
    let mut table = creating();
    table.act(Action::Kill);
    assert_eq!(table.take(to_start(JobInput::Created(Err(HypervisorError::Timeout("create"))))), ["attend"]);
    assert_eq!((table.state.base.stage, table.last_answer()), (Stage::Ended, Some(Ok(false))));
}

#[test]
fn an_adopting_worker_looks_before_it_prepares() {
    for (found, effects, stage) in [
        (read(Lifecycle::Running, "booted"), &["attend", "serve"][..], Stage::Live),
        (read(Lifecycle::Paused, "user"), &["attend", "serve"], Stage::Live),
        (read(Lifecycle::Shutoff, "shutdown"), &["attend", "attend"], Stage::Ended),
        (read(Lifecycle::Shutoff, "failed"), &["prepare"], Stage::Waiting),
        (Input::Read(Err(HypervisorError::NoDomain), None), &["prepare"], Stage::Waiting),
        (Input::Read(Err(HypervisorError::Timeout("state")), None), &[], Stage::Waiting),
    ] {
        let mut table = Table::new(true);
        assert_eq!(table.sync(), [""; 0], "nothing is prepared");
        table.take(Input::Timer);
        assert_eq!(table.take(Input::Connected(Ok(true))), ["warm up", "read"]);
        let label = format!("{found:?}");
        assert_eq!(table.take(found), effects, "{label}");
        assert_eq!(table.state.base.stage, stage, "{label}");
    }
}

#[test]
fn an_adopting_worker_looks_before_it_ends_the_domain() {
    let shutdown = Action::Shutdown { grace: 30 };
    let terminate = Action::Terminate { grace: 30 };
    let missing = || Input::Read(Err(HypervisorError::NoDomain), None);
    for (action, found, effects, stage) in [
        (shutdown, read(Lifecycle::Running, "booted"), &["attend", "shutdown"][..], Stage::Live),
        (terminate, read(Lifecycle::Running, "booted"), &["attend", "shutdown"], Stage::Live),
        (Action::Kill, read(Lifecycle::Running, "booted"), &["attend", "destroy gently"], Stage::Live),
        (terminate, read(Lifecycle::Shutoff, "shutdown"), &["attend", "attend"], Stage::Ended),
        (Action::Kill, missing(), &["attend"], Stage::Ended),
    ] {
        let mut table = Table::new(true);
        assert_eq!(table.act(action), [""; 0]);
        table.take(Input::Timer);
        assert_eq!(table.take(Input::Connected(Ok(true))), ["warm up", "read"]);
        assert_eq!((table.state.base.finished, table.last_answer()), (false, None));
        let label = format!("{action:?} {found:?}");
        assert_eq!(table.take(found), effects, "{label}");
        assert_eq!(table.state.base.stage, stage, "{label}");
    }
    // Without a daemon nothing is found.
    let mut table = Table::new(true);
    table.act(terminate);
    table.after(9);
    assert_eq!(table.last_answer(), None);
    table.after(1);
    assert_eq!((table.state.base.finished, table.last_answer()), (true, Some(Ok(false))));
}

#[test]
fn a_start_and_a_request_to_end_the_domain_wait_for_the_same_look() {
    for (found, effects, started) in [
        (read(Lifecycle::Running, "booted"), &["attend", "serve", "shutdown"][..], None),
        (Input::Read(Err(HypervisorError::NoDomain), None), &["attend"], Some(Err(RequestError::Ending))),
    ] {
        let mut table = Table::new(true);
        table.sync();
        table.act(Action::Shutdown { grace: 30 });
        table.take(Input::Timer);
        table.take(Input::Connected(Ok(true)));
        assert_eq!(table.take(found), effects);
        assert_eq!(table.last_answer(), Some(Ok(false)));
        let answer = table.answers.iter().find(|(id, _)| *id == 1).map(|(_, answer)| answer.clone());
        assert_eq!(answer, started);
    }
}

#[test]
fn a_read_that_began_before_qemus_start_is_ignored() {
    let mut table = Table::connected();
    assert_eq!(table.take(Input::DomainChanged { closed: false, crashed: false }), ["read"]);
    table.sync();
    for input in [
        domain(),
        to_start(JobInput::Served(Ok(()))),
        to_start(JobInput::Defined(Ok(()))),
        to_start(JobInput::Created(Ok(()))),
    ] {
        assert!(!table.take(input).contains(&"read".to_owned()), "a read is in progress");
    }
    assert_eq!(table.take(read(Lifecycle::Shutoff, "unknown")), ["read"]);
    assert_eq!((table.state.base.stage, table.last_answer()), (Stage::Live, None));
    assert_eq!(table.take(read(Lifecycle::Running, "booted")), ["attend"]);
    assert_eq!(table.last_answer(), Some(Ok(true)));
}

#[test]
fn a_domain_that_starts_although_its_start_failed_is_found() {
    let mut table = creating();
    assert_eq!(table.take(Input::DomainChanged { closed: false, crashed: false }), [""; 0]);
    assert_eq!(table.take(to_start(JobInput::Created(Err(HypervisorError::Timeout("create"))))), ["read"]);
    // It appears while the next start prepares; a request to end it aborts that start.
    assert_eq!(table.sync(), ["prepare"]);
    table.sync();
    assert_eq!(table.take(read(Lifecycle::Running, "booted")), ["attend"]);
    assert_eq!(table.act(Action::Shutdown { grace: 30 }), ["serve", "shutdown"]);
    assert_eq!(table.answers.iter().find(|(id, _)| *id == 2), Some(&(2, Err(RequestError::Ending))));
    table.take(to_sync(JobInput::Served(Ok(()))));
    assert!(table.answers.contains(&(3, Ok(false))), "the Sync that waited");
}

#[test]
fn a_shutdown_is_repeated_and_forced_after_the_grace_period() {
    let mut table = Table::live();
    assert_eq!(table.act(Action::Shutdown { grace: 12 }), ["shutdown"]);
    assert_eq!(table.last_answer(), Some(Ok(false)));
    assert_eq!(table.after(5), [""; 0], "the first request is in progress");
    table.take(to_shutdown(JobInput::ShutdownRequested(Ok(()))));
    assert_eq!(table.after(5), ["shutdown"]);
    table.take(to_shutdown(JobInput::ShutdownRequested(Err(HypervisorError::Timeout("shutdown")))));
    assert_eq!(table.after(2), ["destroy gently"]);
    assert_eq!(table.take(Input::Destroyed(Err(HypervisorError::Timeout("destroy")))), ["destroy"]);
    assert_eq!(table.take(Input::Destroyed(Ok(()))), ["read"]);
    assert_eq!(table.take(read(Lifecycle::Shutoff, "destroyed")), ["attend", "attend"]);
    assert!(table.state.job.is_none() && table.state.base.stage == Stage::Ended);
}

#[test]
fn a_shorter_grace_period_wins() {
    for (first, second, forced) in [(60, 2, true), (2, 60, true), (60, 30, false)] {
        let mut table = Table::live();
        table.act(Action::Shutdown { grace: first });
        table.act(Action::Terminate { grace: second });
        let effects = table.after(3);
        assert_eq!(effects.contains(&"destroy gently".to_owned()), forced, "{first} {second} {effects:?}");
    }
}

#[test]
fn virt_handler_has_some_time_to_record_the_end() {
    for (terminating, seconds) in [(false, 300), (true, 10)] {
        let mut table = Table::live();
        table.state.base.terminating = terminating;
        table.take(read(Lifecycle::Shutoff, "shutdown"));
        table.after(seconds - 1);
        assert!(!table.state.base.finished);
        table.after(1);
        assert!(table.state.base.finished, "{terminating}");
    }
}

#[test]
fn jobs_that_virt_handler_has_started_are_published() {
    let jobs = |table: &Table| {
        let jobs = table.state.base.published.jobs.iter();
        jobs.map(|job| (job.name.clone(), job.progress.clone())).collect::<Vec<_>>()
    };
    let dump = ("memory dump".to_owned(), "writing the guest's memory".to_owned());
    let shutdown = ("shutdown".to_owned(), "waiting for the guest".to_owned());
    let mut table = Table::live();
    table.sync();
    assert_eq!(jobs(&table), []);
    table.request(Request::DumpMemory { volume: "claim".into(), file: "a".into() });
    assert_eq!(jobs(&table), std::slice::from_ref(&dump));
    table.act(Action::Shutdown { grace: 30 });
    assert_eq!(jobs(&table), [shutdown.clone(), dump]);
    table.take(to_dump(JobInput::MemoryDumped(Ok(()))));
    assert_eq!(jobs(&table), [shutdown]);
    table.take(read(Lifecycle::Shutoff, "shutdown"));
    table.take(read(Lifecycle::Shutoff, "shutdown"));
    assert_eq!(jobs(&table), []);
}

#[test]
fn a_result_goes_to_the_job_that_it_names() {
    let mut table = Table::connected();
    table.sync();
    let late = || JobInput::Prepared(Ok(Box::<Domain>::default()));
    assert_eq!(table.take(to_in(late())), [""; 0]);
    assert_eq!(table.take(to_start(late())), ["serve"]);
    assert_eq!(table.take(to_sync(JobInput::Served(Ok(())))), [""; 0]);
    assert_eq!(table.take(to_start(JobInput::Served(Ok(())))), ["define"]);
}
