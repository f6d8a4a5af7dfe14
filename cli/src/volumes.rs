//! `addvolume` and `removevolume`: volumes of a machine that runs; `memory-dump`: its memory on a claim.

use clap::{Args, ValueEnum};
use http::Method;
use serde_json::{Value, json};

use crate::{Connection, Error, lifecycle::body, machine_name};

/// Longest name of a volume: it is a label of Kubernetes.
const MAX_NAME: usize = 63;
/// What the API server says when somebody else has changed the machine between our look and our write.
const CONCURRENT: &str = "the server rejected our request due to an error in our request";
/// Attempts against concurrent changes.
const ATTEMPTS: u32 = 15;

/// Kinds of disks that can be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DiskType {
    /// A disk
    Disk,
    /// A disk that takes SCSI commands of the guest
    Lun,
}

/// Options of `addvolume`.
#[derive(Args)]
pub struct AddOptions {
    /// Name of the machine
    #[arg(value_name = "VMI")]
    machine: String,
    /// Name of the DataVolume or PersistentVolumeClaim
    #[arg(long, value_name = "NAME")]
    volume_name: String,
    /// Name of disk and volume in the machine; default: that of the claim
    #[arg(long, value_name = "NAME")]
    disk_name: Option<String>,
    /// Serial number of the disk; default: its name
    #[arg(long)]
    serial: Option<String>,
    /// How writes are cached
    #[arg(long, value_parser = ["none", "writethrough", "writeback"])]
    cache: Option<String>,
    /// Kind of disk
    #[arg(long, value_enum, default_value_t = DiskType::Disk)]
    disk_type: DiskType,
    /// Bus of the disk: scsi, or virtio for a disk that is no LUN
    #[arg(long, value_parser = ["scsi", "virtio"], default_value = "scsi")]
    bus: String,
    /// Deprecated: a volume of a VirtualMachine is always kept in its specification
    #[arg(long)]
    persist: bool,
    /// Check the request, change nothing
    #[arg(long)]
    dry_run: bool,
}

/// Options of `removevolume`.
#[derive(Args)]
pub struct RemoveOptions {
    /// Name of the machine
    #[arg(value_name = "VMI")]
    machine: String,
    /// Name of the volume in the machine
    #[arg(long, value_name = "NAME")]
    volume_name: String,
    /// Deprecated: a volume of a VirtualMachine is always taken out of its specification
    #[arg(long)]
    persist: bool,
    /// Check the request, change nothing
    #[arg(long)]
    dry_run: bool,
}

/// What is done with the memory of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DumpAction {
    /// Write it to a claim
    Get,
    /// Copy the last dump to this computer
    Download,
    /// Give up the claim of the last dump
    Remove,
}

/// Options of `memory-dump`.
#[derive(Args)]
pub struct DumpOptions {
    /// What to do
    #[arg(value_enum)]
    action: DumpAction,
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// PersistentVolumeClaim that receives the dump; default: that of the last dump
    #[arg(long, value_name = "NAME")]
    claim_name: Option<String>,
}

impl AddOptions {
    /// The name of disk and volume in the machine.
    fn name(&self) -> Result<&str, Error> {
        let name = self.disk_name.as_deref().unwrap_or(&self.volume_name);
        if name.len() <= MAX_NAME {
            return Ok(name);
        }
        let advice = if self.disk_name.is_none() { ": give the disk a shorter one with --disk-name" } else { "" };
        Err(Error::Usage(format!("{name} is longer than the {MAX_NAME} characters of a volume's name{advice}")))
    }

