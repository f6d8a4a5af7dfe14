//! virtiofsd, which serves a directory of the pod to the guest: one process for each file system.
//!
//! It serves one connection, that of QEMU, and ends with it. A start of a domain so needs processes that still wait: those of
//! a former attempt, or of a former worker, or new ones.
//!
//! The processes are in the container of QEMU, and not in containers of their own: a page of the guest's memory that virtiofsd
//! is the first to write is charged to its cgroup, where no limit but that of the guest fits.

use std::{
    fs::File,
    io,
    os::unix::fs::FileTypeExt,
    path::{Component, Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use api::{
    VirtualMachineInstance,
    virtiofs::{is_claim, is_shareable},
    vmi::volumes::Volume,
};
use protocol::PATH_NOT_MOUNTED;
use rustix::fs::{FlockOperation, flock};
use thiserror::Error;
use tokio::{
    process::{Child, Command},
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};

use crate::{paths::Paths, socket};

/// The program.
const PROGRAM: &str = "/usr/libexec/virtiofsd";
/// Time that it has to listen.
const DEADLINE: Duration = Duration::from_secs(10);
/// Interval at which its socket is looked for.
const CHECK: Duration = Duration::from_millis(10);
/// Limit of concurrent looks at file systems that others have mounted.
static LOOKING: Semaphore = Semaphore::const_new(1);

/// Failure to serve a file system.
#[derive(Debug, Error)]
pub(crate) enum VirtiofsError {
    /// The pod has no directory for it.
    #[error("cannot share file system {0}: its volume is no directory of the pod")]
    NoDirectory(String),
    /// Other webhooks have mounted nothing there, or the launcher's own files are there.
    #[error("cannot share file system {name}: path {path} {PATH_NOT_MOUNTED}")]
    NotMounted {
        /// Name of the file system.
        name: String,
        /// Path in the container.
        path: String,
    },
    /// The file system that others have mounted does not answer.
    #[error("cannot share file system {name}: the file system of path {path} does not answer")]
    Unanswered {
        /// Name of the file system.
        name: String,
        /// Path in the container.
        path: String,
    },
    /// The program does not start, or its files cannot be used.
    #[error("cannot start virtiofsd of file system {name}: {source}")]
    Start {
        /// Name of the file system.
        name: String,
        /// The cause.
        source: io::Error,
    },
    /// The program has ended before it listened.
    #[error("virtiofsd of file system {name} ended before QEMU connected to it: {how}")]
    Ended {
        /// Name of the file system.
        name: String,
        /// Its exit status.
        how: String,
    },
    /// It does not listen in time, or a former one still serves QEMU.
    #[error("virtiofsd of file system {0} does not listen")]
    Silent(String),
}

/// Starts virtiofsd for each file system of a VMI whose domain starts or arrives.
pub(crate) async fn serve(vmi: &VirtualMachineInstance, paths: &Paths) -> Result<(), VirtiofsError> {
    for name in vmi.spec.domain.devices.filesystems.iter().map(|filesystem| &filesystem.name) {
        let volume = vmi.spec.volumes.iter().find(|volume| volume.name == *name);
        let volume = volume.filter(|volume| is_shareable(volume) && Paths::is_single_component(name));
        let volume = volume.ok_or_else(|| VirtiofsError::NoDirectory(name.clone()))?;
        let server = Server {
            program: Path::new(PROGRAM),
            name,
            socket: paths.virtiofs().join(socket_name(name)),
            limit: DEADLINE,
        };
        server.start(&arguments(volume, &directory(volume, paths).await?)).await?;
    }
    Ok(())
}

/// Returns the name of the socket of a file system.
pub(crate) fn socket_name(name: &str) -> String {
    format!("{name}.sock")
}

/// Returns the directory of the pod with a volume.
async fn directory(volume: &Volume, paths: &Paths) -> Result<PathBuf, VirtiofsError> {
    let name = &volume.name;
    if let Some(source) = &volume.container_path {
        return mounted_in_time(name, &source.path).await;
    }
    Ok(if volume.config_map.is_some() {
        paths.config_map(name)
    } else if volume.secret.is_some() {
        paths.secret(name)
    } else if volume.downward_api.is_some() {
        paths.downward_api(name)
    } else if is_claim(volume) {
        paths.filesystem_volume(name)
    } else {
        paths.service_account()
    })
}

/// Returns the directory at a path of the container. Others have mounted its file system, which may never answer.
async fn mounted_in_time(name: &str, path: &str) -> Result<PathBuf, VirtiofsError> {
    let unanswered = || VirtiofsError::Unanswered { name: name.to_owned(), path: path.to_owned() };
    let turn = LOOKING.try_acquire().map_err(|_| unanswered())?;
    let source = PathBuf::from(path);
    let looked = tokio::task::spawn_blocking(move || {
        let found = std::fs::read_to_string("/proc/self/mountinfo").map(|mounts| mounted(&source, &mounts));
        drop(turn);
        found
    });
    match timeout(DEADLINE, looked).await {
        Ok(Ok(Ok(Some(directory)))) => Ok(directory),
        Ok(Ok(Ok(None))) => Err(VirtiofsError::NotMounted { name: name.to_owned(), path: path.to_owned() }),
        Ok(Ok(Err(source))) => Err(VirtiofsError::Start { name: name.to_owned(), source }),
        Ok(Err(_)) | Err(_) => Err(unanswered()),
    }
}

/// Returns the arguments for a volume that lies in this directory, without the socket.
fn arguments(volume: &Volume, directory: &Path) -> Vec<String> {
    let mut arguments = vec![format!("--shared-dir={}", directory.display())];
    // The pod is the sandbox. virtiofsd cannot create another without capabilities.
    let fixed = ["--sandbox=none", "--cache=auto", "--log-level=warn"];
    let migration = ["--migration-on-error=guest-error", "--migration-mode=find-paths"];
    arguments.extend(fixed.into_iter().chain(migration).map(str::to_owned));
    if volume.container_path.is_some() {
        arguments.push("--readonly".to_owned());
    }
    if volume.service_account.is_some() || volume.container_path.is_some() {
        // Only their owner reads tokens, which is root in the guest.
        arguments.push("--translate-uid=host:107:0:1".to_owned());
    }
    arguments
}

/// Returns the directory at a path, if others have mounted it or one above it. Links are not followed, but for that of `/var/run`.
fn mounted(path: &Path, mounts: &str) -> Option<PathBuf> {
    let plain = match path.strip_prefix("/var/run") {
        Ok(below) => Path::new("/run").join(below),
        Err(_) => path.to_owned(),
    };
    let is_plain = plain.components().skip(1).all(|part| matches!(part, Component::Normal(_)));
    if !plain.is_absolute() || !is_plain || is_own(&plain) {
        return None;
    }
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
    let above = points.filter(|point| plain.starts_with(point)).max_by_key(|point| point.components().count())?;
    let is_there = above.parent().is_some() && plain.canonicalize().is_ok_and(|real| real == plain && real.is_dir());
    is_there.then_some(plain)
}

/// Returns true for what the runtime and the launcher itself have in the container.
fn is_own(path: &Path) -> bool {
    ["/dev", "/proc", "/sys", "/run/libvirt"].iter().any(|own| path.starts_with(own))
        || path.strip_prefix("/run").is_ok_and(|below| below.to_string_lossy().starts_with("kubevirt"))
}

/// The server of one file system.
struct Server<'a> {
    program: &'a Path,
    name: &'a str,
    socket: PathBuf,
    limit: Duration,
}

impl Server<'_> {
    /// Starts the program, unless one waits for QEMU already, and returns once it listens.
    async fn start(&self, arguments: &[String]) -> Result<(), VirtiofsError> {
        let failed = |source| VirtiofsError::Start { name: self.name.to_owned(), source };
        let latest = Instant::now() + self.limit;
        std::fs::create_dir_all(self.socket.parent().unwrap_or(&self.socket)).map_err(failed)?;
        // The former one ends together with its QEMU.
        while is_locked(&self.socket).map_err(failed)? {
            if self.listens() {
                return Ok(());
            }
            self.pause(latest).await?;
        }
        // One that was killed leaves its socket.
        socket::remove(&self.socket).map_err(failed)?;
        let child = Command::new(self.program)
            .arg(format!("--socket-path={}", self.socket.display()))
            .args(arguments)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let mut ended = tokio::spawn(watch(child, self.name.to_owned()));
        while !self.listens() {
            tokio::select! {
                how = &mut ended => {
                    let how = how.unwrap_or_else(|error| error.to_string());
                    return Err(VirtiofsError::Ended { name: self.name.to_owned(), how });
                }
                paused = self.pause(latest) => paused?,
            }
        }
        Ok(())
    }

    fn listens(&self) -> bool {
        self.socket.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket())
    }

    async fn pause(&self, latest: Instant) -> Result<(), VirtiofsError> {
        if Instant::now() >= latest {
            return Err(VirtiofsError::Silent(self.name.to_owned()));
        }
        sleep(CHECK).await;
        Ok(())
    }
}

