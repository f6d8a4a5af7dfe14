//! libvirt's daemon: configuration, start, and restart after a crash.
//!
//! The daemon runs in session mode as the launcher's user. QEMU daemonizes and becomes a child of the pod's first
//! process, so the daemon may crash and restart while the guest runs. A restarted worker takes over a running daemon
//! for the same reason.

use std::{
    fs::DirBuilder,
    io::Write,
    os::fd::OwnedFd,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use tokio::{
    process::Command,
    sync::{oneshot, watch},
};

use crate::{hypervisor::StartError, paths::Paths, tasks::Tasks};

/// Limits of the capabilities cache: number of files and bytes of each.
const CACHE_FILES: usize = 16;
const CACHE_FILE_SIZE: usize = 4 * 1024 * 1024;
/// First and longest pause before a crashed daemon restarts; it doubles in between.
const RESTART_PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// Time until a daemon that does not end is killed.
const STOP_DEADLINE: Duration = Duration::from_secs(3);

/// Interval of checks on a daemon that was taken over.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// Socket name of virtqemud, the daemon for QEMU only.
const SOCKET_NAME: &str = "virtqemud-sock";

/// The installed daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DaemonProgram {
    /// Program.
    pub(crate) path: PathBuf,
    /// Name of its socket.
    pub(crate) socket: &'static str,
    /// Name of its configuration file.
    pub(crate) configuration: &'static str,
    /// Log filters besides warnings, in libvirt's syntax.
    pub(crate) log_filters: Option<String>,
}

impl DaemonProgram {
    /// Finds the daemon: virtqemud if the distribution ships it, else libvirtd.
    pub(crate) fn find() -> Result<Self, StartError> {
        let candidates = [
            ("/usr/sbin/virtqemud", SOCKET_NAME, "virtqemud.conf"),
            ("/usr/sbin/libvirtd", "libvirt-sock", "libvirtd.conf"),
        ];
        candidates
            .into_iter()
            .find(|(path, ..)| Path::new(path).exists())
            .map(|(path, socket, configuration)| Self { path: path.into(), socket, configuration, log_filters: None })
            .ok_or(StartError::Missing)
    }

    /// Returns the path of the daemon's socket.
    pub(crate) fn socket(&self, paths: &Paths) -> PathBuf {
        paths.libvirt_runtime().join(self.socket)
    }

    /// Returns the daemon's URI.
    pub(crate) fn uri(&self, paths: &Paths) -> String {
        format!("qemu+unix:///session?socket={}", self.socket(paths).display())
    }
}

/// Configuration of libvirt's QEMU driver. The pod is the domain's sandbox, so libvirt adds none of its own.
const QEMU_CONF: &str = "\
# The launcher keeps QEMU's log; there is no virtlogd.
stdio_handler = \"file\"
security_driver = \"none\"
dynamic_ownership = 0
remember_owner = 0
namespaces = [ ]
cgroup_controllers = [ ]
max_core = 0
dump_guest_core = 0
vnc_tls = 0
vnc_sasl = 0
# The pods' traffic is encrypted by virt-handler.
migrate_tls_force = 0
# The source's daemon notices a target that does not answer within 15 s.
keepalive_interval = 3
keepalive_count = 4
";

/// Configuration of the daemon. It has one client, all of whose calls may wait for QEMU or the guest at once: the daemon reads no further
/// request of a client with `max_client_requests`. A worker begins when no other is free, so `max_workers` costs no memory until then.
pub(super) const DAEMON_CONF: &str = "\
log_level = 3
log_outputs = \"3:stderr\"
auth_unix_rw = \"none\"
# There is no audit daemon in the pod.
audit_level = 0
min_workers = 2
max_workers = 16
prio_workers = 1
max_clients = 8
max_anonymous_clients = 8
max_client_requests = 16
admin_min_workers = 1
admin_max_workers = 1
admin_max_clients = 2
keepalive_interval = -1
";

/// Writes the configuration and creates the directories.
pub(crate) fn configure(program: &DaemonProgram, paths: &Paths) -> Result<(), StartError> {
    for directory in [paths.libvirt_config(), paths.libvirt_runtime(), paths.capabilities_cache(), paths.nvram()] {
        make_directory(&directory)?;
    }
    let mut qemu = QEMU_CONF.to_owned();
    if Path::new("/dev/hugepages").exists() {
        qemu.push_str("hugetlbfs_mount = \"/dev/hugepages\"\n");
    }
    // Claims of a VMI that migrates are readable and writable on both nodes, whatever their file system is.
    let shared = [paths.filesystem_volumes(), paths.hotplug_disks.clone()];
    let shared = shared.map(|path| format!("\"{}\"", path.display())).join(", ");
    qemu.push_str(&format!("shared_filesystems = [ {shared} ]\n"));
    write_file(&paths.libvirt_config().join("qemu.conf"), qemu.as_bytes())?;
    let daemon = format!("{DAEMON_CONF}host_uuid = \"{}\"\n", host_uuid(paths)?);
    write_file(&paths.libvirt_config().join(program.configuration), daemon.as_bytes())?;
    name_socket(program, paths)
}

