//! DHCPv6 server on the bridge of the guest's interface, with one lease.
//!
//! As in [`super::dhcp`], [`answer`] is pure and decides. There are no router advertisements: as in the reference,
//! cloud-init configures the IPv6 gateway.

use std::{
    ffi::OsString,
    net::{Ipv6Addr, SocketAddr, SocketAddrV6},
    os::fd::AsRawFd,
};

use dhcproto::{
    Decodable, Decoder, Encodable, Encoder,
    v6::{DhcpOption, DhcpOptions, IAAddr, IANA, Message, MessageType, OptionCode},
};
use nix::{
    net::if_::if_nametoindex,
    sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn6, bind, setsockopt, socket, sockopt},
};
use tokio::net::UdpSocket;

use crate::network::dhcp::{DhcpError, LEASE_SECONDS, PACKET_LIMIT, exchange};

/// Port of servers.
const PORT: u16 = 547;
/// Multicast address of all servers and relays of a link.
const SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);

/// The guest's network configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    /// Guest's address.
    pub(crate) address: Ipv6Addr,
    /// MAC address that identifies the server.
    pub(crate) server: [u8; 6],
    /// Name servers.
    pub(crate) dns: Vec<Ipv6Addr>,
}

impl Lease {
    /// Returns the server's DUID, made of its MAC address (DUID-LL).
    fn server_id(&self) -> Vec<u8> {
        let mut id = vec![0, 3, 0, 1];
        id.extend(self.server);
        id
    }
}

/// Returns the reply to a packet; `None` if it is malformed or for another server.
pub(crate) fn answer(lease: &Lease, packet: &[u8]) -> Option<Vec<u8>> {
    let request = Message::decode(&mut Decoder::new(packet.get(..packet.len().min(PACKET_LIMIT))?)).ok()?;
    let asked = request.opts();
    let rapid = request.msg_type() == MessageType::Solicit && asked.get(OptionCode::RapidCommit).is_some();
    let kind = match request.msg_type() {
        MessageType::Solicit if !rapid => MessageType::Advertise,
        MessageType::Solicit
        | MessageType::Request
        | MessageType::Confirm
        | MessageType::Renew
        | MessageType::Rebind
        | MessageType::Release
        | MessageType::Decline
        | MessageType::InformationRequest => MessageType::Reply,
        _ => return None,
    };
    let client = asked.get(OptionCode::ClientId);
    if client.is_none() && request.msg_type() != MessageType::InformationRequest {
        return None;
    }
    let server = lease.server_id();
    if let Some(DhcpOption::ServerId(meant)) = asked.get(OptionCode::ServerId)
        && *meant != server
    {
        return None;
    }
    let mut reply = Message::new_with_id(kind, request.xid());
    let options = reply.opts_mut();
    options.insert(DhcpOption::ServerId(server));
    if let Some(client) = client {
        options.insert(client.clone());
    }
    if rapid {
        options.insert(DhcpOption::RapidCommit);
    }
    if let Some(DhcpOption::IANA(association)) = asked.get(OptionCode::IANA) {
        let mut addresses = DhcpOptions::new();
        addresses.insert(DhcpOption::IAAddr(IAAddr {
            addr: lease.address,
            preferred_life: LEASE_SECONDS,
            valid_life: LEASE_SECONDS,
            opts: DhcpOptions::new(),
        }));
        // The client chooses when it renews.
        options.insert(DhcpOption::IANA(IANA { id: association.id, t1: 0, t2: 0, opts: addresses }));
    }
    if !lease.dns.is_empty() {
        options.insert(DhcpOption::DomainNameServers(lease.dns.clone()));
    }
    let mut bytes = Vec::new();
    reply.encode(&mut Encoder::new(&mut bytes)).ok()?;
    Some(bytes)
}

/// Opens the server's socket on a bridge. Separate from [`serve`], so that a failure is known before the guest starts.
pub(crate) fn open(bridge: &str) -> Result<UdpSocket, DhcpError> {
    let failed = |source: std::io::Error| DhcpError::Socket { bridge: bridge.to_owned(), source };
    let fd = socket(AddressFamily::Inet6, SockType::Datagram, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)
        .map_err(|e| failed(e.into()))?;
    setsockopt(&fd, sockopt::ReuseAddr, &true).map_err(|e| failed(e.into()))?;
    setsockopt(&fd, sockopt::Ipv6V6Only, &true).map_err(|e| failed(e.into()))?;
    setsockopt(&fd, sockopt::BindToDevice, &OsString::from(bridge)).map_err(|e| failed(e.into()))?;
    let address = SockaddrIn6::from(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, PORT, 0, 0));
    bind(fd.as_raw_fd(), &address).map_err(|e| failed(e.into()))?;
    let index = if_nametoindex(bridge).map_err(|e| failed(e.into()))?;
    let socket = std::net::UdpSocket::from(fd);
    socket.join_multicast_v6(&SERVERS, index).map_err(failed)?;
    UdpSocket::from_std(socket).map_err(failed)
}

