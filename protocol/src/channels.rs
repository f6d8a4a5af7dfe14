//! Channels of a migration: connections of libvirt and QEMU between two launchers, carried by both nodes' virt-handlers.
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
//! [`AWAIT_SOCKET`] and [`Channel::socket_byte`] are the same requests of a virt-handler that takes sockets. The launcher then passes
//! the socket of libvirt or QEMU with its answer (`SCM_RIGHTS`), so that no further process copies the data. The connection itself
//! stays silent; its end is that of the channel. Without a socket, as for [`Channel::Release`], the data is on the connection. A
//! launcher that knows these requests answers with [`IDLE`] while it has no migration; one that does not closes the connection.

/// Name of the socket, in the directory of the protocol's socket.
pub const SOCKET: &str = "migration-sock";
/// First byte of a connection that waits for a channel of the source.
pub const AWAIT: u8 = b'A';
/// The same, of a virt-handler that takes sockets.
pub const AWAIT_SOCKET: u8 = AWAIT.to_ascii_lowercase();
/// Answer of a launcher that knows sockets and has no migration.
pub const IDLE: u8 = b'-';
/// Answer of the target's launcher.
pub const CONNECTED: u8 = b'+';

/// Returns the request of a first byte without regard to sockets, and true if virt-handler takes them.
#[must_use]
pub const fn request(first: u8) -> (u8, bool) {
    (first.to_ascii_uppercase(), first.is_ascii_lowercase())
}

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
    /// repeated.
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

    /// Returns the byte of the channel in a request of a virt-handler that takes sockets.
    #[must_use]
    pub const fn socket_byte(self) -> u8 {
        self.byte().to_ascii_lowercase()
    }

    /// Returns the channel of a byte.
    #[must_use]
    pub fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|channel| channel.byte() == byte)
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
            assert_eq!(Channel::of(channel.socket_byte()), None, "{}", channel.name());
            assert_eq!(request(channel.socket_byte()), (channel.byte(), true));
            assert_eq!(request(channel.byte()), (channel.byte(), false));
        }
        for byte in [AWAIT, AWAIT_SOCKET, IDLE, CONNECTED] {
            assert_eq!(Channel::of(byte), None);
            assert!(Channel::ALL.iter().all(|channel| channel.socket_byte() != byte));
        }
        assert_eq!(Channel::of(0), None);
    }
}
