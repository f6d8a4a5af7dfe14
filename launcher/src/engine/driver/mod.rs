//! The driver: one task that owns the domain. It passes events, requests and results to [`decide`](super::decide::decide),
//! publishes the state and carries the effects out ([`effects`]). `handle` is the engine's side for the server; `prepare`
//! makes disks and XML, `timings` measures the steps of a start, `services` runs DHCP, console and credentials,
//! `sizes` reads claims, `migration` passes migrations on, `records` keeps what a later worker needs, `departure` ends a QEMU
//! whose guest has left, `crash` reads QEMU's log.

mod crash;
mod departure;
mod effects;
mod handle;
mod migration;
#[cfg(test)]
mod migration_tests;
mod prepare;
mod records;
#[cfg(test)]
mod save_tests;
mod services;
mod sizes;
#[cfg(test)]
mod tests;
mod timings;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, SystemTime},
};

use protocol::{LauncherState, Lifecycle};
use tokio::{
    sync::{Semaphore, mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};

pub(crate) use self::handle::EngineHandle;
use self::{
    effects::Finished,
    handle::{CurrentDomain, Envelope, GuestAgentChannel},
    prepare::{Pod, kvm_usable},
    services::Services,
    sizes::ClaimReads,
    timings::Timings,
};
use super::{
    decide::{State, decide},
    model::{Answer, Base, Input, RequestId},
};
use crate::{
    domain::{AllocatedDevices, domain_name},
    guest_agent::{GuestAgent, GuestFacts},
    hypervisor::{Hypervisor, Signals},
    migration::Channels,
    options::VmiArgs,
    paths::Paths,
    tasks::{TaskFailure, Tasks},
    vm_state::VmState,
};

/// Limit of requests that wait to be taken.
const REQUESTS: usize = 32;
/// Longest sleep.
const LONGEST_SLEEP: Duration = Duration::from_secs(24 * 3600);

/// Final result of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The domain ended as intended: the guest powered off, or the domain was stopped on request.
    pub(crate) success: bool,
    /// Reason, for the pod's termination message.
    pub(crate) message: String,
}

/// The task that owns the domain.
pub(crate) struct Driver {
    state: State,
    published: watch::Sender<LauncherState>,
    requests: mpsc::Receiver<Envelope>,
    answers: BTreeMap<RequestId, oneshot::Sender<Answer>>,
    last_request: u64,
    hypervisor: Box<dyn Hypervisor>,
    domain: CurrentDomain,
    domains: watch::Sender<CurrentDomain>,
    /// Effects in progress.
    running: JoinSet<Finished>,
    /// Results of effects that end at once.
    results: VecDeque<Input>,
    pod: Arc<Pod>,
    services: Services,
    guest_agent: GuestAgent,
    guest_facts: watch::Receiver<GuestFacts>,
    timings: Timings,
    channels: Channels,
    /// Reason for which the VMI is lost.
    lost: mpsc::Receiver<String>,
}

impl Driver {
    /// Creates a driver and its handle.
    pub(crate) fn new(
        args: VmiArgs,
        paths: Paths,
        hypervisor: Box<dyn Hypervisor>,
        tasks: &Tasks,
    ) -> (Self, EngineHandle) {
        let (requests_sender, requests) = mpsc::channel(REQUESTS);
        let (published, published_receiver) = watch::channel(LauncherState {
            sequence: 1,
            lifecycle: Lifecycle::NoDomain.into(),
            ..LauncherState::default()
        });
        let (domains, domain) = watch::channel(None);
        let (consoles, console) = watch::channel(None);
        let timings = Timings::default();
        let channels = Channels::new(paths.clone());
        let guest = paths.domain_process(&domain_name(&args.namespace, &args.name));
        let (vm_state, lost) = VmState::new(paths.clone(), guest, tasks);
        let guest_agent = GuestAgent::new(GuestAgentChannel(domain.clone()), paths.thaw_at(&args.uid), tasks.clone());
        let handle = EngineHandle {
            requests: requests_sender,
            state: published_receiver,
            domain,
            console,
            guest_agent: guest_agent.clone(),
            paths: paths.clone(),
            args: args.clone(),
            timings: timings.clone(),
            channels: channels.clone(),
            vm_state: vm_state.clone(),
        };
        // Without symbolic links, as disks name the files there.
        let container_disks = std::fs::canonicalize(&paths.container_disks);
        let container_disks = container_disks.unwrap_or_else(|_| paths.container_disks.clone());
        let base = Base {
            hotplugged: paths.hotplug_disks.as_path().into(),
            own_images: paths.own_images().into(),
            container_disks: container_disks.into(),
            ..Base::new(&args, Instant::now())
        };
        let driver = Self {
            state: State::new(base),
            published,
            requests,
            answers: BTreeMap::new(),
            last_request: 0,
            hypervisor,
            domain: None,
            domains,
            running: JoinSet::new(),
            results: VecDeque::new(),
            pod: Arc::new(Pod {
                paths,
                args,
                host_devices: AllocatedDevices::new(std::env::vars_os()),
                vm_state,
                disks: Arc::new(Semaphore::new(1)),
                claims: ClaimReads::default(),
                rendering: Arc::new(Semaphore::new(1)),
            }),
            services: Services::new(tasks.clone(), guest_agent.clone(), consoles),
            guest_facts: guest_agent.facts(),
            guest_agent,
            timings,
            channels,
            lost,
        };
        (driver, handle)
    }

