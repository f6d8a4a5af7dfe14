//! The connection, reads of the domain, and what the guest agent reports.

use std::{sync::Arc, time::Duration};

use protocol::{GuestPanic, Lifecycle};

use super::Turn;
use crate::{
    domain::parse::parse,
    engine::model::{AfterRead, Effect, Job, Link, REFRESH, Stage, StartStep, errors_by_volume, forget_guest},
    guest_agent::GuestFacts,
    hypervisor::{DomainFacts, HypervisorError},
};

/// Pause between attempts to connect to the daemon.
const CONNECT_RETRY: Duration = Duration::from_millis(15);
/// Pause after a read that failed.
const READ_RETRY: Duration = Duration::from_secs(2);

impl Turn {
    /// Decides on an attempt to connect.
    pub(super) fn connected(&mut self, result: Result<bool, HypervisorError>) {
        match result {
            Ok(true) => {
                tracing::debug!("connected to libvirt");
                self.state.link = Link::Up;
                self.state.has_read = false;
                if self.state.stage == Stage::Waiting {
                    // In parallel to virt-handler's network setup. A Sync that arrives earlier loses nothing.
                    self.effects.push(Effect::WarmUp);
                }
                self.read_then(None);
                self.continue_live_sync();
            }
            Ok(false) => self.state.link = Link::Down { retry_at: self.now + CONNECT_RETRY },
            Err(error) => {
                tracing::debug!(%error, "libvirt does not answer yet");
                self.state.link = Link::Down { retry_at: self.now + CONNECT_RETRY * 10 };
            }
        }
    }

    fn disconnect(&mut self) {
        if self.state.link != Link::Up {
            return;
        }
        tracing::warn!("lost the connection to libvirt");
        self.state.link = Link::Down { retry_at: self.now };
        self.state.has_read = false;
        self.effects.push(Effect::Disconnect);
    }

    /// Decides on a domain event.
    pub(super) fn domain_changed(&mut self, closed: bool, crashed: bool) {
        // First: virt-handler may disconnect once the domain has ended.
        if crashed && self.state.published.guest_panic.is_none() {
            self.effects.push(Effect::ReadCrash);
        }
        if closed {
            self.disconnect();
        } else {
            self.read_then(None);
        }
    }

    /// Publishes the guest's first kernel crash.
    pub(super) fn crashed(&mut self, panic: GuestPanic) {
        if self.state.published.guest_panic.is_none() {
            tracing::warn!(kind = panic.kind, "the guest's kernel has crashed");
            self.state.published.guest_panic = Some(panic);
        }
    }

    /// Reads the domain, then does the work. A read in progress may have missed the latest change, so another follows it.
    pub(super) fn read_then(&mut self, then: Option<AfterRead>) {
        if self.state.link != Link::Up {
            self.state.reading.is_fresh = false;
            return then.into_iter().for_each(|then| self.after_read(then));
        }
        self.state.refresh_at = self.now + REFRESH;
        let is_starting = matches!(&self.state.job, Some(Job::Start(start)) if start.step.holds_reads());
        if is_starting && then.is_none() {
            return;
        }
        let reading = &mut self.state.reading;
        if reading.in_progress {
            reading.again = true;
            reading.then_again.extend(then);
        } else {
            reading.in_progress = true;
            reading.then.extend(then);
            self.effects.push(Effect::Read);
        }
    }

    /// Decides on a read of the domain.
    pub(super) fn read_done(&mut self, result: Result<DomainFacts, HypervisorError>, guest_agent: Option<bool>) {
        self.state.reading.in_progress = false;
        let has_answered = matches!(result, Ok(_) | Err(HypervisorError::NoDomain));
        self.state.has_read |= has_answered && self.state.link == Link::Up;
        if !self.is_outdated() || matches!(result, Err(HypervisorError::Disconnected(_))) {
            self.learn(result, guest_agent);
        }
        self.state.reading.is_fresh = has_answered && self.state.link == Link::Up;
        for then in std::mem::take(&mut self.state.reading.then) {
            self.after_read(then);
        }
        if std::mem::take(&mut self.state.reading.again) {
            let mut then = std::mem::take(&mut self.state.reading.then_again).into_iter();
            self.read_then(then.next());
            if self.state.reading.in_progress {
                self.state.reading.then.extend(then);
            } else {
                then.for_each(|then| self.after_read(then));
            }
        }
        if self.state.has_read && self.state.link == Link::Up {
            // A domain that runs is adopted before it is ended; without one, requests to end it abort the start.
            if self.state.stage == Stage::Live {
                self.continue_start();
            }
            self.looked();
            self.continue_start();
            self.continue_incoming();
            self.continue_live_sync();
        }
    }