/// Returns true if a process has the socket: it locks the file with its process ID for its whole life.
fn is_locked(socket: &Path) -> io::Result<bool> {
    let mut path = socket.as_os_str().to_owned();
    path.push(".pid");
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        file => file?,
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Waits for the end of a process, and logs one that leaves the guest without its file system. Returns how it ended.
async fn watch(mut child: Child, name: String) -> String {
    let status = child.wait().await;
    match &status {
        Ok(status) if status.success() => tracing::debug!(name, "virtiofsd has ended"),
        Ok(_) | Err(_) => {
            let how = described(&status);
            tracing::error!(
                name,
                how,
                "virtiofsd has ended: the guest has no access to the file system until it starts again"
            );
        }
    }
    described(&status)
}

fn described(status: &io::Result<ExitStatus>) -> String {
    status.as_ref().map_or_else(ToString::to_string, ToString::to_string)
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::PermissionsExt, net::UnixListener};

    use serde_json::{Value, json};

    use super::*;

    fn volume(mut source: Value) -> Volume {
        source["name"] = json!("v");
        serde_json::from_value(source).unwrap()
    }

    #[tokio::test]
    async fn each_volume_has_its_directory() {
        let private = "/var/run/kubevirt-private";
        let token = "/var/run/secrets/kubernetes.io/serviceaccount";
        for (source, directory) in [
            (json!({"configMap": {"name": "c"}}), format!("{private}/config-map/v")),
            (json!({"secret": {"secretName": "s"}}), format!("{private}/secret/v")),
            (json!({"downwardAPI": {}}), format!("{private}/downwardapi/v")),
            (json!({"serviceAccount": {"serviceAccountName": "a"}}), token.to_owned()),
            (json!({"persistentVolumeClaim": {"claimName": "c"}}), format!("{private}/vmi-disks/v")),
            (json!({"dataVolume": {"name": "d"}}), format!("{private}/vmi-disks/v")),
        ] {
            let volume = volume(source.clone());
            let arguments = arguments(&volume, &super::directory(&volume, &Paths::default()).await.unwrap());
            assert_eq!(arguments[0], format!("--shared-dir={directory}"), "{source}");
            let is_translated = arguments.contains(&"--translate-uid=host:107:0:1".to_owned());
            assert_eq!(is_translated, directory == token, "{source}");
        }
    }

    #[test]
    fn path_of_the_container_is_what_others_have_mounted() {
        let root = std::env::temp_dir().join(format!("launcher-virtiofs-paths-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("token/below")).unwrap();
        std::fs::create_dir_all(root.join("image")).unwrap();
        std::fs::write(root.join("token/file"), "").unwrap();
        std::os::unix::fs::symlink("/etc", root.join("token/link")).unwrap();
        let point = root.join("token");
        let mounts = format!(
            "1 0 0:1 / / rw - overlay o rw\n2 1 0:2 / {} ro - tmpfs t rw\n3 1 0:3 / /proc rw - proc p rw\n",
            point.display()
        );
        let found = |path: &Path| mounted(path, &mounts);
        assert_eq!(found(&point), Some(point.clone()));
        assert_eq!(found(&point.join("below")), Some(point.join("below")));
        for refused in [
            root.join("image"),
            point.join("file"),
            point.join("link"),
            point.join("absent"),
            point.join("../image"),
            "/".into(),
            "/proc".into(),
            "relative".into(),
            "/run/kubevirt-private".into(),
            "/var/run/kubevirt/sockets".into(),
        ] {
            assert_eq!(found(&refused), None, "{}", refused.display());
        }
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[tokio::test]
    async fn path_of_a_file_system_that_does_not_answer_is_named() {
        let volume = volume(json!({"containerPath": {"path": "/run/kubevirt-private"}}));
        let refused = async || super::directory(&volume, &Paths::default()).await.unwrap_err().to_string();
        assert!(refused().await.contains("is in no directory"));
        let turn = LOOKING.acquire().await.unwrap();
        assert!(refused().await.ends_with("the file system of path /run/kubevirt-private does not answer"));
        drop(turn);
    }

    #[tokio::test]
    async fn volume_without_directory_and_name_with_a_path_are_refused() {
        for (name, volumes) in [
            ("v", json!([{"name": "v", "emptyDisk": {"capacity": "1Gi"}}])),
            ("v", json!([])),
            ("../v", json!([{"name": "../v", "configMap": {"name": "c"}}])),
        ] {
            let filesystems = json!([{"name": name, "virtiofs": {}}]);
            let spec = json!({"domain": {"devices": {"filesystems": filesystems}}, "volumes": volumes});
            let vmi = VirtualMachineInstance { spec: serde_json::from_value(spec).unwrap(), ..Default::default() };
            let refused = serve(&vmi, &Paths::default()).await.unwrap_err();
            assert!(matches!(refused, VirtiofsError::NoDirectory(_)), "{refused}");
        }
    }

    /// A directory with a program in the place of virtiofsd.
    struct Fixture {
        root: PathBuf,
        program: PathBuf,
    }

    impl Fixture {
        fn new(name: &str, script: &str) -> Self {
            let root = std::env::temp_dir().join(format!("launcher-virtiofs-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            std::fs::create_dir_all(root.join("sockets")).unwrap();
            let program = root.join("program");
            std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
            Self { root, program }
        }

        fn server(&self, limit: Duration) -> Server<'_> {
            Server { program: &self.program, name: "v", socket: self.root.join("sockets/v.sock"), limit }
        }
    }

    impl Drop for Fixture {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.root);
        }
    }

    const SHORT: Duration = Duration::from_millis(200);

    #[tokio::test]
    async fn program_that_ends_or_does_not_listen_is_an_error() {
        let ends = Fixture::new("ends", "exit 3");
        let error = ends.server(DEADLINE).start(&[]).await.unwrap_err();
        assert!(error.to_string().ends_with("ended before QEMU connected to it: exit status: 3"), "{error}");
        let sleeps = Fixture::new("sleeps", "exec /bin/sleep 2");
        let error = sleeps.server(SHORT).start(&[]).await.unwrap_err();
        assert!(matches!(error, VirtiofsError::Silent(_)), "{error}");
        let missing = Fixture::new("missing", "");
        std::fs::remove_file(&missing.program).unwrap();
        let error = missing.server(SHORT).start(&[]).await.unwrap_err();
        assert!(matches!(error, VirtiofsError::Start { .. }), "{error}");
    }

    #[tokio::test]
    async fn one_that_waits_is_used_and_one_that_serves_is_waited_for() {
        let fixture = Fixture::new("locked", "exit 3");
        let server = fixture.server(SHORT);
        let file = File::create(fixture.root.join("sockets/v.sock.pid")).unwrap();
        flock(&file, FlockOperation::LockExclusive).unwrap();
        let error = server.start(&[]).await.unwrap_err();
        assert!(matches!(error, VirtiofsError::Silent(_)), "{error}");
        let listener = UnixListener::bind(&server.socket).unwrap();
        server.start(&[]).await.unwrap();
        // Without the lock, the socket is one that a killed process has left: the program is started.
        drop((file, listener));
        assert!(matches!(server.start(&[]).await, Err(VirtiofsError::Ended { .. })));
    }
}
