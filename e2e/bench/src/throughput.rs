//! Measures the throughput of a forwarded port, compared with `kubectl port-forward` to a pod that serves the same bytes, and with the same
//! download from the guest without a proxy.
//!
//! A web server sends the bytes: in the guest behind its emulated network card, and in a pod. The ratio to the pod therefore includes the
//! cost of emulation. A download takes a fifth of a second, so the median of several is reported.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_cluster::host;
use ferrovirt_e2e_tests::{Story, kubeconfig, own_cluster};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    time::{sleep, timeout},
};

use crate::{Figures, median, netns::within};

/// Port of the server.
const PORT: u16 = 8080;
/// Size of the download.
const MIB: usize = 32;
/// Downloads of each kind.
const DOWNLOADS: usize = 7;
/// Time limit for an answer of a server.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Measures both ways once.
pub(crate) async fn measure(story: &Story, figures: &mut Figures) -> Result<()> {
    let serve =
        format!("mkdir -p /tmp/www; dd if=/dev/zero of=/tmp/www/f bs=1M count={MIB}; httpd -p {PORT} -h /tmp/www");
    story
        .apply(&format!(
            "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {{name: server}}
spec:
  terminationGracePeriodSeconds: 0
  domain:
    memory: {{guest: 256Mi}}
    devices:
      disks:
      - {{name: root, disk: {{bus: virtio}}}}
      - {{name: seed, disk: {{bus: virtio}}}}
      interfaces: [{{name: default, masquerade: {{}}}}]
  networks: [{{name: default, pod: {{}}}}]
  volumes:
  - {{name: root, containerDisk: {{image: 'ferrovirt.io/guests/tiny:devel', imagePullPolicy: IfNotPresent}}}}
  - name: seed
    cloudInitNoCloud:
      userData: |
        #cloud-config
        runcmd:
        - {serve}
"
        ))
        .await?;
    story.toolbox("server").await?;
    story.exec("server", &["sh", "-c", &format!("({serve}) >/dev/null 2>&1 </dev/null")]).await?;
    story.wait_running("server").await?;

    let port = free_port().await?;
    let mut command = Command::new("kubectl");
    command.env("KUBECONFIG", kubeconfig()).args(["port-forward", "-n", &story.namespace, "pod/server"]);
    let pod = fetch(command, port).await.context("kubectl port-forward")?;
    let port = free_port().await?;
    let guest =
        fetch(story.virt_command(&["port-forward", "vmi/server"]), port).await.context("kubectl virt port-forward")?;
    if let Some(plan) = own_cluster()? {
        let vmi = story.get("vmi", "server").await?;
        let address = vmi["status"]["interfaces"][0]["ipAddress"].as_str().context("the VMI has no address")?;
        let namespace = host::namespace_path(&plan.node(1).namespace);
        let direct = fetch_directly(&namespace, address.parse()?).await.context("download without a proxy")?;
        figures.insert("portforward_direct_mib_s".into(), direct);
    }
    story.delete("Pod", "server").await?;
    story.delete("vmi", "server").await?;
    figures.insert("portforward_mib_s".into(), guest);
    figures.insert("portforward_pod_mib_s".into(), pod);
    Ok(())
}

async fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0)).await?.local_addr()?.port())
}

/// Returns MiB per second through the local port that the command forwards.
async fn fetch(mut command: Command, port: u16) -> Result<f64> {
    let mut forward = command
        .arg(format!("{port}:{PORT}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .context("cannot start")?;
    let result = timeout(TIMEOUT, fetch_when_served(&mut forward, port)).await;
    forward.kill().await.ok();
    result.context("no answer in time")?
}

async fn fetch_when_served(forward: &mut Child, port: u16) -> Result<f64> {
    let mut rates = Vec::new();
    while rates.len() < DOWNLOADS {
        if let Some(status) = forward.try_wait()? {
            bail!("ended with {status}");
        }
        let fetched = async { download(TcpStream::connect(("127.0.0.1", port)).await?).await };
        match fetched.await {
            Ok(rate) => rates.push(rate),
            Err(_) => sleep(Duration::from_millis(500)).await,
        }
    }
    median(&rates).context("no download succeeded")
}

/// Returns MiB per second from the guest's address to a node.
async fn fetch_directly(namespace: &Path, address: IpAddr) -> Result<f64> {
    let mut rates = Vec::new();
    for _ in 0..DOWNLOADS {
        let stream = within(namespace.to_owned(), move || {
            let stream = std::net::TcpStream::connect_timeout(&SocketAddr::new(address, PORT), TIMEOUT)?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        })?;
        let stream = TcpStream::from_std(stream)?;
        rates.push(timeout(TIMEOUT, download(stream)).await.context("no answer in time")??);
    }
    median(&rates).context("no download")
}

async fn download(mut stream: TcpStream) -> Result<f64> {
    stream.write_all(b"GET /f HTTP/1.0\r\n\r\n").await?;
    let mut buffer = vec![0_u8; 64 * 1024];
    // The clock starts with the first bytes, which excludes the start of the server.
    let first = stream.read(&mut buffer).await?;
    ensure!(buffer.starts_with(b"HTTP/1.0 200") || buffer.starts_with(b"HTTP/1.1 200"), "the server has no such file");
    let (began, mut total) = (Instant::now(), first);
    loop {
        match stream.read(&mut buffer).await? {
            0 => break,
            length => total += length,
        }
    }
    ensure!(total > MIB << 20, "{total} bytes came");
    Ok(MIB as f64 / began.elapsed().as_secs_f64())
}
