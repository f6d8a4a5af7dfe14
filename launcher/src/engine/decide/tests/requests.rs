use protocol::Lifecycle;

use super::{Table, read, wanted};
use crate::{
    engine::model::{Action, Input, JobName, Request, RequestError, RequestId, Stage},
    hypervisor::HypervisorError,
};

#[test]
fn hello_writes_the_cache_once_and_may_be_repeated() {
    let mut table = Table::new(false);
    let hello = || Request::Hello { cache: Vec::new(), allow_emulation: true };
    assert_eq!(table.request(hello()), ["start daemon with cache"]);
    let failed = RequestError::retryable("no room");
    table.take(Input::DaemonStarted(Some(RequestId(1)), Err(failed.clone())));
    assert_eq!(table.last_answer(), Some(Err(failed)));
    assert_eq!(table.request(hello()), ["start daemon with cache"]);
    table.take(Input::DaemonStarted(Some(RequestId(2)), Ok(())));
    assert_eq!(table.last_answer(), Some(Ok(false)));
    assert_eq!(table.request(hello()), ["start daemon"]);
    assert_eq!(table.take(Input::Timer), ["connect"]);
}

#[test]
fn actions_on_the_guest_need_a_guest_in_the_right_state() {
    let no_way = Some(Err(RequestError::NoWayToReboot));
    for (lifecycle, action, effects, answer) in [
        (Lifecycle::Running, Action::Pause, &["suspend"][..], None),
        (Lifecycle::Running, Action::Unpause, &["read"], None),
        (Lifecycle::Paused, Action::Unpause, &["resume"], None),
        (Lifecycle::Paused, Action::Pause, &["read"], None),
        (Lifecycle::PmSuspended, Action::Reset, &["reset"], None),
        (Lifecycle::Running, Action::SoftReboot, &[], no_way),
        (Lifecycle::Crashed, Action::Reset, &[], Some(Err(RequestError::NoDomain))),
        (Lifecycle::Running, Action::Finish, &[], Some(Err(RequestError::NotEnded))),
    ] {
        let mut table = Table::live();
        table.state.base.published.set_lifecycle(lifecycle);
        (table.state.base.published.acpi, table.state.base.published.guest_agent_connected) = (false, false);
        assert_eq!(table.act(action), effects, "{lifecycle:?} {action:?}");
        assert_eq!(table.last_answer(), answer, "{lifecycle:?} {action:?}");
    }
}

#[test]
fn an_action_is_answered_after_the_read_that_shows_its_result() {
    let mut table = Table::live();
    table.act(Action::Pause);
    // A read that began before the action ended does not count.
    assert_eq!(table.take(Input::DomainChanged { closed: false, crashed: false }), ["read"]);
    assert_eq!(table.take(Input::Acted(RequestId(1), Ok(()))), [""; 0]);
    assert_eq!(table.take(read(Lifecycle::Running, "booted")), ["attend", "read"]);
    assert_eq!(table.last_answer(), None);
    table.take(read(Lifecycle::Paused, "user"));
    assert_eq!(table.last_answer(), Some(Ok(false)));
}

#[test]
fn actions_are_bounded_and_a_kill_is_always_taken() {
    let mut table = Table::live();
    for _ in 0..4 {
        assert_eq!(table.act(Action::Reset), ["reset"]);
    }
    table.act(Action::Reset);
    assert_eq!(table.last_answer(), Some(Err(RequestError::Busy)));
    assert_eq!(table.act(Action::Kill), ["destroy gently"]);
    assert_eq!(table.act(Action::Kill), [""; 0], "the second shares the first");
    assert_eq!(table.take(Input::Destroyed(Ok(()))), ["read"]);
    table.take(read(Lifecycle::Shutoff, "destroyed"));
    let killed = [6, 7].map(|id| table.answers.iter().any(|(known, answer)| *known == id && *answer == Ok(false)));
    assert_eq!(killed, [true, true]);
}

#[test]
fn a_conflicting_action_is_refused_with_the_jobs_name() {
    let mut table = Table::connected();
    table.sync();
    for action in [Action::Pause, Action::Unpause, Action::Reset, Action::SoftReboot] {
        table.act(action);
        let refused = RequestError::Conflict { job: JobName::Start, progress: "preparing the disks" };
        assert_eq!(table.last_answer(), Some(Err(refused)), "{action:?}");
    }
    let mut table = Table::live();
    table.act(Action::Shutdown { grace: 30 });
    for (action, is_refused) in [(Action::Reset, true), (Action::SoftReboot, true), (Action::Pause, false)] {
        table.act(action);
        let refused = RequestError::Conflict { job: JobName::Shutdown, progress: "waiting for the guest" };
        assert_eq!(table.last_answer(), is_refused.then_some(Err(refused)), "{action:?}");
    }
}

#[test]
fn nothing_acts_on_the_guest_without_a_connection() {
    let mut table = Table::live();
    assert_eq!(table.take(Input::DomainChanged { closed: true, crashed: false }), ["disconnect"]);
    for action in [Action::Pause, Action::Reset, Action::Kill] {
        assert_eq!(table.act(action), [""; 0]);
        let answer = table.last_answer();
        assert!(
            matches!(answer, Some(Err(RequestError::Hypervisor(HypervisorError::Disconnected(_))))),
            "{action:?} {answer:?}"
        );
    }
}

#[test]
fn the_clock_is_set_after_a_pause_by_one_task() {
    let mut table = Table::live();
    table.state.base.published.guest_agent_connected = true;
    for (id, effects) in [(1, &["set clock", "read"][..]), (2, &["read"])] {
        table.state.base.published.set_lifecycle(Lifecycle::Paused);
        table.state.base.reading = Default::default();
        table.act(Action::Unpause);
        assert_eq!(table.take(Input::Acted(RequestId(id), Ok(()))), effects);
    }
    table.take(Input::ClockSet);
    assert!(!table.state.base.setting_clock);
}

#[test]
fn requests_to_end_a_domain_that_never_ran_end_the_launcher() {
    for (action, finished, reason) in [
        (Action::Shutdown { grace: 30 }, false, "destroyed"),
        (Action::Kill, false, "destroyed"),
        (Action::Terminate { grace: 30 }, true, "destroyed"),
    ] {
        let mut table = Table::connected();
        assert_eq!(table.act(action), ["attend"], "{action:?}");
        assert_eq!((table.state.base.stage, table.last_answer()), (Stage::Ended, Some(Ok(false))));
        assert_eq!(
            (table.state.base.finished, table.state.base.published.reason.as_str()),
            (finished, reason),
            "{action:?}"
        );
    }
}

#[test]
fn a_sync_of_another_vmi_or_before_hello_is_refused() {
    let mut table = Table::new(false);
    table.request(Request::Sync(wanted("other", &serde_json::json!({}))));
    assert_eq!(table.last_answer(), Some(Err(RequestError::OtherVmi("d_m".into()))));
    table.sync();
    assert_eq!(table.last_answer(), Some(Err(RequestError::NoHello)));
    assert_eq!(table.state.base.stage, Stage::Waiting);
}