/// Serves requests until the worker ends.
pub(crate) async fn serve(socket: UdpSocket, lease: Lease) {
    exchange(socket, move |packet, from| Some((answer(&lease, packet).filter(|_| is_client(from))?, from))).await;
}

/// Returns true if a client of the link can have this address. It may send from any port, and is answered there.
fn is_client(from: SocketAddr) -> bool {
    matches!(from, SocketAddr::V6(from) if from.port() != 0 && from.ip().is_unicast_link_local())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: [u8; 4] = [0, 3, 0, 1];

    fn lease() -> Lease {
        Lease {
            address: "fd10:0:2::2".parse().unwrap(),
            server: [2, 0, 0, 0, 0, 0],
            dns: vec!["fd00::a".parse().unwrap()],
        }
    }

    fn request(kind: MessageType, more: Vec<DhcpOption>) -> Vec<u8> {
        let mut message = Message::new_with_id(kind, [1, 2, 3]);
        let association = IANA { id: 7, t1: 0, t2: 0, opts: DhcpOptions::new() };
        message.opts_mut().insert(DhcpOption::ClientId(CLIENT.to_vec()));
        message.opts_mut().insert(DhcpOption::IANA(association));
        for option in more {
            message.opts_mut().insert(option);
        }
        let mut bytes = Vec::new();
        message.encode(&mut Encoder::new(&mut bytes)).unwrap();
        bytes
    }

    #[test]
    fn each_request_is_answered_with_the_one_address() {
        for (kind, more, expected) in [
            (MessageType::Solicit, vec![], MessageType::Advertise),
            (MessageType::Solicit, vec![DhcpOption::RapidCommit], MessageType::Reply),
            (MessageType::Request, vec![DhcpOption::ServerId(lease().server_id())], MessageType::Reply),
            (MessageType::Renew, vec![], MessageType::Reply),
        ] {
            let rapid = !more.is_empty() && kind == MessageType::Solicit;
            let reply = answer(&lease(), &request(kind, more)).unwrap();
            let reply = Message::decode(&mut Decoder::new(&reply)).unwrap();
            assert_eq!((reply.msg_type(), reply.xid()), (expected, [1, 2, 3]));
            let options = reply.opts();
            assert_eq!(options.get(OptionCode::ClientId), Some(&DhcpOption::ClientId(CLIENT.to_vec())));
            assert_eq!(
                options.get(OptionCode::ServerId),
                Some(&DhcpOption::ServerId(vec![0, 3, 0, 1, 2, 0, 0, 0, 0, 0]))
            );
            assert_eq!(options.get(OptionCode::RapidCommit).is_some(), rapid);
            assert_eq!(options.get(OptionCode::DomainNameServers), Some(&DhcpOption::DomainNameServers(lease().dns)));
            let Some(DhcpOption::IANA(association)) = options.get(OptionCode::IANA) else { panic!("no association") };
            assert_eq!(association.id, 7);
            let Some(DhcpOption::IAAddr(address)) = association.opts.get(OptionCode::IAAddr) else {
                panic!("no address");
            };
            assert_eq!((address.addr, address.valid_life), (lease().address, LEASE_SECONDS));
        }
    }

    #[test]
    fn only_clients_of_the_link_are_answered() {
        for (from, expected) in [
            ("[fe80::1%3]:546", true),
            ("[fe80::1]:546", true),
            ("[fe80::1]:40000", true),
            ("[fe80::1]:0", false),
            ("[::]:546", false),
            ("[fd00::1]:546", false),
            ("[ff02::1]:546", false),
            ("10.0.2.2:546", false),
        ] {
            assert_eq!(is_client(from.parse().unwrap()), expected, "{from}");
        }
    }

    #[test]
    fn other_servers_messages_and_rubbish_are_not_answered() {
        let other = vec![DhcpOption::ServerId(vec![0, 3, 0, 1, 9, 9, 9, 9, 9, 9])];
        assert_eq!(answer(&lease(), &request(MessageType::Request, other)), None);
        assert_eq!(answer(&lease(), &request(MessageType::Advertise, vec![])), None);
        // A packet without sender gets no answer.
        assert_eq!(answer(&lease(), &[1, 0, 0, 1]), None);
        let good = request(MessageType::Solicit, vec![]);
        for end in 0..8 {
            assert_eq!(answer(&lease(), &good[..end]), None);
        }
        assert_eq!(answer(&lease(), &[0xff; 4000]), None);
    }
}
