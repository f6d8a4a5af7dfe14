#![allow(clippy::disallowed_methods, reason = "tests create the files of pods")]

use std::{fs, io::BufRead, path::Path, process::Child};

use super::*;

/// A directory of one test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ferrovirt-volumes-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Makes a directory that the node's mounts are not shared with.
    fn target(&self, name: &str) -> Target {
        let directory = self.0.join("hotplug-disks");
        fs::create_dir_all(&directory).unwrap();
        Target { directory: SafeDir::trusted(&directory).unwrap(), name: name.to_owned(), form: Form::Image }
    }

    /// Returns the volumes of a launcher.
    fn volumes(&self, launcher: &Pod) -> BTreeMap<String, Form> {
        volumes_of(launcher.1.hotplugged_names().unwrap(), &self.target("").directory)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process with mounts of its own, which `script` makes in a new root.
struct Pod(Child, Arc<Peer>);

impl Pod {
    /// Starts the process in the directory `root`, with the programs of the host. `None` without permission.
    fn start(root: &Path, script: &str) -> Option<Self> {
        let root = root.display();
        let script = format!(
            "mkdir -p {root} && mount --bind {root} {root} && cd {root} && \
             for d in bin sbin dev lib lib64 proc usr; do mkdir -p $d && mount --rbind /$d $d; done && {script} && \
             mkdir -p old && pivot_root . old && umount -l /old && echo ready && exec sleep 60"
        );
        let mut command = std::process::Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
        let mut child = command.stdout(std::process::Stdio::piped()).spawn().ok()?;
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take()?).read_line(&mut line).ok()?;
        if line != "ready\n" {
            let _ = child.wait();
            skips::skip("permission to mount file systems");
            return None;
        }
        let peer = Arc::new(Peer::open(i32::try_from(child.id()).unwrap(), 0).unwrap());
        Some(Self(child, peer))
    }

    /// Runs a script in the pod.
    fn run(&self, script: &str) -> String {
        let pid = self.0.id().to_string();
        let output =
            std::process::Command::new("nsenter").args(["-t", &pid, "-m", "--", "/bin/sh", "-c", script]).output();
        let output = output.unwrap();
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a call on a thread of its own.
fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    std::thread::spawn(work).join().unwrap()
}

fn image(holder: &Pod, volume: &'static str) -> Result<safe_dir::namespace::DetachedMount, safe_dir::Error> {
    let peer = holder.1.clone();
    apart(move || clone_image(&peer, volume))
}

fn owner(path: &Path) -> u32 {
    std::os::unix::fs::MetadataExt::uid(&fs::metadata(path).unwrap())
}

/// A pod with the claim `data`, and a launcher with its directory.
fn pods(scratch: &Scratch) -> Option<(Pod, Pod)> {
    let claim = scratch.0.join("claim");
    fs::create_dir_all(&claim).unwrap();
    fs::write(claim.join("disk.img"), "content of the disk").unwrap();
    scratch.target("");
    let holder = Pod::start(
        &scratch.0.join("holder"),
        &format!("mkdir -p volumes/data volumes/plain path && mount --bind {} volumes/data", claim.display()),
    )?;
    let launcher = Pod::start(
        &scratch.0.join("launcher"),
        &format!(
            "mkdir -p run/kubevirt/hotplug-disks var && ln -s ../run var/run && \
             mount --bind {} run/kubevirt/hotplug-disks",
            scratch.0.join("hotplug-disks").display()
        ),
    )?;
    Some((holder, launcher))
}

#[test]
fn saved_memory_replaces_that_of_the_same_guest_and_is_never_made_for_a_restore() {
    let scratch = Scratch::new("memory");
    let Some((holder, _launcher)) = pods(&scratch) else { return };
    let claim = scratch.0.join("claim");
    for name in ["v-ab-1.memory.save", "w-cd-1.memory.save", "v-ab-1.memory.dump", "other"] {
        fs::write(claim.join(name), "x").unwrap();
    }
    let clone = |name: &'static str, is_new: bool| {
        let peer = holder.1.clone();
        apart(move || clone_memory(&peer, "data", name, is_new, RUNTIME_USER))
    };
    assert!(clone("v-ab-2.memory.save", false).is_err(), "there is none");
    clone("v-ab-1.memory.save", false).unwrap();
    clone("v-ab-2.memory.save", true).unwrap();
    let names = fs::read_dir(&claim).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let left = ["disk.img", "other", "v-ab-1.memory.dump", "v-ab-2.memory.save", "w-cd-1.memory.save"];
    assert_eq!(names.collect::<BTreeSet<_>>(), left.map(str::to_owned).into());
    assert_eq!(owner(&claim.join("v-ab-2.memory.save")), RUNTIME_USER);
}

