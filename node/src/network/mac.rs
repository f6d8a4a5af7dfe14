//! MAC addresses.

/// Returns a locally administered MAC address made from the first bytes of a digest.
pub(super) fn local_mac(bytes: &[u8]) -> [u8; 6] {
    let mut mac = [0x02, 0, 0, 0, 0, 0];
    for (to, from) in mac.iter_mut().skip(1).zip(bytes) {
        *to = *from;
    }
    mac
}