    /// Reports that the read that has just ended began before QEMU's start: it may show the end of an earlier domain.
    fn is_outdated(&self) -> bool {
        let Some(Job::Start(start)) = &self.state.job else { return false };
        let awaited = self.state.reading.then.iter().any(|then| matches!(then, AfterRead::Started));
        start.step.holds_reads() || (matches!(start.step, StartStep::Reading) && !awaited)
    }

    fn after_read(&mut self, then: AfterRead) {
        match then {
            AfterRead::Answer(id, answer) => self.answer(id, answer),
            AfterRead::Killed(requests, result) => self.killed(requests, result.map_err(Into::into)),
            AfterRead::Started => self.started(),
            AfterRead::Synced => self.complete_sync(),
            AfterRead::Settled => self.settled(),
            AfterRead::Arrived(id) => self.arrived(id),
            AfterRead::Resumed => self.arrived_resumed(),
        }
    }

    fn learn(&mut self, result: Result<DomainFacts, HypervisorError>, guest_agent: Option<bool>) {
        if self.state.stage == Stage::Ended {
            return;
        }
        match result {
            Ok(facts) => self.learn_facts(facts, guest_agent),
            // libvirt removes a domain that has not arrived.
            Err(HypervisorError::NoDomain) if self.arrival_ended() || self.left("unknown") => {}
            Err(HypervisorError::NoDomain) if self.state.stage == Stage::Live => {
                self.state.published.set_lifecycle(Lifecycle::Shutoff);
                self.state.published.reason = "unknown".into();
                self.end();
            }
            Err(HypervisorError::NoDomain) => {}
            Err(HypervisorError::Disconnected(_)) => self.disconnect(),
            Err(error) => {
                tracing::warn!(%error, "cannot read the domain's state");
                self.state.refresh_at = self.now + READ_RETRY;
            }
        }
    }

    fn learn_facts(&mut self, facts: DomainFacts, guest_agent: Option<bool>) {
        let DomainFacts { lifecycle, reason, memory, xml, disk_errors } = facts;
        let over = matches!(lifecycle, Lifecycle::Shutoff | Lifecycle::Crashed | Lifecycle::NoDomain);
        if over && (self.arrival_ended() || self.left(reason)) {
            return;
        }
        let active = parse(&xml);
        if !over {
            self.arriving(active.id, lifecycle, reason);
        }
        if self.state.stage == Stage::Waiting {
            // A domain that does not run was defined by a start that may have failed. Only an adopting worker has
            // missed the end of a domain that ran.
            if over && (!self.state.adopting || matches!(reason, "unknown" | "failed")) {
                return;
            }
            self.state.stage = Stage::Live;
        }
        let connected = !over && guest_agent.unwrap_or(active.guest_agent_connected);
        let published = &mut self.state.published;
        let changed = published.lifecycle() != lifecycle || *self.state.active != active;
        published.set_lifecycle(lifecycle);
        published.reason = reason.into();
        published.guest_agent_connected = connected;
        if !connected {
            forget_guest(published);
        }
        published.acpi = self.state.acpi || active.acpi;
        if !over && !active.machine_type.is_empty() {
            published.machine_type.clone_from(&active.machine_type);
            published.software_emulation = active.software_emulation;
            // Without a memory device, a balloon may hold some of the guest's memory.
            let with_device = |boot: u64| Some(boot.saturating_add(active.memory_device.as_ref()?.current));
            published.memory_current = active.memory.and_then(with_device).unwrap_or(memory);
            published.memory_requested = active.memory_requested().unwrap_or(0);
            published.vcpus = active.vcpus.unwrap_or(0);
            (published.nics, published.nic_queues) = (active.nics(), active.nic_queues());
            published.disks = active.disk_targets();
            published.disk_errors = errors_by_volume(&disk_errors, &published.disks);
            for disk in &mut published.disks {
                let made = self.state.disk_sizes.iter().find(|made| made.volume == disk.volume);
                disk.size = made.map_or(0, |made| made.size);
            }
            self.state.active = Arc::new(active);
            self.forget_released();
        }
        self.look_for_switch();
        self.effects.push(Effect::AttendGuestAgent { connected, runs: lifecycle == Lifecycle::Running, changed });
        self.set_late_clock();
        if over {
            tracing::info!(reason, state = lifecycle.as_str_name(), "the domain has ended");
            if reason == "crashed" {
                self.effects.push(Effect::LogLastLines);
            }
            self.end();
        }
    }

    /// Publishes the guest agent's facts.
    pub(super) fn guest_facts(&mut self, facts: GuestFacts) {
        let published = &mut self.state.published;
        published.silences = facts.silences;
        if published.guest_agent_connected {
            published.guest = facts.guest;
            published.interfaces = facts.interfaces;
            published.agent = facts.agent;
            published.file_systems = facts.file_systems;
        }
    }
}
