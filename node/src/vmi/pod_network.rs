//! The call that sets up the network of the launcher's pod. virt-handler itself carries it out.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use api::VirtualMachineInstance;
use sha2::{Digest, Sha256};

use super::{
    call::{Answer, Call, Connected},
    event::Event,
    nics,
    observed::{Link, NETWORK, Now, Observed},
    resize,
    role::Role,
};
use crate::{
    launcher::LauncherError,
    network::{InterfaceFailure, PodNetwork},
};

/// Sets up the pod's network. An interface that is plugged in gets the queues that the launcher gives it.
#[derive(Debug, Default, PartialEq)]
pub(super) struct SetUpNetwork {
    /// The VMI as the launcher may carry it out now, with the MAC addresses that its guest has.
    pub(super) vmi: Arc<VirtualMachineInstance>,
    /// Interfaces whose links are given back to the network plugins.
    pub(super) release: Vec<String>,
}

impl SetUpNetwork {
    /// Returns the setup that the network needs; `None` if it is as it should be.
    pub(super) fn of(observed: &Observed) -> Option<Self> {
        let release = nics::network_work(observed)?;
        let vmi = Arc::new(resize::for_launcher(&observed.vmi, &observed.link).into_owned());
        Some(Self { vmi: nics::with_shown_macs(&vmi), release })
    }
}

impl Call for SetUpNetwork {
    type Reply = PodNetwork;
    const NAME: &'static str = NETWORK;
    const LIMIT: Duration = Duration::from_secs(30);

    async fn send(&self, to: &Connected) -> Answer<PodNetwork> {
        let ready = to.host.set_up_network(&to.peer, &self.vmi, &self.release).await;
        ready.map_err(|failure| LauncherError::Refused {
            call: Self::NAME,
            message: failure.message,
            irrecoverable: failure.permanent,
        })
    }

    fn apply(&self, observed: &mut Observed, connection: u64, answer: Answer<PodNetwork>, now: Now) -> Vec<Event> {
        let mut ready = match answer {
            Ok(ready) => ready,
            Err(LauncherError::Refused { message, irrecoverable, .. }) => {
                return failed(observed, &message, irrecoverable, now);
            }
            Err(_) => return failed(observed, "not done within the time limit", false, now),
        };
        let failures = std::mem::take(&mut ready.failures);
        let needed: Vec<&InterfaceFailure> =
            failures.iter().filter(|failure| nics::is_needed(&observed.vmi, &failure.name)).collect();
        if is_plug(observed) {
            // The guest still has what was set up before. Its status may not show all of it yet.
            let is_kept = |name: &str| failures.iter().any(|failure| failure.name == name);
            if let Some(former) = observed.network.as_deref() {
                ready.nics.extend(former.nics.iter().filter(|nic| is_kept(&nic.name)).cloned());
                ready.interfaces.extend(former.interfaces.iter().filter(|known| is_kept(&known.name)).cloned());
            }
        } else if let Some(failure) = needed.iter().find(|failure| failure.permanent).or(needed.first()) {
            return failed(observed, &failure.message, failure.permanent, now);
        }
        for nic in ready.nics.iter_mut().filter(|nic| nic.mac.is_empty()) {
            nic.mac = generated_mac(&observed.facts.uid, &nic.name);
        }
        let is_other = observed.network.as_deref().is_some_and(|former| names(former) != names(&ready));
        let is_changed = is_other || observed.failure.is_some();
        observed.network = Some(Arc::new(ready));
        if let Some(Link::Up { networked, synced, .. }) = observed.link_of(connection) {
            *networked = true;
            // The launcher attaches what is new.
            *synced = synced.filter(|_| !is_changed);
        }
        if failures.is_empty() {
            observed.network_failure = None;
            return Vec::new();
        }
        let reasons: Vec<&str> = failures.iter().map(|failure| failure.message.as_str()).collect();
        observed.note_network_failure(message(&reasons.join("; ")), now)
    }
}

/// Returns true if the network of a running guest was set up before over the present connection.
fn is_plug(observed: &Observed) -> bool {
    let is_networked = matches!(observed.link, Link::Up { networked: true, .. });
    is_networked && observed.domain().is_alive() && observed.role == Role::Owner
}

/// Records that the guest lacks its network, or what was to change in it.
fn failed(observed: &mut Observed, reason: &str, permanent: bool, now: Now) -> Vec<Event> {
    if is_plug(observed) {
        return observed.note_network_failure(message(reason), now);
    }
    let events = observed.note_failure(message(reason), permanent, now);
    observed.spare_guest();
    events
}

fn names(network: &PodNetwork) -> BTreeSet<&str> {
    network.nics.iter().map(|nic| nic.name.as_str()).collect()
}

fn message(reason: &str) -> String {
    format!("failed to configure vmi network: {reason}")
}

/// Returns the MAC address of an interface whose object names none: the same after each restart, with the prefix of QEMU's own
/// addresses. It is visible inside the pod only.
fn generated_mac(uid: &str, name: &str) -> String {
    let digest = Sha256::new().chain_update(uid).chain_update([0]).chain_update(name).finalize();
    match digest.as_slice() {
        [a, b, c, ..] => format!("52:54:00:{a:02x}:{b:02x}:{c:02x}"),
        _ => String::new(),
    }
}
