//! DHCP server on the bridge of the guest's interface, with one lease.
//!
//! [`answer`] is pure and decides; [`serve`] moves packets. The guest controls the packets: they go through a checked
//! decoder with a size limit, and the answer is always the one lease.

use std::{
    ffi::OsString,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
};

use dhcproto::{
    Decodable, Decoder, Encodable, Encoder, Name,
    v4::{DhcpOption, Flags, Message, MessageType, Opcode, OptionCode, UnknownOption},
};
use ipnet::Ipv4Net;
use nix::{
    libc, setsockopt_impl, sockopt_impl,
    sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, setsockopt, socket, sockopt},
};
use thiserror::Error;
use tokio::net::UdpSocket;

/// Lease time: 999 days, since the address never changes during the pod's life.
pub(crate) const LEASE_SECONDS: u32 = 999 * 24 * 3600;
/// Limit of search domains in a reply, in bytes: clients accept no packet longer than a frame.
const SEARCH_LIMIT: usize = 512;
/// Port of clients.
const CLIENT_PORT: u16 = 68;
/// Largest packet that is parsed.
pub(crate) const PACKET_LIMIT: usize = 1500;

sockopt_impl!(
    /// Packets are sent without UDP checksum, which IPv4 allows (RFC 768).
    NoChecksum,
    SetOnly,
    libc::SOL_SOCKET,
    libc::SO_NO_CHECK,
    bool
);

/// Failure to start the server.
#[derive(Debug, Error)]
pub(crate) enum DhcpError {
    /// The lease is malformed.
    #[error("DHCP lease of interface {0} is not valid")]
    Lease(String),
    /// The socket cannot be set up.
    #[error("cannot serve DHCP on {bridge}: {source}")]
    Socket { bridge: String, source: std::io::Error },
}

/// The guest's network configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    /// Guest's address and its network.
    pub(crate) address: Ipv4Net,
    /// Address of the server.
    pub(crate) server: Ipv4Addr,
    /// Default gateway.
    pub(crate) gateway: Option<Ipv4Addr>,
    /// More routes.
    pub(crate) routes: Vec<(Ipv4Net, Ipv4Addr)>,
    /// Name servers.
    pub(crate) dns: Vec<Ipv4Addr>,
    /// Search domains.
    pub(crate) search: Vec<String>,
    /// Domain of the guest.
    pub(crate) domain: Option<String>,
    /// Host name of the guest.
    pub(crate) hostname: Option<String>,
    /// MTU; 0 if it is not sent.
    pub(crate) mtu: u16,
    /// MAC address of the only client that gets answers, if restricted.
    pub(crate) client: Option<[u8; 6]>,
    /// Time servers.
    pub(crate) ntp: Vec<Ipv4Addr>,
    /// Server to boot from.
    pub(crate) tftp_server: Option<String>,
    pub(crate) boot_file: Option<String>,
    /// Options of the site, 224 to 254.
    pub(crate) private: Vec<(u8, String)>,
}

