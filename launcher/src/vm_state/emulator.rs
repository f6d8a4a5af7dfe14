//! The process of the TPM emulator swtpm, to which QEMU connects. It belongs to process 1 of the pod, so that a restarted worker
//! finds it by its file.

use std::{
    fs::OpenOptions,
    io::Read,
    os::{
        fd::OwnedFd,
        unix::fs::{OpenOptionsExt, symlink},
    },
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::net::unix::pipe::Receiver;

use super::{VmStateError, claim};
use crate::paths::Paths;

const SWTPM: &str = "/usr/bin/swtpm";
const SWTPM_SETUP: &str = "/usr/bin/swtpm_setup";
/// Name of the process in `/proc/PID/comm`.
const COMMAND: &str = "swtpm";
/// Begin of the name of QEMU's process.
const QEMU: &str = "qemu-";
/// Time limit of making a TPM: keys of a certificate authority are made, too.
const SETUP_DEADLINE: Duration = Duration::from_secs(40);
/// Time limit of a start, and of an end after a signal.
const DEADLINE: Duration = Duration::from_secs(5);
/// Pause between looks at a process.
const LOOK: Duration = Duration::from_millis(5);
/// Limit of the content of the file with the process ID, in bytes.
const PID_LIMIT: u64 = 32;
/// Limit of the error output that is kept, in bytes.
const OUTPUT_LIMIT: u64 = 1024;

/// Makes a TPM in this directory: an endorsement key for RSA and ECC, with certificates if there is a directory for the authority
/// that signs them.
pub(super) fn make(directory: &Path, local_ca: Option<&Path>, paths: &Paths, name: &str) -> Result<(), VmStateError> {
    let work = paths.tpm_work();
    claim::make_directory(&work)?;
    let configuration = work.join("swtpm_setup.conf");
    let mut command = Command::new(SWTPM_SETUP);
    command.args(["--tpm2", "--createek", "--not-overwrite", "--tpm-state"]).arg(directory);
    if let Some(local_ca) = local_ca {
        for (file, content) in configurations(&work, local_ca) {
            std::fs::write(work.join(file), content)?;
        }
        command.args(["--create-ek-cert", "--create-platform-cert", "--lock-nvram", "--vmid", name]);
    } else {
        std::fs::write(&configuration, "active_pcr_banks = sha256\n")?;
    }
    command.arg("--config").arg(&configuration).env("TMPDIR", &work);
    run(command, &work, SETUP_DEADLINE)
}

/// Returns the configuration files of swtpm_setup and of its tool for certificates.
fn configurations(work: &Path, local_ca: &Path) -> [(&'static str, String); 3] {
    let (work, local_ca) = (work.display(), local_ca.display());
    [
        (
            "swtpm_setup.conf",
            format!(
                "create_certs_tool = /usr/bin/swtpm_localca\n\
                 create_certs_tool_config = {work}/swtpm-localca.conf\n\
                 create_certs_tool_options = {work}/swtpm-localca.options\n\
                 active_pcr_banks = sha256\n"
            ),
        ),
        (
            "swtpm-localca.conf",
            format!(
                "statedir = {local_ca}\n\
                 signingkey = {local_ca}/signkey.pem\n\
                 issuercert = {local_ca}/issuercert.pem\n\
                 certserial = {local_ca}/certserial\n"
            ),
        ),
        (
            "swtpm-localca.options",
            "--platform-manufacturer KubeVirt --platform-version 2.1 --platform-model QEMU\n".into(),
        ),
    ]
}

/// Starts the emulator with this state, in place of one that runs.
pub(super) fn start(state: &Path, paths: &Paths) -> Result<(), VmStateError> {
    end(paths)?;
    let link = paths.tpm_state();
    claim::remove(&link)?;
    symlink(state, &link)?;
    start_again(paths)
}

/// Starts the emulator with the state that it had, unless it runs.
pub(super) fn start_again(paths: &Paths) -> Result<(), VmStateError> {
    if running(paths).is_some() {
        return Ok(());
    }
    let state = std::fs::read_link(paths.tpm_state())?;
    let (work, socket) = (paths.tpm_work(), paths.tpm_socket());
    claim::make_directory(&work)?;
    claim::remove(&socket)?;
    claim::remove(&paths.tpm_process())?;
    let mut command = Command::new(SWTPM);
    command.args(["socket", "--daemon", "--tpm2", "--ctrl"]);
    command.arg(format!("type=unixio,path={},mode=0600", socket.display()));
    command.arg("--tpmstate").arg(format!("dir={},mode=0600", state.display()));
    command.arg("--pid").arg(format!("file={}", paths.tpm_process().display()));
    command.arg("--log").arg(format!("file={},level=1", work.join("swtpm.log").display()));
    run(command, &work, DEADLINE)?;
    wait_for("start", || (socket.exists() && running(paths).is_some()).then_some(()))
}

/// Runs a program of swtpm to its end.
fn run(mut command: Command, work: &Path, limit: Duration) -> Result<(), VmStateError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = work.join("output");
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&output)?;
    command.env("PATH", "/usr/bin").env("HOME", work).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let failed = |message: String| VmStateError::Program { program: program.clone(), message };
    let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
    let until = Instant::now() + limit;
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(failed(format!("{status}: {}", last_output(&output)))),
            None if Instant::now() < until => std::thread::sleep(LOOK),
            None => {
                child.kill()?;
                child.wait()?;
                return Err(failed(format!("no end within {} s: {}", limit.as_secs(), last_output(&output))));
            }
        }
    }
}

