//! Collects the capabilities of libvirt and QEMU on a node, once for all launchers of the node.
//!
//! libvirt probes QEMU when it starts, which takes seconds, and caches the result in files that are valid for one QEMU
//! binary, kernel, user and presence of KVM. `collect` lets it probe in a scratch directory, with the user and binaries
//! of launcher pods, and keeps these files. Each probing run is a process of its own, since it changes its user and
//! hides or shows /dev/kvm.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::stat::{Mode, SFlag, mknod},
    unistd::{Gid, Uid, setgid, setgroups, setuid},
};
use rustix::process::{Pid, WaitOptions, wait};
use thiserror::Error;

use super::{
    callbacks,
    connection::{CallKind, Connection},
    daemon::{self, Daemon, DaemonProgram},
};
use crate::{
    hypervisor::{HypervisorError, StartError},
    paths::Paths,
    tasks::Tasks,
};

/// User and group of launcher pods.
const LAUNCHER_ID: u32 = 107;
/// Time limit of one probing run; under emulation a run takes some seconds.
const PROBE_DEADLINE: Duration = Duration::from_secs(90);
const CALL_DEADLINE: Duration = Duration::from_secs(60);
/// Machine type of the collected domain capabilities.
const MACHINE_TYPE: &str = "q35";
const KVM: &str = "/dev/kvm";
/// Capability that makes libvirt query some 450 CPU properties one by one when QEMU starts. QEMU reads its monitor byte
/// by byte, so this takes 0.3 s of a core. Without it libvirt reads the CPUID leaves in three calls. These lack the
/// features in model specific registers, which matter only where libvirt compares the guest's CPU with the host's: not
/// under emulation.
const PROPERTY_WISE_CPU: &str = "<flag name='cpu-unavailable-features'/>";

