#![allow(clippy::disallowed_methods, reason = "tests create the files that virt-handler finds")]

use std::{
    fs,
    io::IoSlice,
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, PermissionsExt, symlink},
    },
    time::{Duration, Instant},
};

use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg, setsockopt};
use protocol::channels::{Channel, SOCKET};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

use super::{
    socket::{PassRights, launcher_socket},
    *,
};

const SOON: Duration = Duration::from_millis(300);

/// A temporary directory of one test.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("safe-dir-{}", uuid::Uuid::new_v4()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn pod(&self) -> SafeDir {
        fs::create_dir_all(self.0.join("pod")).unwrap();
        SafeDir::trusted(&self.0.join("pod")).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[tokio::test]
async fn cve_2026_7374_a_socket_swapped_for_a_link_to_a_host_socket_is_not_dialled() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    let host = UnixListener::bind(scratch.path("containerd.sock")).unwrap();
    for target in [scratch.path("containerd.sock"), "../containerd.sock".into()] {
        symlink(&target, scratch.path("pod/console.sock")).unwrap();
        let error = pod.connect("console.sock", SOON).await.unwrap_err();
        // The descriptor names the link itself, which is no socket.
        assert!(matches!(error, Error::WrongKind { found: Kind::Link, .. }), "{error:?}");
        fs::remove_file(scratch.path("pod/console.sock")).unwrap();
    }
    // A link instead of a directory on the path.
    symlink(&scratch.0, scratch.path("pod/sockets")).unwrap();
    let error = pod.connect("sockets/containerd.sock", SOON).await.unwrap_err();
    assert!(matches!(error, Error::Escape(_)), "{error:?}");
    let error = pod.connect("../containerd.sock", SOON).await.unwrap_err();
    assert!(matches!(error, Error::NotBeneath(_)), "{error:?}");
    assert!(
        tokio::time::timeout(Duration::from_millis(50), host.accept()).await.is_err(),
        "the host socket was connected"
    );
}

#[tokio::test]
async fn cve_2026_13201_a_descriptor_of_a_link_is_never_followed_to_its_target() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    fs::write(scratch.path("shadow"), "secret").unwrap();
    symlink(scratch.path("shadow"), scratch.path("pod/notify")).unwrap();
    for outcome in [
        pod.open_file("notify").map(drop),
        pod.read_bounded("notify", 100).map(drop),
        pod.write_existing("notify", b"x"),
        pod.chown_device("notify", (10, 232), 107, 107),
        pod.chown_block_device("notify", 107, 107),
        pod.listen("notify", 0o600).map(drop),
    ] {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::WrongKind { found: Kind::Link, .. }), "{error:?}");
    }
    assert_eq!(pod.stat("notify").unwrap().kind, Kind::Link);
    assert_eq!(fs::read_to_string(scratch.path("shadow")).unwrap(), "secret");
}

#[test]
fn cve_2026_13218_a_file_is_never_written_through_a_link() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    fs::write(scratch.path("cron"), "host").unwrap();
    symlink(scratch.path("cron"), scratch.path("pod/cache")).unwrap();
    assert!(pod.write_existing("cache", b"x").is_err());
    assert_eq!(fs::read_to_string(scratch.path("cron")).unwrap(), "host");
    // A link to a directory of the host instead of a directory on the path.
    fs::create_dir(scratch.path("etc")).unwrap();
    fs::write(scratch.path("etc/passwd"), "host").unwrap();
    symlink(scratch.path("etc"), scratch.path("pod/dir")).unwrap();
    for outcome in [
        pod.write_existing("dir/passwd", b"x"),
        pod.remove_file("dir/passwd"),
        pod.listen("dir/socket", 0o600).map(drop),
        pod.open_dir("dir").map(drop),
    ] {
        let error = outcome.unwrap_err();
        assert!(!error.is_not_found(), "{error:?}");
    }
    assert_eq!(fs::read_to_string(scratch.path("etc/passwd")).unwrap(), "host");
    assert_eq!(fs::read_dir(scratch.path("etc")).unwrap().count(), 1);
}

