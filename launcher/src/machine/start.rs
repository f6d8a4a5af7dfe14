//! The way from a VirtualMachineInstance to a running domain.

use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
    time::Duration,
};

use api::{VirtualMachineInstance, constants::annotation};
use futures::FutureExt;
use ipnet::Ipv4Net;
use tokio::{sync::Semaphore, task::JoinHandle};

use super::RequestError;
use crate::{
    dhcp::{self, DhcpError, Lease},
    dhcp6,
    disks::{self, Tolerance},
    domain::{self, Domain, Environment, Given, unsupported::Unsupported},
    options::MachineArgs,
    paths::Paths,
    resolver::Resolver,
    stream::USB_CHANNELS,
};

/// How long making the images may take.
const PREPARE_DEADLINE: Duration = Duration::from_secs(60);
/// How long a look at the claims of a running machine may take: what users ask for waits meanwhile.
const LOOK_DEADLINE: Duration = Duration::from_secs(3);
/// How long a machine that never ran may fail to start before it is given up.
const GIVE_UP_AFTER: Duration = Duration::from_secs(300);
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
    pub unsupported: Unsupported,
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

/// Whether a machine that does not run is given up after this error, when starts have failed for so long: where no attempt
/// can help, and where none has helped for minutes. Another pod, on another node maybe, may do better. A machine that a
/// worker before this one may have started is left to run.
pub(super) fn gives_up(error: &RequestError, failing_for: Duration, adopting: bool) -> bool {
    match error {
        RequestError::Start { lasting: true, .. } | RequestError::Unsupported(_) => true,
        RequestError::Start { .. } | RequestError::Libvirt(_) => !adopting && failing_for >= GIVE_UP_AFTER,
        _ => false,
    }
}

impl Start {
    /// Fails if the VMI has fields that nobody carries out.
    pub(super) fn check_supported(&self) -> Result<(), RequestError> {
        if self.unsupported.is_empty() { Ok(()) } else { Err(RequestError::Unsupported(self.unsupported.clone())) }
    }

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

    /// Whether the machine gives roles to its interfaces.
    pub(super) fn has_roles(&self) -> bool {
        let mut tags = self.vmi.spec.domain.devices.interfaces.iter().filter_map(|interface| interface.tag.as_deref());
        tags.any(|tag| !tag.is_empty())
    }

    /// Tells the guest of the roles of its interfaces. Gives the volume that does and its size, if one does.
    pub(super) async fn tell_roles(&self, definition: String) -> Result<Option<(String, u64)>, RequestError> {
        let this = self.clone();
        let work = tokio::task::spawn_blocking(move || {
            let interfaces = domain::tagged_interfaces(&this.vmi, &definition);
            disks::tell_interfaces(&this.vmi, &this.paths, interfaces).map_err(passing)
        });
        match tokio::time::timeout(PREPARE_DEADLINE, work).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) | Err(_) => Err(passing("the guest could not be told of its interfaces in time")),
        }
    }

    /// Starts DHCP on the bridges of the machine's interfaces.
    pub(super) fn serve_dhcp(&self) -> Result<Vec<JoinHandle<()>>, RequestError> {
        let resolver = Resolver::read(Path::new("/etc/resolv.conf")).with_subdomain(self.vmi.spec.subdomain.as_deref());
        let mut ready = Vec::new();
        for nic in self.options.nics.iter().filter(|nic| !nic.bridge.is_empty()) {
            let invalid = || passing(DhcpError::Lease(nic.name.clone()));
            if nic.dhcp.is_some() {
                let lease = lease(nic, &self.vmi, &resolver).ok_or_else(invalid)?;
                ready.push(dhcp::serve(dhcp::open(&nic.bridge).map_err(passing)?, lease).boxed());
            }
            if let Some(told) = &nic.dhcp6 {
                let lease = lease6(told, &resolver).ok_or_else(invalid)?;
                ready.push(dhcp6::serve(dhcp6::open(&nic.bridge).map_err(passing)?, lease).boxed());
            }
        }
        // All or none: the next attempt would start those that run already once more.
        Ok(ready.into_iter().map(tokio::spawn).collect())
    }
}

