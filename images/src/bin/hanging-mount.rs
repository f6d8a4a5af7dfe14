//! Mounts a FUSE file system without a server on `/dev` of containers, so that accesses hang. For tests; part of the toolbox
//! image.
//!
//! ```text
//! hanging-mount PID...    processes of the containers in the caller's PID namespace
//! ```
//!
//! It prints a line for each container, and unmounts on SIGTERM. When it exits, the kernel aborts all pending accesses.

use std::{
    fs::{File, OpenOptions},
    os::fd::AsRawFd,
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result, anyhow, ensure};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::signal::{SigSet, Signal},
};

fn main() -> Result<()> {
    let pids: Vec<String> = std::env::args().skip(1).collect();
    ensure!(!pids.is_empty(), "hanging-mount PID...");
    let end = SigSet::from(Signal::SIGTERM);
    // Threads inherit the signal mask.
    end.thread_block()?;
    let (mounted, all) = channel();
    let holders: Vec<_> = pids.into_iter().map(|pid| Holder::start(pid, mounted.clone())).collect();
    drop(mounted);
    // The channel closes when a thread fails.
    let count = all.iter().take(holders.len()).inspect(|pid| println!("mounted in {pid}")).count();
    if count == holders.len() {
        end.wait()?;
    }
    holders.into_iter().try_for_each(Holder::end)
}

/// A thread in the mount namespace of a container.
struct Holder {
    thread: JoinHandle<Result<()>>,
    /// Dropping it ends the thread.
    held: Sender<()>,
}

impl Holder {
    fn start(pid: String, mounted: Sender<String>) -> Self {
        let (held, end) = channel();
        let thread = thread::spawn(move || hold(&pid, mounted, &end).with_context(|| format!("process {pid}")));
        Self { thread, held }
    }

    /// Unmounts and ends the thread.
    fn end(self) -> Result<()> {
        drop(self.held);
        self.thread.join().map_err(|_| anyhow!("a thread has panicked"))?
    }
}

fn hold(pid: &str, mounted: Sender<String>, end: &Receiver<()>) -> Result<()> {
    // Opened first, since the container lacks both.
    let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse").context("open /dev/fuse")?;
    let namespace = File::open(format!("/proc/{pid}/ns/mnt")).context("open the mount namespace")?;
    // Required for entering another mount namespace.
    unshare(CloneFlags::CLONE_FS)?;
    setns(&namespace, CloneFlags::CLONE_NEWNS).context("enter the mount namespace")?;
    let data = format!("fd={},rootmode=40000,user_id=0,group_id=0", fuse.as_raw_fd());
    mount(Some("hanging"), "/dev", Some("fuse"), MsFlags::MS_NOSUID, Some(data.as_str())).context("mount")?;
    mounted.send(pid.to_owned())?;
    drop(mounted);
    // Fails when the sender is dropped.
    end.recv().ok();
    umount2("/dev", MntFlags::MNT_DETACH).context("unmount")?;
    drop(fuse);
    Ok(())
}
