//! Files in the mount namespaces of pods.
//!
//! A volume of an attachment pod becomes visible in a launcher pod as a mount of one file, its image or the node of its
//! device, or of the directory of a utility volume. The mount is cloned in the namespace of the attachment pod and attached in that of the launcher pod. None is made
//! on the node, so that nothing has to be undone there: the mounts end with the container.
//!
//! Each function here moves the thread that calls it into another mount namespace, and must run on a thread of its own
//! ([`super::pod_calls`]).

use std::{os::fd::OwnedFd, path::Path};

use nix::sched::CloneFlags;
use rustix::{
    fs::{AtFlags, Gid, Mode, OFlags, ResolveFlags, Uid},
    io::Errno,
    mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags},
    thread::ThreadNameSpaceType,
};

use api::hibernation;

use super::{BENEATH, Error, Kind, Peer, SafeDir, require_kind, stat_of};

/// Directory of file systems in an attachment pod.
const FILE_SYSTEMS: &str = "volumes";
/// Directory of device nodes in an attachment pod.
const DEVICES: &str = "path";
/// Image in a claim with a file system.
const IMAGE: &str = "disk.img";
/// Directory of hot-plugged volumes in a launcher pod.
const TARGETS: &str = "var/run/kubevirt/hotplug-disks";
/// Most entries of a claim for memory dumps.
const MAX_DUMPS: usize = 1024;
/// Most entries in the directory of a device node.
const MAX_NODES: usize = 8;

/// What a launcher pod sees of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A regular file.
    Image,
    /// A device node.
    Device,
    /// The directory of a file system.
    Directory,
}

/// The mount of a file or directory, attached nowhere.
#[derive(Debug)]
pub(crate) struct DetachedMount {
    mount: OwnedFd,
    /// Number of the block device; `None` for anything else.
    pub(crate) device: Option<(u32, u32)>,
}

/// A file or directory of a launcher pod's volume on which a mount is attached.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// The volume, as the node sees it.
    pub(crate) directory: SafeDir,
    pub(crate) name: String,
    /// What is mounted there.
    pub(crate) form: Form,
}

