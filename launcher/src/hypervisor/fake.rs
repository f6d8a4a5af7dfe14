//! A hypervisor in memory, for tests. It records calls, and a test can hold calls, fail them and end the domain.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures::future::BoxFuture;
use protocol::{Lifecycle, StatsReply};
use tokio::sync::watch;

use super::{
    Call, DeviceChange, Domain, DomainFacts, Hypervisor, HypervisorError, MigrateCall, Progress, RebootWay, Signals,
    StartError,
};

/// The hypervisor; clones share it, as workers of a pod share libvirt's daemon.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fake {
    state: Arc<Mutex<FakeState>>,
}

#[derive(Debug)]
struct FakeState {
    listens: bool,
    signals: Option<Arc<Signals>>,
    definition: Option<String>,
    lifecycle: Lifecycle,
    reason: &'static str,
    calls: Vec<String>,
    failures: BTreeMap<&'static str, HypervisorError>,
    held: BTreeMap<&'static str, watch::Sender<bool>>,
    /// The guest does not release detached disks.
    keeps_disks: bool,
    /// Progress of the migration in progress.
    progress: Option<Progress>,
    /// Where the domain goes.
    target: Option<Fake>,
}

/// Returns the device name of a disk's element.
fn target(xml: &str) -> Option<String> {
    let document = roxmltree::Document::parse(xml).ok()?;
    let target = document.root_element().children().find(|node| node.has_tag_name("target"))?;
    target.attribute("dev").map(str::to_owned)
}

/// Replaces the number of plugged vCPUs in a definition.
fn set_vcpus(definition: &mut String, vcpus: u32) -> Option<()> {
    let document = roxmltree::Document::parse(definition).ok()?;
    let element = document.root_element().children().find(|node| node.has_tag_name("vcpu"))?;
    let (range, most) = (element.range(), element.text()?.to_owned());
    definition.replace_range(range, &format!("<vcpu placement='static' current='{vcpus}'>{most}</vcpu>"));
    Some(())
}

/// Attaches or updates the memory device. As in libvirt, the memory of the domain includes its whole size.
fn set_memory_device(definition: &mut String, xml: &str) -> Option<()> {
    let device =
        super::super::domain::parse::parse(&format!("<domain><devices>{xml}</devices></domain>")).memory_device?;
    let active = super::super::domain::parse::parse(definition);
    if let Some(known) = active.memory_device {
        let at = definition.find(&known.xml)?;
        definition.replace_range(at..at + known.xml.len(), xml);
        return Some(());
    }
    let document = roxmltree::Document::parse(definition).ok()?;
    let range = document.root_element().children().find(|node| node.has_tag_name("memory"))?.range();
    let total = active.memory?.saturating_add(device.size);
    definition.replace_range(range, &format!("<memory unit='b'>{total}</memory>"));
    let end = definition.rfind("</devices>")?;
    definition.insert_str(end, xml);
    Some(())
}

/// Finds the element of a disk in a definition.
fn disk_range(definition: &str, target: &str) -> Option<std::ops::Range<usize>> {
    let document = roxmltree::Document::parse(definition).ok()?;
    let mut disks = document.descendants().filter(|node| node.has_tag_name("disk"));
    let disk = disks.find(|disk| {
        disk.children().any(|node| node.has_tag_name("target") && node.attribute("dev") == Some(target))
    })?;
    Some(disk.range())
}

impl Default for FakeState {
    fn default() -> Self {
        Self {
            listens: true,
            signals: None,
            definition: None,
            lifecycle: Lifecycle::Shutoff,
            reason: "unknown",
            calls: Vec::new(),
            failures: BTreeMap::new(),
            held: BTreeMap::new(),
            keeps_disks: false,
            progress: None,
            target: None,
        }
    }
}

impl FakeState {
    fn is_active(&self) -> bool {
        !matches!(self.lifecycle, Lifecycle::Shutoff | Lifecycle::Crashed)
    }

    /// Changes the active domain. The guest releases a detached disk unless the test keeps it.
    fn change_device(&mut self, change: DeviceChange, xml: &str) -> Result<(), HypervisorError> {
        let definition = self.definition.as_mut().ok_or(HypervisorError::NoDomain)?;
        if xml.starts_with("<memory") {
            return set_memory_device(definition, xml).ok_or(HypervisorError::NoDomain);
        }
        let target = target(xml).ok_or(HypervisorError::ZeroByte)?;
        let present = disk_range(definition, &target);
        match (change, present) {
            (DeviceChange::Detach, Some(_)) if self.keeps_disks => {}
            (DeviceChange::Detach, Some(range)) => definition.replace_range(range, ""),
            (DeviceChange::Update, Some(range)) => definition.replace_range(range, xml),
            (DeviceChange::Attach, None) => {
                let end = definition.rfind("</devices>").ok_or(HypervisorError::NoDomain)?;
                definition.insert_str(end, xml);
            }
            (DeviceChange::Attach, Some(_)) => {
                return Err(HypervisorError::Libvirt { code: 27, message: format!("target {target} already exists") });
            }
            (_, None) => {
                return Err(HypervisorError::Libvirt { code: 99, message: format!("disk {target} not found") });
            }
        }
        if let Some(signals) = &self.signals {
            signals.set_changed();
        }
        Ok(())
    }

