//! Converts libvirt's errors.

use virt::error::{ErrorDomain, ErrorNumber};

use super::callbacks;
use crate::hypervisor::HypervisorError;

impl From<virt::error::Error> for HypervisorError {
    fn from(error: virt::error::Error) -> Self {
        match error.code() {
            ErrorNumber::NoDomain => Self::NoDomain,
            ErrorNumber::AgentUnresponsive | ErrorNumber::AgentUnsynced | ErrorNumber::AgentCommandTimeout => {
                Self::GuestAgentUnresponsive(error.message().to_owned())
            }
            ErrorNumber::AgentCommandFailed => Self::GuestAgentRefused(error.message().to_owned()),
            ErrorNumber::NoConnect | ErrorNumber::InvalidConn | ErrorNumber::Rpc => {
                Self::Disconnected(error.message().to_owned())
            }
            // The socket of the daemon failed: "Cannot recv data: Connection reset by peer" and others.
            ErrorNumber::SystemError if error.domain() == ErrorDomain::Rpc => {
                Self::Disconnected(error.message().to_owned())
            }
            _ => Self::Libvirt { code: callbacks::last_code(), message: error.message().to_owned() },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::unix::net::UnixListener};

    use virt::connect::Connect;

    use super::*;

    #[test]
    fn daemon_that_ends_during_a_call_is_disconnected() {
        let dir = std::env::temp_dir().join(format!("ferrovirt-libvirt-error-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        // What it leaves unread makes the kernel reset the connection.
        let daemon = std::thread::spawn(move || listener.accept().unwrap().0.read_exact(&mut [0]).unwrap());
        let uri = format!("qemu:///system?mode=direct&socket={}", path.display());
        let Err(error) = Connect::open(Some(&uri)) else { panic!("connected without a daemon") };
        daemon.join().unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(error.message().contains("recv"), "{error}");
        assert!(matches!(HypervisorError::from(error), HypervisorError::Disconnected(_)));
    }
}
