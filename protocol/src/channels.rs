//! Channels of a migration: connections of libvirt and QEMU between two launchers, relayed by both nodes' virt-handlers.
//!
//! Each launcher listens on a unix socket beside that of the protocol ([`SOCKET`]); virt-handler is its only client. A connection
//! begins with one byte of virt-handler:
//!
//! - source: [`AWAIT`]. When libvirt, QEMU or the launcher opens a channel, the launcher answers with the byte of the channel.
//! - target: the byte of a channel. The launcher connects it within the pod and answers with [`CONNECTED`].
//!
//! Everything after these two bytes is the data of the channel, which virt-handler does not parse. A launcher without a
//! migration closes the connection.
//!
//! libvirt and QEMU of the source connect to sockets of the launcher ([`Channel::socket`]). At the target QEMU itself listens on those of
//! bulk data; virt-handler connects to them, and no byte precedes the data.

/// Name of the socket, in the directory of the protocol's socket.
pub const SOCKET: &str = "migration-sock";
/// First byte of a connection that waits for a channel of the source.
pub const AWAIT: u8 = b'A';
/// Answer of the target's launcher.
pub const CONNECTED: u8 = b'+';

/// A channel.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Hash)]
pub enum Channel {
    /// From libvirt to libvirt's daemon.
    Control,
    /// From QEMU to QEMU: memory and devices. There can be several connections.
    Memory,
    /// From QEMU to the NBD server of the other QEMU: disks.
    Disks,
    /// From launcher to launcher: the source's QEMU has ended, so the target may run the guest.
    /// One byte, `r` (run) or `p` (stay paused), is answered with `k` (done) or `n` (no domain has arrived); without an answer it is
    /// repeated. Before the migration, `i` begins a comparison of images; a launcher of an older release closes the connection.
    Release,
}

impl Channel {
    /// All channels.
    pub const ALL: [Self; 4] = [Self::Control, Self::Memory, Self::Disks, Self::Release];

    /// Returns the byte of the channel.
    #[must_use]
    pub const fn byte(self) -> u8 {
        match self {
            Self::Control => b'C',
            Self::Memory => b'M',
            Self::Disks => b'D',
            Self::Release => b'R',
        }
    }

    /// Returns the channel of a byte.
    #[must_use]
    pub fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|channel| channel.byte() == byte)
    }

    /// Returns true if the channel is for bulk data, from QEMU to QEMU.
    #[must_use]
    pub const fn is_bulk(self) -> bool {
        matches!(self, Self::Memory | Self::Disks)
    }

    /// Returns the name of the channel's socket, in the directory of the protocol's socket.
    #[must_use]
    pub fn socket(self) -> String {
        format!("migration-{}", self.name())
    }

    /// Returns the name for logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Memory => "memory",
            Self::Disks => "disks",
            Self::Release => "release",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_channels_are_distinct() {
        for channel in Channel::ALL {
            assert_eq!(Channel::of(channel.byte()), Some(channel));
            assert_ne!(channel.byte(), AWAIT);
        }
        assert_eq!(Channel::of(AWAIT), None);
        assert_eq!(Channel::of(0), None);
    }
}
