//! Hello: the launcher accepts the UID of its VMI and starts libvirtd.

use std::{collections::BTreeSet, time::Duration};

use protocol::{
    HelloRequest,
    features::{self, Feature},
};

use super::{
    call::{Call, Connected},
    event::Event,
    observed::{Link, Now, Observed},
};
use crate::launcher::{CALL_TIMEOUT, LauncherError, bounded, with_causes};

/// Calls Hello with the UID of the VMI and the node's data. The launcher of another VMI refuses.
#[derive(Debug, PartialEq)]
pub(super) struct Hello;

impl Call for Hello {
    type Reply = BTreeSet<Feature>;
    type Error = LauncherError;

    const NAME: &'static str = "hello";
    /// With the grant of devices before it.
    const LIMIT: Duration = Duration::from_secs(35);

    async fn send(&self, to: &Connected) -> Result<BTreeSet<Feature>, LauncherError> {
        let capabilities_cache = to.host.equip(&to.peer, &to.vmi).await.map_err(|error| {
            let message = with_causes(&error);
            if to.peer.is_alive() {
                LauncherError::Refused { call: "Hello", message, irrecoverable: false }
            } else {
                // Nothing else notices the end of a connection over which Hello was not answered.
                LauncherError::Lost(message)
            }
        })?;
        let request = HelloRequest {
            capabilities_cache,
            allow_emulation: to.host.settings().allow_emulation,
            uid: to.vmi.metadata.uid.clone().unwrap_or_default(),
            features: features::own(),
        };
        let reply = to.launcher.call(request, CALL_TIMEOUT).await?;
        let features = features::common(&reply.features);
        tracing::debug!(version = bounded(&reply.launcher_version), ?features, "virt-launcher answered Hello");
        Ok(features)
    }

    fn apply(
        &self,
        observed: &mut Observed,
        connection: u64,
        result: Result<BTreeSet<Feature>, LauncherError>,
        now: Now,
    ) -> Vec<Event> {
        match result {
            Ok(of_launcher) => {
                observed.hello_at.get_or_insert(now.wall);
                if let Some(Link::Up { greeted, features, .. }) = observed.link_of(connection) {
                    (*greeted, *features) = (true, of_launcher);
                }
                Vec::new()
            }
            Err(error) => {
                // Nothing follows the connection yet that could notice its end.
                if error.is_lost() {
                    tracing::info!(%error, "connection to virt-launcher lost before Hello was answered");
                    observed.apply_disconnect(connection, now);
                }
                observed.failed(&error, now)
            }
        }
    }
}