    fn request(&self, source: &Value) -> Result<Value, Error> {
        let name = self.name()?;
        let device = match (self.disk_type, self.bus.as_str()) {
            (DiskType::Disk, bus) => ("disk", json!({"bus": bus})),
            (DiskType::Lun, "scsi") => ("lun", json!({"bus": "scsi"})),
            (DiskType::Lun, bus) => {
                return Err(Error::Usage(format!("a LUN is on the bus scsi, not {bus}")));
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

fn is_not_found(error: &Error) -> bool {
    matches!(error, Error::Refused { code: 404, .. })
}

/// What stands behind a volume of this name: a DataVolume, or else a claim.
async fn source(connection: &Connection, name: &str) -> Result<Value, Error> {
    let name = machine_name(name)?;
    let namespace = &connection.namespace;
    let data_volume = format!("/apis/cdi.kubevirt.io/v1beta1/namespaces/{namespace}/datavolumes/{name}");
    match connection.call(Method::GET, &data_volume, Vec::new()).await {
        Ok(_) => return Ok(json!({"dataVolume": {"name": name, "hotpluggable": true}})),
        // Not there, not installed, or none of this user's business: then it is a claim.
        Err(Error::Refused { .. }) => {}
        Err(error) => return Err(error),
    }
    let claim = format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}");
    match connection.call(Method::GET, &claim, Vec::new()).await {
        Ok(_) => Ok(json!({"persistentVolumeClaim": {"claimName": name, "hotpluggable": true}})),
        Err(error) if is_not_found(&error) => Err(Error::Usage(format!(
            "error adding volume, Volume {name} is not a DataVolume or PersistentVolumeClaim"
        ))),
        Err(error) => Err(error),
    }
}

/// Asks the VirtualMachine, or the machine itself where it has none.
async fn ask(connection: &Connection, machine: &str, action: &str, request: &Value) -> Result<(), Error> {
    let body = request.to_string().into_bytes();
    let put = |resource: &'static str| {
        let (path, body) = (connection.path(resource, machine, action), body.clone());
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

/// A refusal with what was attempted before it.
fn while_doing(what: &str) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::Refused { code, message } => Error::Refused { code, message: format!("error {what}, {message}") },
        other => other,
    }
}

/// Scripts may still give the flag.
fn told_of_persist(persist: bool) {
    if persist {
        eprintln!("--persist is deprecated and has no effect: volumes of a VirtualMachine are always part of it");
    }
}

pub async fn add(connection: &Connection, options: &AddOptions) -> Result<(), Error> {
    let machine = machine_name(&options.machine)?;
    options.name()?;
    told_of_persist(options.persist);
    let request = options.request(&source(connection, &options.volume_name).await?)?;
    ask(connection, machine, "addvolume", &request).await.map_err(while_doing("adding volume"))?;
    say!("Successfully submitted add volume request to VM {machine} for volume {}", options.volume_name)?;
    Ok(())
}

pub async fn remove(connection: &Connection, options: &RemoveOptions) -> Result<(), Error> {
    let machine = machine_name(&options.machine)?;
    told_of_persist(options.persist);
    let mut request = json!({"name": options.volume_name});
    if options.dry_run {
        request["dryRun"] = json!(["All"]);
    }
    ask(connection, machine, "removevolume", &request).await.map_err(while_doing("removing volume"))?;
    say!("Successfully submitted remove volume request to VM {machine} for volume {}", options.volume_name)?;
    Ok(())
}

pub async fn memory_dump(connection: &Connection, options: &DumpOptions) -> Result<(), Error> {
    let vm = machine_name(&options.vm)?;
    match options.action {
        DumpAction::Get => {
            let request = body(&[("claimName", options.claim_name.as_ref().map(|name| json!(name)))], false);
            let path = connection.path("virtualmachines", vm, "memorydump");
            connection.call(Method::PUT, &path, request).await.map_err(while_doing("dumping vm memory"))?;
            say!("Successfully submitted memory dump request of VM {vm}")?;
        }
        DumpAction::Remove => {
            let path = connection.path("virtualmachines", vm, "removememorydump");
            let removed = connection.call(Method::PUT, &path, Vec::new()).await;
            removed.map_err(while_doing("removing memory dump association"))?;
            say!("Successfully submitted remove memory dump association of VM {vm}")?;
        }
        DumpAction::Download => {
            return Err(Error::Usage(
                "memory dumps cannot be downloaded yet: it takes exports, which are not available".into(),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{Cli, Command};

    fn request(words: &[&str]) -> Result<Value, Error> {
        let cli = Cli::try_parse_from([&["kubectl-virt", "addvolume", "vm"], words].concat());
        let Command::AddVolume(options) = cli.unwrap().command else { panic!("another command") };
        options.request(&json!({"persistentVolumeClaim": {"claimName": "claim"}}))
    }

    #[test]
    fn added_volume_is_a_scsi_disk_of_the_claims_name_unless_said_otherwise() {
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
    fn wrong_words_are_refused_before_anything_is_asked() {
        for words in [
            &["addvolume", "vm"][..],
            &["addvolume", "vm", "--volume-name=a", "--bus=sata"],
            &["addvolume", "vm", "--volume-name=a", "--cache=all"],
            &["addvolume", "vm", "--volume-name=a", "--disk-type=cdrom"],
            &["removevolume", "vm"],
            &["memory-dump", "vm"],
            &["memory-dump", "put", "vm"],
        ] {
            assert!(Cli::try_parse_from([&["kubectl-virt"], words].concat()).is_err(), "{words:?}");
        }
        for words in [
            &["removevolume", "vm", "--volume-name=a", "--persist", "--dry-run"][..],
            &["memory-dump", "get", "vm", "--claim-name=a"],
            &["memory-dump", "remove", "vm"],
        ] {
            assert!(Cli::try_parse_from([&["kubectl-virt"], words].concat()).is_ok(), "{words:?}");
        }
    }

    #[test]
    fn refusal_says_what_was_attempted() {
        let refused = Error::Refused { code: 501, message: "hot-plug of volumes is not available yet".into() };
        let said = while_doing("adding volume")(refused).to_string();
        assert_eq!(said, "error adding volume, hot-plug of volumes is not available yet");
    }
}
