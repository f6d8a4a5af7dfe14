//! Executes a plan in the network namespace of the calling thread.

use std::{net::Ipv4Addr, path::Path, process::Stdio, time::Duration};

use futures::{TryStream, TryStreamExt};
use rtnetlink::{
    Handle, LinkBridge, LinkBridgePort, LinkMessageBuilder, LinkUnspec, RouteMessageBuilder,
    packet_route::{
        address::{AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage},
        link::{LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
        route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::Command,
};

use super::{
    Error, InterfaceFailure, PodNetwork, bridge,
    observed::{Address, Link, Observed, Route, is_link_local},
    plan::decide,
    request::{Release, Request},
    step::{Step, TAP_OWNER},
};
use crate::safe_dir::SafeDir;

/// Limit of nft.
const NFT_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of nft's error output that are kept.
const NFT_COMPLAINT: u64 = 4 * 1024;
/// Search path of the node's programs, independent of virt-handler's environment.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Observes, decides and executes, one interface after the other. The failure of one does not affect the others.
pub(super) async fn reconcile(requests: &[Request], releases: &[Release]) -> Result<PodNetwork, Error> {
    let (connection, handle, _) =
        rtnetlink::new_connection().map_err(|source| link_error("open netlink for", "links", source))?;
    // Ends with the runtime of this thread.
    tokio::spawn(connection);
    let mut ready = PodNetwork::default();
    for release in releases {
        match give_back(release, &handle).await {
            Ok(()) => {
                ready.released.insert(release.name.clone());
            }
            Err(error) => ready.failures.push(InterfaceFailure::of(&release.name, &error)),
        }
    }
    for request in requests {
        match set_up(request, &handle).await {
            Ok(network) => {
                ready.nics.extend(network.nics);
                ready.interfaces.extend(network.interfaces);
            }
            Err(error) => ready.failures.push(InterfaceFailure::of(&request.name, &error)),
        }
    }
    Ok(ready)
}

async fn give_back(release: &Release, handle: &Handle) -> Result<(), Error> {
    for step in bridge::release(&release.pod_link, &observe(handle).await?)? {
        carry_out(&step, handle).await?;
    }
    tracing::info!(interface = %release.name, "the link is given back to the network plugins");
    Ok(())
}

async fn set_up(request: &Request, handle: &Handle) -> Result<PodNetwork, Error> {
    let plan = decide(request, &observe(handle).await?)?;
    for step in &plan.steps {
        carry_out(step, handle).await?;
    }
    tracing::debug!(interface = %request.name, steps = plan.steps.len(), "pod network is set up");
    Ok(plan.network)
}

/// Reads links, addresses and routes.
async fn observe(handle: &Handle) -> Result<Observed, Error> {
    let links = list("links", handle.link().get().execute()).await?;
    let addresses = list("addresses", handle.address().get().execute()).await?;
    let query = RouteMessageBuilder::<Ipv4Addr>::new().build();
    let routes = list("routes", handle.route().get(query).execute()).await?;
    Ok(Observed {
        links: links.iter().filter_map(link).collect(),
        addresses: addresses.iter().filter_map(address).collect(),
        routes: routes.iter().filter_map(route).collect(),
    })
}

async fn list<M>(what: &str, messages: impl TryStream<Ok = M, Error = rtnetlink::Error>) -> Result<Vec<M>, Error> {
    messages.try_collect().await.map_err(|source| link_error("list", what, source))
}

fn link(message: &LinkMessage) -> Option<Link> {
    let mut name = None;
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        kind: String::new(),
        mac: None,
        mtu: 0,
        controller: None,
        up: message.header.flags.contains(LinkFlags::Up),
        alias: None,
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(value) => name = Some(value.clone()),
            LinkAttribute::Address(value) => link.mac = value.as_slice().try_into().ok(),
            LinkAttribute::Mtu(value) => link.mtu = *value,
            LinkAttribute::Controller(value) => link.controller = Some(*value).filter(|index| *index != 0),
            LinkAttribute::IfAlias(value) => link.alias = Some(value.clone()),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    if let LinkInfo::Kind(kind) = info {
                        link.kind = kind.to_string();
                    }
                }
            }
            _ => {}
        }
    }
    name.map(|name| Link { name, ..link })
}

fn address(message: &AddressMessage) -> Option<Address> {
    // Of a point-to-point link IFA_ADDRESS is the other end.
    let (mut local, mut other) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => other = Some(*ip),
            _ => {}
        }
    }
    Some(Address { link: message.header.index, ip: local.or(other)?, prefix: message.header.prefix_len })
}

/// Converts an IPv4 route of the main table with one link.
fn route(message: &RouteMessage) -> Option<Route> {
    if message.header.table != RouteHeader::RT_TABLE_MAIN || message.header.kind != RouteType::Unicast {
        return None;
    }
    let (mut link, mut destination, mut gateway) = (None, Ipv4Addr::UNSPECIFIED, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => link = Some(*index),
            RouteAttribute::Destination(RouteAddress::Inet(ip)) => destination = *ip,
            RouteAttribute::Gateway(RouteAddress::Inet(ip)) => gateway = Some(*ip),
            _ => {}
        }
    }
    Some(Route { link: link?, destination, prefix: message.header.destination_prefix_length, gateway })
}