/// Returns the last line that a program has written.
fn last_output(path: &Path) -> String {
    let text = std::fs::read(path).unwrap_or_default();
    let end = text.len().saturating_sub(usize::try_from(OUTPUT_LIMIT).unwrap_or_default());
    let text = String::from_utf8_lossy(text.get(end..).unwrap_or_default()).into_owned();
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no output").trim().to_owned()
}

/// Ends the emulator, if it runs.
pub(super) fn end(paths: &Paths) -> Result<(), VmStateError> {
    for signal in [Signal::TERM, Signal::KILL] {
        let Some(process) = running(paths) else { return Ok(()) };
        let _ = pidfd_send_signal(&process, signal);
        if wait_for("end", || running(paths).is_none().then_some(())).is_ok() {
            return Ok(());
        }
    }
    Err(VmStateError::Late("end"))
}

fn wait_for(what: &'static str, look: impl Fn() -> Option<()>) -> Result<(), VmStateError> {
    let until = Instant::now() + DEADLINE;
    while Instant::now() < until {
        if look().is_some() {
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
    Err(VmStateError::Late(what))
}

/// Returns the emulator's process, if it runs.
pub(super) fn running(paths: &Paths) -> Option<OwnedFd> {
    let pid = pid_in(&paths.tpm_process())?;
    let process = pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
    // Afterwards: the number may be that of another process.
    (name(pid)?.trim() == COMMAND && !has_ended(pid)).then_some(process)
}

/// Returns true if the process of a file is a QEMU that runs.
pub(super) fn is_qemu(file: &Path) -> bool {
    pid_in(file).is_some_and(|pid| name(pid).is_some_and(|name| name.starts_with(QEMU)) && !has_ended(pid))
}

fn name(pid: Pid) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero())).ok()
}

/// Returns true for a process that has ended and was not reaped.
fn has_ended(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with(['Z', 'X']))
}

/// Returns the process of a file, if there is one.
pub(super) fn process_in(file: &Path) -> Option<(Pid, OwnedFd)> {
    let pid = pid_in(file)?;
    Some((pid, pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?))
}

/// Returns true for a process that the kernel is ending: it takes its memory away first, for many seconds if there is much of it.
pub(super) fn is_ending(pid: Pid) -> bool {
    // Arguments lie in the memory of the process.
    std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).is_ok_and(|arguments| arguments.is_empty())
}

fn pid_in(file: &Path) -> Option<Pid> {
    let mut text = String::new();
    std::fs::File::open(file).ok()?.take(PID_LIMIT).read_to_string(&mut text).ok()?;
    // A negative number is no process, and an error of the program for `Pid`.
    text.trim().parse().ok().filter(|pid| *pid > 0).and_then(Pid::from_raw)
}