    /// Runs until the domain has ended and virt-handler has recorded the end.
    pub(crate) async fn run(mut self) -> Result<Outcome, TaskFailure> {
        let begin = self.begin();
        self.take(begin);
        while !self.state.base.finished {
            let input = match self.results.pop_front() {
                Some(result) => Some(result),
                None => self.next_input().await?,
            };
            input.into_iter().for_each(|input| self.take(input));
        }
        self.services.stop();
        self.domain = None;
        let _ = self.domains.send_replace(None);
        self.hypervisor.stop().await;
        let state = self.published.borrow().clone();
        self.pod.vm_state.clone().end(&state).await;
        Ok(outcome(state))
    }

    /// Returns the first input. The daemon starts ahead of Hello, unless virt-handler must first open /dev/kvm, which the
    /// daemon checks when it starts, or raise limits of locked memory or of real-time priority, which the daemon and QEMU inherit.
    /// A restarted worker takes over the running daemon; the directory that each start creates first shows that a domain may
    /// run.
    fn begin(&self) -> Input {
        let Pod { paths, args, host_devices, .. } = &*self.pod;
        let adopting = paths.domain(&args.uid).exists();
        let migration = records::read(&paths.migration_record()).map(Box::new);
        let save = records::read(&paths.save_record());
        let must_wait =
            args.await_limits || host_devices.has_pci() || (paths.dev.join("kvm").exists() && !kvm_usable(&paths.dev));
        let (start_daemon, simulate_crash) = (adopting || !must_wait, args.simulate_crash);
        Input::Begin { adopting, start_daemon, simulate_crash, migration, save }
    }

    /// Waits for the next input. Domain events come before results, and results before requests.
    async fn next_input(&mut self) -> Result<Option<Input>, TaskFailure> {
        let now = Instant::now();
        let wake = self.state.next_wake().unwrap_or(now + LONGEST_SLEEP).min(now + LONGEST_SLEEP);
        let signals = self.domain.as_ref().map(|domain| domain.signals());
        let input = tokio::select! {
            biased;
            () = changed(signals.as_deref()) => {
                let (closed, crashed) = signals.map_or((true, false), |s| (s.is_closed(), s.take_crashed()));
                Input::DomainChanged { closed, crashed }
            }
            Some(finished) = self.running.join_next() => match finished {
                Ok(finished) => return Ok(self.input_of(finished)),
                Err(error) if error.is_panic() => return Err(TaskFailure::Panicked("effect")),
                Err(_) => return Ok(None),
            },
            Some(reason) = self.lost.recv() => Input::Lost(reason),
            () = sleep_until(wake) => Input::Timer,
            Ok(()) = self.guest_facts.changed() => Input::GuestFacts(Box::new(self.guest_facts.borrow_and_update().clone())),
            Ok(()) = self.services.credentials_status.changed() => {
                Input::Credentials(self.services.credentials_status.borrow_and_update().clone())
            }
            Some((request, reply)) = self.requests.recv() => {
                self.last_request += 1;
                let id = RequestId(self.last_request);
                self.answers.insert(id, reply);
                Input::Request(id, request)
            }
        };
        Ok(Some(input))
    }

    /// Decides on an input, publishes the state and carries the effects out.
    fn take(&mut self, input: Input) {
        let ran_at = self.domain.as_ref().and_then(|domain| domain.signals().ran_at());
        self.timings.input(&input, SystemTime::now(), ran_at);
        let (state, effects) = decide(&self.state, Instant::now(), input);
        self.state = state;
        publish(&self.published, &self.state.base.published);
        for effect in effects {
            self.timings.effect(&effect, SystemTime::now());
            self.carry_out(effect);
        }
    }
}

/// Waits for a domain event; forever without a connection.
async fn changed(signals: Option<&Signals>) {
    match signals {
        Some(signals) => signals.changed().await,
        None => std::future::pending().await,
    }
}

/// Publishes a state with the next sequence number if it differs.
fn publish(sender: &watch::Sender<LauncherState>, state: &LauncherState) {
    sender.send_if_modified(|published| {
        let sequence = std::mem::replace(&mut published.sequence, state.sequence);
        let changed = *published != *state;
        if changed {
            published.clone_from(state);
        }
        published.sequence = sequence + u64::from(changed);
        changed
    });
}

fn outcome(state: LauncherState) -> Outcome {
    let ended = matches!(state.reason.as_str(), "shutdown" | "destroyed" | "migrated" | "saved");
    let success = state.failure.is_empty()
        && (state.lifecycle() == Lifecycle::NoDomain || (state.lifecycle() == Lifecycle::Shutoff && ended));
    let message = if state.failure.is_empty() { state.reason } else { state.failure };
    Outcome { success, message }
}
