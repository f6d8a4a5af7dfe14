//! Accepts the channels that other nodes open, and connects them to the launcher that receives the VMI.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Mutex,
    time::{Duration, Instant},
};

use api::{address::is_dialable, tls::handler_server_name};
use daemon::lock;
use daemon::{
    CancellationToken,
    tls::{Accepted, Callers, Limits, TlsStream, serve_streams},
};
use protocol::channels::{CONNECTED, Channel};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, UnixStream},
    task::JoinSet,
    time::timeout,
};

use super::{
    Channels, LauncherSocket,
    connection::{notice_loss, prepare, tcp},
    frame::Header,
    refusal::Refusal,
    relay::{End, relay},
    target::Admitted,
};

/// Limits of the listener. Ten migrations take about 150 connections. The handshake requires the certificate of a virt-handler.
const LIMITS: Limits = Limits {
    connections: 320,
    probes: 0,
    handshake_proves: true,
    // Channels end with the process.
    drain: Duration::from_secs(1),
    ..Limits::DEFAULT
};
/// Longest time from the handshake to the last byte of the header.
pub(super) const HEADER_LIMIT: Duration = Duration::from_secs(5);
/// Longest time for the launcher to connect a channel. Longer than it waits for its libvirtd (20 s), which may be restarting.
const LAUNCHER_LIMIT: Duration = Duration::from_secs(25);
/// Least interval of logged failures of handshakes. Each pod can cause them.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of checks of the address of migrations.
const ADDRESS_CHECK: Duration = Duration::from_secs(10);
/// Most addresses at which a process listens.
const ADDRESSES: usize = 8;
/// Interface of the migration network, if the pod of virt-handler has one.
const INTERFACE: &str = "migration0";

/// Returns the address at which this node accepts migrations: of the migration network, or else `pod`.
pub(crate) fn address(pod: IpAddr) -> IpAddr {
    let interfaces = match nix::ifaddrs::getifaddrs() {
        Ok(interfaces) => interfaces,
        Err(error) => {
            tracing::warn!(%error, "cannot list network interfaces, migrations use the address of the pod");
            return pod;
        }
    };
    let mut addresses = interfaces.filter(|interface| interface.interface_name == INTERFACE).filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    });
    addresses.find(|address| is_dialable(*address)).unwrap_or(pod)
}

/// Listens at further addresses when that of the migration network changes, until `stop`. Migrations in progress go on at the address
/// at which they began. `now` returns the address.
pub(crate) async fn follow_address(channels: Channels, now: impl Fn() -> IpAddr, stop: CancellationToken) {
    let mut served = vec![channels.endpoint().ip()];
    let mut servers = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(ADDRESS_CHECK) => {}
        }
        let (address, known) = (now(), channels.endpoint());
        if address == known.ip() {
            continue;
        }
        let endpoint = SocketAddr::new(address, known.port());
        if !served.contains(&address) {
            if served.len() >= ADDRESSES {
                continue;
            }
            // An address can be unusable at first.
            let Ok(listener) = daemon::tls::listen(endpoint) else { continue };
            servers.spawn(serve(channels.clone(), listener, stop.clone()));
            served.push(address);
        }
        tracing::info!(%address, former = %known.ip(), "migrations use another address");
        channels.set_endpoint(endpoint);
    }
    while servers.join_next().await.is_some() {}
}

/// Serves other nodes until `stop`.
pub(crate) async fn serve(channels: Channels, listener: TcpListener, stop: CancellationToken) {
    let tls = channels.0.tls.server();
    let failed = {
        let (metrics, logged) = (channels.0.metrics.clone(), std::sync::Arc::new(Logged::default()));
        move |address: SocketAddr, error: &io::Error| {
            metrics.refuse(Refusal::Handshake.label());
            if logged.is_due() {
                tracing::warn!(peer = %address, %error, reason = %Refusal::Handshake, "channel of a migration is refused");
            }
        }
    };
    let serve = move |accepted| connection(channels.clone(), accepted);
    serve_streams(listener, tls, LIMITS, Callers::default(), stop, failed, serve).await;
}

