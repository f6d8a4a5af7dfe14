//! Carries effects out. Each result becomes an input.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tracing::Instrument;

use super::{Driver, crash, departure::Departure, prepare::Preparation};
use crate::{
    engine::model::{ChannelMode, Effect, GuestCall, Input, RequestError, Wanted},
    hypervisor::{Call, Domain, HypervisorError, MigrateCall},
};

/// Attempts to set the guest's clock, and the pause between them: the guest agent may be busy.
const CLOCK_ATTEMPTS: u32 = 60;
const CLOCK_RETRY: Duration = Duration::from_secs(1);

/// Result of an effect that ran as a task.
pub(super) enum Finished {
    /// An input.
    Input(Input),
    /// An attempt to connect.
    Connected(Result<Option<Arc<dyn Domain>>, HypervisorError>),
    /// Nothing to decide.
    Nothing,
}

impl Driver {
    /// Converts the result of a task to an input.
    pub(super) fn finished(&mut self, finished: Finished) -> Option<Input> {
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
                let log = self.pod.paths.domain_log(&self.state.domain_name());
                self.results.push_back(Input::Crash(crash::last(&log)));
            }
            Effect::LogLastLines => {
                let log = self.pod.paths.domain_log(&self.state.domain_name());
                for line in crash::last_lines(&log) {
                    tracing::warn!("QEMU's log ends: {line}");
                }
            }
            Effect::Serve(wanted) => {
                let result = self.services.serve(&self.pod, &wanted);
                self.results.push_back(Input::Served(result));
            }
            Effect::Prepare { wanted, allow_emulation } => {
                let domain = self.preparation(wanted, allow_emulation).domain();
                self.spawn(async move { Finished::Input(Input::Prepared(domain.await)) });
            }
            Effect::Compare { wanted, active, allow_emulation } => {
                let compare = self.preparation(wanted, allow_emulation).compare(active);
                self.spawn(async move { Finished::Input(compare.await) });
            }
            Effect::PrepareTarget { wanted, allow_emulation } => {
                let domain = self.preparation(wanted, allow_emulation).target();
                self.spawn(async move { Finished::Input(Input::Prepared(domain.await)) });
            }
            Effect::OpenMigration(record, mode) => {
                let result = self.save_migration(&record, mode).map_err(RequestError::retryable);
                self.results.push_back(Input::MigrationOpened(result));
            }
            Effect::SaveMigration(record, mode) => {
                if let Err(error) = self.save_migration(&record, mode) {
                    tracing::error!(%error, "cannot keep the state of the migration");
                }
            }
            Effect::Release { paused } => {
                let channels = self.channels.clone();
                let thaw_after = self.guest_agent.thaw_after();
                self.spawn(async move {
                    let result = channels.release(paused, thaw_after).await;
                    Finished::Input(Input::Released(result.map_err(|error| error.to_string())))
                });
            }
            Effect::AwaitDeparture => {
                let name = self.state.domain_name();
                let paths = &self.pod.paths;
                let departure = Departure::watch(&paths.domain_log(&name), &paths.domain_process(&name));
                let channels = self.channels.clone();
                self.spawn(async move {
                    let ended = async { departure?.ended().await };
                    tokio::select! {
                        result = ended => Finished::Input(Input::Departed(result.map_err(|error| error.to_string()))),
                        () = channels.closed(ChannelMode::Outgoing) => Finished::Nothing,
                    }
                });
            }
            Effect::WriteTags(wanted) => self.write_tags(wanted),
            _ => self.call_domain(effect),
        }
    }

    /// Starts a call to the hypervisor.
    fn call_domain(&mut self, effect: Effect) {
        match effect {
            Effect::WarmUp => {
                let call = self.call(Domain::warm_up);
                self.spawn(async move {
                    if let Err(error) = call.await {
                        tracing::debug!(%error, "cannot warm up libvirt");
                    }
                    Finished::Nothing
                });
            }
            Effect::Read => {
                let signals = self.domain.as_ref().map(|domain| domain.signals());
                self.spawn_call(Domain::facts, move |result| {
                    Input::Read(result, signals.and_then(|signals| signals.guest_agent_connected()))
                });
            }
            Effect::Define(domain) => {
                tracing::debug!(xml = domain.xml, "defining the domain");
                let connection = self.domain.clone();
                self.spawn(async move { Finished::Input(Input::Defined(define(connection, &domain).await)) });
            }
            Effect::PlugVcpus(vcpus) => self.spawn_call(|domain| domain.plug_vcpus(vcpus), Input::VcpusPlugged),
            Effect::ChangeDevice(change, xml) => {
                tracing::debug!(?change, xml, "changing a device");
                self.spawn_call(|domain| domain.change_device(change, xml), Input::DeviceChanged);
            }
            Effect::DumpMemory(path) => self.spawn_call(|domain| domain.dump_memory(path), Input::MemoryDumped),
            Effect::Migrate { request, copied, way } => {
                let call = MigrateCall { way, ..self.migrate_call(&request, copied) };
                self.spawn_call(|domain| domain.migrate(call), Input::Migrated);
            }
            Effect::StartPostCopy => self.spawn_call(Domain::start_post_copy, Input::PostCopyStarted),
            Effect::ReadProgress => self.spawn_call(Domain::migration_progress, Input::ProgressRead),
            Effect::AbortMigration => self.spawn_call(Domain::abort_migration, Input::MigrationAborted),
            Effect::SetMaxDowntime(milliseconds) => {
                let call = self.call(|domain| domain.set_max_downtime(milliseconds));
                self.spawn(async move {
                    if let Err(error) = call.await {
                        tracing::warn!(%error, "cannot set the longest downtime of the migration");
                    }
                    Finished::Nothing
                });
            }
            Effect::PauseForCopy => self.spawn_call(Domain::suspend, Input::PausedForCopy),
            Effect::RunAfterMigration => self.spawn_call(Domain::resume, Input::RunsAfterMigration),
            Effect::Create { paused } => self.spawn_call(|domain| domain.create(paused), Input::Created),
            Effect::GrowDisk { target, size } => {
                self.spawn_call(|domain| domain.grow_disk(target, size), Input::DiskGrown);
            }
            Effect::ResumeAfterDiskError => self.spawn_call(Domain::resume, Input::Resumed),
            Effect::Act(id, call) => {
                self.spawn_call(|domain| act(domain, call), move |result| Input::Acted(id, result))
            }
            Effect::Shutdown => self.spawn_call(Domain::shutdown, Input::ShutdownRequested),
            Effect::Destroy { gently } => self.spawn_call(|domain| domain.destroy(gently), Input::Destroyed),
            Effect::SetClock => {
                let domain = self.domain.clone();
                self.spawn(async move {
                    if let Some(domain) = domain {
                        set_clock(&*domain).await;
                    }
                    Finished::Input(Input::ClockSet)
                });
            }
            _ => {}
        }
    }

    fn preparation(&self, wanted: Arc<Wanted>, allow_emulation: bool) -> Preparation {
        Preparation::new(self.pod.clone(), wanted, allow_emulation)
    }

    /// Reads the addresses that libvirt assigned and writes the tags of interfaces.
    fn write_tags(&mut self, wanted: Arc<Wanted>) {
        let definition = self.call(Domain::definition);
        let preparation = self.preparation(wanted, self.state.allow_emulation);
        self.spawn(async move {
            let result = match definition.await {
                Ok(definition) => preparation.write_tags(definition).await,
                Err(error) => Err(error.into()),
            };
            Finished::Input(Input::TagsWritten(result))
        });
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

    fn spawn(&mut self, work: impl Future<Output = Finished> + Send + 'static) {
        self.running.spawn(work.in_current_span());
    }
}

/// Defines the domain; with free ports in a second definition that has the addresses of the first.
async fn define(connection: Option<Arc<dyn Domain>>, domain: &crate::domain::Domain) -> Result<(), HypervisorError> {
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
