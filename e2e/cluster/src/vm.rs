//! The node in a VM: its disks, its start, and commands inside it through the guest agent.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::{
    agent::Agent,
    command::{program, run},
    components, down,
    error::{Error, FileContext, Result},
    host,
    kubectl::Kubectl,
    kvm_result,
    plan::{Node, Plan},
    progress::Progress,
    render::{self, storage, vm::Files},
};

/// Programs of the cluster that run on a node.
const PROGRAMS: [&str; 11] = [
    "bridge",
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "host-local",
    "kube-proxy",
    "kubelet",
    "loopback",
    "multus",
    "passthru-cni",
    "portmap",
];

/// Folders that the program `images` prints.
#[derive(Deserialize)]
struct Built {
    /// Debian's disk with its kernel.
    node: PathBuf,
    /// Packages of QEMU.
    qemu: PathBuf,
    /// Packages with tools for disks.
    tools: PathBuf,
}

/// Returns the folder whose content becomes the disk of the node.
pub(crate) fn content(node: &Node) -> PathBuf {
    node.folder.join("content")
}

/// Builds the disks of the node. Its files are in [`content`]. Returns the configuration of its first process on the host.
pub(crate) fn prepare(
    plan: &Plan,
    node: &Node,
    bin: &Path,
    driver: &Path,
    progress: &Progress,
) -> Result<render::Init> {
    let built = build(progress)?;
    let content = content(node);
    let programs = content.join("bin");
    fs::create_dir_all(&programs).at("create", &programs)?;
    for name in PROGRAMS {
        copy(&bin.join(name), &programs.join(name))?;
    }
    copy(driver, &programs.join(storage::PROGRAM))?;
    let services = render::vm::services(plan, node);
    let units = content.join("units");
    fs::create_dir_all(&units).at("create", &units)?;
    for service in &services {
        let path = units.join(format!("{}.service", service.name));
        fs::write(&path, render::vm::unit(service)).at("write", path)?;
    }
    let setup = content.join("setup");
    fs::write(&setup, render::vm::setup(plan, node, &services)).at("write", setup)?;
    let (overlay, disk) = (node.folder.join("disk.qcow2"), node.folder.join("cluster.ext4"));
    make_disk(&built.tools, &content, &disk)?;
    let base = built.node.join("disk.raw");
    let mut create = program_of(&built.tools, "usr/bin/qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&overlay);
    run("creating the disk of the node", &mut create)?;
    let files = Files {
        qemu: &built.qemu,
        kernel: &built.node,
        overlay: &overlay,
        disk: &disk,
        kvm: kvm_result::read(plan).unwrap_or(false),
    };
    Ok(render::vm::init(plan, node, bin, &files))
}

/// Builds Debian's disk with the program `images`, beside this program, unless it is cached.
fn build(progress: &Progress) -> Result<Built> {
    let images = std::env::current_exe().at("find", "the own program")?.with_file_name("images");
    progress.step("node-vm: disk of Debian; once this takes about 3 minutes");
    let text = run("building the disk of the node", &mut program(images, ["node"]))?;
    serde_json::from_str(&text).map_err(|source| Error::Document { what: "the answer of images node".into(), source })
}

/// Builds a file system with the content of a folder.
fn make_disk(tools: &Path, folder: &Path, disk: &Path) -> Result<()> {
    let size = size_of(folder)?;
    let mut make = program_of(tools, "usr/sbin/mke2fs");
    make.env("MKE2FS_CONFIG", tools.join("etc/mke2fs.conf"))
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-L", render::vm::DISK_LABEL, "-E"])
        .args(["root_owner=0:0", "-d"])
        .arg(folder)
        .arg(disk)
        // Tables of the file system need a part.
        .arg(format!("{}k", size / 1024 * 5 / 4 + 32 * 1024));
    run("building the disk with the programs of the cluster", &mut make).map(drop)
}

fn size_of(folder: &Path) -> Result<u64> {
    let mut size = 0;
    for entry in fs::read_dir(folder).at("list", folder)?.flatten() {
        let data = entry.metadata().at("read", entry.path())?;
        size += if data.is_dir() { size_of(&entry.path())? } else { data.len() };
    }
    Ok(size)
}

fn program_of(root: &Path, name: &str) -> std::process::Command {
    let command = render::vm::from_root(root, name);
    program(&command[0], &command[1..])
}

/// Copies a program without using space, if both folders are on one file system.
fn copy(from: &Path, to: &Path) -> Result<()> {
    // Programs of several versions are links.
    let from = fs::canonicalize(from).at("find", from)?;
    if fs::hard_link(&from, to).is_err() {
        fs::copy(&from, to).at("copy", &from)?;
        fs::set_permissions(to, fs::Permissions::from_mode(0o755)).at("make executable", to)?;
    }
    Ok(())
}

/// Runs a command in the VM and returns its standard output.
///
/// # Errors
/// Fails if the guest agent does not answer, or if the command fails.
pub fn command(pid: i32, command: &[&str]) -> Result<String> {
    let ran = Agent::connect(pid)?.run(command)?;
    if ran.status == 0 {
        return Ok(ran.stdout);
    }
    Err(Error::Command {
        step: "running a command in the VM".into(),
        command: command.join(" "),
        status: format!("exit status {}", ran.status),
        output: ran.stderr + &ran.stdout,
    })
}

/// Imports an archive into containerd of the VM, through the folder that it shares with the host.
pub(crate) fn import(plan: &Plan, pid: i32, file: &Path) -> Result<()> {
    let shared = plan.shared().join("import.tar");
    fs::copy(file, &shared).at("copy", file)?;
    let imported = ctr(pid, &["import", &shared.to_string_lossy()]);
    fs::remove_file(&shared).at("remove", &shared)?;
    imported.map(drop)
}

/// Runs a command about the images of the VM.
pub(crate) fn ctr(pid: i32, arguments: &[&str]) -> Result<String> {
    let program = format!("{}/bin/ctr", render::vm::DISK);
    let ctr = [&program, "--address", render::node::CONTAINERD_SOCKET, "--namespace", "k8s.io", "images"];
    command(pid, &[&ctr, arguments].concat())
}

/// Removes the VM and its node from a cluster that stays. The control plane removes the pods of the node.
pub(crate) fn remove(plan: &Plan, progress: &Progress) -> Result<()> {
    let node = plan.vm_node();
    progress.step(format!("removing {}", node.name));
    down::remove_node(&node)?;
    let kubectl = Kubectl::new(&components::bin(plan)?, plan.kubeconfig());
    kubectl.run("deleting the node", &["delete", "node", &node.name, "--ignore-not-found"]).map(drop)
}

/// Shell script that prints the state of a node.
const STATE: &str = "exec 2>&1; uname -a; stat -f /sys/fs/cgroup; systemctl --failed --no-pager; systemctl list-units --no-pager; \
    systemd-cgls --no-pager --full; df; free -m; ps axww; mount; ip address; ip route; nft list ruleset; dmesg; \
    for f in $(find /sys/fs/cgroup/kubepods.slice -name memory.max -o -name memory.current -o -name cpu.max -o -name cgroup.procs); \
    do echo $f $(cat $f); done";

/// Writes the state of the VM to `state.txt` beside the logs of the node, if it runs. Reports what fails.
pub fn keep_state(plan: &Plan, progress: &Progress) {
    let node = plan.vm_node();
    let Some(pid) = host::init_process(&node.namespace) else { return };
    let path = node.logs.join("state.txt");
    let kept = command(pid, &["sh", "-c", STATE]).and_then(|text| fs::write(&path, text).at("write", &path));
    progress.step(match kept {
        Ok(()) => format!("{}: its state is in {}", node.name, path.display()),
        Err(error) => format!("{}: cannot read its state: {error}", node.name),
    });
}