/// Moves this thread into the mount namespace of a process and returns its root directory.
fn enter(peer: &Peer) -> Result<SafeDir, Error> {
    let failed = |errno| Error::io("enter the mount namespace of process", peer.pid().to_string(), errno);
    let identity = |path: String| rustix::fs::stat(path).map(|stat| (stat.st_dev, stat.st_ino));
    let of_peer = identity(format!("/proc/{}/ns/mnt", peer.pid())).map_err(failed)?;
    let own = identity("/proc/self/ns/mnt".to_owned()).map_err(failed)?;
    // Process 1 can be inaccessible. Without the node's process ids it has no meaning.
    let node = identity("/proc/1/ns/mnt".to_owned()).ok();
    if of_peer == own || Some(of_peer) == node {
        return Err(Error::NodeNamespace(peer.pid()));
    }
    if !peer.is_alive() {
        return Err(Error::PeerGone(peer.pid()));
    }
    // `/proc` is that of the pod afterwards.
    let proc = rustix::fs::open("/proc", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let proc = proc.map_err(failed)?;
    // A namespace can be entered only with a root and a working directory that no other thread shares.
    nix::sched::unshare(CloneFlags::CLONE_FS).map_err(|errno| failed(Errno::from_raw_os_error(errno as i32)))?;
    rustix::thread::move_into_thread_name_spaces(peer.pidfd(), ThreadNameSpaceType::MOUNT).map_err(failed)?;
    // A process that anyone can start in a user namespace of its own has mounts that kubelet has not made. It cannot return
    // from there, so that its mounts, entered before, were not such ones.
    let user = |path: String| rustix::fs::statat(&proc, path, AtFlags::empty()).map(|stat| (stat.st_dev, stat.st_ino));
    let of_peer = user(format!("{}/ns/user", peer.pid()));
    if !peer.is_alive() {
        return Err(Error::PeerGone(peer.pid()));
    }
    if of_peer.map_err(failed)? != user("self/ns/user".to_owned()).map_err(failed)? {
        return Err(Error::UserNamespace(peer.pid()));
    }
    let root = rustix::fs::open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    Ok(SafeDir { fd: root.map_err(failed)?.into(), one_mount: false })
}

/// Opens the file system of the claim `volume` in an attachment pod. Entries are listed with another access than `PATH`.
fn open_claim(peer: &Peer, volume: &str, access: OFlags) -> Result<SafeDir, Error> {
    let path = Path::new(volume);
    let named = OFlags::PATH | OFlags::NOFOLLOW;
    let root =
        enter(peer)?.resolve("open", Path::new(FILE_SYSTEMS), named | OFlags::DIRECTORY, Mode::empty(), BENEATH)?;
    let volumes = SafeDir { fd: root.into(), one_mount: false };
    let flags = named | OFlags::DIRECTORY;
    // The claim is a mount of its own, which kubelet has made. The container's own directory is none.
    let same_mount = volumes.resolve("open", path, flags, Mode::empty(), BENEATH.union(ResolveFlags::NO_XDEV));
    match same_mount {
        Err(Error::Escape(_)) => {}
        Ok(_) => return Err(Error::NotMounted(path.to_owned())),
        Err(error) => return Err(error),
    }
    let flags = access | OFlags::NOFOLLOW | OFlags::DIRECTORY;
    Ok(SafeDir { fd: volumes.resolve("open", path, flags, Mode::empty(), BENEATH)?.into(), one_mount: true })
}

/// Clones the mount of the image of `volume` in an attachment pod. Its owner stays: the group of the pod has access by `fsGroup`.
pub(crate) fn clone_image(peer: &Peer, volume: &str) -> Result<DetachedMount, Error> {
    let claim = open_claim(peer, volume, OFlags::PATH)?;
    let named = OFlags::PATH | OFlags::NOFOLLOW;
    let image = match claim.resolve("open", Path::new(IMAGE), named, Mode::empty(), BENEATH) {
        Err(error) if error.is_not_found() => return Err(Error::NoImage),
        outcome => outcome?,
    };
    require_kind(stat_of(&image, Path::new(IMAGE))?, Path::new(IMAGE), Kind::File)?;
    Ok(DetachedMount { mount: cloned(&image, IMAGE)?, device: None })
}

/// Creates the file `name` for a memory dump in the claim `volume` of an attachment pod, gives it to `user` and clones its mount.
/// Earlier dumps in the claim are removed.
pub(crate) fn clone_dump(peer: &Peer, volume: &str, name: &str, user: u32) -> Result<DetachedMount, Error> {
    let claim = open_claim(peer, volume, OFlags::RDONLY)?;
    create_alone(&claim, name, |former| former.ends_with(api::hotplug::DUMP_SUFFIX))?;
    clone_file(&claim, name, user)
}

/// Clones the mount of the file `name` for the memory of a guest in the claim `volume` of an attachment pod. A new one is created and
/// given to `user`, and earlier ones of the same guest are removed: the names of a guest differ in the text after the last hyphen.
pub(crate) fn clone_memory(
    peer: &Peer,
    volume: &str,
    name: &str,
    is_new: bool,
    user: u32,
) -> Result<DetachedMount, Error> {
    let claim = open_claim(peer, volume, OFlags::RDONLY)?;
    if is_new {
        let guest = name.rsplit_once('-').map(|(guest, _)| guest);
        let is_of_guest = |former: &str| former.rsplit_once('-').map(|(guest, _)| guest) == guest;
        let is_former = |former: &str| guest.is_some() && is_of_guest(former) && former.ends_with(hibernation::SUFFIX);
        create_alone(&claim, name, is_former)?;
    }
    clone_file(&claim, name, user)
}

/// Creates a file unless it exists, and removes files that are former ones.
fn create_alone(claim: &SafeDir, name: &str, is_former: impl Fn(&str) -> bool) -> Result<(), Error> {
    for entry in claim.list(MAX_DUMPS)? {
        let known = entry.name.to_string_lossy();
        if entry.kind == Kind::File && known != name && is_former(&known) {
            claim.remove_file(&entry.name)?;
        }
    }
    match claim.create_file(name) {
        Err(error) if !error.already_exists() => Err(error),
        _ => Ok(()),
    }
}

/// Gives a file of a claim to `user` and clones its mount.
fn clone_file(claim: &SafeDir, name: &str, user: u32) -> Result<DetachedMount, Error> {
    let path = Path::new(name);
    let file = claim.resolve("open", path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), BENEATH)?;
    let stat = stat_of(&file, path)?;
    require_kind(stat, path, Kind::File)?;
    give(&file, name, stat.uid, user)?;
    Ok(DetachedMount { mount: cloned(&file, name)?, device: None })
}

/// Clones the mount of the claim `volume` in an attachment pod.
pub(crate) fn clone_directory(peer: &Peer, volume: &str) -> Result<DetachedMount, Error> {
    let claim = open_claim(peer, volume, OFlags::PATH)?;
    Ok(DetachedMount { mount: cloned(&claim.fd, volume)?, device: None })
}

/// Clones the mount of the node of the block device `volume` in an attachment pod, and gives the node to `user`. `published` are
/// the devices that kubelet has attached to the pod: a node that the pod has made is none of them.
pub(crate) fn clone_device(
    peer: &Peer,
    volume: &str,
    published: &[(u32, u32)],
    user: u32,
) -> Result<DetachedMount, Error> {
    let nodes = enter(peer)?.open_dir(Path::new(DEVICES).join(volume))?;
    let entries = nodes.list(MAX_NODES)?;
    let mut devices = entries.iter().filter(|entry| entry.kind == Kind::BlockDevice);
    let (Some(entry), None) = (devices.next(), devices.next()) else {
        return Err(Error::NotMounted(volume.into()));
    };
    let path = Path::new(&entry.name);
    let node = nodes.resolve("open", path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), BENEATH)?;
    let stat = stat_of(&node, path)?;
    require_kind(stat, path, Kind::BlockDevice)?;
    if !published.contains(&stat.rdev) {
        let (major, minor) = stat.rdev;
        return Err(Error::Unpublished { volume: volume.into(), major, minor });
    }
    give(&node, volume, stat.uid, user)?;
    Ok(DetachedMount { mount: cloned(&node, volume)?, device: Some(stat.rdev) })
}