#[test]
fn paths_that_are_not_beneath_are_rejected() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    fs::write(scratch.path("secret"), "x").unwrap();
    for path in ["", "/", "/etc/passwd", "..", "../secret", "a/../../secret", "./../secret", "a\0b"] {
        let error = pod.open_file(path).unwrap_err();
        assert!(matches!(error, Error::NotBeneath(_)), "{path:?}: {error:?}");
        assert!(pod.remove_file(path).is_err());
        assert!(pod.open_dir(path).is_err());
        assert!(pod.exists(path).is_err());
    }
    assert!(matches!(SafeDir::trusted(Path::new("relative")), Err(Error::NotBeneath(_))));
}

#[test]
fn links_of_the_kernel_are_not_followed() {
    let proc = SafeDir::trusted(Path::new("/proc")).unwrap();
    for path in ["self/root", "self/cwd", "self/status", "1/root/etc"] {
        assert!(proc.open_dir(path).is_err(), "{path}");
        assert!(proc.open_file(path).is_err(), "{path}");
    }
    let own = format!("{}/status", std::process::id());
    assert!(proc.read_text(own, 64 * 1024).unwrap().contains("Pid:"));
}

#[test]
fn only_regular_files_are_opened() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    rustix::fs::mknodat(rustix::fs::CWD, scratch.path("pod/pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0)
        .unwrap();
    fs::create_dir(scratch.path("pod/dir")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(scratch.path("pod/socket")).unwrap();
    // Opening a pipe without a writer would block forever.
    for (path, kind) in [("pipe", Kind::Pipe), ("dir", Kind::Directory), ("socket", Kind::Socket)] {
        let error = pod.read_bounded(path, 10).unwrap_err();
        assert!(matches!(error, Error::WrongKind { found, .. } if found == kind), "{error:?}");
        assert_eq!(pod.stat(path).unwrap().kind, kind);
    }
}

#[test]
fn reads_are_bounded() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    fs::write(scratch.path("pod/file"), vec![b'x'; 1000]).unwrap();
    assert_eq!(pod.read_bounded("file", 1000).unwrap().len(), 1000);
    assert!(matches!(pod.read_bounded("file", 999), Err(Error::TooLarge { limit: 999, .. })));
    fs::write(scratch.path("pod/binary"), [0xff, 0xfe]).unwrap();
    assert!(matches!(pod.read_text("binary", 10), Err(Error::NotText(_))));
    assert!(pod.read_text("absent", 10).unwrap_err().is_not_found());
}

#[test]
fn a_directory_is_listed_up_to_a_limit() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    for name in ["b", "a", "c"] {
        fs::write(scratch.path("pod").join(name), "").unwrap();
    }
    symlink("a", scratch.path("pod/link")).unwrap();
    let entries = pod.list(4).unwrap();
    assert_eq!(entries.iter().map(|entry| entry.name.to_str().unwrap()).collect::<Vec<_>>(), ["a", "b", "c", "link"]);
    assert_eq!(entries[3].kind, Kind::Link);
    assert!(matches!(pod.list(3), Err(Error::TooManyEntries(3))));
}

#[test]
fn files_are_written_only_if_they_exist_and_are_removed() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    fs::write(scratch.path("pod/a"), "1").unwrap();
    pod.write_existing("a", b"2").unwrap();
    assert_eq!(pod.read_text("a", 10).unwrap(), "2");
    assert!(pod.write_existing("absent", b"3").unwrap_err().is_not_found());
    pod.remove_file("a").unwrap();
    assert!(!pod.exists("a").unwrap());
}

#[tokio::test]
async fn the_peer_process_is_known() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    fs::create_dir(scratch.path("pod/deep")).unwrap();
    let listener = pod.listen("deep/socket", 0o600).unwrap();
    assert!(fs::symlink_metadata(scratch.path("pod/deep/socket")).unwrap().file_type().is_socket());
    assert_eq!(fs::metadata(scratch.path("pod/deep/socket")).unwrap().permissions().mode() & 0o777, 0o600);
    let mut client = pod.connect("deep/socket", SOON).await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    client.write_all(b"hello").await.unwrap();
    let mut buffer = [0; 5];
    server.read_exact(&mut buffer).await.unwrap();
    assert_eq!(&buffer, b"hello");

    let peer = Peer::of(&client).unwrap();
    assert_eq!(peer.pid(), i32::try_from(std::process::id()).unwrap());
    assert!(peer.is_alive());
    let own = rustix::process::getuid().as_raw();
    assert!(peer.require_user(own).is_ok());
    assert!(matches!(peer.require_user(own + 1), Err(Error::ForeignUser { .. })));
    // The test does not run in a pod of this UID.
    let error = peer.require_pod("c2b5a8f0-11d2-4a6c-9d5e-0123456789ab").unwrap_err();
    assert!(matches!(error, Error::ForeignPod { .. }), "{error:?}");
    assert!(peer.root().unwrap().exists("usr").unwrap());
}

