//! The first process of a node or of the control plane.
//!
//! It is process 1 of a separate PID namespace with separate mount and UTS namespaces. It prepares the namespaces, keeps
//! the services running and reaps orphans. Killing it makes the kernel kill all processes below it, which makes `down`
//! complete.
//!
//! ```text
//! service:   waiting for its dependency ──▶ running ──▶ ended ──(1 s)──▶ waiting ...
//! ```

use std::{
    collections::HashMap,
    fs,
    net::TcpStream,
    os::unix::net::UnixStream,
    path::Path,
    process::{Command, Stdio},
    sync::{
        Mutex, PoisonError,
        mpsc::{Sender, channel},
    },
    thread,
    time::Duration,
};

use rustix::{
    io::Errno,
    mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change},
    process::{WaitOptions, WaitStatus, wait},
};

use crate::{
    command::open_log,
    error::{Error, FileContext, Result},
    host,
    render::{After, Init, Service},
};

/// Delay between the end of a service and its restart.
const RESTART_DELAY: Duration = Duration::from_secs(1);
/// Interval of checks for a service's dependency.
const DEPENDENCY_INTERVAL: Duration = Duration::from_millis(100);

/// Senders that wait for the exit of a process, by process.
type Waiting = Mutex<HashMap<i32, Sender<WaitStatus>>>;

/// Prepares the namespaces and runs the services until killed.
///
/// # Errors
/// Fails if the preparation fails. Does not return once services run.
pub fn run(configuration: &Path) -> Result<()> {
    let text = fs::read_to_string(configuration).at("read", configuration)?;
    let init: Init = serde_json::from_str(&text)
        .map_err(|source| Error::Document { what: configuration.display().to_string(), source })?;
    prepare(&init)?;
    let inherited = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{inherited}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin", init.path.display());
    let waiting = Waiting::default();
    thread::scope(|scope| {
        for service in &init.services {
            let (waiting, path) = (&waiting, path.as_str());
            scope.spawn(move || keep_running(service, path, waiting));
        }
        reap(&waiting);
    });
    Ok(())
}

fn prepare(init: &Init) -> Result<()> {
    let system = |action: String| move |source| Error::System { action, source };
    // The cgroup of the caller may have limits and may be removed with its session.
    host::enter_cgroup(&init.cgroup)?;
    // `/proc` of this PID namespace: a pod in the host's PID namespace finds a process 1 that it may enter.
    mount("proc", "/proc", "proc", MountFlags::empty(), None).map_err(system("mount /proc".into()))?;
    let hostname = Path::new("/proc/sys/kernel/hostname");
    fs::write(hostname, &init.hostname).at("write", hostname)?;
    if init.own_run {
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("run", "/run", "tmpfs", flags, Some(c"mode=755")).map_err(system("mount /run".into()))?;
        let lock = Path::new("/run/lock");
        fs::create_dir_all(lock).at("create", lock)?;
    }
    for (own, seen) in &init.binds {
        mount_bind(own, seen).map_err(system(format!("mount {} over {}", own.display(), seen.display())))?;
    }
    // Pods with bidirectional mount propagation need shared mounts. Sharing stays inside this namespace. It comes last
    // because a bind mount made from a shared one would receive later mounts twice.
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::SHARED).map_err(system("share /".into()))?;
    for (name, value) in &init.sysctls {
        let path = Path::new("/proc/sys").join(name);
        // Kernels without the feature have no such file.
        if path.exists() {
            fs::write(&path, value).at("write", path)?;
        }
    }
    Ok(())
}

fn keep_running(service: &Service, path: &str, waiting: &Waiting) {
    loop {
        if let Some(after) = &service.after {
            while !is_met(after, service, path, waiting) {
                thread::sleep(DEPENDENCY_INTERVAL);
            }
        }
        match run_once(&service.name, &service.command, &service.log, path, waiting) {
            Ok(status) => eprintln!("{} ended: {status:?}; restarting it", service.name),
            Err(error) => eprintln!("{error}"),
        }
        thread::sleep(RESTART_DELAY);
    }
}

fn is_met(after: &After, service: &Service, path: &str, waiting: &Waiting) -> bool {
    match after {
        After::Tcp(address) => TcpStream::connect_timeout(address, Duration::from_secs(1)).is_ok(),
        After::Unix(path) => UnixStream::connect(path).is_ok(),
        After::Command(command) => {
            matches!(run_once(&service.name, command, &service.log, path, waiting), Ok(Some(status)) if status.exit_status() == Some(0))
        }
    }
}

fn run_once(name: &str, command: &[String], log: &Path, path: &str, waiting: &Waiting) -> Result<Option<WaitStatus>> {
    let Some((program, arguments)) = command.split_first() else {
        return Ok(None);
    };
    let output = open_log(log)?;
    let error_output = output.try_clone().at("open", log)?;
    let mut command = Command::new(program);
    command.args(arguments).env("PATH", path).current_dir("/").stdin(Stdio::null()).stdout(output).stderr(error_output);
    let (sender, receiver) = channel();
    {
        // The lock is held across the start so that the exit cannot be reaped before it is registered.
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let child = command.spawn().map_err(|source| crate::command::start_error(name, &command, source))?;
        waiting.insert(child.id().cast_signed(), sender);
    }
    Ok(receiver.recv().ok())
}

/// Reaps all children and orphans. Never returns.
fn reap(waiting: &Waiting) {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) => {
                let pid = pid.as_raw_nonzero().get();
                let waiter = waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid);
                if let Some(waiter) = waiter {
                    // The receiver waits until it has received.
                    let _ = waiter.send(status);
                }
            }
            Err(Errno::CHILD) => thread::sleep(Duration::from_millis(100)),
            Ok(None) | Err(_) => {}
        }
    }
}