/// Whether hardware virtualization is there for this process: the device plugin gives the device only to pods that ask for
/// it, and only on nodes where it was proven to work.
pub(super) fn kvm_usable(dev: &Path) -> bool {
    let path: PathBuf = dev.join("kvm");
    std::fs::OpenOptions::new().read(true).write(true).open(path).is_ok()
}

/// Whether probes of a machine's guest agent are to succeed whatever the agent does.
pub(super) fn pauses_probes(vmi: &VirtualMachineInstance) -> bool {
    let annotations = vmi.metadata.annotations.as_ref();
    let asked = annotations.and_then(|all| all.get(annotation::PAUSE_GUEST_AGENT_PROBES));
    asked.is_some_and(|value| matches!(value.as_str(), "1" | "t" | "T" | "true" | "True" | "TRUE"))
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
        hostname: Some(vmi.hostname()).filter(|name| !name.is_empty()),
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

fn lease6(told: &protocol::DhcpLease6, resolver: &Resolver) -> Option<dhcp6::Lease> {
    Some(dhcp6::Lease {
        address: told.address.parse().ok()?,
        server: mac(&told.server_mac)?,
        dns: resolver.servers6.clone(),
    })
}

fn mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> = text.split(':').map(|part| u8::from_str_radix(part, 16)).collect::<Result<_, _>>().ok()?;
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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

    #[test]
    fn a_start_that_keeps_failing_is_given_up() {
        let start = |lasting| RequestError::Start { message: "no kernel".into(), lasting };
        let libvirt = || RequestError::Libvirt(crate::libvirt::Error::NoDomain);
        for (error, seconds, adopting, expected) in [
            (start(true), 0, false, true),
            (start(true), 0, true, true),
            (RequestError::Unsupported(Unsupported::default()), 0, false, true),
            (start(false), 0, false, false),
            (start(false), 299, false, false),
            (start(false), 300, false, true),
            (libvirt(), 300, false, true),
            (start(false), 3000, true, false),
            (libvirt(), 3000, true, false),
            (RequestError::Ending, 3000, false, false),
            (RequestError::NoHello, 3000, false, false),
        ] {
            let given_up = gives_up(&error, Duration::from_secs(seconds), adopting);
            assert_eq!(given_up, expected, "{error:?} {seconds} {adopting}");
        }
    }

    #[test]
    fn an_annotation_pauses_probes_of_the_guest_agent() {
        let no = ["false", "0", "tRUE", "yes", "invalid", ""].map(|value| (value, false));
        for (value, paused) in ["true", "True", "TRUE", "t", "T", "1"].map(|value| (value, true)).into_iter().chain(no)
        {
            let mut vmi = VirtualMachineInstance::default();
            let name = annotation::PAUSE_GUEST_AGENT_PROBES.to_owned();
            vmi.metadata.annotations = Some(BTreeMap::from([(name, value.to_owned())]));
            assert_eq!(pauses_probes(&vmi), paused, "{value}");
        }
        assert!(!pauses_probes(&VirtualMachineInstance::default()));
    }

    #[test]
    fn a_lease_for_ipv6_is_the_agents_address_with_the_pods_name_servers() {
        let resolver = Resolver::parse("nameserver 10.96.0.10\nnameserver fd00::a");
        let told = |address: &str, mac: &str| protocol::DhcpLease6 { address: address.into(), server_mac: mac.into() };
        let lease = lease6(&told("fd10:0:2::2", "02:00:00:00:00:00"), &resolver).unwrap();
        assert_eq!(lease.address.to_string(), "fd10:0:2::2");
        assert_eq!((lease.server, lease.dns), ([2, 0, 0, 0, 0, 0], resolver.servers6.clone()));
        for (address, mac) in [("10.0.2.2", "02:00:00:00:00:00"), ("fd10:0:2::2", "02:00")] {
            assert_eq!(lease6(&told(address, mac), &resolver), None, "{address} {mac}");
        }
    }
}
