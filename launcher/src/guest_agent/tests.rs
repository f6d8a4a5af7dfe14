//! Tests of the guest agent's handle against a simulated guest.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

use super::*;

/// A guest with a guest agent.
#[derive(Default)]
struct Guest {
    frozen: AtomicBool,
    silent: AtomicBool,
    silent_about_file_systems: AtomicBool,
    has_no_file_systems: AtomicBool,
    loses_freezes: AtomicBool,
    lacks_users: AtomicBool,
    lacks_load: AtomicBool,
    user_questions: AtomicU32,
    commands: Mutex<Vec<String>>,
}

impl Guest {
    fn answer(&self, command: &str) -> Result<String, HypervisorError> {
        if self.silent.load(Ordering::SeqCst) {
            return Err(HypervisorError::GuestAgentUnresponsive("not connected".into()));
        }
        let execute: serde_json::Value = serde_json::from_str(command).unwrap();
        let command = execute["execute"].as_str().unwrap().to_owned();
        self.commands.lock().unwrap().push(command.clone());
        let frozen = self.frozen.load(Ordering::SeqCst);
        let value = match command.as_str() {
            "guest-fsfreeze-status" => if frozen { r#""frozen""# } else { r#""thawed""# }.to_owned(),
            "guest-fsfreeze-freeze" | "guest-fsfreeze-thaw" if self.has_no_file_systems.load(Ordering::SeqCst) => {
                "0".to_owned()
            }
            "guest-fsfreeze-freeze" if self.loses_freezes.load(Ordering::SeqCst) => {
                self.frozen.store(true, Ordering::SeqCst);
                return Err(HypervisorError::GuestAgentUnresponsive("timed out".into()));
            }
            "guest-fsfreeze-freeze" => {
                self.frozen.store(true, Ordering::SeqCst);
                "1".to_owned()
            }
            "guest-fsfreeze-thaw" => {
                self.frozen.store(false, Ordering::SeqCst);
                "1".to_owned()
            }
            "guest-info" => {
                let users = !self.lacks_users.load(Ordering::SeqCst);
                let load = !self.lacks_load.load(Ordering::SeqCst);
                // While file systems are frozen, most commands are disabled.
                let commands: Vec<_> = [
                    ("guest-info", true),
                    ("guest-fsfreeze-status", true),
                    ("guest-fsfreeze-thaw", true),
                    ("guest-fsfreeze-freeze", !frozen),
                    ("guest-get-fsinfo", !frozen),
                    ("guest-get-users", users && !frozen),
                    ("guest-get-load", load && !frozen),
                    ("guest-get-host-name", !frozen),
                    ("guest-ping", true),
                    ("guest-exec", !frozen),
                    ("guest-exec-status", !frozen),
                ]
                .iter()
                .map(|(name, enabled)| format!(r#"{{"name":"{name}","enabled":{enabled}}}"#))
                .collect();
                format!(r#"{{"version":"10.0","supported_commands":[{}]}}"#, commands.join(","))
            }
            "guest-ping" => "{}".to_owned(),
            _ if frozen => return Err(HypervisorError::GuestAgentRefused("not allowed while frozen".into())),
            "guest-get-host-name" => r#"{"host-name":"web"}"#.into(),
            "guest-exec" => r#"{"pid":7}"#.into(),
            "guest-exec-status" if self.asked("guest-exec-status") == 1 => r#"{"exited":false}"#.into(),
            "guest-exec-status" => r#"{"exited":true,"exitcode":3,"out-data":"b3V0"}"#.into(),
            "guest-get-users" => {
                self.user_questions.fetch_add(1, Ordering::SeqCst);
                r#"[{"user":"root","login-time":1.5}]"#.into()
            }
            "guest-get-fsinfo" if self.silent_about_file_systems.load(Ordering::SeqCst) => {
                return Err(HypervisorError::GuestAgentUnresponsive("timed out".into()));
            }
            "guest-get-load" => r#"{"load1m":1.5,"load5m":0.5,"load15m":0.25}"#.into(),
            "guest-get-fsinfo" => r#"[{"name":"vda1","mountpoint":"/","type":"ext4","disk":[]}]"#.into(),
            other => panic!("{other} was not to be asked"),
        };
        Ok(format!(r#"{{"return":{value}}}"#))
    }

    fn asked(&self, command: &str) -> usize {
        self.commands.lock().unwrap().iter().filter(|known| *known == command).count()
    }
}

struct Wire(Arc<Guest>);

impl Channel for Wire {
    fn ask(&self, command: String, _: Duration) -> BoxFuture<'static, Result<String, HypervisorError>> {
        let guest = self.0.clone();
        Box::pin(async move { guest.answer(&command) })
    }
}

struct Stage {
    guest: Arc<Guest>,
    agent: GuestAgent,
    file: PathBuf,
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

fn stage(name: &str) -> Stage {
    let guest = Arc::new(Guest::default());
    let file = std::env::temp_dir().join(format!("launcher-agent-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&file);
    Stage { agent: GuestAgent::new(Wire(guest.clone()), file.clone(), Tasks::new().0), guest, file }
}

impl Stage {
    /// A stage after the first poll.
    async fn known(name: &str) -> Self {
        let stage = stage(name);
        stage.agent.attend(true, true);
        let mut facts = stage.agent.facts();
        let wait = facts.wait_for(|facts| !facts.file_systems.is_empty() && facts.guest.is_some());
        tokio::time::timeout(Duration::from_secs(5), wait).await.unwrap().unwrap();
        stage
    }
}

fn exists(path: &Path) -> bool {
    path.exists()
}

#[tokio::test]
async fn the_poll_reports_facts_and_a_disconnect_clears_them() {
    let stage = Stage::known("poll").await;
    let facts = stage.agent.facts().borrow().clone();
    assert_eq!(facts.agent.unwrap().version, "10.0");
    assert_eq!(facts.guest.unwrap().hostname, "web");
    assert_eq!(facts.file_systems, "thawed");
    stage.agent.attend(false, true);
    assert_eq!(*stage.agent.facts().borrow(), GuestFacts::default());
    assert!(matches!(stage.agent.users().await, Err(GuestAgentError::NotConnected)));
}

#[tokio::test(start_paused = true)]
async fn the_poll_begins_again_after_a_change() {
    let asked_after = async |change: &str| {
        let stage = Stage::known(&format!("again-{change}")).await;
        let start = Instant::now();
        let until = |seconds| tokio::time::sleep_until(start + Duration::from_secs(seconds));
        // The pauses are 5, 10, 20, 40 and 80 s.
        until(100).await;
        stage.guest.lacks_load.store(change.ends_with("answer"), Ordering::SeqCst);
        match change {
            "domain" => stage.agent.look_again(),
            "requested answer" => {
                stage.agent.ask(Query::Agent, Instant::now() + Duration::from_secs(1)).await.unwrap();
            }
            _ => {}
        }
        until(108).await;
        let soon = stage.guest.asked("guest-get-host-name");
        until(163).await;
        (soon, stage.guest.asked("guest-get-host-name"))
    };
    for (change, expected) in [
        ("none", (5, 6)),
        // The poll gets it at 155 s.
        ("answer", (5, 7)),
        // At 105, 110, 120 and 140 s.
        ("domain", (6, 9)),
        ("requested answer", (6, 9)),
    ] {
        assert_eq!(asked_after(change).await, expected, "{change}");
    }
}

#[tokio::test]
async fn each_silence_counts_once_and_outlives_the_connection() {
    let stage = Stage::known("silence").await;
    let silences = || stage.agent.facts().borrow().silences;
    for (answered, counted) in [(true, 0), (false, 1), (false, 1), (true, 1), (false, 2)] {
        stage.agent.record_probe(answered);
        assert_eq!(silences(), counted);
    }
    stage.agent.attend(false, true);
    assert_eq!(*stage.agent.facts().borrow(), GuestFacts { silences: 2, ..GuestFacts::default() });
}

#[tokio::test]
async fn concurrent_requests_run_one_query() {
    let stage = Stage::known("many").await;
    let all = (0..50).map(|_| stage.agent.users());
    for users in futures::future::join_all(all).await {
        assert_eq!(users.unwrap()[0].name, "root");
    }
    assert_eq!(stage.guest.user_questions.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn facts_stay_when_the_guest_agent_is_silent() {
    let stage = Stage::known("silent").await;
    stage.agent.file_systems().await.unwrap();
    stage.guest.silent.store(true, Ordering::SeqCst);
    stage.agent.state().answers.iter_mut().for_each(|(_, at, _)| *at -= FRESH * 2);
    assert_eq!(stage.agent.file_systems().await.unwrap()[0].mount_point, "/");
    assert!(matches!(stage.agent.users().await, Err(GuestAgentError::Hypervisor(_))), "never known");
}

#[tokio::test]
async fn an_open_query_does_not_hide_other_answers() {
    let known = Stage::known("open").await;
    known.guest.silent_about_file_systems.store(true, Ordering::SeqCst);
    let report = known.agent.report().await.unwrap();
    assert_eq!(report.guest.unwrap().hostname, "web");
    assert_eq!(report.users.len(), 1);
    assert_eq!(report.file_systems, []);
    let mute = stage("mute");
    mute.guest.silent.store(true, Ordering::SeqCst);
    mute.agent.attend(true, false);
    assert!(matches!(mute.agent.report().await, Err(GuestAgentError::Hypervisor(_))));
}

#[tokio::test]
async fn an_unsupported_command_is_not_sent() {
    let stage = stage("lacks");
    stage.guest.lacks_users.store(true, Ordering::SeqCst);
    stage.agent.attend(true, false);
    let report = stage.agent.report().await;
    // A paused guest is not polled, so the report asks for everything.
    let report = report.unwrap();
    assert_eq!(report.users, []);
    assert_eq!(report.file_systems.len(), 1);
    assert_eq!(report.guest.unwrap().hostname, "web");
    assert_eq!(stage.guest.asked("guest-get-users"), 0);
    assert_eq!(stage.guest.asked("guest-get-osinfo"), 0, "not in its list");
}

#[tokio::test]
async fn metrics_get_recent_file_systems_and_a_recent_load() {
    let stage = Stage::known("recent").await;
    let load = || protocol::GuestLoad { one_minute: 1.5, five_minutes: 0.5, fifteen_minutes: 0.25 };
    let older = |by: Duration| stage.agent.state().answers.iter_mut().for_each(|(_, at, _)| *at -= by);
    for (age, asked) in [(0, (1, 1)), (10, (1, 1)), (10, (1, 2)), (50, (2, 3))] {
        older(Duration::from_secs(age));
        let (systems, found) = stage.agent.recent().await;
        assert_eq!((systems.len(), found), (1, Some(load())), "{age}");
        assert_eq!((stage.guest.asked("guest-get-fsinfo"), stage.guest.asked("guest-get-load")), asked, "{age}");
    }
    stage.guest.silent.store(true, Ordering::SeqCst);
    older(RECENT_LOAD);
    let (systems, found) = stage.agent.recent().await;
    assert_eq!((systems.len(), found), (1, None), "an old load is not shown");
    let old = self::stage("no-load");
    old.guest.lacks_load.store(true, Ordering::SeqCst);
    old.agent.attend(true, true);
    let mut facts = old.agent.facts();
    facts.wait_for(|facts| facts.agent.is_some()).await.unwrap();
    assert_eq!(old.agent.recent().await.1, None);
    assert_eq!(old.guest.asked("guest-get-load"), 0, "not in its list");
}

#[tokio::test]
async fn file_systems_freeze_and_thaw_once() {
    let stage = Stage::known("freeze").await;
    stage.agent.freeze(0).await.unwrap();
    stage.agent.freeze(0).await.unwrap();
    assert_eq!(stage.guest.asked("guest-fsfreeze-freeze"), 1);
    assert_eq!(stage.agent.facts().borrow().file_systems, "frozen");
    assert!(!exists(&stage.file), "no automatic thaw was asked for");
    stage.agent.unfreeze().await.unwrap();
    stage.agent.unfreeze().await.unwrap();
    assert_eq!(stage.guest.asked("guest-fsfreeze-thaw"), 1);
    assert_eq!(stage.agent.facts().borrow().file_systems, "thawed");
}

/// The hooks of the guest have run, and hold applications until the thaw.
#[tokio::test]
async fn freeze_that_froze_nothing_is_thawed() {
    let stage = Stage::known("nothing").await;
    stage.guest.has_no_file_systems.store(true, Ordering::SeqCst);
    stage.agent.freeze(100).await.unwrap();
    stage.agent.freeze(100).await.unwrap();
    assert_eq!(stage.guest.asked("guest-fsfreeze-freeze"), 1);
    stage.agent.unfreeze().await.unwrap();
    stage.agent.unfreeze().await.unwrap();
    assert_eq!(stage.guest.asked("guest-fsfreeze-thaw"), 1);
}

#[tokio::test]
async fn freeze_without_an_answer_is_open_until_the_guest_agent_answers() {
    let stage = Stage::known("open").await;
    stage.guest.loses_freezes.store(true, Ordering::SeqCst);
    assert!(!stage.agent.is_freezing());
    stage.agent.freeze(3600).await.unwrap_err();
    assert!(stage.agent.is_freezing());
    let limit = tokio::time::Instant::now() + Duration::from_secs(5);
    stage.agent.inner.ask_in_turn(Query::Freeze, limit).await.unwrap();
    assert_eq!(stage.agent.facts().borrow().file_systems, "frozen");
    assert!(!stage.agent.is_freezing());
    stage.guest.frozen.store(false, Ordering::SeqCst);
    stage.guest.loses_freezes.store(false, Ordering::SeqCst);
    stage.agent.freeze(3600).await.unwrap();
    assert!(!stage.agent.is_freezing());
}

/// The answer to the first freeze is lost. Its client counts the time from the second one.
#[tokio::test]
async fn repeated_freeze_puts_the_thaw_off() {
    let stage = Stage::known("repeated").await;
    stage.guest.loses_freezes.store(true, Ordering::SeqCst);
    stage.agent.freeze(10).await.unwrap_err();
    assert!(stage.agent.thaw_after().unwrap() <= 10);
    for seconds in [100, 10, 0] {
        stage.agent.freeze(seconds).await.unwrap();
        assert!(stage.agent.thaw_after().unwrap() >= 95, "{seconds}");
    }
    assert_eq!(stage.guest.asked("guest-fsfreeze-freeze"), 1);
}

#[tokio::test]
async fn commands_disabled_by_a_freeze_return_after_it() {
    let stage = Stage::known("disabled").await;
    let limit = || tokio::time::Instant::now() + Duration::from_secs(5);
    for _ in 0..2 {
        stage.agent.freeze(0).await.unwrap();
        stage.agent.inner.forget(Query::Agent);
        stage.agent.inner.ask_in_turn(Query::Agent, limit()).await.unwrap();
        stage.agent.unfreeze().await.unwrap();
        assert_eq!(stage.agent.users().await.unwrap()[0].name, "root");
    }
    // Another program froze them, and the guest agent reported so before this process knew.
    stage.guest.frozen.store(true, Ordering::SeqCst);
    stage.agent.inner.forget(Query::Agent);
    stage.agent.inner.ask_in_turn(Query::Agent, limit()).await.unwrap();
    stage.guest.frozen.store(false, Ordering::SeqCst);
    stage.agent.freeze(0).await.unwrap();
    assert_eq!(stage.guest.asked("guest-fsfreeze-freeze"), 3);
}

#[tokio::test]
async fn a_freeze_ends_by_itself() {
    let stage = Stage::known("timeout").await;
    stage.agent.freeze(1).await.unwrap();
    assert!(exists(&stage.file));
    let mut facts = stage.agent.facts();
    let thawed = facts.wait_for(|facts| facts.file_systems == "thawed");
    tokio::time::timeout(Duration::from_secs(10), thawed).await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!exists(&stage.file));
}

/// The guest is paused for hours.
#[tokio::test(start_paused = true)]
async fn automatic_thaw_is_tried_until_the_guest_answers() {
    let stage = Stage::known("late").await;
    stage.agent.freeze(60).await.unwrap();
    stage.guest.silent.store(true, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(3 * 3600)).await;
    assert!(stage.guest.frozen.load(Ordering::SeqCst));
    stage.guest.silent.store(false, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(!stage.guest.frozen.load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_freeze_with_a_limit_ends_one_without() {
    for has_no_file_systems in [false, true] {
        let stage = Stage::known("limit").await;
        stage.guest.has_no_file_systems.store(has_no_file_systems, Ordering::SeqCst);
        stage.agent.freeze(0).await.unwrap();
        assert!(!exists(&stage.file));
        stage.agent.freeze(3600).await.unwrap();
        assert_eq!(stage.guest.asked("guest-fsfreeze-freeze"), 1);
        assert!(exists(&stage.file));
        stage.agent.unfreeze().await.unwrap();
        assert_eq!((stage.guest.asked("guest-fsfreeze-thaw"), exists(&stage.file)), (1, false));
    }
}

#[tokio::test]
async fn an_early_unfreeze_cancels_the_thaw() {
    let stage = Stage::known("cancel").await;
    stage.agent.freeze(3600).await.unwrap();
    stage.agent.unfreeze().await.unwrap();
    assert!(!exists(&stage.file));
    assert!(stage.agent.inner.thaw.lock().unwrap().is_idle());
}

#[tokio::test]
async fn a_restarted_worker_thaws_a_freeze_of_the_former_worker() {
    let stage = stage("restart");
    stage.guest.frozen.store(true, Ordering::SeqCst);
    std::fs::write(&stage.file, "1").unwrap();
    stage.agent.attend(true, true);
    let mut facts = stage.agent.facts();
    let thawed = facts.wait_for(|facts| facts.file_systems == "thawed");
    tokio::time::timeout(Duration::from_secs(10), thawed).await.unwrap().unwrap();
    assert!(!stage.guest.frozen.load(Ordering::SeqCst));
}

#[tokio::test]
async fn automatic_thaw_moves_with_the_guest() {
    let source = Stage::known("leaves-frozen").await;
    assert_eq!(source.agent.thaw_after(), None);
    source.agent.freeze(100).await.unwrap();
    let left = source.agent.thaw_after().unwrap();
    assert!((95..=100).contains(&left), "{left}");
    let target = stage("arrives-frozen");
    target.guest.frozen.store(true, Ordering::SeqCst);
    target.agent.take_thaw(1);
    target.agent.attend(true, true);
    assert!(target.agent.may_be_frozen());
    let mut facts = target.agent.facts();
    let thawed = facts.wait_for(|facts| facts.file_systems == "thawed");
    tokio::time::timeout(Duration::from_secs(10), thawed).await.unwrap().unwrap();
    assert!(!target.guest.frozen.load(Ordering::SeqCst));
    source.agent.unfreeze().await.unwrap();
    assert_eq!(source.agent.thaw_after(), None);
}

#[tokio::test]
async fn probes_do_not_count_while_the_guest_may_be_frozen() {
    let stage = Stage::known("probes").await;
    assert!(!stage.agent.may_be_frozen());
    for thaw_after in [0, 100] {
        stage.agent.freeze(thaw_after).await.unwrap();
        assert!(stage.agent.may_be_frozen(), "{thaw_after}");
        stage.agent.unfreeze().await.unwrap();
        assert!(!stage.agent.may_be_frozen(), "{thaw_after}");
    }
    stage.agent.freeze(100).await.unwrap();
    let until = stage.agent.inner.thaw.lock().unwrap().frozen_until().unwrap();
    let left = until.saturating_duration_since(tokio::time::Instant::now()).as_secs();
    assert!((155..=160).contains(&left), "bounded by the thaw: {left}");
}

/// Without an automatic thaw only the guest shows that it is frozen no more.
#[tokio::test]
async fn probes_count_again_after_the_guest_has_thawed_or_was_reset() {
    let stage = Stage::known("probes-thawed").await;
    stage.agent.freeze(0).await.unwrap();
    stage.guest.frozen.store(false, Ordering::SeqCst);
    let limit = tokio::time::Instant::now() + Duration::from_secs(5);
    stage.agent.inner.ask_in_turn(Query::Freeze, limit).await.unwrap();
    assert!(!stage.agent.may_be_frozen());
    for thaw_after in [0, 100] {
        let stage = Stage::known(&format!("probes-reset-{thaw_after}")).await;
        stage.agent.freeze(thaw_after).await.unwrap();
        stage.agent.attend(false, true);
        assert_eq!(stage.agent.may_be_frozen(), thaw_after != 0, "{thaw_after}");
    }
    // The answer to the freeze is open.
    let stage = Stage::known("probes-open").await;
    stage.guest.loses_freezes.store(true, Ordering::SeqCst);
    stage.agent.freeze(0).await.unwrap_err();
    stage.agent.attend(false, true);
    assert!(stage.agent.may_be_frozen());
}

#[tokio::test]
async fn a_program_in_the_guest_gives_its_exit_code_and_its_output() {
    let stage = Stage::known("exec").await;
    let within = Duration::from_secs(5);
    stage.agent.ping(within).await.unwrap();
    let executed = stage.agent.exec("cat", &["/x".to_owned()], within).await.unwrap();
    assert_eq!(executed, Executed { exit_code: 3, output: b"out".to_vec() });
    assert_eq!(stage.guest.asked("guest-exec-status"), 2);
    stage.guest.silent.store(true, Ordering::SeqCst);
    assert!(stage.agent.ping(within).await.is_err());
}
