//! How the resources stand with kubelet.

use std::collections::BTreeMap;

use tokio::sync::watch;

/// Whether kubelet knows the plugin of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Registration {
    /// Not yet, or not any more: kubelet is waited for.
    #[default]
    Awaited,
    /// kubelet has taken the plugin.
    Done,
    /// The last attempt failed, for this reason; there will be another.
    Failed(String),
}

/// One resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// Whether kubelet knows the plugin.
    pub registration: Registration,
    /// Whether the device is there; `None` before the first look.
    pub healthy: Option<bool>,
}

/// All resources, by the name that pods ask for.
pub type Offers = BTreeMap<String, Offer>;

/// Whether kubelet knows all plugins. Before any is offered it does not.
#[must_use]
pub fn all_known(offers: &Offers) -> bool {
    !offers.is_empty() && offers.values().all(|offer| offer.registration == Registration::Done)
}

/// Waits for a change; for ever once there can be none.
pub async fn changed(offers: &mut watch::Receiver<Offers>) {
    if offers.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Changes one offer, and tells those who wait only if that changes anything.
pub(super) fn note(offers: &watch::Sender<Offers>, resource: &str, change: impl FnOnce(&mut Offer)) {
    offers.send_if_modified(|offers| {
        let before = offers.get(resource).cloned();
        let offer = offers.entry(resource.to_owned()).or_default();
        change(offer);
        before.as_ref() != Some(&*offer)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_are_known_when_kubelet_has_taken_each() {
        let (sender, mut receiver) = watch::channel(Offers::new());
        assert!(!all_known(&receiver.borrow_and_update()), "there is none yet");
        note(&sender, "devices.kubevirt.io/kvm", |offer| offer.registration = Registration::Done);
        note(&sender, "devices.kubevirt.io/tun", |_| {});
        assert!(!all_known(&receiver.borrow_and_update()));
        note(&sender, "devices.kubevirt.io/tun", |offer| offer.registration = Registration::Done);
        assert!(all_known(&receiver.borrow_and_update()));
        note(&sender, "devices.kubevirt.io/tun", |offer| offer.registration = Registration::Done);
        assert!(!receiver.has_changed().unwrap(), "nothing is told twice");
    }
}
