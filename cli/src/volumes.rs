//! `addvolume` and `removevolume`: volumes of a running VM or VMI.

use clap::{Args, ValueEnum};
use http::Method;
use serde_json::{Value, json};

use crate::{Connection, Error, failed_while, is_not_found, object_name};

/// Longest name of a volume, which must be a DNS label.
const MAX_NAME: usize = 63;
/// Message of the API server if another client has changed the object between read and write.
const CONCURRENT: &str = "the server rejected our request due to an error in our request";
/// Limits attempts after concurrent changes.
const ATTEMPTS: u32 = 15;

/// Types of disks that can be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DiskType {
    /// A disk
    Disk,
    /// A disk that accepts SCSI commands of the guest
    Lun,
}

/// Options of `addvolume`.
#[derive(Args)]
pub(crate) struct AddOptions {
    /// Name of the VirtualMachine or VirtualMachineInstance
    #[arg(value_name = "VMI")]
    vm: String,
    /// Name of the DataVolume or PersistentVolumeClaim
    #[arg(long, value_name = "NAME")]
    volume_name: String,
    /// Name of disk and volume in the VM; default: that of the claim
    #[arg(long, value_name = "NAME")]
    disk_name: Option<String>,
    /// Serial number of the disk; default: its name
    #[arg(long)]
    serial: Option<String>,
    /// Cache mode of the disk
    #[arg(long, value_parser = ["none", "writethrough", "writeback"])]
    cache: Option<String>,
    /// Type of the disk
    #[arg(long, value_enum, default_value_t = DiskType::Disk)]
    disk_type: DiskType,
    /// Bus of the disk: scsi, or virtio for a disk other than a LUN
    #[arg(long, value_parser = ["scsi", "virtio"], default_value = "scsi")]
    bus: String,
    /// Deprecated, has no effect: volumes of a VirtualMachine are always added to its specification
    #[arg(long)]
    persist: bool,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

/// Options of `removevolume`.
#[derive(Args)]
pub(crate) struct RemoveOptions {
    /// Name of the VirtualMachine or VirtualMachineInstance
    #[arg(value_name = "VMI")]
    vm: String,
    /// Name of the volume in the VM
    #[arg(long, value_name = "NAME")]
    volume_name: String,
    /// Deprecated, has no effect: volumes of a VirtualMachine are always removed from its specification
    #[arg(long)]
    persist: bool,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

impl AddOptions {
    /// Returns the name of disk and volume.
    fn name(&self) -> Result<&str, Error> {
        let name = self.disk_name.as_deref().unwrap_or(&self.volume_name);
        if name.len() <= MAX_NAME {
            return Ok(name);
        }
        let advice = if self.disk_name.is_none() { ": set a shorter one with --disk-name" } else { "" };
        Err(Error::Usage(format!("volume name {name} exceeds {MAX_NAME} characters{advice}")))
    }

    fn request(&self, source: &Value) -> Result<Value, Error> {
        let name = self.name()?;
        let device = match (self.disk_type, self.bus.as_str()) {
            (DiskType::Disk, bus) => ("disk", json!({"bus": bus})),
            (DiskType::Lun, "scsi") => ("lun", json!({"bus": "scsi"})),
            (DiskType::Lun, bus) => {
                return Err(Error::Usage(format!("a LUN requires bus scsi, not {bus}")));
            }
        };
        let mut disk = json!({"name": name, "serial": self.serial.as_deref().unwrap_or(name), device.0: device.1});
        if let Some(cache) = &self.cache {
            disk["cache"] = json!(cache);
        }
        let mut request = json!({"name": name, "disk": disk, "volumeSource": source});
        if self.dry_run {
            request["dryRun"] = json!(["All"]);
        }
        Ok(request)
    }
}

/// Returns the source of the volume: the DataVolume of this name, or else the claim.
async fn source(connection: &Connection, name: &str) -> Result<Value, Error> {
    let name = object_name(name)?;
    let namespace = &connection.namespace;
    let data_volume = format!("/apis/cdi.kubevirt.io/v1beta1/namespaces/{namespace}/datavolumes/{name}");
    match connection.call(Method::GET, &data_volume, Vec::new()).await {
        Ok(_) => return Ok(json!({"dataVolume": {"name": name, "hotpluggable": true}})),
        // The DataVolume is missing, CDI is not installed, or the user may not read it.
        Err(Error::Refused { .. }) => {}
        Err(error) => return Err(error),
    }
    let claim = format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}");
    match connection.call(Method::GET, &claim, Vec::new()).await {
        Ok(_) => Ok(json!({"persistentVolumeClaim": {"claimName": name, "hotpluggable": true}})),
        Err(error) if is_not_found(&error) => Err(Error::Usage(format!(
            "error adding volume, Volume {name} is not a DataVolume or PersistentVolumeClaim: namespace {namespace} has no \
             claim of this name"
        ))),
        Err(error) => Err(error),
    }
}

/// Sends the request for the VirtualMachine, or for the VMI if there is no VirtualMachine.
async fn put_vm_or_vmi(connection: &Connection, vm: &str, action: &str, request: &Value) -> Result<(), Error> {
    let body = request.to_string().into_bytes();
    let put = |resource: &'static str| {
        let (path, body) = (connection.path(resource, vm, action), body.clone());
        async move { connection.call(Method::PUT, &path, body).await.map(drop) }
    };
    let mut attempt = 1;
    loop {
        let done = match put("virtualmachines").await {
            Err(error) if is_not_found(&error) => put("virtualmachineinstances").await,
            done => done,
        };
        match done {
            Err(Error::Refused { message, .. }) if message == CONCURRENT && attempt < ATTEMPTS => {
                tokio::time::sleep(std::time::Duration::from_millis(u64::from(attempt) * 3)).await;
                attempt += 1;
            }
            done => return done,
        }
    }
}

