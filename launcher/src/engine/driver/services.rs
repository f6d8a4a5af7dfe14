//! Services beside the domain: DHCP, the serial console, credentials of the guest, and metrics for it.

use std::collections::{BTreeMap, btree_map::Entry};

use protocol::AccessCredentials;
use tokio::{sync::watch, task::AbortHandle};

use super::{
    handle::CurrentDomain,
    prepare::{Pod, pauses_probes},
};
use crate::{
    downward_metrics,
    engine::model::{RequestError, Wanted},
    guest_agent::{GuestAgent, credentials},
    network,
    streaming::console::Console,
    tasks::Tasks,
};

/// The services of a domain. Each starts once; DHCP servers come and go with the interfaces.
pub(super) struct Services {
    tasks: Tasks,
    guest_agent: GuestAgent,
    consoles: watch::Sender<Option<Console>>,
    /// DHCP servers by interface.
    dhcp: BTreeMap<String, Vec<AbortHandle>>,
    credentials: Option<AbortHandle>,
    /// The name of the node, for the metrics of the guest.
    node: watch::Sender<String>,
    /// Tasks of metrics for the guest.
    metrics: Vec<AbortHandle>,
    pub(super) credentials_status: watch::Receiver<Option<AccessCredentials>>,
}

impl Services {
    pub(super) fn new(tasks: Tasks, guest_agent: GuestAgent, consoles: watch::Sender<Option<Console>>) -> Self {
        let credentials_status = watch::channel(None).1;
        let (dhcp, node) = (BTreeMap::new(), watch::channel(String::new()).0);
        Self { tasks, guest_agent, consoles, dhcp, credentials: None, node, metrics: Vec::new(), credentials_status }
    }

    /// Starts the services of a VMI.
    pub(super) fn serve(
        &mut self,
        pod: &Pod,
        wanted: &Wanted,
        domain: watch::Receiver<CurrentDomain>,
    ) -> Result<(), RequestError> {
        self.serve_addresses(wanted)?;
        self.open_console(pod, wanted);
        self.follow_credentials(pod, wanted);
        self.serve_metrics(pod, wanted, domain);
        self.guest_agent.pause_probes(pauses_probes(&wanted.vmi));
        Ok(())
    }

    /// Starts the DHCP servers of interfaces that have none, and ends those of interfaces that are gone.
    fn serve_addresses(&mut self, wanted: &Wanted) -> Result<(), RequestError> {
        let nics = &wanted.options.nics;
        let gone = self.dhcp.extract_if(.., |name, _| !nics.iter().any(|nic| nic.name == *name));
        gone.flat_map(|(_, servers)| servers).for_each(|server| server.abort());
        for nic in nics.iter().filter(|nic| !nic.bridge.is_empty()) {
            if let Entry::Vacant(entry) = self.dhcp.entry(nic.name.clone()) {
                entry.insert(network::serve(&wanted.vmi, nic, &self.tasks).map_err(RequestError::retryable)?);
            }
        }
        Ok(())
    }

    fn open_console(&self, pod: &Pod, wanted: &Wanted) {
        let devices = &wanted.vmi.spec.domain.devices;
        if devices.autoattach_serial_console == Some(false) || self.consoles.borrow().is_some() {
            return;
        }
        let log = devices.log_serial_console.unwrap_or(!wanted.options.serial_console_log_disabled);
        let console = Console::start(pod.paths.serial(&pod.args.uid), log, &self.tasks);
        let _ = self.consoles.send_replace(Some(console));
    }

    fn follow_credentials(&mut self, pod: &Pod, wanted: &Wanted) {
        let sources = credentials::Sources::of(&wanted.vmi, &pod.paths);
        if self.credentials.is_some() || sources.is_empty() {
            return;
        }
        let (status, receiver) = watch::channel(None);
        self.credentials_status = receiver;
        let follow = credentials::follow(self.guest_agent.clone(), sources, status);
        self.credentials = Some(self.tasks.keep("guest credentials", follow));
    }

    fn serve_metrics(&mut self, pod: &Pod, wanted: &Wanted, domain: watch::Receiver<CurrentDomain>) {
        let node = wanted.vmi.status.as_ref().and_then(|status| status.node_name.clone());
        let _ = self.node.send_replace(node.unwrap_or_default());
        let readers = downward_metrics::Readers::of(&wanted.vmi, &pod.paths, &pod.args.uid);
        if self.metrics.is_empty() {
            self.metrics = downward_metrics::serve(readers, domain, self.node.subscribe(), &self.tasks);
        }
    }

    /// Ends the services.
    pub(super) fn stop(&self) {
        self.dhcp.values().flatten().chain(&self.credentials).chain(&self.metrics).for_each(AbortHandle::abort);
    }
}