#[test]
fn a_dump_gets_a_file_of_its_own_and_replaces_the_former_one() {
    let scratch = Scratch::new("dump");
    let Some((holder, launcher)) = pods(&scratch) else { return };
    let claim = scratch.0.join("claim");
    let dump = |name: &'static str| {
        let peer = holder.1.clone();
        apart(move || clone_dump(&peer, "data", name, RUNTIME_USER))
    };
    let listed = || {
        let names = fs::read_dir(&claim).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<BTreeSet<_>>()
    };
    for name in ["a.memory.dump", "b.memory.dump", "b.memory.dump"] {
        let source = dump(name).unwrap();
        assert_eq!(listed(), ["disk.img".to_owned(), name.to_owned()].into(), "other files stay");
        assert_eq!(owner(&claim.join(name)), RUNTIME_USER);
        let (target, peer) = (scratch.target("data.img"), launcher.1.clone());
        target.create().unwrap();
        apart(move || {
            target.detach(&peer).unwrap();
            target.attach(&peer, &source).unwrap();
        });
        launcher.run(&format!("echo {name} > /run/kubevirt/hotplug-disks/data.img"));
        assert_eq!(fs::read_to_string(claim.join(name)).unwrap(), format!("{name}\n"));
    }
    // A link is not followed.
    std::os::unix::fs::symlink("disk.img", claim.join("c.memory.dump")).unwrap();
    assert!(dump("c.memory.dump").is_err());
    assert_eq!(fs::read_to_string(claim.join("disk.img")).unwrap(), "content of the disk");
}

#[test]
fn an_image_is_handed_over_by_its_mount_and_taken_back_once_it_is_closed() {
    let scratch = Scratch::new("image");
    let Some((holder, launcher)) = pods(&scratch) else { return };
    let own = owner(&scratch.0.join("claim/disk.img"));
    let target = scratch.target("data.img");
    target.create().unwrap();
    target.create().unwrap();
    let source = image(&holder, "data").unwrap();
    assert_eq!(source.device, None);
    let attach = |source| {
        let (target, launcher) = (target.clone(), launcher.1.clone());
        apart(move || target.attach(&launcher, &source))
    };
    attach(source).unwrap();
    assert_eq!(launcher.run("cat /var/run/kubevirt/hotplug-disks/data.img"), "content of the disk");
    assert_eq!(scratch.volumes(&launcher), BTreeMap::from([("data".to_owned(), Form::Image)]));
    // On the node there is only the file.
    assert_eq!(fs::read_to_string(scratch.0.join("hotplug-disks/data.img")).unwrap(), "");
    assert_eq!(owner(&scratch.0.join("claim/disk.img")), own, "never given to another user");
    // Repeated by a restarted virt-handler.
    attach(image(&holder, "data").unwrap()).unwrap();
    assert_eq!(launcher.1.hotplugged_names().unwrap(), ["data.img"]);
    // The attachment pod ends: the mount stays.
    drop(holder);
    assert_eq!(launcher.run("cat /run/kubevirt/hotplug-disks/data.img"), "content of the disk");

    let detach = || {
        let (target, launcher) = (target.clone(), launcher.1.clone());
        apart(move || target.detach(&launcher))
    };
    launcher.run("( exec 3</run/kubevirt/hotplug-disks/data.img; exec sleep 3 ) >&- 2>&- & sleep 0.5");
    let in_use = detach();
    assert!(matches!(in_use, Err(safe_dir::Error::Io { .. })), "{in_use:?}");
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(detach().unwrap(), None);
    assert_eq!(detach().unwrap(), None, "again");
    assert_eq!(scratch.volumes(&launcher), BTreeMap::new());
    assert_eq!(launcher.run("cat /run/kubevirt/hotplug-disks/data.img"), "");
}