/// Returns the UUID of this pod as a host of libvirt, which refuses a migration between daemons with the same one: several pods of
/// a node have the same machine.
fn host_uuid(paths: &Paths) -> Result<String, StartError> {
    let path = paths.libvirt_config().join("host-uuid");
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    if known.len() == 36 {
        return Ok(known);
    }
    let random = Path::new("/proc/sys/kernel/random/uuid");
    let uuid = std::fs::read_to_string(random)
        .map_err(|source| StartError::Write { path: random.to_owned(), source })?
        .trim()
        .to_owned();
    write_file(&path, uuid.as_bytes())?;
    Ok(uuid)
}

/// Links the daemon's socket under the name that tools and scripts expect in a launcher pod.
fn name_socket(program: &DaemonProgram, paths: &Paths) -> Result<(), StartError> {
    if program.socket == SOCKET_NAME {
        return Ok(());
    }
    let path = paths.libvirt_socket();
    match std::os::unix::fs::symlink(program.socket, &path) {
        // A former worker has created it.
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        result => result.map_err(|source| StartError::Write { path, source }),
    }
}

/// Writes the node's capabilities cache, so that the daemon does not probe QEMU.
pub(crate) fn write_cache(paths: &Paths, files: &[protocol::CacheFile]) -> Result<(), StartError> {
    if files.len() > CACHE_FILES {
        return Err(StartError::CacheFile(format!("number {}", files.len())));
    }
    let directory = paths.capabilities_cache();
    make_directory(&directory)?;
    for file in files {
        let acceptable = Paths::is_single_component(&file.name)
            && file.name.ends_with(".xml")
            && file.name.len() <= 128
            && file.content.len() <= CACHE_FILE_SIZE;
        if !acceptable {
            return Err(StartError::CacheFile(file.name.chars().take(128).collect()));
        }
        write_file(&directory.join(&file.name), &file.content)?;
    }
    Ok(())
}

fn make_directory(path: &Path) -> Result<(), StartError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(path)
        .map_err(|source| StartError::Write { path: path.to_owned(), source })
}

fn write_file(path: &Path, content: &[u8]) -> Result<(), StartError> {
    let failed = |source| StartError::Write { path: path.to_owned(), source };
    let staging = path.with_extension("staging");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&staging)
        .map_err(failed)?;
    file.write_all(content).map_err(failed)?;
    drop(file);
    std::fs::rename(&staging, path).map_err(failed)
}

/// The running daemon.
#[derive(Debug)]
pub(crate) struct Daemon {
    stop: watch::Sender<bool>,
    stopped: oneshot::Receiver<()>,
}

impl Daemon {
    /// Starts the daemon, or takes over one that runs, and keeps it running.
    pub(crate) fn start(program: DaemonProgram, paths: Paths, tasks: &Tasks) -> Self {
        let (stop, stopping) = watch::channel(false);
        let (stopped_sender, stopped) = oneshot::channel();
        tasks.keep("libvirt daemon", async move {
            supervise(program, paths, stopping).await;
            let _ = stopped_sender.send(());
            // This end was requested: only another one is a failure.
            std::future::pending().await
        });
        Self { stop, stopped }
    }

    /// Ends the daemon. The guest is not touched.
    pub(crate) async fn stop(self) {
        let _ = self.stop.send(true);
        let _ = tokio::time::timeout(STOP_DEADLINE * 2, self.stopped).await;
    }
}

async fn supervise(program: DaemonProgram, paths: Paths, mut stopped: watch::Receiver<bool>) {
    let mut pause = RESTART_PAUSE.0;
    let mut first = true;
    loop {
        let started = tokio::time::Instant::now();
        let running = run_once(&program, &paths, first, &mut stopped).await;
        if *stopped.borrow() {
            return;
        }
        first = false;
        match running {
            Ok(how) => {
                tracing::warn!(program = %program.path.display(), how, "libvirt's daemon ended, restarting it")
            }
            Err(error) => tracing::error!(%error, program = %program.path.display(), "cannot run libvirt's daemon"),
        }
        if started.elapsed() > RESTART_PAUSE.1 {
            pause = RESTART_PAUSE.0;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stopped.changed() => return,
        }
        pause = (pause * 2).min(RESTART_PAUSE.1);
    }
}

