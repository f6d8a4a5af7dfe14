//! Carries effects out. Each result becomes an input.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tracing::Instrument;

use super::{Driver, crash, departure::Departure, migration::images_of_target, prepare::Preparation, records};
use crate::{
    engine::model::{
        ChannelMode, DomainCall, Effect, GuestCall, Input, JobInput, JobName, RequestError, SaveRecord, Wanted, Work,
    },
    hypervisor::{Call, Domain, HypervisorError, MigrateCall},
    saved_memory::{self, SavedMemoryError},
    storage::Purpose,
};

/// Attempts to set the guest's clock, and the pause between them: the guest agent may be busy.
const CLOCK_ATTEMPTS: u32 = 60;
const CLOCK_RETRY: Duration = Duration::from_secs(1);

/// Result of an effect that ran as a task.
pub(super) enum Finished {
    Input(Input),
    /// An attempt to connect.
    Connected(Result<Option<Arc<dyn Domain>>, HypervisorError>),
    /// Nothing to decide.
    Nothing,
}

impl Driver {
    /// Converts the result of a task to an input.
    pub(super) fn input_of(&mut self, finished: Finished) -> Option<Input> {
        match finished {
            Finished::Input(input) => Some(input),
            Finished::Connected(result) => Some(Input::Connected(result.map(|domain| {
                let connected = domain.is_some();
                if connected {
                    let _ = self.domains.send_replace(domain.clone());
                    self.domain = domain;
                }
                connected
            }))),
            Finished::Nothing => None,
        }
    }

