//! Tables of decisions: a state and inputs, and the effects they lead to.

mod dump;
mod events;
mod jobs;
mod migration_images;
mod migration_source;
mod migration_target;
mod post_copy;
mod requests;
mod save;
mod sync;

use std::{sync::Arc, time::Duration};

use api::VirtualMachineInstance;
use protocol::Lifecycle;
use serde_json::json;
use tokio::time::Instant;

use super::{State, decide};
use crate::{
    domain::{diff::DeviceChange, unsupported::Unsupported},
    engine::model::{
        Action, Answer, Base, DomainCall, Effect, GuestCall, Input, JobInput, JobName, MigrationRecord, Request,
        RequestId, Wanted, Work,
    },
    hypervisor::{DomainFacts, HypervisorError, MigrateWay},
    options::VmiArgs,
};

/// An engine without a driver.
struct Table {
    state: State,
    now: Instant,
    next: u64,
    answers: Vec<(u64, Answer)>,
}

impl Table {
    /// A worker that has just started, with a domain of a former worker if `adopting`.
    fn new(adopting: bool) -> Self {
        let args = VmiArgs {
            name: "m".into(),
            uid: "u".into(),
            namespace: "d".into(),
            grace_period_seconds: 45,
            allow_emulation: true,
            libvirt_log_filters: None,
            ovmf_path: "/nowhere".into(),
            await_limits: false,
            simulate_crash: false,
        };
        let now = Instant::now();
        let mut table = Self { state: State::new(Base::new(&args, now)), now, next: 0, answers: Vec::new() };
        table.take(Input::Begin { adopting, start_daemon: true, simulate_crash: false, migration: None, save: None });
        table.take(Input::DaemonStarted(None, Ok(())));
        table
    }

    /// A restarted worker that finds this record.
    fn restarted(record: MigrationRecord) -> Self {
        let mut table = Self::new(false);
        table.take(Input::Begin {
            adopting: true,
            start_daemon: true,
            simulate_crash: false,
            migration: Some(Box::new(record)),
            save: None,
        });
        table.take(Input::DaemonStarted(None, Ok(())));
        table
    }

    /// A worker with a connection and no domain.
    fn connected() -> Self {
        let mut table = Self::new(false);
        table.take(Input::DaemonStarted(Some(RequestId(0)), Ok(())));
        table.take(Input::Timer);
        table.take(Input::Connected(Ok(true)));
        table.take(Input::Read(Err(HypervisorError::NoDomain), None));
        table.answers.clear();
        table
    }

    /// A worker with a running domain.
    fn live() -> Self {
        let mut table = Self::new(true);
        table.take(Input::Timer);
        table.take(Input::Connected(Ok(true)));
        table.take(read(Lifecycle::Running, "booted"));
        table
    }

    /// Decides on an input and returns the effects except answers, which are kept.
    fn take(&mut self, input: Input) -> Vec<String> {
        let (state, effects) = decide(&self.state, self.now, input);
        self.state = state;
        let mut names = Vec::new();
        for effect in effects {
            match effect {
                Effect::Answer(id, answer) => self.answers.push((id.0, answer)),
                effect => names.push(name(&effect).to_owned()),
            }
        }
        names
    }

    fn request(&mut self, request: Request) -> Vec<String> {
        self.next += 1;
        self.take(Input::Request(RequestId(self.next), request))
    }

    fn act(&mut self, action: Action) -> Vec<String> {
        self.request(Request::Act(action))
    }

    fn sync(&mut self) -> Vec<String> {
        self.request(Request::Sync(wanted("m", &json!({}))))
    }

    /// Lets time pass.
    fn after(&mut self, seconds: u64) -> Vec<String> {
        self.now += Duration::from_secs(seconds);
        self.take(Input::Timer)
    }

    /// Returns the answer to the last request, if there is one.
    fn last_answer(&self) -> Option<Answer> {
        self.answers.iter().find(|(id, _)| *id == self.next).map(|(_, answer)| answer.clone())
    }
}

/// A VMI of that name whose domain has these further fields.
fn wanted(name: &str, domain: &serde_json::Value) -> Arc<Wanted> {
    let mut spec = json!({"memory": {"guest": "64Mi"}, "devices": {}});
    spec.as_object_mut().unwrap().extend(domain.as_object().unwrap().clone());
    let object = json!({"metadata": {"name": name, "namespace": "d", "uid": "u"}, "spec": {"domain": spec}});
    let unsupported = Unsupported::find(&object);
    let vmi: VirtualMachineInstance = serde_json::from_value(object).unwrap();
    Arc::new(Wanted { vmi, unsupported, options: protocol::VmiOptions::default() })
}