#[tokio::test]
async fn a_socket_without_a_listener_refuses_and_is_replaced() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    drop(pod.listen("socket", 0o600).unwrap());
    assert!(pod.connect("socket", SOON).await.unwrap_err().is_refused());
    let _listener = pod.listen("socket", 0o600).unwrap();
    assert!(pod.connect("socket", SOON).await.is_ok());
    fs::write(scratch.path("pod/file"), "").unwrap();
    assert!(matches!(pod.listen("file", 0o600), Err(Error::WrongKind { .. })));
    assert!(matches!(pod.connect("file", SOON).await, Err(Error::WrongKind { .. })));
}

#[test]
fn a_peer_that_exits_is_noticed() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let peer = Peer::open(i32::try_from(child.id()).unwrap(), 0).unwrap();
    assert!(peer.is_alive());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!peer.is_alive());
    assert!(matches!(peer.require_pod("c2b5a8f0-11d2-4a6c-9d5e-0123456789ab"), Err(Error::PeerGone(_))));
    assert!(peer.root().is_err());
}

#[tokio::test]
async fn waiting_ends_as_soon_as_the_last_of_several_directories_and_the_entry_appear() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    let path = launcher_socket("c2b5a8f0-11d2-4a6c-9d5e-0123456789ab");
    let waiting = tokio::spawn({
        let (pod, path) = (pod.clone(), path.clone());
        async move { pod.wait_for(path, Duration::from_secs(10)).await }
    });
    let mut at = scratch.path("pod");
    for name in path.parent().unwrap() {
        tokio::time::sleep(Duration::from_millis(30)).await;
        at.push(name);
        fs::create_dir(&at).unwrap();
    }
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert!(!waiting.is_finished());
    // A short path: that of a pod is longer than a socket path may be.
    let _listener = SafeDir::trusted(&at).unwrap().listen("starting", 0o600).unwrap();
    let appeared = Instant::now();
    fs::rename(at.join("starting"), at.join("launcher-sock")).unwrap();
    waiting.await.unwrap().unwrap();
    assert!(appeared.elapsed() < Duration::from_millis(1000), "no inotify event: {:?}", appeared.elapsed());
    // An existing entry is not waited for.
    pod.wait_for(&path, Duration::from_millis(1)).await.unwrap();
}

#[tokio::test]
async fn waiting_has_a_deadline() {
    let scratch = Scratch::new();
    let error = scratch.pod().wait_for("a/b/c", Duration::from_millis(50)).await.unwrap_err();
    assert!(error.is_timeout(), "{error:?}");
}

#[tokio::test]
async fn a_directory_with_constant_changes_is_checked_at_a_bounded_rate() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    let (noise, late) = (scratch.path("pod/noise"), scratch.path("pod/late"));
    let began = Instant::now();
    let noisy = std::thread::spawn(move || {
        while began.elapsed() < Duration::from_secs(1) {
            fs::write(&noise, "").unwrap();
            fs::remove_file(&noise).unwrap();
        }
        fs::write(late, "").unwrap();
    });
    let looks = pod.appear(Path::new("late")).await.unwrap();
    // At once at first, then ten times per second.
    let most = 65 + began.elapsed().as_millis() / 100;
    assert!(u128::from(looks) <= most, "{looks} looks, {most} at most");
    noisy.join().unwrap();
}

#[tokio::test]
async fn waiting_behind_a_link_is_an_error_and_not_an_absence() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    symlink(&scratch.0, scratch.path("pod/volumes")).unwrap();
    let error = pod.wait_for("volumes/x", Duration::from_secs(5)).await.unwrap_err();
    assert!(matches!(error, Error::Escape(_)), "{error:?}");
}

