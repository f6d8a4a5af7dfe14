//! The way from a VirtualMachineInstance to a running domain.

use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
    time::Duration,
};

use api::VirtualMachineInstance;
use ipnet::Ipv4Net;
use tokio::{sync::Semaphore, task::JoinHandle};

use super::RequestError;
use crate::{
    dhcp::{self, DhcpError, Lease},
    disks::{self, Tolerance, cloud_init},
    domain::{self, Domain, Environment, Given},
    options::MachineArgs,
    paths::Paths,
    resolver::Resolver,
    stream::USB_CHANNELS,
};

/// How long making the images may take.
const PREPARE_DEADLINE: Duration = Duration::from_secs(60);
/// How long a look at the claims of a running machine may take: what users ask for waits meanwhile.
const LOOK_DEADLINE: Duration = Duration::from_secs(3);
/// Looks at claims at a time.
static LOOKS: Semaphore = Semaphore::const_new(1);
/// Where Debian has UEFI firmware, in case the cluster's setting names another distribution's directory.
const OVMF_FALLBACK: &str = "/usr/share/OVMF";

/// Where QEMU looks up time zones.
const ZONES: &str = "/usr/share/zoneinfo";

/// Everything a start needs to know.
#[derive(Clone, Debug)]
pub(super) struct Start {
    pub vmi: VirtualMachineInstance,
    pub options: protocol::MachineOptions,
    pub paths: Paths,
    pub args: MachineArgs,
    pub allow_emulation: bool,
    pub host_devices: Given,
}

/// A failure that may pass: an image appears, space is freed, a claim is repaired. The machine waits for it.
fn passing(error: impl std::fmt::Display) -> RequestError {
    RequestError::Start { message: error.to_string(), lasting: false }
}

impl Start {
    /// Makes the images and writes the domain's XML.
    pub(super) async fn domain(&self) -> Result<Domain, RequestError> {
        let this = self.clone();
        let work = tokio::task::spawn_blocking(move || this.domain_blocking());
        match tokio::time::timeout(PREPARE_DEADLINE, work).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) | Err(_) => Err(passing("the machine's disks could not be made ready in time")),
        }
    }

    /// How large the disks in claims could be, by volume. Storage that does not answer is not asked again before it does:
    /// each question holds a thread.
    pub(super) async fn room(&self) -> Vec<(String, u64)> {
        let Ok(turn) = LOOKS.try_acquire() else { return Vec::new() };
        let this = self.clone();
        let work = tokio::task::spawn_blocking(move || {
            let sizes = disks::room(&this.vmi, &this.paths);
            drop(turn);
            sizes
        });
        match tokio::time::timeout(LOOK_DEADLINE, work).await {
            Ok(Ok(sizes)) => sizes,
            Ok(Err(_)) | Err(_) => {
                tracing::warn!("the machine's claims could not be looked at in time");
                Vec::new()
            }
        }
    }

    fn domain_blocking(&self) -> Result<Domain, RequestError> {
        let prepared = disks::prepare(&self.vmi, &self.paths, &Tolerance::of(&self.options)).map_err(passing)?;
        let efi = self
            .vmi
            .spec
            .domain
            .firmware
            .as_ref()
            .and_then(|firmware| firmware.bootloader.as_ref())
            .and_then(|bootloader| bootloader.efi.as_ref());
        let uefi = efi.and_then(|efi| {
            let directories = [self.args.ovmf_path.as_path(), Path::new(OVMF_FALLBACK)];
            domain::select_uefi(&directories, efi.secure_boot.unwrap_or(true), Path::exists)
        });
        let serial = self.paths.serial(&self.args.uid);
        let vnc = self.paths.vnc(&self.args.uid);
        let usb_redirection: Vec<PathBuf> =
            (0..USB_CHANNELS).map(|channel| self.paths.usb_redirection(&self.args.uid, channel)).collect();
        let nvram = self.paths.nvram().join(format!("{}_VARS.fd", self.args.name));
        std::fs::create_dir_all(self.paths.machine(&self.args.uid))
            .map_err(|error| passing(format!("cannot make the machine's directory: {error}")))?;
        let environment = Environment {
            kvm: kvm_usable(&self.paths.dev),
            allow_emulation: self.allow_emulation,
            serial: &serial,
            vnc: &vnc,
            usb_redirection: &usb_redirection,
            nvram: &nvram,
            secrets: &self.paths.private.join("secret"),
            prepared: &prepared,
            uefi: uefi.as_ref(),
            zones: Path::new(ZONES),
            host_devices: &self.host_devices,
            options: &self.options,
        };
        domain::convert(&self.vmi, &environment)
            .map_err(|error| RequestError::Start { lasting: error.is_lasting(), message: error.to_string() })
    }

    /// Starts DHCP on the bridges of the machine's interfaces.
    pub(super) fn serve_dhcp(&self) -> Result<Vec<JoinHandle<()>>, RequestError> {
        let resolver = Resolver::read(Path::new("/etc/resolv.conf")).with_subdomain(self.vmi.spec.subdomain.as_deref());
        let mut servers = Vec::new();
        for nic in self.options.nics.iter().filter(|nic| !nic.bridge.is_empty()) {
            let lease = lease(nic, &self.vmi, &resolver).ok_or_else(|| passing(DhcpError::Lease(nic.name.clone())))?;
            let socket = dhcp::open(&nic.bridge).map_err(passing)?;
            servers.push(tokio::spawn(dhcp::serve(socket, lease)));
        }
        Ok(servers)
    }
}

