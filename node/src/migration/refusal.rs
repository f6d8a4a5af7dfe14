//! Reasons for which a channel is refused.

/// Reason for which a channel of another node is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// The TLS handshake failed: no certificate of a virt-handler.
    #[error("the TLS handshake failed")]
    Handshake,
    /// The peer did not agree on the protocol.
    #[error("the peer does not speak the protocol of migrations")]
    Protocol,
    /// The certificate names no node.
    #[error("the certificate does not name exactly one node")]
    Certificate,
    /// The header is malformed.
    #[error("the header is malformed")]
    Header,
    /// The header did not arrive in time.
    #[error("the header did not arrive in time")]
    Slow,
    /// No migration of this VMI is received.
    #[error("no migration of this VMI is received")]
    UnknownVmi,
    /// Another migration of this VMI is received.
    #[error("this migration of the VMI is not received")]
    UnknownMigration,
    /// The VMI comes from another node.
    #[error("the VMI comes from another node")]
    Node,
    /// The migration has its most channels.
    #[error("the migration has too many channels")]
    Full,
    /// virt-handler is about to stop, and the migration has not begun. The text is the reference's.
    #[error("unable to process new migration connections during virt-handler shutdown")]
    Stopping,
    /// The launcher does not accept the channel.
    #[error("the launcher does not accept the channel")]
    Launcher,
}

impl Refusal {
    /// Returns the value of the label of metrics.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::Protocol => "protocol",
            Self::Certificate => "certificate",
            Self::Header => "header",
            Self::Slow => "slow",
            Self::UnknownVmi => "unknown_vmi",
            Self::UnknownMigration => "unknown_migration",
            Self::Node => "node",
            Self::Full => "full",
            Self::Stopping => "stopping",
            Self::Launcher => "launcher",
        }
    }
}