/// Returns the reply to a packet, and its recipient; `None` if the packet is malformed or for another server.
pub(crate) fn answer(lease: &Lease, packet: &[u8]) -> Option<(Vec<u8>, Ipv4Addr)> {
    let request = Message::decode(&mut Decoder::new(packet.get(..packet.len().min(PACKET_LIMIT))?)).ok()?;
    if request.opcode() != Opcode::BootRequest || request.hlen() != 6 {
        return None;
    }
    if lease.client.is_some_and(|client| request.chaddr() != client) {
        return None;
    }
    let kind = match request.opts().get(OptionCode::MessageType)? {
        DhcpOption::MessageType(MessageType::Discover) => MessageType::Offer,
        DhcpOption::MessageType(MessageType::Request) => MessageType::Ack,
        _ => return None,
    };
    if let Some(DhcpOption::ServerIdentifier(server)) = request.opts().get(OptionCode::ServerIdentifier)
        && *server != lease.server
    {
        return None;
    }
    // A client that renews is answered at its address (RFC 2131, section 4.1). With a bridge binding there is no route to it. One that
    // searches for a server, or takes its offer, has no address yet, even if it names one.
    let has_address = kind == MessageType::Ack && request.opts().get(OptionCode::ServerIdentifier).is_none();
    let is_renewed = has_address
        && lease.client.is_none()
        && request.ciaddr() == lease.address.addr()
        && !request.flags().broadcast();
    let (flags, client, recipient) = if is_renewed {
        (request.flags(), request.ciaddr(), request.ciaddr())
    } else {
        (Flags::default().set_broadcast(), Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST)
    };
    let mut reply = Message::default();
    reply
        .set_opcode(Opcode::BootReply)
        .set_xid(request.xid())
        .set_flags(flags)
        .set_ciaddr(client)
        .set_yiaddr(lease.address.addr())
        .set_siaddr(lease.server)
        .set_chaddr(request.chaddr());
    let options = reply.opts_mut();
    options.insert(DhcpOption::MessageType(kind));
    options.insert(DhcpOption::ServerIdentifier(lease.server));
    options.insert(DhcpOption::AddressLeaseTime(LEASE_SECONDS));
    options.insert(DhcpOption::SubnetMask(lease.address.netmask()));
    if let Some(gateway) = lease.gateway {
        options.insert(DhcpOption::Router(vec![gateway]));
    }
    if !lease.routes.is_empty() {
        // Clients that support option 121 ignore the router option (RFC 3442), so the default route is repeated, last.
        let mut routes = lease.routes.clone();
        if let Some(gateway) = lease.gateway {
            routes.push((Ipv4Net::default(), gateway));
        }
        options.insert(DhcpOption::ClasslessStaticRoute(routes));
    }
    if !lease.dns.is_empty() {
        options.insert(DhcpOption::DomainNameServer(lease.dns.clone()));
    }
    let mut length = 0;
    let fits = |domain: &&String| {
        // Each label follows its length; the last one is empty.
        length += domain.len() + 2;
        length <= SEARCH_LIMIT
    };
    let domains = lease.search.iter().take_while(fits);
    let search: Vec<Name> = domains.filter_map(|domain| Name::from_ascii(domain).ok()).collect();
    if !search.is_empty() {
        options.insert(DhcpOption::DomainSearch(search));
    }
    if let Some(domain) = &lease.domain {
        options.insert(DhcpOption::DomainName(domain.clone()));
    }
    if let Some(hostname) = &lease.hostname {
        options.insert(DhcpOption::Hostname(hostname.clone()));
    }
    if lease.mtu != 0 {
        options.insert(DhcpOption::InterfaceMtu(lease.mtu));
    }
    if !lease.ntp.is_empty() {
        options.insert(DhcpOption::NtpServers(lease.ntp.clone()));
    }
    if let Some(server) = &lease.tftp_server {
        options.insert(DhcpOption::TFTPServerName(server.clone().into_bytes()));
    }
    if let Some(file) = &lease.boot_file {
        options.insert(DhcpOption::BootfileName(file.clone().into_bytes()));
    }
    for (code, value) in &lease.private {
        options.insert(DhcpOption::Unknown(UnknownOption::new(OptionCode::Unknown(*code), value.clone().into_bytes())));
    }
    let mut bytes = Vec::new();
    reply.encode(&mut Encoder::new(&mut bytes)).ok()?;
    Some((bytes, recipient))
}

/// Opens the server's socket on a bridge. Separate from [`serve`], so that a failure is known before the guest starts.
pub(crate) fn open(bridge: &str) -> Result<UdpSocket, DhcpError> {
    let failed = |source: std::io::Error| DhcpError::Socket { bridge: bridge.to_owned(), source };
    let fd = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)
        .map_err(|e| failed(e.into()))?;
    setsockopt(&fd, sockopt::ReuseAddr, &true).map_err(|e| failed(e.into()))?;
    setsockopt(&fd, sockopt::Broadcast, &true).map_err(|e| failed(e.into()))?;
    // A tap does not compute checksums, and DHCP clients that read raw packets would see wrong ones.
    setsockopt(&fd, NoChecksum, &true).map_err(|e| failed(e.into()))?;
    setsockopt(&fd, sockopt::BindToDevice, &OsString::from(bridge)).map_err(|e| failed(e.into()))?;
    bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &SockaddrIn::new(0, 0, 0, 0, 67)).map_err(|e| failed(e.into()))?;
    UdpSocket::from_std(std::net::UdpSocket::from(fd)).map_err(failed)
}