async fn carry_out(step: &Step, handle: &Handle) -> Result<(), Error> {
    match step {
        Step::CreateBridge { name, mac, mtu, up } => {
            let message = LinkBridge::new(name).address(mac.to_vec()).mtu(*mtu);
            let message = if *up { message.up() } else { message.down() };
            let made = handle.link().add(message.build()).execute().await;
            made.map_err(|source| link_error("create bridge", name, source))
        }
        Step::CreateTap { name, queues } => create_tap(name, *queues),
        Step::SetLink { name, mtu, controller, up } => {
            let mut message = LinkUnspec::new_with_index(index_of(handle, name).await?);
            if let Some(mtu) = mtu {
                message = message.mtu(*mtu);
            }
            if let Some(controller) = controller {
                message = message.controller(index_of(handle, controller).await?);
            }
            if *up {
                message = message.up();
            }
            set_link(handle, name, message).await
        }
        Step::AddAddress { link, ip, prefix } => {
            let index = index_of(handle, link).await?;
            let mut request = handle.address().add(index, *ip, *prefix);
            if ip.is_ipv6() {
                // The address is unique on our own bridge: the guest need not wait for duplicate address detection.
                let message = request.message_mut();
                message.header.flags |= AddressHeaderFlags::Nodad;
                message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
            }
            request.execute().await.map_err(|source| link_error("add an address to", link, source))
        }
        Step::Rename { from, to } => {
            let index = index_of(handle, from).await?;
            set_link(handle, from, LinkUnspec::new_with_index(index).down()).await?;
            set_link(handle, from, LinkUnspec::new_with_index(index).name(to.as_str())).await
        }
        Step::SetMac { link, mac } => {
            let message = LinkUnspec::new_with_index(index_of(handle, link).await?).address(mac.to_vec());
            set_link(handle, link, message).await
        }
        Step::Delete { link } => {
            let deleted = handle.link().del(index_of(handle, link).await?).execute().await;
            deleted.map_err(|source| link_error("delete", link, source))
        }
        Step::TakeAddresses { link } => take_addresses(handle, link).await,
        Step::StopLearning { link } => {
            let message = LinkBridgePort::new(index_of(handle, link).await?).learning(false).build();
            let set = handle.link().set_port(message).execute().await;
            set.map_err(|source| link_error("change the port of", link, source))
        }
        Step::SetKernel { path, value } => {
            // `/proc/sys/net` shows the network namespace of the calling thread.
            Ok(SafeDir::trusted(Path::new("/proc/sys"))?.write_existing(path, value.as_bytes())?)
        }
        Step::Rules(text) => rules(text).await,
        Step::Mark { link, mark } => {
            let message = LinkUnspec::new_with_index(index_of(handle, link).await?).alias(mark.as_str());
            set_link(handle, link, message).await
        }
    }
}

async fn take_addresses(handle: &Handle, link: &str) -> Result<(), Error> {
    let failed = |source| link_error("take an address from", link, source);
    let index = index_of(handle, link).await?;
    let of_link: Vec<AddressMessage> =
        handle.address().get().set_link_index_filter(index).execute().try_collect().await.map_err(failed)?;
    for message in of_link {
        if address(&message).is_some_and(|address| !is_link_local(&address.ip)) {
            handle.address().del(message).execute().await.map_err(failed)?;
        }
    }
    Ok(())
}

async fn set_link(handle: &Handle, name: &str, message: LinkMessageBuilder<LinkUnspec>) -> Result<(), Error> {
    let set = handle.link().set(message.build()).execute().await;
    set.map_err(|source| link_error("change", name, source))
}

async fn index_of(handle: &Handle, name: &str) -> Result<u32, Error> {
    let found = handle.link().get().match_name(name).execute().try_next().await;
    match found.map_err(|source| link_error("look up", name, source))? {
        Some(message) => Ok(message.header.index),
        None => Err(link_error("look up", name, std::io::Error::from(std::io::ErrorKind::NotFound))),
    }
}

/// Creates a tap device that outlives this process and that the launcher may open.
fn create_tap(name: &str, queues: u32) -> Result<(), Error> {
    let failed = |source| link_error("create tap device", name, source);
    let owner = i32::try_from(TAP_OWNER).map_err(|source| link_error("create tap device", name, source))?;
    let builder = tokio_tun::Tun::builder()
        .name(name)
        .tap()
        .owner(owner)
        .group(owner)
        .queues(usize::try_from(queues).unwrap_or(1))
        .persist();
    builder.build().map(drop).map_err(failed)
}

/// Applies rules with nft: one program, one transaction.
async fn rules(text: &str) -> Result<(), Error> {
    let run = async {
        let mut nft = Command::new("nft")
            .args(["-f", "-"])
            .env_clear()
            .env("PATH", PATH)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(Error::Nft)?;
        let (stdin, stderr) = (nft.stdin.take(), nft.stderr.take());
        let write = async {
            if let Some(mut stdin) = stdin {
                // If nft stops reading, its exit status and error output contain the reason.
                let _ = stdin.write_all(text.as_bytes()).await;
            }
        };
        let read = async {
            let mut complaint = Vec::new();
            if let Some(mut stderr) = stderr {
                let _ = (&mut stderr).take(NFT_COMPLAINT).read_to_end(&mut complaint).await;
                // The rest is drained, so that nft does not block.
                let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
            }
            complaint
        };
        let ((), complaint) = tokio::join!(write, read);
        let status = nft.wait().await.map_err(Error::Nft)?;
        if status.success() {
            return Ok(());
        }
        Err(Error::Rules(format!("{status}: {}", String::from_utf8_lossy(&complaint).trim())))
    };
    tokio::time::timeout(NFT_TIMEOUT, run).await.map_err(|_| Error::Timeout)?
}

fn link_error(
    operation: &'static str,
    link: &str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> Error {
    Error::Link { operation, link: link.to_owned(), source: source.into() }
}