/// Whether hardware virtualization is there for this process: the device plugin gives the device only to pods that ask for
/// it, and only on nodes where it was proven to work.
pub(super) fn kvm_usable(dev: &Path) -> bool {
    let path: PathBuf = dev.join("kvm");
    std::fs::OpenOptions::new().read(true).write(true).open(path).is_ok()
}

fn lease(nic: &protocol::Nic, vmi: &VirtualMachineInstance, resolver: &Resolver) -> Option<Lease> {
    let told = nic.dhcp.as_ref()?;
    let address: Ipv4Net = told.address.parse().ok()?;
    let optional = |text: &str| if text.is_empty() { Some(None) } else { text.parse::<Ipv4Addr>().ok().map(Some) };
    let routes = told
        .routes
        .iter()
        .map(|route| {
            Some((route.destination.parse().ok()?, optional(&route.gateway)?.unwrap_or(Ipv4Addr::UNSPECIFIED)))
        })
        .collect::<Option<Vec<_>>>()?;
    let interface = vmi.spec.domain.devices.interfaces.iter().find(|interface| interface.name == nic.name);
    let extra = interface.and_then(|interface| interface.dhcp_options.as_ref());
    let some = |text: Option<&String>| text.filter(|t| !t.is_empty()).cloned();
    // Behind a bridge of several ports only the guest's own interface is answered; masquerade has one port.
    let bridged = interface.is_some_and(|interface| interface.bridge.is_some());
    Some(Lease {
        address,
        server: told.server.parse().ok()?,
        gateway: optional(&told.gateway)?,
        routes,
        dns: resolver.servers.clone(),
        search: resolver.search.clone(),
        domain: resolver.domain().map(ToOwned::to_owned),
        hostname: Some(cloud_init::hostname(vmi)).filter(|name| !name.is_empty()),
        mtu: u16::try_from(nic.mtu).ok()?,
        client: if bridged { mac(&nic.mac) } else { None },
        ntp: extra.iter().flat_map(|o| &o.ntp_servers).filter_map(|server| server.parse().ok()).collect(),
        tftp_server: extra.and_then(|o| some(o.tftp_server_name.as_ref())),
        boot_file: extra.and_then(|o| some(o.boot_file_name.as_ref())),
        private: extra
            .iter()
            .flat_map(|o| &o.private_options)
            .filter_map(|option| Some((u8::try_from(option.option).ok()?, option.value.clone())))
            .filter(|(code, value)| (224..=254).contains(code) && value.len() <= 255)
            .collect(),
    })
}

fn mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> = text.split(':').map(|part| u8::from_str_radix(part, 16)).collect::<Result<_, _>>().ok()?;
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_masquerade_lease_answers_anyone_with_the_agents_address() {
        let nic = protocol::Nic {
            name: "default".into(),
            bridge: "k6t-eth0".into(),
            mtu: 1450,
            mac: "02:00:00:00:00:01".into(),
            dhcp: Some(protocol::DhcpLease {
                address: "10.0.2.2/24".into(),
                gateway: "10.0.2.1".into(),
                server: "10.0.2.1".into(),
                routes: Vec::new(),
            }),
            ..protocol::Nic::default()
        };
        let mut vmi = VirtualMachineInstance::default();
        vmi.metadata.name = Some("web".into());
        let lease = lease(&nic, &vmi, &Resolver::parse("nameserver 10.96.0.10\nsearch svc.cluster.local")).unwrap();
        assert_eq!(lease.address.to_string(), "10.0.2.2/24");
        assert_eq!(lease.hostname.as_deref(), Some("web"));
        assert_eq!(lease.client, None);
        assert_eq!(lease.mtu, 1450);
        // In place of its pod a guest is the only one on its bridge that is answered: others are on its network, too.
        vmi.spec.domain.devices.interfaces =
            serde_json::from_value(serde_json::json!([{"name": "default", "bridge": {}}])).unwrap();
        let routes = vec![
            protocol::Route { destination: "172.16.0.0/12".into(), gateway: "10.0.2.7".into() },
            protocol::Route { destination: "169.254.1.1/32".into(), gateway: String::new() },
        ];
        let told = protocol::DhcpLease { gateway: String::new(), routes, ..nic.dhcp.clone().unwrap() };
        let bridged = protocol::Nic { dhcp: Some(told), ..nic.clone() };
        let bridged = super::lease(&bridged, &vmi, &Resolver::default()).unwrap();
        assert_eq!(bridged.client, Some([2, 0, 0, 0, 0, 1]));
        assert_eq!(bridged.gateway, None);
        assert_eq!(bridged.routes[1], ("169.254.1.1/32".parse().unwrap(), Ipv4Addr::UNSPECIFIED));
        let broken = protocol::Nic {
            dhcp: Some(protocol::DhcpLease { address: "10.0.2.2".into(), ..nic.dhcp.clone().unwrap() }),
            ..nic
        };
        assert_eq!(super::lease(&broken, &vmi, &Resolver::default()), None);
    }
}