    fn set(&mut self, lifecycle: Lifecycle, reason: &'static str) {
        (self.lifecycle, self.reason) = (lifecycle, reason);
        if let Some(signals) = &self.signals {
            signals.set_changed();
        }
    }
}

impl Fake {
    fn state(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap()
    }

    /// Returns the calls since the last look.
    pub(crate) fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.state().calls)
    }

    /// Lets the domain change its state without a call.
    pub(crate) fn set_domain(&self, lifecycle: Lifecycle, reason: &'static str) {
        self.state().set(lifecycle, reason);
    }

    /// Fails the next call of this name.
    pub(crate) fn fail(&self, call: &'static str, error: HypervisorError) {
        self.state().failures.insert(call, error);
    }

    /// Makes the guest keep detached disks, or release them.
    pub(crate) fn keep_disks(&self, keep: bool) {
        self.state().keeps_disks = keep;
    }

    /// Reports this progress of the migration.
    pub(crate) fn set_progress(&self, progress: Option<Progress>) {
        self.state().progress = progress;
    }

    /// Names the hypervisor where the domain goes.
    pub(crate) fn set_target(&self, target: &Self) {
        self.state().target = Some(target.clone());
    }

    /// Lets a domain arrive, or be complete with the reason `user`.
    pub(crate) fn arrive(&self, definition: &str, reason: &'static str) {
        let mut state = self.state();
        state.definition = Some(definition.to_owned());
        state.set(Lifecycle::Paused, reason);
    }

    /// Lets the guest release a disk.
    pub(crate) fn release_disk(&self, target: &str) {
        let mut state = self.state();
        let range = state.definition.as_deref().and_then(|definition| disk_range(definition, target));
        if let (Some(definition), Some(range)) = (&mut state.definition, range) {
            definition.replace_range(range, "");
        }
        if let Some(signals) = &state.signals {
            signals.set_changed();
        }
    }

    /// Holds calls of this name until they are released.
    pub(crate) fn hold(&self, call: &'static str) {
        self.state().held.insert(call, watch::channel(true).0);
    }

    /// Releases held calls.
    pub(crate) fn release(&self, call: &'static str) {
        let _ = self.state().held.remove(call).map(|held| held.send_replace(false));
    }

    /// Ends the daemon: connections break, and a new one needs [`Fake::listen`].
    pub(crate) fn end_daemon(&self) {
        let mut state = self.state();
        state.listens = false;
        if let Some(signals) = state.signals.take() {
            signals.set_closed();
        }
    }

    /// Lets the daemon listen again.
    pub(crate) fn listen(&self) {
        self.state().listens = true;
    }
}

impl Hypervisor for Fake {
    fn write_cache(&self, _: &[protocol::CacheFile]) -> Result<(), StartError> {
        self.state().calls.push("cache".into());
        Ok(())
    }

    fn start(&mut self) -> Result<(), StartError> {
        Ok(())
    }

    fn connect(&self) -> Call<Option<Arc<dyn Domain>>> {
        let listens = self.state().listens;
        let domain = listens.then(|| {
            let signals = Arc::new(Signals::default());
            self.state().signals = Some(signals.clone());
            Arc::new(FakeDomain { fake: self.clone(), signals }) as Arc<dyn Domain>
        });
        Box::pin(std::future::ready(Ok(domain)))
    }

    fn stop(&mut self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}

struct FakeDomain {
    fake: Fake,
    signals: Arc<Signals>,
}

impl FakeDomain {
    fn call<T: Send + 'static>(
        &self,
        name: &'static str,
        call: impl FnOnce(&mut FakeState) -> Result<T, HypervisorError> + Send + 'static,
    ) -> Call<T> {
        let (fake, signals) = (self.fake.clone(), self.signals.clone());
        Box::pin(async move {
            fake.state().calls.push(name.to_owned());
            let held = fake.state().held.get(name).map(watch::Sender::subscribe);
            if let Some(mut held) = held {
                let _ = held.wait_for(|held| !held).await;
            }
            let mut state = fake.state();
            if signals.is_closed() {
                return Err(HypervisorError::Disconnected("closed".into()));
            }
            match state.failures.remove(name) {
                Some(error) => Err(error),
                None => call(&mut state),
            }
        })
    }

    fn change(&self, name: &'static str, lifecycle: Lifecycle, reason: &'static str) -> Call<()> {
        self.call(name, move |state| {
            if !state.is_active() {
                return Err(HypervisorError::NoDomain);
            }
            state.set(lifecycle, reason);
            Ok(())
        })
    }
}

impl Domain for FakeDomain {
    fn signals(&self) -> Arc<Signals> {
        self.signals.clone()
    }