#[test]
fn a_utility_volume_is_the_directory_of_its_claim() {
    let scratch = Scratch::new("directory");
    let Some((holder, launcher)) = pods(&scratch) else { return };
    let own = owner(&scratch.0.join("claim"));
    let target = Target { form: Form::Directory, ..scratch.target("data") };
    for _ in 0..2 {
        target.create().unwrap();
        let (peer, place, holder) = (launcher.1.clone(), target.clone(), holder.1.clone());
        apart(move || place.attach(&peer, &clone_directory(&holder, "data").unwrap())).unwrap();
    }
    assert_eq!(scratch.volumes(&launcher), BTreeMap::from([("data".to_owned(), Form::Directory)]));
    assert_eq!(launcher.1.hotplugged_names().unwrap(), ["data"], "a second time changes nothing");
    launcher.run("echo written > /run/kubevirt/hotplug-disks/data/file");
    assert_eq!(fs::read_to_string(scratch.0.join("claim/file")).unwrap(), "written\n");
    assert_eq!(owner(&scratch.0.join("claim")), own, "never given to another user");
    let peer = holder.1.clone();
    let plain = apart(move || clone_directory(&peer, "plain")).unwrap_err();
    assert!(matches!(plain, safe_dir::Error::NotMounted(_)), "{plain:?}");

    let (place, peer) = (target.clone(), launcher.1.clone());
    assert_eq!(apart(move || place.detach(&peer)).unwrap(), None);
    target.remove().unwrap();
    assert_eq!(scratch.volumes(&launcher), BTreeMap::new());
    assert_eq!(launcher.run("ls /run/kubevirt/hotplug-disks"), "");
    assert!(scratch.0.join("claim/file").exists(), "the content stays");
}

#[test]
fn only_the_claim_of_an_attachment_pod_is_used() {
    let scratch = Scratch::new("claims");
    let Some((holder, _launcher)) = pods(&scratch) else { return };
    let secret = scratch.0.join("secret");
    fs::write(&secret, "secret").unwrap();
    // A directory of the container itself.
    assert!(matches!(image(&holder, "plain"), Err(safe_dir::Error::NotMounted(_))));
    assert!(image(&holder, "absent").unwrap_err().is_not_found());
    // A link, or another kind of file, instead of the image.
    let claim = scratch.0.join("claim/disk.img");
    fs::remove_file(&claim).unwrap();
    assert!(matches!(image(&holder, "data"), Err(safe_dir::Error::NoImage)));
    std::os::unix::fs::symlink(&secret, &claim).unwrap();
    let link = image(&holder, "data").unwrap_err();
    assert!(matches!(link, safe_dir::Error::WrongKind { found: safe_dir::Kind::Link, .. }), "{link:?}");
    fs::remove_file(&claim).unwrap();
    fs::create_dir(&claim).unwrap();
    assert!(matches!(image(&holder, "data"), Err(safe_dir::Error::WrongKind { .. })));
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&fs::metadata(&secret).unwrap()), 0);
}

#[test]
fn a_launcher_cannot_redirect_a_mount() {
    let scratch = Scratch::new("redirect");
    let Some((holder, launcher)) = pods(&scratch) else { return };
    let target = scratch.target("data.img");
    let attach = |source| {
        let (target, launcher) = (target.clone(), launcher.1.clone());
        apart(move || target.attach(&launcher, &source))
    };
    // A link instead of the file.
    std::os::unix::fs::symlink("/usr/bin/env", scratch.0.join("hotplug-disks/data.img")).unwrap();
    target.create().unwrap();
    let link = attach(image(&holder, "data").unwrap()).unwrap_err();
    assert!(matches!(link, safe_dir::Error::WrongKind { found: safe_dir::Kind::Link, .. }), "{link:?}");
    // Another directory instead of the volume.
    fs::remove_file(scratch.0.join("hotplug-disks/data.img")).unwrap();
    target.create().unwrap();
    launcher.run("umount /run/kubevirt/hotplug-disks && touch /run/kubevirt/hotplug-disks/data.img");
    let elsewhere = attach(image(&holder, "data").unwrap()).unwrap_err();
    assert!(matches!(elsewhere, safe_dir::Error::Escape(_)), "{elsewhere:?}");
    assert_eq!(scratch.volumes(&launcher), BTreeMap::new());
}