/// Serves requests until the worker ends.
pub(crate) async fn serve(socket: UdpSocket, lease: Lease) {
    exchange(socket, move |packet, _| {
        let (reply, recipient) = answer(&lease, packet)?;
        Some((reply, SocketAddr::V4(SocketAddrV4::new(recipient, CLIENT_PORT))))
    })
    .await;
}

/// Answers packets forever. `answer` returns the reply to a packet and its sender, and the recipient.
pub(crate) async fn exchange(
    socket: UdpSocket,
    answer: impl Fn(&[u8], SocketAddr) -> Option<(Vec<u8>, SocketAddr)> + Send,
) {
    let mut buffer = [0; PACKET_LIMIT];
    loop {
        match socket.recv_from(&mut buffer).await {
            Ok((n, from)) => {
                let Some((reply, to)) = answer(buffer.get(..n).unwrap_or_default(), from) else { continue };
                if let Err(error) = socket.send_to(&reply, to).await {
                    // Guests can cause it as often as they like, by the sender that they name.
                    tracing::debug!(%error, "cannot send a DHCP reply");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot receive DHCP requests");
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease() -> Lease {
        Lease {
            address: "10.0.2.2/24".parse().unwrap(),
            server: Ipv4Addr::new(10, 0, 2, 1),
            gateway: Some(Ipv4Addr::new(10, 0, 2, 1)),
            routes: Vec::new(),
            dns: vec![Ipv4Addr::new(10, 96, 0, 10)],
            search: vec!["default.svc.cluster.local".into()],
            domain: Some("default.svc.cluster.local".into()),
            hostname: Some("guest".into()),
            mtu: 1450,
            client: None,
            ntp: Vec::new(),
            tftp_server: None,
            boot_file: None,
            private: vec![(240, "site".into())],
        }
    }

    fn request(kind: MessageType, mac: [u8; 6]) -> Message {
        let mut message = Message::default();
        message.set_opcode(Opcode::BootRequest).set_xid(7).set_chaddr(&mac);
        message.opts_mut().insert(DhcpOption::MessageType(kind));
        message
    }

    fn encoded(message: &Message) -> Vec<u8> {
        let mut bytes = Vec::new();
        message.encode(&mut Encoder::new(&mut bytes)).unwrap();
        bytes
    }

    #[test]
    fn discover_is_offered_and_request_acknowledged_with_the_one_lease() {
        for (kind, expected) in [(MessageType::Discover, MessageType::Offer), (MessageType::Request, MessageType::Ack)]
        {
            let (reply, _) = answer(&lease(), &encoded(&request(kind, [2, 0, 0, 0, 0, 1]))).unwrap();
            let reply = Message::decode(&mut Decoder::new(&reply)).unwrap();
            assert_eq!(reply.yiaddr(), Ipv4Addr::new(10, 0, 2, 2));
            assert_eq!(reply.xid(), 7);
            let options = reply.opts();
            assert_eq!(options.get(OptionCode::MessageType), Some(&DhcpOption::MessageType(expected)));
            assert_eq!(options.get(OptionCode::InterfaceMtu), Some(&DhcpOption::InterfaceMtu(1450)));
            assert_eq!(
                options.get(OptionCode::SubnetMask),
                Some(&DhcpOption::SubnetMask(Ipv4Addr::new(255, 255, 255, 0)))
            );
            assert_eq!(options.get(OptionCode::AddressLeaseTime), Some(&DhcpOption::AddressLeaseTime(LEASE_SECONDS)));
            assert!(
                matches!(options.get(OptionCode::DomainSearch), Some(DhcpOption::DomainSearch(list)) if list.len() == 1)
            );
        }
    }

    #[test]
    fn a_client_that_renews_is_answered_at_its_address() {
        let (own, other) = (Ipv4Addr::new(10, 0, 2, 2), Ipv4Addr::new(10, 0, 2, 9));
        let mac = [2, 0, 0, 0, 0, 1];
        for (address, flags, client, expected) in [
            (own, Flags::default(), None, own),
            (own, Flags::default().set_broadcast(), None, Ipv4Addr::BROADCAST),
            (other, Flags::default(), None, Ipv4Addr::BROADCAST),
            (Ipv4Addr::UNSPECIFIED, Flags::default(), None, Ipv4Addr::BROADCAST),
            // Bridge binding.
            (own, Flags::default(), Some(mac), Ipv4Addr::BROADCAST),
        ] {
            let mut asked = request(MessageType::Request, mac);
            asked.set_ciaddr(address).set_flags(flags);
            let (reply, recipient) = answer(&Lease { client, ..lease() }, &encoded(&asked)).unwrap();
            assert_eq!(recipient, expected, "{address} {client:?}");
            let reply = Message::decode(&mut Decoder::new(&reply)).unwrap();
            let is_broadcast = expected == Ipv4Addr::BROADCAST;
            assert_eq!(reply.flags().broadcast(), is_broadcast);
            assert_eq!(reply.ciaddr(), if is_broadcast { Ipv4Addr::UNSPECIFIED } else { own });
            assert_eq!(reply.yiaddr(), own);
        }
        let mut searches = request(MessageType::Discover, mac);
        let mut takes = request(MessageType::Request, mac);
        takes.opts_mut().insert(DhcpOption::ServerIdentifier(lease().server));
        for asked in [&mut searches, &mut takes] {
            asked.set_ciaddr(own);
            assert_eq!(answer(&lease(), &encoded(asked)).unwrap().1, Ipv4Addr::BROADCAST);
        }
    }

    #[test]
    fn a_reply_fits_into_a_frame_with_any_search_list() {
        let domain = |number: usize| format!("{number:02}{}", ".abcdefghijklmnopqrstuvwxyz".repeat(7));
        for (domains, sent) in [(1, true), (16, true), (0, false)] {
            let lease = Lease { search: (0..domains).map(domain).collect(), ..lease() };
            let (reply, _) = answer(&lease, &encoded(&request(MessageType::Discover, [2, 0, 0, 0, 0, 1]))).unwrap();
            assert!(reply.len() < 1400, "{domains}: {}", reply.len());
            let reply = Message::decode(&mut Decoder::new(&reply)).unwrap();
            assert_eq!(reply.opts().get(OptionCode::DomainSearch).is_some(), sent, "{domains}");
        }
    }

    #[test]
    fn other_messages_clients_and_servers_are_not_answered() {
        let mac = [2, 0, 0, 0, 0, 1];
        assert_eq!(answer(&lease(), &encoded(&request(MessageType::Release, mac))), None);
        let only = Lease { client: Some([2, 0, 0, 0, 0, 9]), ..lease() };
        assert_eq!(answer(&only, &encoded(&request(MessageType::Discover, mac))), None);
        let mut other = request(MessageType::Request, mac);
        other.opts_mut().insert(DhcpOption::ServerIdentifier(Ipv4Addr::new(1, 2, 3, 4)));
        assert_eq!(answer(&lease(), &encoded(&other)), None);
    }

    #[test]
    fn rubbish_is_ignored() {
        let good = encoded(&request(MessageType::Discover, [2, 0, 0, 0, 0, 1]));
        for end in 0..240 {
            assert_eq!(answer(&lease(), &good[..end]), None);
        }
        assert_eq!(answer(&lease(), &[0xff; 4000]), None);
    }

    #[test]
    fn routes_carry_the_default_route_last() {
        let lease = Lease { routes: vec![("192.168.0.0/16".parse().unwrap(), Ipv4Addr::new(10, 0, 2, 1))], ..lease() };
        let (reply, _) = answer(&lease, &encoded(&request(MessageType::Discover, [2, 0, 0, 0, 0, 1]))).unwrap();
        let reply = Message::decode(&mut Decoder::new(&reply)).unwrap();
        let Some(DhcpOption::ClasslessStaticRoute(routes)) = reply.opts().get(OptionCode::ClasslessStaticRoute) else {
            panic!("no routes");
        };
        assert_eq!(routes.last().unwrap().0.prefix_len(), 0);
    }
}
