//! The guest's addresses: DHCP servers for IPv4 ([`dhcp`]) and IPv6 ([`dhcp6`]) on the bridges that virt-handler sets up, and
//! the pod's resolver configuration that they pass on ([`resolver`]).

mod dhcp;
mod dhcp6;
mod resolver;

use std::{net::Ipv4Addr, path::Path};

use api::VirtualMachineInstance;
use futures::FutureExt;
use ipnet::Ipv4Net;
use tokio::task::AbortHandle;

use self::{
    dhcp::{DhcpError, Lease},
    resolver::Resolver,
};
use crate::tasks::Tasks;

/// Starts the DHCP servers of an interface, all or none: a retry would start running servers a second time.
pub(crate) fn serve(
    vmi: &VirtualMachineInstance,
    nic: &protocol::Nic,
    tasks: &Tasks,
) -> Result<Vec<AbortHandle>, DhcpError> {
    let resolver = Resolver::read(Path::new("/etc/resolv.conf")).with_subdomain(vmi.spec.subdomain.as_deref());
    let mut ready = Vec::new();
    let invalid = || DhcpError::Lease(nic.name.clone());
    if nic.dhcp.is_some() {
        let lease = lease(nic, vmi, &resolver).ok_or_else(invalid)?;
        ready.push(dhcp::serve(dhcp::open(&nic.bridge)?, lease).boxed());
    }
    if let Some(settings) = &nic.dhcp6 {
        let lease = lease6(settings, &resolver).ok_or_else(invalid)?;
        ready.push(dhcp6::serve(dhcp6::open(&nic.bridge)?, lease).boxed());
    }
    Ok(ready.into_iter().map(|server| tasks.keep("DHCP server", server)).collect())
}

fn lease(nic: &protocol::Nic, vmi: &VirtualMachineInstance, resolver: &Resolver) -> Option<Lease> {
    let settings = nic.dhcp.as_ref()?;
    let address: Ipv4Net = settings.address.parse().ok()?;
    let optional = |text: &str| if text.is_empty() { Some(None) } else { text.parse::<Ipv4Addr>().ok().map(Some) };
    let routes = settings
        .routes
        .iter()
        .map(|route| {
            Some((route.destination.parse().ok()?, optional(&route.gateway)?.unwrap_or(Ipv4Addr::UNSPECIFIED)))
        })
        .collect::<Option<Vec<_>>>()?;
    let interface = vmi.spec.domain.devices.interfaces.iter().find(|interface| interface.name == nic.name);
    let extra = interface.and_then(|interface| interface.dhcp_options.as_ref());
    let some = |text: Option<&String>| text.filter(|t| !t.is_empty()).cloned();
    // A bridge binding shares its network with others, so only the guest's interface gets answers; masquerade has one
    // port.
    let bridged = interface.is_some_and(|interface| interface.bridge.is_some());
    Some(Lease {
        address,
        server: settings.server.parse().ok()?,
        gateway: optional(&settings.gateway)?,
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

fn lease6(settings: &protocol::DhcpLease6, resolver: &Resolver) -> Option<dhcp6::Lease> {
    Some(dhcp6::Lease {
        address: settings.address.parse().ok()?,
        server: mac(&settings.server_mac)?,
        dns: resolver.servers6.clone(),
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
    fn a_masquerade_lease_is_for_any_client() {
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
        // With a bridge binding only the guest gets answers, since others share its network.
        vmi.spec.domain.devices.interfaces =
            serde_json::from_value(serde_json::json!([{"name": "default", "bridge": {}}])).unwrap();
        let routes = vec![
            protocol::Route { destination: "172.16.0.0/12".into(), gateway: "10.0.2.7".into() },
            protocol::Route { destination: "169.254.1.1/32".into(), gateway: String::new() },
        ];
        let settings = protocol::DhcpLease { gateway: String::new(), routes, ..nic.dhcp.clone().unwrap() };
        let bridged = protocol::Nic { dhcp: Some(settings), ..nic.clone() };
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
    fn an_ipv6_lease_has_the_pods_name_servers() {
        let resolver = Resolver::parse("nameserver 10.96.0.10\nnameserver fd00::a");
        let settings =
            |address: &str, mac: &str| protocol::DhcpLease6 { address: address.into(), server_mac: mac.into() };
        let lease = lease6(&settings("fd10:0:2::2", "02:00:00:00:00:00"), &resolver).unwrap();
        assert_eq!(lease.address.to_string(), "fd10:0:2::2");
        assert_eq!((lease.server, lease.dns), ([2, 0, 0, 0, 0, 0], resolver.servers6.clone()));
        for (address, mac) in [("10.0.2.2", "02:00:00:00:00:00"), ("fd10:0:2::2", "02:00")] {
            assert_eq!(lease6(&settings(address, mac), &resolver), None, "{address} {mac}");
        }
    }
}