#[test]
fn a_device_node_that_the_pod_made_is_not_used() {
    let scratch = Scratch::new("device");
    let script = "mkdir -p path/data && mknod path/data/uid b 7 200";
    let Some(holder) = Pod::start(&scratch.0.join("holder"), script) else { return };
    let device = |published: &'static [(u32, u32)]| {
        let peer = holder.1.clone();
        apart(move || clone_device(&peer, "data", published, RUNTIME_USER))
    };
    for published in [[].as_slice(), &[(7, 201), (8, 200)]] {
        let refused = device(published).unwrap_err();
        assert!(matches!(refused, safe_dir::Error::Unpublished { major: 7, minor: 200, .. }), "{refused:?}");
    }
    let owner = fs::metadata(scratch.0.join("holder/path/data/uid"));
    assert!(owner.is_err() || std::os::unix::fs::MetadataExt::uid(&owner.unwrap()) == 0, "the node was given away");
    assert_eq!(device(&[(7, 201), (7, 200)]).unwrap().device, Some((7, 200)));
}

#[test]
fn mounts_of_a_user_namespace_are_not_used() {
    let mut command = std::process::Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", "echo ready && exec sleep 60"]);
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if line == "ready\n" {
        let peer = Arc::new(Peer::open(i32::try_from(child.id()).unwrap(), 0).unwrap());
        let refused = apart(move || clone_image(&peer, "data")).unwrap_err();
        assert!(matches!(refused, safe_dir::Error::UserNamespace(_)), "{refused:?}");
        let _ = child.kill();
    } else {
        skips::skip("permission to make user namespaces");
    }
    let _ = child.wait();
}

#[tokio::test]
async fn a_pod_that_does_not_hold_the_volume_of_the_vmi_is_refused() {
    // The answer of a pod of this release, or what another program sends.
    let ask = async |vmi: &str, volume: &str, other: Option<&'static str>| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let held = holder::Held { vmi: "u1".to_owned(), volumes: vec!["data".to_owned()] };
        let pod = tokio::spawn(async move {
            let mut question = [0; 256];
            let length = theirs.read(&mut question).await.unwrap();
            let question = String::from_utf8_lossy(&question[..length]).into_owned();
            let _ = theirs.write_all(other.unwrap_or_else(|| held.answer(&question)).as_bytes()).await;
        });
        let outcome = require_held(ours, "p", vmi, volume).await;
        pod.await.unwrap();
        outcome
    };
    ask("u1", "data", None).await.unwrap();
    for (vmi, volume) in [("u2", "data"), ("u1", "other"), ("", "data")] {
        let refused = ask(vmi, volume, None).await.unwrap_err();
        assert!(matches!(refused, Error::Foreign { .. }), "{refused:?}");
        assert_eq!(refused.to_string(), format!("attachment pod p does not hold this volume of VMI {vmi}"));
        assert!(!refused.failure().waiting);
    }
    for other in ["held", "held\nheld\n", "yes\n", &"held\n".repeat(100)] {
        let other = Some(&*other.to_owned().leak());
        assert!(matches!(ask("u1", "data", other).await, Err(Error::Foreign { .. })), "{other:?}");
    }
    // A pod of a former release closes the connection.
    assert!(matches!(ask("u1", "data", Some("")).await, Err(Error::Silent { .. })));
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    assert!(matches!(require_held(ours, "p", "u1", "data").await, Err(Error::Silent { .. })));
    let (ours, _theirs) = UnixStream::pair().unwrap();
    tokio::time::pause();
    assert!(matches!(require_held(ours, "p", "u1", "data").await, Err(Error::NotReady)));
}

#[test]
fn a_process_of_the_node_is_no_pod() {
    let own = Arc::new(Peer::open(i32::try_from(std::process::id()).unwrap(), 0).unwrap());
    let refused = apart(move || clone_image(&own, "data")).unwrap_err();
    assert!(matches!(refused, safe_dir::Error::NodeNamespace(_)), "{refused:?}");
}

#[test]
fn names_of_volumes_are_plain() {
    let long = "a".repeat(64);
    for (name, accepted) in [
        ("data", true),
        ("my-data-1", true),
        ("", false),
        ("a/b", false),
        ("..", false),
        ("a.img", false),
        (&long, false),
    ] {
        assert_eq!(is_name(name), accepted, "{name:?}");
    }
    let path = pod_volume("1a-2b");
    assert_eq!(path, Path::new("1a-2b/volumes/kubernetes.io~empty-dir/hotplug-disks"));
}