    fn warm_up(&self) -> Call<()> {
        self.call("warm up", |_| Ok(()))
    }

    fn define(&self, xml: String) -> Call<()> {
        self.call("define", move |state| {
            state.definition = Some(xml);
            Ok(())
        })
    }

    fn definition(&self) -> Call<String> {
        self.call("definition", |state| state.definition.clone().ok_or(HypervisorError::NoDomain))
    }

    fn create(&self, paused: bool) -> Call<()> {
        self.call("create", move |state| {
            let (lifecycle, reason) = if paused { (Lifecycle::Paused, "user") } else { (Lifecycle::Running, "booted") };
            state.set(lifecycle, reason);
            Ok(())
        })
    }

    fn facts(&self) -> Call<DomainFacts> {
        self.call("read", |state| {
            let xml = state.definition.clone().ok_or(HypervisorError::NoDomain)?;
            let xml = if state.is_active() { xml } else { String::new() };
            let (lifecycle, reason) = (state.lifecycle, state.reason);
            Ok(DomainFacts { lifecycle, reason, memory: 1 << 26, xml, disk_errors: Vec::new() })
        })
    }

    fn suspend(&self) -> Call<()> {
        self.change("suspend", Lifecycle::Paused, "user")
    }

    fn resume(&self) -> Call<()> {
        self.change("resume", Lifecycle::Running, "unpaused")
    }

    fn reset(&self) -> Call<()> {
        self.call("reset", |_| Ok(()))
    }

    fn reboot(&self, _: RebootWay) -> Call<()> {
        self.call("reboot", |_| Ok(()))
    }

    fn shutdown(&self) -> Call<()> {
        self.change("shutdown", Lifecycle::Shutoff, "shutdown")
    }

    fn destroy(&self, gently: bool) -> Call<()> {
        let name = if gently { "destroy gently" } else { "destroy" };
        self.change(name, Lifecycle::Shutoff, "destroyed")
    }

    fn grow_disk(&self, _: String, _: u64) -> Call<bool> {
        self.call("grow", |_| Ok(true))
    }

    fn plug_vcpus(&self, vcpus: u32) -> Call<()> {
        self.call("plug vCPUs", move |state| {
            let definition = state.definition.as_mut().ok_or(HypervisorError::NoDomain)?;
            set_vcpus(definition, vcpus).ok_or(HypervisorError::NoDomain)
        })
    }

    fn change_device(&self, change: DeviceChange, xml: String) -> Call<()> {
        let name = match change {
            DeviceChange::Attach => "attach",
            DeviceChange::Detach => "detach",
            DeviceChange::Update => "update",
        };
        self.call(name, move |state| state.change_device(change, &xml))
    }

    fn dump_memory(&self, path: PathBuf) -> Call<()> {
        self.call("dump", move |_| std::fs::write(path, "ELF").map_err(|_| HypervisorError::NoDomain))
    }

    fn save_memory(&self, path: PathBuf) -> Call<()> {
        self.call("save", move |state| {
            std::fs::write(path, "LibvirtQemudSave").map_err(|_| HypervisorError::NoDomain)?;
            state.set(Lifecycle::Shutoff, "saved");
            Ok(())
        })
    }

    fn restore_memory(&self, _: PathBuf) -> Call<()> {
        self.call("restore", |state| {
            state.set(Lifecycle::Paused, "migration");
            Ok(())
        })
    }

    fn migrate(&self, _: MigrateCall) -> Call<()> {
        self.call("migrate", move |state| {
            if !state.is_active() {
                return Err(HypervisorError::NoDomain);
            }
            let definition = state.definition.clone().unwrap_or_default();
            if let Some(target) = &state.target {
                target.arrive(&definition, "user");
            }
            state.progress = None;
            state.set(Lifecycle::Shutoff, "migrated");
            Ok(())
        })
    }

    fn migration_progress(&self) -> Call<Option<Progress>> {
        self.call("progress", |state| Ok(state.progress))
    }

    fn abort_migration(&self) -> Call<()> {
        self.call("abort", |_| Ok(()))
    }

    fn start_post_copy(&self) -> Call<()> {
        self.call("post-copy", |_| Ok(()))
    }

    fn set_max_downtime(&self, _: u64) -> Call<()> {
        self.call("downtime", |_| Ok(()))
    }

    fn set_time(&self, _: i64) -> Call<()> {
        self.call("set time", |_| Ok(()))
    }

    fn guest_agent_command(&self, _: String, _: Duration) -> Call<String> {
        self.call("guest agent", |_| Err(HypervisorError::GuestAgentUnresponsive("none".into())))
    }

    fn stats(&self) -> Call<StatsReply> {
        self.call("stats", |_| Ok(StatsReply::default()))
    }

    fn screenshot(&self) -> Call<(String, Vec<u8>)> {
        self.call("screenshot", |_| Ok(("image/png".into(), Vec::new())))
    }
}
