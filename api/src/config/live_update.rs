//! Limits of live updates.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{ConfigError, check_quantity};
use crate::kubevirt::configuration::KubeVirtConfiguration;

/// Sizes to which VMIs can grow while they run, unless they name their own.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveUpdateLimits {
    /// Sockets; `None`: a multiple of those at the start.
    pub max_cpu_sockets: Option<u32>,
    /// Guest memory; `None`: a multiple of that at the start.
    pub max_guest: Option<Quantity>,
    /// The multiple.
    pub max_hotplug_ratio: u32,
}

impl Default for LiveUpdateLimits {
    fn default() -> Self {
        Self { max_cpu_sockets: None, max_guest: None, max_hotplug_ratio: 4 }
    }
}

impl LiveUpdateLimits {
    pub(super) fn overlay(&mut self, from: &KubeVirtConfiguration) -> Result<(), ConfigError> {
        let Some(limits) = &from.live_update_configuration else { return Ok(()) };
        if let Some(guest) = &limits.max_guest {
            check_quantity("liveUpdateConfiguration.maxGuest", guest)?;
        }
        self.max_cpu_sockets = limits.max_cpu_sockets.filter(|sockets| *sockets != 0);
        self.max_guest.clone_from(&limits.max_guest);
        if let Some(ratio) = limits.max_hotplug_ratio.filter(|ratio| *ratio != 0) {
            self.max_hotplug_ratio = ratio;
        }
        Ok(())
    }
}