/// Warns about the deprecated flag, which scripts may still set.
fn warn_persist_deprecated(persist: bool) {
    if persist {
        eprintln!("--persist is deprecated and has no effect: volume changes of a VirtualMachine are always persisted");
    }
}

pub(crate) async fn add(connection: &Connection, options: &AddOptions) -> Result<(), Error> {
    let vm = object_name(&options.vm)?;
    options.name()?;
    warn_persist_deprecated(options.persist);
    let request = options.request(&source(connection, &options.volume_name).await?)?;
    put_vm_or_vmi(connection, vm, "addvolume", &request).await.map_err(failed_while("adding volume"))?;
    say!("Successfully submitted add volume request to VM {vm} for volume {}", options.volume_name)?;
    Ok(())
}

pub(crate) async fn remove(connection: &Connection, options: &RemoveOptions) -> Result<(), Error> {
    let vm = object_name(&options.vm)?;
    warn_persist_deprecated(options.persist);
    let mut request = json!({"name": options.volume_name});
    if options.dry_run {
        request["dryRun"] = json!(["All"]);
    }
    put_vm_or_vmi(connection, vm, "removevolume", &request).await.map_err(failed_while("removing volume"))?;
    say!("Successfully submitted remove volume request to VM {vm} for volume {}", options.volume_name)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::command_line::{Cli, Command};

    fn request(words: &[&str]) -> Result<Value, Error> {
        let cli = Cli::try_parse_from([&["kubectl-virt", "addvolume", "vm"], words].concat());
        let Command::AddVolume(options) = cli.unwrap().command else { panic!("another command") };
        options.request(&json!({"persistentVolumeClaim": {"claimName": "claim"}}))
    }

    #[test]
    fn added_volume_is_by_default_a_scsi_disk_with_the_name_of_the_claim() {
        assert_eq!(
            request(&["--volume-name", "claim"]).unwrap(),
            json!({
                "name": "claim",
                "disk": {"name": "claim", "serial": "claim", "disk": {"bus": "scsi"}},
                "volumeSource": {"persistentVolumeClaim": {"claimName": "claim"}},
            })
        );
        let words =
            ["--volume-name=claim", "--disk-name=d", "--serial=1", "--cache=none", "--disk-type=lun", "--dry-run"];
        assert_eq!(
            request(&words).unwrap(),
            json!({
                "name": "d",
                "disk": {"name": "d", "serial": "1", "cache": "none", "lun": {"bus": "scsi"}},
                "volumeSource": {"persistentVolumeClaim": {"claimName": "claim"}},
                "dryRun": ["All"],
            })
        );
        assert!(request(&["--volume-name=claim", "--disk-type=lun", "--bus=virtio"]).is_err());
        let long = "x".repeat(64);
        assert!(request(&["--volume-name", &long]).unwrap_err().to_string().contains("--disk-name"));
        assert!(request(&["--volume-name", &long, "--disk-name", "d"]).is_ok());
    }

    #[test]
    fn wrong_arguments_are_rejected_before_any_request() {
        for words in [
            &["addvolume", "vm"][..],
            &["addvolume", "vm", "--volume-name=a", "--bus=sata"],
            &["addvolume", "vm", "--volume-name=a", "--cache=all"],
            &["addvolume", "vm", "--volume-name=a", "--disk-type=cdrom"],
            &["removevolume", "vm"],
        ] {
            assert!(Cli::try_parse_from([&["kubectl-virt"], words].concat()).is_err(), "{words:?}");
        }
        let words = ["kubectl-virt", "removevolume", "vm", "--volume-name=a", "--persist", "--dry-run"];
        assert!(Cli::try_parse_from(words).is_ok());
    }
}
