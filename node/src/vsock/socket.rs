//! VSOCK sockets of the kernel.

use std::io;

use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener, VsockStream};

/// Connects to a port of the guest with this context id.
pub(super) async fn connect(cid: u32, port: u32) -> io::Result<VsockStream> {
    VsockStream::connect(VsockAddr::new(cid, port)).await
}

/// Listens on a port of the host for all guests.
pub(super) fn listen(port: u32) -> io::Result<VsockListener> {
    VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn connecting_to_a_missing_guest_fails() {
        // On every host: without VSOCK, without guests, or with guests of other context ids.
        let attempt = tokio::time::timeout(Duration::from_secs(20), connect(0xfeed_beef, 1)).await;
        assert!(attempt.is_ok_and(|connected| connected.is_err()));
    }
}