#[tokio::test]
async fn a_listener_outside_the_pod_is_not_accepted_as_the_launcher() {
    let scratch = Scratch::new();
    let pods = scratch.pod();
    let uid = "c2b5a8f0-11d2-4a6c-9d5e-0123456789ab";
    let path = scratch.path("pod").join(launcher_socket(uid));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let _listener = SafeDir::trusted(path.parent().unwrap()).unwrap().listen("launcher-sock", 0o600).unwrap();
    let error = connect_launcher(&pods, uid, Duration::from_secs(2)).await.unwrap_err();
    assert!(matches!(error, Error::ForeignPod { .. } | Error::ForeignUser { .. }), "{error:?}");
}

#[tokio::test]
async fn a_listener_outside_the_pod_gets_no_channel_of_a_migration() {
    let scratch = Scratch::new();
    let pods = scratch.pod();
    let uid = "c2b5a8f0-11d2-4a6c-9d5e-0123456789ab";
    let sockets = scratch.path("pod").join(launcher_socket(uid)).parent().unwrap().to_owned();
    fs::create_dir_all(&sockets).unwrap();
    for name in [SOCKET.to_owned(), Channel::Memory.socket(), Channel::Disks.socket()] {
        let connect = || connect_migration(&pods, uid, &name, Duration::from_secs(2));
        symlink("launcher-sock", sockets.join(&name)).unwrap();
        let error = connect().await.unwrap_err();
        assert!(matches!(error, Error::Escape(_) | Error::WrongKind { .. }), "{name}: {error:?}");
        fs::remove_file(sockets.join(&name)).unwrap();
        let _listener = SafeDir::trusted(&sockets).unwrap().listen(&name, 0o600).unwrap();
        let error = connect().await.unwrap_err();
        assert!(matches!(error, Error::ForeignPod { .. } | Error::ForeignUser { .. }), "{name}: {error:?}");
    }
}

#[tokio::test]
async fn nobody_passes_descriptors_to_virt_handler() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    let pass = |from: &UnixStream| {
        let rights = [from.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&rights)];
        sendmsg::<UnixAddr>(from.as_raw_fd(), &[IoSlice::new(b"x")], &rights, MsgFlags::empty(), None)
    };
    // Earlier kernels do not have the option.
    let (one, other) = UnixStream::pair().unwrap();
    let expected = match setsockopt(&other, PassRights, &false) {
        Ok(()) => Err(nix::Error::EPERM),
        Err(_) => Ok(1),
    };
    assert_eq!(pass(&one), expected);
    // To a socket that virt-handler connects, and to one at which it listens.
    let listener = UnixListener::bind(scratch.path("pod/launcher")).unwrap();
    let mut handler = pod.connect("launcher", SOON).await.unwrap();
    let mut launcher = listener.accept().await.unwrap().0;
    assert_eq!(pass(&launcher), expected);
    let listener = pod.listen("handler", 0o600).unwrap();
    let client = UnixStream::connect(scratch.path("pod/handler")).await.unwrap();
    assert_eq!(pass(&client), expected);
    let _accepted = listener.accept().await.unwrap();
    assert_eq!(pass(&client), expected);
    // Bytes alone arrive.
    launcher.write_all(b"y").await.unwrap();
    assert!([b'x', b'y'].contains(&handler.read_u8().await.unwrap()));
}

#[test]
fn a_node_of_another_device_is_not_granted() {
    let dev = SafeDir::trusted(Path::new("/dev")).unwrap();
    let error = dev.chown_device("null", (10, 232), 107, 107).unwrap_err();
    assert!(matches!(error, Error::WrongDevice { .. } | Error::Escape(_)), "{error:?}");
    let error = dev.chown_device("absent", (10, 232), 107, 107).unwrap_err();
    assert!(error.is_not_found(), "{error:?}");
}

