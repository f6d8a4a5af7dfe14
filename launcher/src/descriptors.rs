//! Large tables of descriptors.
//!
//! The kernel enlarges the table of a process with threads after a grace period of RCU (`expand_fdtable`), which takes 10 to 20 ms. QEMU
//! would need its 65th descriptor when a guest starts, or resumes after a migration.

use std::{io::Result, os::fd::IntoRawFd};

use rustix::fs::{Mode, OFlags, open};

/// Descriptors of the first table of a process.
const FIRST_TABLE: i32 = 64;

/// Takes the descriptors of the first table for good, also in processes that this one starts. Those that libvirt's daemon opens and
/// passes to QEMU have higher numbers then, so that QEMU begins with a larger table.
pub(crate) fn take_first_table() -> Result<()> {
    // Without CLOEXEC.
    while open("/dev/null", OFlags::RDONLY, Mode::empty())?.into_raw_fd() < FIRST_TABLE - 1 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsRawFd};

    use super::*;

    #[test]
    fn later_descriptors_are_beyond_the_first_table() {
        take_first_table().unwrap();
        assert!(File::open("/dev/null").unwrap().as_raw_fd() >= FIRST_TABLE);
    }
}
