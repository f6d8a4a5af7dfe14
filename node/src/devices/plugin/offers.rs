//! State of the resources at kubelet.

use std::collections::BTreeMap;

use tokio::sync::watch;

/// Registration of the plugin of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Registration {
    /// Not registered: kubelet is not available yet, or restarts.
    #[default]
    Awaited,
    /// kubelet has registered the plugin.
    Done,
    /// The last attempt failed with this message; it is repeated.
    Failed(String),
}

/// State of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Registration of the plugin.
    pub registration: Registration,
    /// The device exists; `None` before the first look.
    pub healthy: Option<bool>,
}

/// All resources by name.
pub(crate) type Offers = BTreeMap<String, Offer>;

/// Returns true if all plugins are registered; false without any resource.
pub(crate) fn all_known(offers: &Offers) -> bool {
    !offers.is_empty() && offers.values().all(|offer| offer.registration == Registration::Done)
}

/// Waits for a change; forever if there can be none.
pub(crate) async fn changed(offers: &mut watch::Receiver<Offers>) {
    if offers.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Changes one offer and notifies receivers if it differs.
pub(super) fn update(offers: &watch::Sender<Offers>, resource: &str, change: impl FnOnce(&mut Offer)) {
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
    fn plugins_are_known_after_kubelet_registered_each() {
        let (sender, mut receiver) = watch::channel(Offers::new());
        assert!(!all_known(&receiver.borrow_and_update()), "no resource yet");
        update(&sender, "devices.kubevirt.io/kvm", |offer| offer.registration = Registration::Done);
        update(&sender, "devices.kubevirt.io/tun", |_| {});
        assert!(!all_known(&receiver.borrow_and_update()));
        update(&sender, "devices.kubevirt.io/tun", |offer| offer.registration = Registration::Done);
        assert!(all_known(&receiver.borrow_and_update()));
        update(&sender, "devices.kubevirt.io/tun", |offer| offer.registration = Registration::Done);
        assert!(!receiver.has_changed().unwrap(), "no notification without a change");
    }
}
