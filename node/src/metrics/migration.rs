//! Metrics of the channels of migrations.

use daemon::metrics::Metrics as _;
use prometheus::{IntCounter, IntCounterVec, IntGaugeVec, Registry};
use protocol::channels::Channel;

/// Metrics of the channels of migrations between nodes.
#[derive(Clone)]
pub(crate) struct MigrationMetrics {
    open: IntGaugeVec,
    refused: IntCounterVec,
    bytes: IntCounterVec,
}

/// An open channel. Dropping it ends the count.
pub(crate) struct OpenChannel {
    channel: Channel,
    metrics: MigrationMetrics,
}

impl MigrationMetrics {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let open =
            registry.gauges("ferrovirt_handler_migration_channels", "Open channels of migrations", &["channel"])?;
        let refused = registry.counters(
            "ferrovirt_handler_migration_channels_refused_total",
            "Channels of migrations that other nodes opened and that were refused, by reason",
            &["reason"],
        )?;
        let bytes = registry.counters(
            "ferrovirt_handler_migration_bytes_total",
            "Bytes transferred by channels of migrations",
            &["channel", "direction"],
        )?;
        Ok(Self { open, refused, bytes })
    }

    /// Counts a channel as open until the returned value is dropped.
    #[must_use]
    pub(crate) fn open(&self, channel: Channel) -> OpenChannel {
        self.open.with_label_values(&[channel.name()]).inc();
        OpenChannel { channel, metrics: self.clone() }
    }

    /// Counts a refused channel.
    pub(crate) fn refuse(&self, reason: &'static str) {
        self.refused.with_label_values(&[reason]).inc();
    }
}

#[cfg(test)]
impl MigrationMetrics {
    /// Returns the open channels of all kinds.
    pub(crate) fn open_now(&self) -> i64 {
        Channel::ALL.iter().map(|channel| self.open.with_label_values(&[channel.name()]).get()).sum()
    }

    /// Returns the channels that were refused for a reason.
    pub(crate) fn refused_so_far(&self, reason: &'static str) -> u64 {
        self.refused.with_label_values(&[reason]).get()
    }
}

impl OpenChannel {
    /// Returns the counter of bytes sent to the other node.
    pub(crate) fn sent(&self) -> IntCounter {
        self.metrics.bytes.with_label_values(&[self.channel.name(), "sent"])
    }

    /// Returns the counter of bytes received from the other node.
    pub(crate) fn received(&self) -> IntCounter {
        self.metrics.bytes.with_label_values(&[self.channel.name(), "received"])
    }
}

impl Drop for OpenChannel {
    fn drop(&mut self) {
        self.metrics.open.with_label_values(&[self.channel.name()]).dec();
    }
}