/// A read of the domain in that state.
fn read(lifecycle: Lifecycle, reason: &'static str) -> Input {
    let xml = include_str!("../../../domain/recorded/active.xml").to_owned();
    Input::Read(Ok(DomainFacts { lifecycle, reason, memory: 1, xml, disk_errors: Vec::new() }), None)
}

fn to_start(input: JobInput) -> Input {
    Input::Job(JobName::Start, input)
}

fn to_sync(input: JobInput) -> Input {
    Input::Job(JobName::Sync, input)
}

fn to_shutdown(input: JobInput) -> Input {
    Input::Job(JobName::Shutdown, input)
}

fn to_dump(input: JobInput) -> Input {
    Input::Job(JobName::MemoryDump, input)
}

fn to_save(input: JobInput) -> Input {
    Input::Job(JobName::MemorySave, input)
}

fn to_out(input: JobInput) -> Input {
    Input::Job(JobName::MigrationSource, input)
}

fn to_in(input: JobInput) -> Input {
    Input::Job(JobName::MigrationTarget, input)
}

fn name(effect: &Effect) -> &'static str {
    match effect {
        Effect::Answer(..) => "answer",
        Effect::StartDaemon { cache: Some(_), .. } => "start daemon with cache",
        Effect::StartDaemon { cache: None, .. } => "start daemon",
        Effect::Connect => "connect",
        Effect::Disconnect => "disconnect",
        Effect::ReadCrash => "read crash",
        Effect::LogLastLines => "log last lines",
        Effect::AttendGuestAgent { .. } => "attend",
        Effect::SaveMigration(..) => "save migration",
        Effect::Work(_, work) => match work {
            Work::Prepare(_) => "prepare",
            Work::PrepareTarget(..) => "prepare target",
            Work::Serve(_) => "serve",
            Work::WriteTags(_) => "write tags",
            Work::TagTarget(_) => "tag target",
            Work::Compare(_) => "compare",
            Work::OpenMigration(..) => "open migration",
            Work::RecordSave(Some(_)) => "record save",
            Work::RecordSave(None) => "forget save",
            Work::KeepMemory(_) => "keep memory",
            Work::DiscardMemory(_) => "discard memory",
            Work::MarkMemory(_) => "mark memory",
            Work::UnmarkMemory(_) => "unmark memory",
            Work::FreeMemory(_) => "free memory",
            Work::CompareImages { .. } => "compare images",
            Work::AwaitDeparture => "await departure",
            Work::Release { paused: false, .. } => "release",
            Work::Release { paused: true, .. } => "release paused",
        },
        Effect::Call(job, call) => match call {
            DomainCall::WarmUp => "warm up",
            DomainCall::Read => "read",
            DomainCall::Define(_) => "define",
            DomainCall::Create { paused: false } => "create",
            DomainCall::Create { paused: true } => "create paused",
            DomainCall::GrowDisk { .. } => "grow",
            DomainCall::PlugVcpus(_) => "plug vCPUs",
            DomainCall::ChangeDevice(DeviceChange::Attach, _) => "attach",
            DomainCall::ChangeDevice(DeviceChange::Detach, _) => "detach",
            DomainCall::ChangeDevice(DeviceChange::Update, _) => "update",
            DomainCall::DumpMemory(_) => "dump",
            DomainCall::SaveMemory(_) => "save",
            DomainCall::RestoreMemory(_) => "restore",
            DomainCall::Migrate { way: MigrateWay::PreCopy, .. } => "migrate",
            DomainCall::Migrate { way: MigrateWay::PostCopy, .. } => "migrate for post-copy",
            DomainCall::StartPostCopy => "start post-copy",
            DomainCall::ReadProgress => "read progress",
            DomainCall::AbortMigration => "abort migration",
            DomainCall::SetMaxDowntime(_) => "set downtime",
            DomainCall::Pause if *job == Some(JobName::MemorySave) => "pause for save",
            DomainCall::Pause => "pause for copy",
            DomainCall::Resume if *job == Some(JobName::Sync) => "resume after error",
            DomainCall::Resume if *job == Some(JobName::Start) => "run restored guest",
            DomainCall::Resume if *job == Some(JobName::MemorySave) => "run unsaved guest",
            DomainCall::Resume if *job == Some(JobName::MemoryDump) => "run dumped guest",
            DomainCall::Resume => "run after migration",
            DomainCall::Act(_, GuestCall::Suspend) => "suspend",
            DomainCall::Act(_, GuestCall::Resume) => "resume",
            DomainCall::Act(_, GuestCall::Reset) => "reset",
            DomainCall::Act(_, GuestCall::Reboot(_)) => "reboot",
            DomainCall::Shutdown => "shutdown",
            DomainCall::Destroy { gently: true } => "destroy gently",
            DomainCall::Destroy { gently: false } => "destroy",
            DomainCall::SetClock => "set clock",
        },
    }
}
