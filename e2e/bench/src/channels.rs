//! Measures the channels of migrations without a cluster: virt-handler's relay of both ends, between a program that writes like the
//! QEMU of the source and one that reads like that of the target.
//!
//! The throughput is measured in a network that delays each packet by a millisecond on its way between two network namespaces, CPU time
//! without it, on the loopback interface. With the program of an earlier build both take turns.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use ferrovirt_e2e_cluster::host;
use protocol::channels::{AWAIT, Channel};
use tokio::runtime::Runtime;
use tokio_tun::Tun;

use crate::{Figures, median, netns::within};

/// Bytes before the measurement: the windows of the connection grow.
const WARM_UP: u64 = 256 << 20;
/// Measured bytes.
const BYTES: u64 = 1 << 30;
/// Bytes of a write. QEMU writes up to 64 pages at once.
const WRITE: usize = 256 << 10;
/// Time that each packet takes from one end to the other.
const DELAY: Duration = Duration::from_millis(1);
/// Largest packet, as on networks for migrations.
const MTU: i32 = 9000;
/// Most packets on their way in one direction. Further ones are lost.
const ON_THE_WAY: usize = 16 << 10;
/// Network namespaces of the source and of the target with their addresses.
const ENDS: [(&str, Ipv4Addr); 2] =
    [("bench-source", Ipv4Addr::new(10, 88, 253, 1)), ("bench-target", Ipv4Addr::new(10, 88, 253, 2))];
/// Port of the target.
const PORT: u16 = 18_187;
/// Longest time without any progress.
const PATIENCE: Duration = Duration::from_secs(30);

/// Measures the program `now`, and in turns with it that of an earlier build.
pub(crate) fn measure(now: &Path, before: Option<&Path>, rounds: usize, figures: &mut Figures) -> Result<()> {
    let programs = [("", Some(now)), ("before_", before)].into_iter();
    let mut builds: Vec<_> =
        programs.filter_map(|(name, program)| Some((name, program?, Vec::new(), Vec::new()))).collect();
    let network = DelayedNetwork::start()?;
    for round in 0..rounds {
        for (name, program, delayed, cpu) in &mut builds {
            let far = transfer(program, Some(&network))?;
            let near = transfer(program, None)?;
            println!("{name}channel {round}: {:.2?} a GiB with the delay, CPU time {:.2?}", far.took, near.cpu);
            delayed.push(far.took.as_secs_f64());
            cpu.push(near.cpu.as_secs_f64());
        }
    }
    for (name, _, delayed, cpu) in &builds {
        let took = median(delayed).context("no round")?;
        figures.insert(format!("{name}channel_1ms_s_per_gib"), took);
        figures.insert(format!("{name}channel_1ms_mib_s"), 1024.0 / took);
        figures.insert(format!("{name}channel_cpu_s_per_gib"), median(cpu).context("no round")?);
    }
    Ok(())
}

/// A transfer of [`BYTES`].
struct Transfer {
    took: Duration,
    /// CPU time of both ends.
    cpu: Duration,
}

fn transfer(program: &Path, network: Option<&DelayedNetwork>) -> Result<Transfer> {
    let directory = Directory::create()?;
    let (launcher, qemu) = (directory.listen("launcher")?, directory.listen("qemu")?);
    let address = SocketAddr::from((network.map_or(Ipv4Addr::LOCALHOST, |_| ENDS[1].1), PORT));
    let start = |end: &str, namespace: &'static str, socket: &str| {
        End::start(program, end, network.map(|_| namespace), address, &directory.0, socket)
    };
    let target = start("target", ENDS[1].0, "qemu")?;
    let source = start("source", ENDS[0].0, "launcher")?;
    let mut near = accept(&launcher)?;
    let mut first = [0];
    near.read_exact(&mut first).context("virt-handler does not wait for a channel")?;
    ensure!(first == [AWAIT], "virt-handler begins with byte {first:?}");
    near.write_all(&[Channel::Memory.byte()])?;
    let far = accept(&qemu).context("the channel does not arrive")?;
    let writes = thread::spawn(move || write(near));
    let transfer = receive(far, &[&source, &target]);
    drop((source, target));
    writes.join().map_err(|_| anyhow!("the thread that writes has ended"))?.or_else(|error| match &transfer {
        // The other side has reported its own failure.
        Err(_) => Ok(()),
        Ok(_) => Err(error),
    })?;
    transfer
}

fn write(mut stream: UnixStream) -> io::Result<()> {
    let block = vec![0x5a; WRITE];
    for _ in 0..(WARM_UP + BYTES) / WRITE as u64 {
        stream.write_all(&block)?;
    }
    Ok(())
}

