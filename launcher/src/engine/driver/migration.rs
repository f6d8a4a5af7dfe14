//! The record of the last migration, the images that it compares, and the parameters of libvirt's call.

use std::path::{Path, PathBuf};

use api::VirtualMachineInstance;
use protocol::{MigrateRequest, channels::Channel};

use super::{Driver, records};
use crate::{
    domain::{parse::parse, pinning::Pinning, pinning_of_target},
    engine::model::{BaseImage, ChannelMode, MigrationRecord, base_images, copied_disks, moved_disks},
    hypervisor::{HypervisorError, MigrateCall},
    paths::Paths,
};

impl Driver {
    /// Writes the record of a migration and passes channels on.
    pub(super) fn save_migration(&self, record: &MigrationRecord, mode: ChannelMode) -> std::io::Result<()> {
        let written = records::write(&self.pod.paths.migration_record(), record);
        self.channels.open(mode)?;
        written
    }

    /// Returns the parameters of libvirt's call.
    pub(super) fn migrate_call(
        &self,
        request: &MigrateRequest,
        copied: Vec<String>,
    ) -> Result<MigrateCall, HypervisorError> {
        let paths = &self.pod.paths;
        // As `UntrustedDir::regular_file` returns the path of an image to the target.
        let private = std::fs::canonicalize(&paths.private).unwrap_or_else(|_| paths.private.clone());
        let paths = Paths { private, ..paths.clone() };
        Ok(MigrateCall {
            control: self.channels.socket(Channel::Control),
            memory: self.channels.socket(Channel::Memory),
            disks: self.channels.socket(Channel::Disks),
            copied,
            moved: moved_disks(&self.state.base.active, &request.destinations, &paths),
            bandwidth: request.bandwidth,
            auto_converge: request.auto_converge,
            allow_unsafe: request.allow_unsafe,
            memory_connections: request.memory_connections,
            pinning: pinning_at_target(&request.vmi)?,
            ..MigrateCall::default()
        })
    }
}

/// Returns the images beneath the disks of a domain that arrives, whose overlays are copied.
pub(super) fn images_of_target(xml: &str, own_images: &[PathBuf], container_disks: &Path) -> Vec<BaseImage> {
    let domain = parse(xml);
    let copied = copied_disks(&domain, own_images, &[]).unwrap_or_default();
    base_images(&domain, &copied, container_disks)
}

/// Assigns the CPUs of the target's pod. `vmi` is the VMI as JSON; empty if its CPUs are not dedicated.
fn pinning_at_target(vmi: &[u8]) -> Result<Option<Pinning>, HypervisorError> {
    if vmi.is_empty() {
        return Ok(None);
    }
    let vmi: VirtualMachineInstance =
        serde_json::from_slice(vmi).map_err(|error| HypervisorError::Pinning(error.to_string()))?;
    pinning_of_target(&vmi).map_err(|error| HypervisorError::Pinning(error.to_string()))
}
