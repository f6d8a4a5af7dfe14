//! Converts libvirt's errors.

use virt::error::ErrorNumber;

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
            ErrorNumber::SystemError if error.message().contains("socket") => {
                Self::Disconnected(error.message().to_owned())
            }
            _ => Self::Libvirt { code: callbacks::last_code(), message: error.message().to_owned() },
        }
    }
}