/// Waits until a process has ended.
pub(super) async fn ended(process: OwnedFd) -> std::io::Result<()> {
    // Readable once it has ended. It is not read.
    Receiver::from_owned_fd_unchecked(process)?.readable().await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> Paths {
        let root = std::env::temp_dir().join(format!("launcher-emulator-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let paths = Paths { private: root.join("private"), runtime: root.join("run"), ..Paths::default() };
        std::fs::create_dir_all(paths.libvirt_runtime()).unwrap();
        std::fs::create_dir_all(&paths.private).unwrap();
        paths
    }

    fn remove_pod(paths: &Paths) {
        std::fs::remove_dir_all(paths.private.parent().unwrap()).unwrap();
    }

    #[tokio::test]
    async fn only_the_emulator_is_found_by_its_file() {
        let paths = pod("found");
        assert!(running(&paths).is_none());
        let program = paths.private.join(COMMAND);
        std::fs::copy("/bin/sleep", &program).unwrap();
        let mut emulator = Command::new(&program).arg("600").spawn().unwrap();
        std::fs::write(paths.tpm_process(), emulator.id().to_string()).unwrap();
        // The process gets its name after the program is loaded.
        wait_for("start", || running(&paths).map(drop)).unwrap();
        for (content, found) in [
            (emulator.id().to_string(), true),
            (format!("{}\n", emulator.id()), true),
            (std::process::id().to_string(), false),
            ("1".repeat(100), false),
            ("-1".into(), false),
            (String::new(), false),
        ] {
            std::fs::write(paths.tpm_process(), &content).unwrap();
            assert_eq!(running(&paths).is_some(), found, "{content:?}");
        }
        std::fs::write(paths.tpm_process(), emulator.id().to_string()).unwrap();
        let process = running(&paths).unwrap();
        let waiting = tokio::spawn(ended(process));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        end(&paths).unwrap();
        waiting.await.unwrap().unwrap();
        assert!(!emulator.wait().unwrap().success());
        assert!(running(&paths).is_none());
        remove_pod(&paths);
    }

    #[test]
    fn a_process_without_memory_is_ending() {
        let mut process = Command::new("/bin/sleep").arg("600").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(process.id()).unwrap()).unwrap();
        // A program that begins has no arguments for a moment.
        wait_for("start", || (!is_ending(pid)).then_some(())).unwrap();
        process.kill().unwrap();
        wait_for("end", || is_ending(pid).then_some(())).unwrap();
        process.wait().unwrap();
    }

    #[test]
    fn a_program_that_fails_or_hangs_is_an_error_with_its_last_line() {
        let paths = pod("programs");
        let shell = |script: &str| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]);
            command
        };
        run(shell("echo fine"), &paths.private, DEADLINE).unwrap();
        for (script, limit, expected) in [
            ("echo first; echo 'no space left' >&2; exit 3", DEADLINE, "exit status: 3: no space left"),
            ("exit 1", DEADLINE, "exit status: 1: no output"),
            ("echo waiting; exec sleep 600", Duration::from_secs(1), "no end within 1 s: waiting"),
        ] {
            let error = run(shell(script), &paths.private, limit).unwrap_err().to_string();
            assert_eq!(error, format!("/bin/sh has failed: {expected}"));
        }
        let missing = run(Command::new("/nonexistent"), &paths.private, DEADLINE).unwrap_err().to_string();
        assert!(missing.starts_with("/nonexistent has failed: "), "{missing}");
        remove_pod(&paths);
    }

    #[test]
    fn a_tpm_gets_an_endorsement_key_and_its_state_comes_back() {
        if !Path::new(SWTPM_SETUP).exists() {
            return skips::skip("swtpm, for its programs");
        }
        let paths = pod("real");
        let (state, authority) = (paths.private.join("state"), paths.private.join("ca"));
        claim::make_directory(&state).unwrap();
        claim::make_directory(&authority).unwrap();
        make(&state, Some(&authority), &paths, "vm:uuid").unwrap();
        assert!(authority.join("issuercert.pem").exists());
        let made = std::fs::read(state.join("tpm2-00.permall")).unwrap();
        make(&state, Some(&authority), &paths, "vm:uuid").unwrap();
        assert_eq!(std::fs::read(state.join("tpm2-00.permall")).unwrap(), made, "a TPM that exists is kept");
        start(&state, &paths).unwrap();
        start_again(&paths).unwrap();
        assert!(paths.tpm_socket().exists() && running(&paths).is_some());
        // An emulator locks its state for its whole life, so another one needs its end.
        let former = pid_in(&paths.tpm_process()).unwrap();
        start(&state, &paths).unwrap();
        assert!(running(&paths).is_some() && has_ended(former), "the former emulator still runs");
        end(&paths).unwrap();
        start_again(&paths).unwrap();
        assert!(running(&paths).is_some());
        end(&paths).unwrap();
        remove_pod(&paths);
    }
}