/// Runs the daemon once. Returns how it ended.
async fn run_once(
    program: &DaemonProgram,
    paths: &Paths,
    first: bool,
    stopped: &mut watch::Receiver<bool>,
) -> std::io::Result<String> {
    if first && let Some(pid) = running_daemon(&program.socket(paths)) {
        tracing::info!(pid = pid.as_raw_nonzero().get(), "taking over the running daemon");
        let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
        tokio::select! {
            () = ended(&pidfd) => {}
            () = wait_for_stop(stopped) => {
                let _ = pidfd_send_signal(&pidfd, Signal::TERM);
                if tokio::time::timeout(STOP_DEADLINE, ended(&pidfd)).await.is_err() {
                    let _ = pidfd_send_signal(&pidfd, Signal::KILL);
                }
            }
        }
        return Ok("taken over".into());
    }
    let mut command = Command::new(&program.path);
    command
        .arg("--config")
        .arg(paths.libvirt_config().join(program.configuration))
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", &paths.private)
        .env("XDG_CACHE_HOME", &paths.private)
        .env("XDG_CONFIG_HOME", &paths.runtime)
        .env("XDG_RUNTIME_DIR", &paths.runtime)
        // One heap for all threads: each launcher pod pays for the daemon's memory.
        .env("MALLOC_ARENA_MAX", "1")
        // Freed memory at the end of the heap returns to the system. The default keeps 128 KiB.
        .env("MALLOC_TRIM_THRESHOLD_", "16384")
        // Small freed blocks merge with their neighbours instead of staying in caches of the threads: 0.4 MiB.
        .env("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log());
    if let Some(filters) = &program.log_filters {
        // The environment overrides the configuration file, whose output takes warnings only.
        command.env("LIBVIRT_LOG_FILTERS", filters).env("LIBVIRT_LOG_OUTPUTS", "1:stderr");
    }
    let mut child = command.spawn()?;
    tokio::select! {
        status = child.wait() => Ok(status?.to_string()),
        () = wait_for_stop(stopped) => {
            if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, Signal::TERM);
            }
            match tokio::time::timeout(STOP_DEADLINE, child.wait()).await {
                Ok(status) => Ok(status?.to_string()),
                Err(_) => {
                    child.kill().await?;
                    Ok("killed".into())
                }
            }
        }
    }
}

/// Returns the log of the daemon: the pipe of virt-launcher-monitor, if it has made one.
fn log() -> Stdio {
    let pipe = std::env::var_os("VIRT_LAUNCHER_DAEMON_LOG");
    let pipe = pipe.and_then(|path| std::fs::OpenOptions::new().write(true).open(path).ok());
    pipe.map_or_else(Stdio::inherit, Stdio::from)
}

/// Waits until the process of a pidfd has ended; used for a daemon that was taken over.
async fn ended(pidfd: &OwnedFd) {
    loop {
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        if !matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0)) {
            return;
        }
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

/// Waits for the request to stop; forever if no sender is left.
async fn wait_for_stop(stopped: &mut watch::Receiver<bool>) {
    if stopped.wait_for(|stop| *stop).await.is_err() {
        std::future::pending().await
    }
}

/// Returns the process that listens on the daemon's socket, if any.
fn running_daemon(socket: &Path) -> Option<Pid> {
    let stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    Some(rustix::net::sockopt::socket_peercred(&stream).ok()?.pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_has_the_name_that_scripts_know() {
        let root = std::env::temp_dir().join(format!("launcher-socket-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let paths = Paths { private: root.join("private"), runtime: root.clone(), ..Paths::default() };
        let program = |socket| DaemonProgram {
            path: "/usr/sbin/daemon".into(),
            socket,
            configuration: "daemon.conf",
            log_filters: None,
        };
        configure(&program(SOCKET_NAME), &paths).unwrap();
        assert!(!paths.libvirt_runtime().join(SOCKET_NAME).exists());
        // The second worker finds the link of the first.
        for _ in 0..2 {
            configure(&program("libvirt-sock"), &paths).unwrap();
        }
        let link = std::fs::read_link(paths.libvirt_runtime().join(SOCKET_NAME)).unwrap();
        assert_eq!(link, Path::new("libvirt-sock"));
        // A restarted daemon is the same host.
        let configuration = || std::fs::read_to_string(paths.libvirt_config().join("daemon.conf")).unwrap();
        let first = configuration();
        configure(&program("libvirt-sock"), &paths).unwrap();
        assert_eq!(configuration(), first);
        assert!(first.lines().any(|line| line.starts_with("host_uuid = \"") && line.len() == 50), "{first}");
        let _ = std::fs::remove_dir_all(root);
    }

    #[test]
    fn cache_files_stay_in_their_directory() {
        let root = std::env::temp_dir().join(format!("launcher-daemon-{}", std::process::id()));
        let paths = Paths { private: root.clone(), ..Paths::default() };
        let file = |name: &str| protocol::CacheFile { name: name.into(), content: b"<x/>".to_vec() };
        for name in ["../x.xml", "/x.xml", "a/x.xml", "x.txt", "", ".."] {
            assert!(write_cache(&paths, &[file(name)]).is_err(), "{name}");
        }
        write_cache(&paths, &[file("abc.xml")]).unwrap();
        assert_eq!(std::fs::read(paths.capabilities_cache().join("abc.xml")).unwrap(), b"<x/>");
        let many: Vec<_> = (0..17).map(|i| file(&format!("{i}.xml"))).collect();
        assert!(write_cache(&paths, &many).is_err());
        let _ = std::fs::remove_dir_all(root);
    }
}