fn receive(mut stream: UnixStream, ends: &[&End]) -> Result<Transfer> {
    let cpu = || ends.iter().map(|end| end.cpu()).sum::<Result<Duration>>();
    discard(&mut stream, WARM_UP)?;
    let (began, used) = (Instant::now(), cpu()?);
    discard(&mut stream, BYTES)?;
    Ok(Transfer { took: began.elapsed(), cpu: cpu()?.saturating_sub(used) })
}

fn discard(stream: &mut UnixStream, length: u64) -> Result<()> {
    let mut buffer = vec![0; WRITE];
    let mut left = length;
    while left > 0 {
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = stream.read(&mut buffer[..most]).context("the channel stands still")?;
        ensure!(read > 0, "the channel ended {left} bytes too early");
        left -= read as u64;
    }
    Ok(())
}

/// Accepts a connection in time.
fn accept(listener: &UnixListener) -> Result<UnixStream> {
    let began = Instant::now();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                return Ok(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                ensure!(began.elapsed() < PATIENCE, "nobody connects");
                thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// A directory for sockets and certificates, removed on drop.
struct Directory(PathBuf);

impl Directory {
    fn create() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("ferrovirt-channels-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }

    fn listen(&self, name: &str) -> Result<UnixListener> {
        let listener = UnixListener::bind(self.0.join(name))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// One end of the channels, a process.
struct End(Child);

impl End {
    /// Starts the program and waits until it is ready.
    fn start(
        program: &Path,
        end: &str,
        namespace: Option<&str>,
        target: SocketAddr,
        directory: &Path,
        socket: &str,
    ) -> Result<Self> {
        let mut command = match namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.args([end, "--target", &target.to_string(), "--directory"]).arg(directory);
        command.arg("--socket").arg(directory.join(socket));
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut end = Self(child.with_context(|| program.display().to_string())?);
        let output = end.0.stdout.take().context("no output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line.trim() == "ready", "{} does not start: {line}", program.display());
        Ok(end)
    }

    /// Returns the CPU time of all threads.
    fn cpu(&self) -> Result<Duration> {
        let mut nanoseconds = 0;
        for thread in fs::read_dir(format!("/proc/{}/task", self.0.id()))? {
            // A thread that was idle for long may have ended.
            let Ok(text) = fs::read_to_string(thread?.path().join("schedstat")) else { continue };
            let first = text.split(' ').next().and_then(|word| word.parse::<u64>().ok());
            nanoseconds += first.with_context(|| format!("no CPU time: {text}"))?;
        }
        Ok(Duration::from_nanos(nanoseconds))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two network namespaces between which each packet takes [`DELAY`]. The kernel's own delay, netem, is not part of every kernel.
struct DelayedNetwork {
    _runtime: Runtime,
}

impl DelayedNetwork {
    fn start() -> Result<Self> {
        // Those of an interrupted run.
        remove();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let [(source, near), (target, far)] = ENDS;
        let first = Arc::new(interface(&runtime, source, near, far)?);
        let second = Arc::new(interface(&runtime, target, far, near)?);
        delay(&runtime, first.clone(), second.clone());
        delay(&runtime, second, first);
        Ok(Self { _runtime: runtime })
    }
}

impl Drop for DelayedNetwork {
    fn drop(&mut self) {
        remove();
    }
}

fn remove() {
    for (namespace, _) in ENDS {
        let _ = Command::new("ip").args(["netns", "delete", namespace]).stderr(Stdio::null()).status();
    }
}

/// Creates a network namespace with an interface whose packets this program reads and writes.
fn interface(runtime: &Runtime, namespace: &'static str, own: Ipv4Addr, other: Ipv4Addr) -> Result<Tun> {
    let status = Command::new("ip").args(["netns", "add", namespace]).status().context("cannot run ip")?;
    ensure!(status.success(), "ip netns add {namespace}: {status}");
    let handle = runtime.handle().clone();
    within(host::namespace_path(namespace), move || {
        let _entered = handle.enter();
        let built = Tun::builder().name("bench").mtu(MTU).address(own).destination(other).up().build();
        let mut queues = built.context("cannot create the interface")?;
        queues.pop().context("the interface has no queue")
    })
}

/// Passes packets on, each a while after it came.
fn delay(runtime: &Runtime, from: Arc<Tun>, to: Arc<Tun>) {
    let (sender, packets) = mpsc::sync_channel::<(Instant, Vec<u8>)>(ON_THE_WAY);
    runtime.spawn(async move {
        let mut buffer = vec![0; MTU as usize];
        while let Ok(length) = from.recv(&mut buffer).await {
            // A full queue drops packets, as networks do.
            let _ = sender.try_send((Instant::now() + DELAY, buffer[..length].to_vec()));
        }
    });
    // Timers of the runtime have a resolution of a millisecond.
    thread::spawn(move || {
        while let Ok((due, packet)) = packets.recv() {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let _ = to.try_send(&packet);
        }
    });
}