/// Failure to collect a node's capabilities.
#[derive(Debug, Error)]
pub enum CapabilitiesError {
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A probing run failed.
    #[error("probing {0} failed")]
    Probe(&'static str),
    /// A probing run did not end in time.
    #[error("probing {0} took too long")]
    Timeout(&'static str),
    /// The surroundings of a probing run cannot be set up.
    #[error("cannot set up the probing run: {0}")]
    Surroundings(#[from] nix::Error),
    /// The daemon cannot be set up.
    #[error(transparent)]
    Daemon(#[from] StartError),
    /// libvirt failed.
    #[error(transparent)]
    Libvirt(#[from] HypervisorError),
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> CapabilitiesError + '_ {
    move |source| CapabilitiesError::Io { path: path.to_owned(), source }
}

/// Writes `capabilities.xml`, `virsh_domcapabilities.xml`, `cache-qemu/` and, where KVM works, `cache-kvm/` to `output`.
///
/// # Errors
/// When probing without KVM fails, or files cannot be written. KVM that does not work is not an error.
pub fn collect(output: &Path) -> Result<(), CapabilitiesError> {
    fs::create_dir_all(output).map_err(io(output))?;
    let scratch = Scratch::new()?;
    run_probe(&scratch.0.join("qemu"), false)?;
    let mut described = scratch.0.join("qemu");
    replace_directory(&cache_of(&described), &output.join("cache-qemu"), |cache| {
        without_property_wise_cpu(without_emulated_cpus(cache))
    })?;

    let kvm_cache = output.join("cache-kvm");
    let kvm = scratch.0.join("kvm");
    match Path::new(KVM).exists().then(|| run_probe(&kvm, true)) {
        Some(Ok(())) if described_virtualization(&kvm) == "kvm" => {
            replace_directory(&cache_of(&kvm), &kvm_cache, without_emulated_cpus)?;
            described = kvm;
        }
        result => {
            if let Some(Err(error)) = result {
                tracing::warn!(%error, "KVM does not work on this node");
            }
            if kvm_cache.exists() {
                fs::remove_dir_all(&kvm_cache).map_err(io(&kvm_cache))?;
            }
        }
    }
    for file in ["capabilities.xml", "virsh_domcapabilities.xml"] {
        let (from, to) = (described.join(file), output.join(file));
        let staging = output.join(format!(".{file}"));
        fs::copy(&from, &staging).map_err(io(&from))?;
        fs::rename(&staging, &to).map_err(io(&to))?;
    }
    Ok(())
}

struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, CapabilitiesError> {
        let path = std::env::temp_dir().join(format!("node-capabilities-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(io(&path))?;
        let scratch = Self(path);
        for run in ["qemu", "kvm"] {
            let path = scratch.0.join(run);
            fs::create_dir_all(&path).map_err(io(&path))?;
            std::os::unix::fs::chown(&path, Some(LAUNCHER_ID), Some(LAUNCHER_ID)).map_err(io(&path))?;
        }
        Ok(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn scratch_paths(scratch: &Path) -> Paths {
    Paths { private: scratch.join("private"), runtime: scratch.join("run"), ..Paths::default() }
}

fn cache_of(scratch: &Path) -> PathBuf {
    scratch_paths(scratch).capabilities_cache()
}

fn described_virtualization(scratch: &Path) -> String {
    let text = fs::read_to_string(scratch.join("virsh_domcapabilities.xml")).unwrap_or_default();
    let document = roxmltree::Document::parse(&text).ok();
    document
        .and_then(|document| {
            let domain = document.root_element().children().find(|node| node.has_tag_name("domain"))?;
            domain.text().map(ToOwned::to_owned)
        })
        .unwrap_or_default()
}

/// Runs one probe in its own process, with a time limit.
fn run_probe(scratch: &Path, kvm: bool) -> Result<(), CapabilitiesError> {
    let what = if kvm { "with KVM" } else { "without KVM" };
    let program = std::env::current_exe().map_err(io(Path::new("/proc/self/exe")))?;
    let mut command = Command::new(&program);
    command.args(["probe-capabilities", "--scratch"]).arg(scratch);
    if kvm {
        command.arg("--kvm");
    }
    let mut child = command.env("LIBVIRT_AUTOSTART", "0").stdin(Stdio::null()).spawn().map_err(io(&program))?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let started = Instant::now();
    loop {
        // In its container this is process 1: libvirt waits until the QEMU processes it probes, children of process 1,
        // are reaped.
        while let Ok(Some((reaped, status))) = wait(WaitOptions::NOHANG) {
            if Some(reaped) == pid {
                if status.exit_status() == Some(0) {
                    tracing::info!(what, seconds = started.elapsed().as_secs_f32(), "probed");
                    return Ok(());
                }
                return Err(CapabilitiesError::Probe(what));
            }
        }
        if started.elapsed() > PROBE_DEADLINE {
            // Processes of the run end with this container.
            let _ = child.kill();
            return Err(CapabilitiesError::Timeout(what));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs one probe: hides or shows /dev/kvm, changes to the launcher's user, starts libvirt's daemon and writes the
/// capabilities. With `verify` the cache must already hold everything.
///
/// # Errors
/// When any step fails.
pub fn probe(scratch: &Path, kvm: bool, verify: bool) -> Result<(), CapabilitiesError> {
    if rustix::process::getuid().is_root() {
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
        if let Ok(device) = fs::metadata(KVM) {
            if kvm {
                // Launcher pods get a device they may open; the host's own may be for root only.
                let open = scratch.join("kvm-device");
                mknod(&open, SFlag::S_IFCHR, Mode::empty(), device.rdev())?;
                fs::set_permissions(&open, fs::Permissions::from_mode(0o666)).map_err(io(&open))?;
                mount(Some(&open), KVM, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
            } else {
                // A file only root may open replaces the device.
                let cover = scratch.join("no-kvm");
                fs::write(&cover, "").map_err(io(&cover))?;
                fs::set_permissions(&cover, fs::Permissions::from_mode(0o600)).map_err(io(&cover))?;
                mount(Some(&cover), KVM, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
            }
        }
        setgroups(&[])?;
        setgid(Gid::from_raw(LAUNCHER_ID))?;
        setuid(Uid::from_raw(LAUNCHER_ID))?;
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io(Path::new("runtime")))?;
    let result = runtime.block_on(probe_as_launcher(scratch, verify));
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn probe_as_launcher(scratch: &Path, verify: bool) -> Result<(), CapabilitiesError> {
    let paths = scratch_paths(scratch);
    let program = DaemonProgram::find()?;
    daemon::configure(&program, &paths)?;
    let before = newest(&paths.capabilities_cache());
    let (tasks, _failures) = Tasks::new();
    let daemon = Daemon::start(program.clone(), paths.clone(), &tasks);
    let result = describe(scratch, &program, &paths).await;
    daemon.stop().await;
    result?;
    if verify && newest(&paths.capabilities_cache()) != before {
        return Err(CapabilitiesError::Probe("a second time: the cache was not accepted"));
    }
    Ok(())
}

async fn describe(scratch: &Path, program: &DaemonProgram, paths: &Paths) -> Result<(), CapabilitiesError> {
    let started = Instant::now();
    let connection = loop {
        if std::os::unix::net::UnixStream::connect(program.socket(paths)).is_ok() {
            match Connection::open(program.uri(paths), CALL_DEADLINE).await {
                Ok(connection) => break connection,
                Err(error) if started.elapsed() > CALL_DEADLINE => return Err(error.into()),
                Err(_) => {}
            }
        } else if started.elapsed() > CALL_DEADLINE {
            return Err(CapabilitiesError::Probe("libvirt's daemon does not listen"));
        }
        tokio::time::sleep(Duration::from_millis(15)).await;
    };
    let kind = CallKind::Ordinary;
    let host = connection.run(kind, "capabilities", CALL_DEADLINE, |connect| Ok(connect.get_capabilities()?)).await?;
    let domains = |virtualization: &'static str| {
        connection.run(kind, "domain capabilities", CALL_DEADLINE, move |connect| {
            callbacks::domain_capabilities(connect, MACHINE_TYPE, virtualization)
        })
    };
    let domains = match domains("kvm").await {
        Ok(xml) => xml,
        Err(_) => domains("qemu").await?,
    };
    for (file, content) in [("capabilities.xml", host), ("virsh_domcapabilities.xml", domains)] {
        let path = scratch.join(file);
        fs::write(&path, content).map_err(io(&path))?;
    }
    Ok(())
}

/// Returns name and time of the newest file of a cache.
fn newest(directory: &Path) -> Option<(i64, i64, PathBuf)> {
    let entries = fs::read_dir(directory).ok()?;
    entries
        .flatten()
        .filter_map(|entry| {
            let meta = entry.metadata().ok()?;
            Some((meta.mtime(), meta.mtime_nsec(), entry.path()))
        })
        .max()
}

/// Creates the cache for launchers without KVM: see [`PROPERTY_WISE_CPU`].
fn without_property_wise_cpu(cache: String) -> String {
    if !cache.contains(PROPERTY_WISE_CPU) {
        return cache;
    }
    cache.lines().filter(|line| line.trim() != PROPERTY_WISE_CPU).flat_map(|line| [line, "\n"]).collect()
}

/// Removes the properties of the host's CPU under emulation, and the features that each model lacks there. Domains under
/// emulation have the maximum or a named model that is not checked. libvirtd would keep 1.1 MiB more in each launcher pod, most of
/// it holes in its heap that are left by the parsed document.
fn without_emulated_cpus(cache: String) -> String {
    const MODEL_END: &str = "</cpu>";
    let mut within = None;
    let is_kept = |line: &&str| {
        let line = line.trim();
        match within {
            Some(end) if line == end => {
                within = None;
                end == MODEL_END
            }
            Some(_) => false,
            None => {
                let is_host = line.starts_with("<hostCPU type='tcg'");
                if is_host {
                    within = Some("</hostCPU>");
                } else if line.starts_with("<cpu type='tcg'") && !line.ends_with("/>") {
                    within = Some(MODEL_END);
                }
                !is_host
            }
        }
    };
    cache.lines().filter(is_kept).flat_map(|line| [line, "\n"]).collect()
}

/// Replaces a directory of small XML files, each changed by `edit`.
fn replace_directory(from: &Path, to: &Path, edit: fn(String) -> String) -> Result<(), CapabilitiesError> {
    let staging = to.with_extension("staging");
    for path in [staging.as_path(), to] {
        if path.exists() {
            fs::remove_dir_all(path).map_err(io(path))?;
        }
    }
    fs::create_dir_all(&staging).map_err(io(&staging))?;
    for entry in fs::read_dir(from).map_err(io(from))? {
        let entry = entry.map_err(io(from))?;
        if entry.path().extension().is_some_and(|extension| extension == "xml") {
            let target = staging.join(entry.file_name());
            let content = fs::read_to_string(entry.path()).map_err(io(&entry.path()))?;
            fs::write(&target, edit(content)).map_err(io(&target))?;
        }
    }
    fs::rename(&staging, to).map_err(io(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_for_emulation_loses_one_flag_and_nothing_else() {
        let cache = "<qemuCaps>\n  <flag name='qom-list'/>\n  <flag name='cpu-unavailable-features'/>\n  <version>1</version>\n</qemuCaps>\n";
        let edited = without_property_wise_cpu(cache.to_owned());
        assert_eq!(edited, "<qemuCaps>\n  <flag name='qom-list'/>\n  <version>1</version>\n</qemuCaps>\n");
        assert_eq!(without_property_wise_cpu(edited.clone()), edited);
    }

    #[test]
    fn of_cpus_under_emulation_only_names_stay() {
        let host = |kind: &str| {
            format!(
                "  <hostCPU type='{kind}' model='base'>\n    <property name='avx' type='boolean' value='true'/>\n  </hostCPU>\n"
            )
        };
        let model = |kind: &str, lacks: &str| {
            format!(
                "  <cpu type='{kind}' name='max' usable='yes'/>\n  <cpu type='{kind}' name='EPYC' usable='no'>\n{lacks}  </cpu>\n"
            )
        };
        let lacks = "    <blocker name='xsaves'/>\n";
        let cache = |kind: &str| format!("<qemuCaps>\n{}{}</qemuCaps>\n", host(kind), model(kind, lacks));
        assert_eq!(without_emulated_cpus(cache("tcg")), format!("<qemuCaps>\n{}</qemuCaps>\n", model("tcg", "")));
        assert_eq!(without_emulated_cpus(cache("kvm")), cache("kvm"));
    }
}