    /// Starts the work of an effect, or does it if it ends at once.
    pub(super) fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Answer(id, answer) => {
                // The client may be gone.
                let _ = self.answers.remove(&id).map(|reply| reply.send(answer));
            }
            Effect::StartDaemon { cache, request } => {
                let written = cache.map_or(Ok(()), |cache| self.hypervisor.write_cache(&cache));
                let result = written.and_then(|()| self.hypervisor.start());
                let result = result.map_err(RequestError::retryable);
                self.results.push_back(Input::DaemonStarted(request, result));
            }
            Effect::Connect => {
                let connect = self.hypervisor.connect();
                self.spawn(async move { Finished::Connected(connect.await) });
            }
            Effect::Disconnect => {
                self.domain = None;
                let _ = self.domains.send_replace(None);
            }
            Effect::AttendGuestAgent { connected, runs, changed } => {
                self.guest_agent.attend(connected, runs);
                if changed {
                    self.guest_agent.look_again();
                }
            }
            Effect::ReadCrash => {
                let log = self.pod.paths.domain_log(&self.state.base.domain_name());
                self.results.push_back(Input::Crash(crash::last(&log)));
            }
            Effect::LogLastLines => {
                let log = self.pod.paths.domain_log(&self.state.base.domain_name());
                for line in crash::last_lines(&log) {
                    tracing::warn!("QEMU's log ends: {line}");
                }
            }
            Effect::SaveMigration(record, mode) => {
                if let Err(error) = self.save_migration(&record, mode) {
                    tracing::error!(%error, "cannot keep the state of the migration");
                }
                if record.has_arrived() {
                    let vm_state = self.pod.vm_state.clone();
                    self.spawn(async move {
                        vm_state.arrived(&record.migration).await;
                        Finished::Nothing
                    });
                }
            }
            Effect::Call(job, call) => self.call_domain(job, call),
            Effect::Work(job, work) => self.work(job, work),
        }
    }

    /// Starts work for a job.
    fn work(&mut self, job: JobName, work: Work) {
        match work {
            Work::Serve(wanted) => {
                let result = self.services.serve(&self.pod, &wanted, self.domains.subscribe());
                self.results.push_back(Input::Job(job, JobInput::Served(result)));
            }
            Work::OpenMigration(record, mode) => {
                let result = self.save_migration(&record, mode).map_err(RequestError::retryable);
                self.results.push_back(Input::Job(job, JobInput::MigrationOpened(result)));
            }
            Work::Prepare(wanted) => {
                let domain = self.preparation(wanted).domain();
                self.spawn_work(job, async move { JobInput::Prepared(domain.await) });
            }
            Work::PrepareTarget(wanted, migration) => {
                let domain = self.preparation(wanted).target(migration);
                let (channels, base) = (self.channels.clone(), &self.state.base);
                let (own_images, container_disks) = (base.own_images.clone(), base.container_disks.clone());
                self.spawn_work(job, async move {
                    let domain = domain.await;
                    if let Ok(domain) = &domain {
                        channels.read_images(&images_of_target(&domain.xml, &own_images, &container_disks));
                    }
                    JobInput::Prepared(domain)
                });
            }
            Work::Compare(wanted) => {
                let compare = self.preparation(wanted).compare(self.state.base.active.clone());
                self.spawn_work(job, compare);
            }
            Work::WriteTags(wanted) => {
                let definition = self.call(Domain::definition);
                let written = write_tags(self.preparation(wanted), definition, Purpose::Start);
                self.spawn_work(job, async move { JobInput::TagsWritten(written.await) });
            }
            Work::TagTarget(wanted) => {
                let definition = self.call(Domain::definition);
                let written = write_tags(self.preparation(wanted), definition, Purpose::MigrationTarget);
                self.spawn(async move {
                    if let Err(error) = written.await {
                        tracing::warn!(%error, "cannot write the tags of devices");
                    }
                    Finished::Nothing
                });
            }
            Work::CompareImages { migration, images } => {
                let channels = self.channels.clone();
                self.spawn(async move {
                    tokio::select! {
                        result = channels.compare_images(&images) => {
                            Finished::Input(Input::Job(job, JobInput::ImagesCompared { migration, result }))
                        }
                        () = channels.closed(ChannelMode::Source) => Finished::Nothing,
                    }
                });
            }
            Work::Release { migration, paused } => {
                let (channels, thaw_after) = (self.channels.clone(), self.guest_agent.thaw_after());
                let vm_state = self.pod.vm_state.clone();
                self.spawn_work(job, async move {
                    vm_state.leaving(&migration).await;
                    let result = channels.release(paused, thaw_after).await;
                    if matches!(result, Ok(true)) {
                        vm_state.left(&migration).await;
                    }
                    JobInput::Released(result.map_err(|error| error.to_string()))
                });
            }
            Work::RecordSave(record) => self.record_save(job, record.as_ref()),
            Work::KeepMemory(path) => self.spawn_file(job, move || saved_memory::keep(&path), JobInput::MemoryKept),
            Work::DiscardMemory(path) => {
                self.spawn_file(job, move || saved_memory::discard(&path), JobInput::MemoryDiscarded);
            }
            Work::MarkMemory(path) => self.spawn_file(job, move || saved_memory::mark(&path), JobInput::MemoryMarked),
            Work::UnmarkMemory(path) => {
                self.spawn_file(job, move || saved_memory::unmark(&path), JobInput::MemoryUnmarked);
            }
            Work::FreeMemory(path) => {
                let freed = blocking(move || saved_memory::free(&path));
                self.spawn(async move {
                    if let Err(error) = freed.await {
                        tracing::warn!(error, "cannot free the space of the saved memory");
                    }
                    Finished::Nothing
                });
            }
            Work::AwaitDeparture => {
                let name = self.state.base.domain_name();
                let paths = &self.pod.paths;
                let departure = Departure::watch(&paths.domain_log(&name), &paths.domain_process(&name));
                let channels = self.channels.clone();
                self.spawn(async move {
                    let ended = async { departure?.ended().await };
                    tokio::select! {
                        result = ended => {
                            let result = result.map_err(|error| error.to_string());
                            Finished::Input(Input::Job(job, JobInput::Departed(result)))
                        }
                        () = channels.closed(ChannelMode::Source) => Finished::Nothing,
                    }
                });
            }
        }
    }

    /// Writes or removes the record of a save of the guest's memory.
    fn record_save(&mut self, job: JobName, record: Option<&SaveRecord>) {
        let path = self.pod.paths.save_record();
        match record {
            Some(record) => {
                // The published state does not show a freeze whose answer has not come.
                let result = if self.guest_agent.is_freezing() {
                    Err(RequestError::Frozen.to_string())
                } else {
                    records::write(&path, record).map_err(|error| error.to_string())
                };
                self.results.push_back(Input::Job(job, JobInput::SaveRecorded(result)));
            }
            None => records::remove(&path).unwrap_or_else(|error| {
                tracing::error!(%error, "cannot remove the record of the save of the guest's memory");
            }),
        }
    }

    /// Starts a call to libvirt.
    fn call_domain(&mut self, job: Option<JobName>, call: DomainCall) {
        match call {
            DomainCall::WarmUp => {
                self.spawn_silent(Domain::warm_up, |error| tracing::debug!(%error, "cannot warm up libvirt"));
            }
            DomainCall::Read => {
                let signals = self.domain.as_ref().map(|domain| domain.signals());
                self.spawn_call(Domain::facts, move |result| {
                    Input::Read(result, signals.and_then(|signals| signals.guest_agent_connected()))
                });
            }
            DomainCall::Act(id, call) => {
                self.spawn_call(|domain| act(domain, call), move |result| Input::Acted(id, result));
            }
            DomainCall::Destroy { gently } => self.spawn_call(|domain| domain.destroy(gently), Input::Destroyed),
            DomainCall::SetClock => {
                let domain = self.domain.clone();
                self.spawn(async move {
                    if let Some(domain) = domain {
                        set_clock(&*domain).await;
                    }
                    Finished::Input(Input::ClockSet)
                });
            }
            DomainCall::SetMaxDowntime(milliseconds) => {
                let set = |domain: &dyn Domain| domain.set_max_downtime(milliseconds);
                self.spawn_silent(set, |error| {
                    tracing::warn!(%error, "cannot set the longest downtime of the migration");
                });
            }
            DomainCall::Define(domain) => {
                tracing::debug!(xml = domain.xml, "defining the domain");
                let connection = self.domain.clone();
                self.spawn_for(job, |_| Box::pin(define(connection, domain)), JobInput::Defined);
            }
            DomainCall::Create { paused } => self.spawn_for(job, |domain| domain.create(paused), JobInput::Created),
            DomainCall::GrowDisk { target, size } => {
                self.spawn_for(job, |domain| domain.grow_disk(target, size), JobInput::DiskGrown);
            }
            DomainCall::PlugVcpus(vcpus) => {
                self.spawn_for(job, |domain| domain.plug_vcpus(vcpus), JobInput::VcpusPlugged);
            }
            DomainCall::ChangeDevice(change, xml) => {
                tracing::debug!(?change, xml, "changing a device");
                self.spawn_for(job, |domain| domain.change_device(change, xml), JobInput::DeviceChanged);
            }
            DomainCall::DumpMemory(path) => {
                self.spawn_for(job, |domain| domain.dump_memory(path), JobInput::MemoryDumped);
            }
            DomainCall::SaveMemory(path) => {
                self.spawn_for(job, |domain| domain.save_memory(path), JobInput::MemorySaved);
            }
            DomainCall::RestoreMemory(path) => {
                let connection = self.domain.clone();
                self.spawn_for(job, |_| Box::pin(restore(connection, path)), JobInput::Created);
            }
            DomainCall::Migrate { request, copied, way } => {
                let parameters = self.migrate_call(&request, copied).map(|call| MigrateCall { way, ..call });
                let migrate = |domain: &dyn Domain| match parameters {
                    Ok(parameters) => domain.migrate(parameters),
                    Err(error) => Box::pin(std::future::ready(Err(error))),
                };
                self.spawn_for(job, migrate, JobInput::Migrated);
            }
            DomainCall::StartPostCopy => self.spawn_for(job, Domain::start_post_copy, JobInput::PostCopyStarted),
            DomainCall::ReadProgress => self.spawn_for(job, Domain::migration_progress, JobInput::ProgressRead),
            DomainCall::AbortMigration => self.spawn_for(job, Domain::abort_migration, JobInput::MigrationAborted),
            DomainCall::Pause => self.spawn_for(job, Domain::suspend, JobInput::Paused),
            DomainCall::Resume => self.spawn_for(job, Domain::resume, JobInput::Resumed),
            DomainCall::Shutdown => self.spawn_for(job, Domain::shutdown, JobInput::ShutdownRequested),
        }
    }

    fn preparation(&self, wanted: Arc<Wanted>) -> Preparation {
        Preparation::new(self.pod.clone(), wanted, self.state.base.allow_emulation)
    }

    /// Returns a call to the domain; it fails without a connection.
    fn call<T: Send + 'static>(&self, call: impl FnOnce(&dyn Domain) -> Call<T>) -> Call<T> {
        match &self.domain {
            Some(domain) => call(&**domain),
            None => Box::pin(std::future::ready(Err(HypervisorError::Disconnected("reconnecting".into())))),
        }
    }

    fn spawn_call<T: Send + 'static>(
        &mut self,
        call: impl FnOnce(&dyn Domain) -> Call<T>,
        input: impl FnOnce(Result<T, HypervisorError>) -> Input + Send + 'static,
    ) {
        let call = self.call(call);
        self.spawn(async move { Finished::Input(input(call.await)) });
    }

    /// Starts a call whose result is an input of the job.
    fn spawn_for<T: Send + 'static>(
        &mut self,
        job: Option<JobName>,
        call: impl FnOnce(&dyn Domain) -> Call<T>,
        input: fn(Result<T, HypervisorError>) -> JobInput,
    ) {
        let call = self.call(call);
        self.spawn(async move {
            let input = input(call.await);
            job.map_or(Finished::Nothing, |job| Finished::Input(Input::Job(job, input)))
        });
    }

    /// Starts a call whose failure is logged only.
    fn spawn_silent(&mut self, call: impl FnOnce(&dyn Domain) -> Call<()>, log: fn(HypervisorError)) {
        let call = self.call(call);
        self.spawn(async move {
            call.await.unwrap_or_else(log);
            Finished::Nothing
        });
    }

    /// Starts work on a file whose result is an input of the job.
    fn spawn_file<T: Send + 'static>(
        &mut self,
        job: JobName,
        work: impl FnOnce() -> Result<T, SavedMemoryError> + Send + 'static,
        input: fn(Result<T, String>) -> JobInput,
    ) {
        let result = blocking(work);
        self.spawn_work(job, async move { input(result.await) });
    }

    fn spawn_work(&mut self, job: JobName, work: impl Future<Output = JobInput> + Send + 'static) {
        self.spawn(async move { Finished::Input(Input::Job(job, work.await)) });
    }

    fn spawn(&mut self, work: impl Future<Output = Finished> + Send + 'static) {
        self.running.spawn(work.in_current_span());
    }
}