/// Time of the last message.
#[derive(Default)]
struct Logged(Mutex<Option<Instant>>);

impl Logged {
    /// Returns true if a message may be logged now.
    fn is_due(&self) -> bool {
        let mut last = lock(&self.0);
        let is_due = last.is_none_or(|last| last.elapsed() >= LOG_INTERVAL);
        if is_due {
            *last = Some(Instant::now());
        }
        is_due
    }
}

async fn connection(channels: Channels, mut accepted: Accepted) {
    let peer = accepted.peer.address;
    let name = accepted.peer.dns_name();
    let mut header = None;
    let refuse = |header: Option<&Header>, reason: Refusal, detail: &str| {
        channels.0.metrics.refuse(reason.label());
        let vmi = header.map(|header| header.migration.vmi.as_str());
        let migration = header.map(|header| header.migration.migration.as_str());
        let channel = header.map(|header| header.channel.name());
        let node = name.as_deref();
        tracing::warn!(%peer, node, vmi, migration, channel, %reason, detail, "channel of a migration is refused");
    };
    let admitted = match admit(&channels, &mut accepted, name.as_deref(), &mut header).await {
        Ok(admitted) => admitted,
        Err(reason) => return refuse(header.as_ref(), reason, ""),
    };
    let Some(header) = header else { return };
    let (mut stream, _kept) = accepted.keep();
    let served = async {
        let launcher = match connect_launcher(&*admitted.launcher, header.channel).await {
            Ok(launcher) => launcher,
            Err(error) => return refuse(Some(&header), Refusal::Launcher, &error.to_string()),
        };
        let open = channels.0.metrics.open(header.channel);
        let relayed = async {
            answer(&mut stream, header.channel).await?;
            relay(stream, launcher, End::Target, header.channel, &open).await
        };
        if let Err(error) = relayed.await {
            let (vmi, channel) = (&header.migration.vmi, header.channel.name());
            tracing::info!(%peer, vmi, channel, %error, "channel of a migration ended");
        }
    };
    tokio::select! {
        () = served => {}
        () = admitted.stop.cancelled() => tracing::debug!(vmi = header.migration.vmi, "channel of a migration is ended"),
    }
}

/// Reads the header and finds the migration.
async fn admit(
    channels: &Channels,
    accepted: &mut Accepted,
    name: Option<&str>,
    header: &mut Option<Header>,
) -> Result<Admitted, Refusal> {
    let name = name.ok_or(Refusal::Certificate)?;
    if !channels.0.tls.has_agreed(&accepted.stream) {
        return Err(Refusal::Protocol);
    }
    if notice_loss(tcp(&accepted.stream)).is_err() {
        return Err(Refusal::Header);
    }
    let read = timeout(HEADER_LIMIT, Header::read(&mut accepted.stream)).await;
    let read = header.insert(read.map_err(|_| Refusal::Slow)?.map_err(|_| Refusal::Header)?);
    channels.0.targets.admit(&read.migration, &channels.0.in_progress, |node| handler_server_name(node) == name)
}

async fn answer(stream: &mut TlsStream, channel: Channel) -> io::Result<()> {
    prepare(tcp(stream), channel)?;
    stream.write_all(&[CONNECTED]).await?;
    stream.flush().await
}

/// Opens a channel of the launcher, or of its QEMU.
async fn connect_launcher(launcher: &dyn LauncherSocket, channel: Channel) -> io::Result<UnixStream> {
    let connected = async {
        if channel.is_bulk() {
            return launcher.open_qemu(channel).await;
        }
        let mut stream = launcher.open().await?;
        stream.write_all(&[channel.byte()]).await?;
        match stream.read_u8().await? {
            CONNECTED => Ok(stream),
            other => Err(io::Error::other(format!("it answers with byte {other}"))),
        }
    };
    timeout(LAUNCHER_LIMIT, connected).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_migration_network_the_address_of_the_pod_is_published() {
        let pod = "10.244.0.7".parse().unwrap();
        assert_eq!(address(pod), pod);
    }
}
