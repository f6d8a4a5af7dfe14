//! The connection to the launcher.

use std::{collections::BTreeSet, time::Duration};

use daemon::backoff;
use protocol::features::Feature;

use super::{Now, Observed};
use crate::vmi::host::ConnectError;

/// First and longest pause after a lost connection. Short, because the supervisor restarts a worker at once; grows while
/// connections end soon.
const AFTER_LOSS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(6400));
/// Duration after which a connection does not count as short.
const LASTING: Duration = Duration::from_secs(10);
/// Pause after an attempt to connect, and the longest one while connections are refused.
pub(super) const RECONNECT: Duration = Duration::from_millis(100);
const LONGEST_RECONNECT: Duration = Duration::from_millis(3200);

/// The connection to the launcher.
#[derive(Clone, Debug)]
pub(crate) enum Link {
    /// Not connected.
    Down {
        /// Start of this state.
        since: Duration,
        /// A connection existed before.
        had: bool,
        /// Time of the next attempt.
        retry_at: Duration,
        /// Since when the pod's directory is missing on the node.
        pod_missing_since: Option<Duration>,
        /// Consecutive attempts that failed for another reason than a missing socket.
        refused: Option<RefusedConnects>,
    },
    /// Connected.
    Up {
        /// Number of the connection.
        connection: u64,
        /// Hello was answered.
        greeted: bool,
        /// Optional features of the launcher, from Hello.
        features: BTreeSet<Feature>,
        /// The pod's network is set up.
        networked: bool,
        /// Fingerprint of the last successful Sync over this connection.
        synced: Option<u64>,
        /// Sequence of the first report with the results of that Sync. Reports and answers arrive in any order.
        results_from: u64,
    },
}

/// Consecutive refused attempts to connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RefusedConnects {
    /// Time of the first one.
    pub(in crate::vmi) since: Duration,
    /// Their number.
    pub(in crate::vmi) attempts: u32,
    /// Error of the last one.
    pub(in crate::vmi) message: String,
}

impl Link {
    pub(in crate::vmi) fn down(since: Duration, had: bool) -> Self {
        Self::Down { since, had, retry_at: since, pod_missing_since: None, refused: None }
    }

    /// Returns true if the connected launcher is of a release without live migration; `None` before it has answered Hello.
    pub(in crate::vmi) fn lacks_live_migration(&self) -> Option<bool> {
        match self {
            Self::Up { greeted: true, features, .. } => Some(!features.contains(&Feature::LiveMigration)),
            Self::Up { .. } | Self::Down { .. } => None,
        }
    }

    /// Returns true if the connected launcher does not report results per item: it is of an older release and does not apply
    /// changes of the spec to the running domain.
    pub(super) fn lacks_item_results(&self) -> bool {
        matches!(self, Self::Up { greeted: true, features, .. } if !features.contains(&Feature::ItemResults))
    }
}

impl Observed {
    /// Returns the link if it is still this connection.
    pub(in crate::vmi) fn link_of(&mut self, connection: u64) -> Option<&mut Link> {
        let current = matches!(self.link, Link::Up { connection: current, .. } if current == connection);
        current.then_some(&mut self.link)
    }

    /// Applies the end of a connection.
    pub(in crate::vmi) fn apply_disconnect(&mut self, connection: u64, now: Now) {
        if matches!(self.link, Link::Up { connection: current, .. } if current == connection) {
            self.link = Link::down(now.since_start, true);
            // A launcher that accepts connections and closes them must not cause attempts without pause.
            if now.since_start >= self.connected_at.saturating_add(LASTING) {
                self.short_connections = 0;
            }
            self.short_connections = self.short_connections.saturating_add(1);
            if let Link::Down { retry_at, .. } = &mut self.link {
                *retry_at = now.since_start + backoff::pause(AFTER_LOSS, self.short_connections);
            }
        }
    }

    /// Returns the error of the last refused attempt to connect.
    pub(in crate::vmi) fn refused_connect(&self) -> Option<&str> {
        match &self.link {
            Link::Down { refused, .. } => refused.as_ref().map(|refused| refused.message.as_str()),
            Link::Up { .. } => None,
        }
    }

    pub(super) fn apply_connect(&mut self, result: Result<u64, ConnectError>, now: Now) {
        match result {
            Ok(connection) => {
                self.connected_at = now.since_start;
                self.volumes = None;
                self.reported = false;
                self.prepared_migration = None;
                // A restarted launcher does not know what it was asked for.
                self.called_migration = None;
                self.aborted_migration = None;
                let features = BTreeSet::new();
                self.link =
                    Link::Up { connection, greeted: false, features, networked: false, synced: None, results_from: 0 };
            }
            Err(error) => {
                let Link::Down { retry_at, pod_missing_since, refused, .. } = &mut self.link else { return };
                // Usually the attempt itself waited; this bounds the rate of attempts that fail at once.
                *retry_at = now.since_start + RECONNECT;
                match error {
                    ConnectError::NoSocket => (*pod_missing_since, *refused) = (None, None),
                    ConnectError::NoPod => {
                        pod_missing_since.get_or_insert(now.since_start);
                        *refused = None;
                    }
                    ConnectError::Refused(message) => {
                        *pod_missing_since = None;
                        let (since, attempts) =
                            refused.take().map_or((now.since_start, 0), |known| (known.since, known.attempts));
                        let attempts = attempts.saturating_add(1);
                        *retry_at = now.since_start + backoff::pause((RECONNECT, LONGEST_RECONNECT), attempts);
                        *refused = Some(RefusedConnects { since, attempts, message });
                    }
                }
            }
        }
    }
}