/// Writes the tags of devices with the addresses of the domain's definition.
async fn write_tags(
    preparation: Preparation,
    definition: Call<String>,
    purpose: Purpose,
) -> Result<Option<(String, u64)>, RequestError> {
    preparation.write_tags(definition.await?, purpose).await
}

/// Defines the domain; with free ports in a second definition that has the addresses of the first.
async fn define(
    connection: Option<Arc<dyn Domain>>,
    domain: Box<crate::domain::Domain>,
) -> Result<(), HypervisorError> {
    let connection = connection.ok_or_else(|| HypervisorError::Disconnected("reconnecting".into()))?;
    connection.define(domain.xml.clone()).await?;
    if !domain.ports.any() {
        return Ok(());
    }
    let definition = connection.definition().await?;
    let definition = domain
        .with_free_ports(&definition)
        .map_err(|error| HypervisorError::Libvirt { code: 0, message: error.to_string() })?;
    connection.define(definition).await
}

/// Starts the defined domain from saved memory, paused.
async fn restore(connection: Option<Arc<dyn Domain>>, path: PathBuf) -> Result<(), HypervisorError> {
    let connection = connection.ok_or_else(|| HypervisorError::Disconnected("reconnecting".into()))?;
    let file = path.clone();
    blocking(move || saved_memory::check(&file)).await.map_err(HypervisorError::SavedMemory)?;
    connection.restore_memory(path).await
}

/// Runs work on a file on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SavedMemoryError> + Send + 'static,
) -> Result<T, String> {
    let result = tokio::task::spawn_blocking(work).await.map_err(|error| error.to_string())?;
    result.map_err(|error| error.to_string())
}

fn act(domain: &dyn Domain, call: GuestCall) -> Call<()> {
    match call {
        GuestCall::Suspend => domain.suspend(),
        GuestCall::Resume => domain.resume(),
        GuestCall::Reset => domain.reset(),
        GuestCall::Reboot(way) => domain.reboot(way),
    }
}

/// Sets the guest's clock, which stood still during a pause.
async fn set_clock(domain: &dyn Domain) {
    for _ in 0..CLOCK_ATTEMPTS {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        match domain.set_time(i64::try_from(now.as_secs()).unwrap_or_default()).await {
            Ok(()) | Err(HypervisorError::NoDomain) => return,
            Err(error) => tracing::debug!(%error, "cannot set the guest's clock"),
        }
        tokio::time::sleep(CLOCK_RETRY).await;
    }
}