/// Changes the owner of a file, unless it has it already or its file system has no owners that could be changed.
fn give(file: &OwnedFd, name: &str, owner: u32, user: u32) -> Result<(), Error> {
    if owner == user {
        return Ok(());
    }
    match rustix::fs::chownat(file, "", Some(Uid::from_raw(user)), Some(Gid::from_raw(user)), AtFlags::EMPTY_PATH) {
        // Read-only, or owned by a server: the group of the pod may still have access.
        Ok(()) | Err(Errno::ROFS | Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP) => Ok(()),
        Err(errno) => Err(Error::io("change owner of", name, errno)),
    }
}

fn cloned(file: &OwnedFd, path: &str) -> Result<OwnedFd, Error> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(file, "", flags).map_err(|errno| Error::io("clone the mount of", path, errno))
}

impl Target {
    /// Creates the file or directory, if it does not exist.
    pub(crate) fn create(&self) -> Result<(), Error> {
        let created = match self.form {
            Form::Image | Form::Device => self.directory.create_file(&self.name),
            Form::Directory => self.directory.create_dir(&self.name),
        };
        match created {
            Err(error) if error.already_exists() => Ok(()),
            outcome => outcome,
        }
    }

    /// Removes the file or directory.
    pub(crate) fn remove(&self) -> Result<(), Error> {
        match self.form {
            Form::Image | Form::Device => self.directory.remove_file(&self.name),
            Form::Directory => self.directory.remove_dir(&self.name),
        }
    }

    /// Opens the directory in the namespace of the launcher, whose root is `root`. It must be the one that the node sees.
    fn open(&self, root: &SafeDir) -> Result<SafeDir, Error> {
        // `/var/run` is a link in most images.
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let directory = root.resolve("open", Path::new(TARGETS), flags, Mode::empty(), resolve)?;
        let (seen, expected) =
            (stat_of(&directory, Path::new(TARGETS))?, stat_of(&*self.directory.fd, Path::new("."))?);
        if (seen.device, seen.inode) != (expected.device, expected.inode) {
            return Err(Error::Escape(TARGETS.into()));
        }
        Ok(SafeDir { fd: directory.into(), one_mount: false })
    }

    /// Attaches a mount in the namespace of the launcher. Does nothing if one is attached.
    pub(crate) fn attach(&self, launcher: &Peer, source: &DetachedMount) -> Result<(), Error> {
        let directory = self.open(&enter(launcher)?)?;
        let path = Path::new(&self.name);
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let resolve = BENEATH.union(ResolveFlags::NO_XDEV);
        let file = match directory.resolve("open", path, flags, Mode::empty(), resolve) {
            Err(Error::Escape(_)) => return Ok(()),
            outcome => outcome?,
        };
        let kind = if self.form == Form::Directory { Kind::Directory } else { Kind::File };
        require_kind(stat_of(&file, path)?, path, kind)?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        rustix::mount::move_mount(&source.mount, "", &file, "", flags)
            .map_err(|errno| Error::io("attach the mount on", path, errno))
    }

    /// Returns the number of the block device that the launcher has there.
    pub(crate) fn device(&self, launcher: &Peer) -> Result<Option<(u32, u32)>, Error> {
        self.number(&self.open(&enter(launcher)?)?)
    }

    fn number(&self, directory: &SafeDir) -> Result<Option<(u32, u32)>, Error> {
        let stat = directory.stat(&self.name)?;
        Ok(Some(stat).filter(|stat| stat.kind == Kind::BlockDevice).map(|stat| stat.rdev))
    }

    /// Detaches the mount in the namespace of the launcher. Returns the number of its block device. Fails while a process has
    /// the file open, or one of the directory.
    pub(crate) fn detach(&self, launcher: &Peer) -> Result<Option<(u32, u32)>, Error> {
        let directory = self.open(&enter(launcher)?)?;
        let path = Path::new(&self.name);
        // Images and directories are not looked at: their storage may not answer.
        let device = if self.form == Form::Device { self.number(&directory)? } else { None };
        let failed = |errno| Error::io("detach the mount from", path, errno);
        // One name in the directory of this thread: no other mount can be meant.
        rustix::process::fchdir(&*directory.fd).map_err(failed)?;
        match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
            // Nothing is mounted there.
            Ok(()) | Err(Errno::INVAL) => Ok(device),
            Err(errno) => Err(failed(errno)),
        }
    }
}