#[test]
fn a_link_is_read_and_not_followed() {
    let scratch = Scratch::new();
    let pod = scratch.pod();
    symlink("../../bus/pci/drivers/vfio-pci", scratch.path("pod/driver")).unwrap();
    assert_eq!(pod.read_link("driver").unwrap(), Path::new("../../bus/pci/drivers/vfio-pci"));
    fs::write(scratch.path("pod/file"), "").unwrap();
    assert!(pod.read_link("file").is_err());
    assert!(pod.read_link("absent").unwrap_err().is_not_found());
    symlink(".", scratch.path("pod/here")).unwrap();
    assert!(matches!(pod.read_link("here/driver"), Err(Error::Escape(_))));
    assert!(matches!(pod.read_link("../pod/driver"), Err(Error::NotBeneath(_))));
}

#[test]
fn locked_memory_is_allowed_to_one_process() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let peer = Peer::open(i32::try_from(child.id()).unwrap(), 0).unwrap();
    // A lower limit needs no privilege.
    peer.allow_locked_memory(4096).unwrap();
    let limits = fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max locked memory")).unwrap();
    assert_eq!(line.split_whitespace().filter(|word| *word == "4096").count(), 2, "{line}");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(peer.allow_locked_memory(4096), Err(Error::PeerGone(_))));
}

/// Starts a process with mounts of its own, which `script` creates. Descriptor 3 is the server side of FUSE, which never
/// answers. `None` without permission.
fn contained(script: &str) -> Option<(std::process::Child, Peer)> {
    use std::io::BufRead;
    let script = format!("exec 3<>/dev/fuse && {script} && echo ready && exec sleep 60");
    let mut command = std::process::Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if line != "ready\n" {
        let _ = child.wait();
        skips::skip("permission to mount file systems, and /dev/fuse");
        return None;
    }
    let peer = Peer::open(i32::try_from(child.id()).unwrap(), 0).unwrap();
    Some((child, peer))
}

/// Mounts a file system that never answers; the shell does not open it.
const HANGS: &str = "mount -i -t fuse -o fd=3,rootmode=40000,user_id=0,group_id=0 none";

/// Runs a call that must not hang.
fn promptly<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (answer, outcome) = std::sync::mpsc::channel();
    std::thread::spawn(move || answer.send(work()));
    outcome.recv_timeout(Duration::from_secs(10)).expect("the call hangs")
}

#[test]
fn dev_of_a_container_is_used_if_it_is_a_tmpfs_and_mounts_in_it_are_not_entered() {
    let script = format!("mount -t tmpfs none /dev && mkdir /dev/net /dev/vfio && {HANGS} /dev/net");
    let Some((mut child, peer)) = contained(&script) else { return };
    let results = {
        let peer = peer.clone();
        promptly(move || {
            let dev = peer.dev().unwrap();
            let names: Vec<_> = dev.list(16).unwrap().into_iter().map(|entry| entry.name).collect();
            let touched = [
                dev.stat("net").map(drop),
                dev.stat("net/tun").map(drop),
                dev.open_dir("net").map(drop),
                dev.chown_device("net/tun", (10, 200), 107, 107),
                dev.open_dir("vfio").and_then(|vfio| vfio.stat("../net").map(drop)),
            ];
            (names, touched, dev.open_dir("vfio").is_ok(), peer.root().and_then(|root| root.security_label()).is_ok())
        })
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let (names, touched, vfio, labelled) = results;
    assert_eq!(names, ["net", "vfio"]);
    let [inside @ .., above] = &touched;
    assert!(inside.iter().all(|outcome| matches!(outcome, Err(Error::Escape(_)))), "{touched:?}");
    assert!(matches!(above, Err(Error::NotBeneath(_))), "{above:?}");
    assert!(vfio && labelled);
    assert!(peer.dev().is_err(), "the process is gone");
}

#[test]
fn dev_of_a_container_that_hangs_is_refused_by_its_type() {
    for (script, found) in [
        (format!("{HANGS} /dev"), "fuse"),
        // Beneath it there is an entry of the expected name.
        (format!("mount -t tmpfs none /dev && {HANGS} /dev"), "fuse"),
        // Neither a tmpfs nor a hanging file system.
        ("mount -t proc none /dev".to_owned(), "proc"),
    ] {
        let Some((mut child, peer)) = contained(&script) else { return };
        let refused = promptly(move || peer.dev().map(drop));
        child.kill().unwrap();
        child.wait().unwrap();
        match refused {
            Err(Error::FileSystem { found: kind, .. }) if kind == found => {}
            other => panic!("{script}: {other:?}"),
        }
    }
}
