//! Imports images into the containerd of each node.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    command::{program, run},
    error::{Error, FileContext, Result},
    host, pause,
    plan::{Node, Plan},
    progress::Progress,
    render::node::CONTAINERD_SOCKET,
    vm,
};

/// Archives that the node in a VM does without: importing one takes up to a minute there.
const NOT_IN_VM: [&str; 5] = [
    "guest-debian.tar",
    "guest-tiny-arm64.tar",
    "guest-tiny-signed.tar",
    "virt-launcher-arm64.tar",
    "virt-launcher-debug.tar",
];

/// Imports OCI or Docker archives into every running node.
///
/// # Errors
/// Fails if no node runs or an import fails.
pub fn load(plan: &Plan, bin: &Path, files: &[PathBuf], progress: &Progress) -> Result<()> {
    let nodes = running_nodes(plan);
    if nodes.is_empty() {
        return Err(Error::Refused("no node is running: run `cluster up` first".into()));
    }
    for file in files {
        let file = fs::canonicalize(file).at("find", file)?;
        let skips = |node: &Node| node.is_vm() && NOT_IN_VM.iter().any(|name| file.ends_with(name));
        for (node, pid) in nodes.iter().filter(|(node, _)| !skips(node)) {
            import(plan, node, *pid, bin, &file)?;
        }
        progress.step(format!("loaded {}", file.display()));
    }
    Ok(())
}

/// Returns the running nodes, each with its first process.
#[must_use]
pub fn running_nodes(plan: &Plan) -> Vec<(Node, i32)> {
    host::namespaces(plan)
        .iter()
        .filter_map(|name| plan.node_of_namespace(name))
        .filter_map(|node| host::init_process(&node.namespace).map(|pid| (node, pid)))
        .collect()
}

/// Returns the digest of each image on the first running node, by image name.
///
/// # Errors
/// Fails if containerd does not answer.
pub fn digests(plan: &Plan, bin: &Path) -> Result<BTreeMap<String, String>> {
    let Some((node, pid)) = running_nodes(plan).into_iter().next() else { return Ok(BTreeMap::new()) };
    digests_of(&node, pid, bin)
}

/// Runs a command of `ctr` on a node that is not in a VM, and returns its output.
///
/// # Errors
/// Fails if the command does.
pub fn command(pid: i32, bin: &Path, arguments: &[&str]) -> Result<String> {
    run("using containerd of a node", containerd(pid, bin).args(arguments))
}

/// Returns the digest of each image of a node.
///
/// # Errors
/// Fails if containerd does not answer.
pub fn digests_of(node: &Node, pid: i32, bin: &Path) -> Result<BTreeMap<String, String>> {
    let table =
        if node.is_vm() { vm::ctr(pid, &["list"])? } else { run("listing the images", ctr(pid, bin).arg("list"))? };
    Ok(parse_digests(&table))
}

/// Returns a command about the images of a node.
fn ctr(pid: i32, bin: &Path) -> Command {
    let mut command = containerd(pid, bin);
    command.arg("images");
    command
}

/// Returns a command about the containers and images of a node.
fn containerd(pid: i32, bin: &Path) -> Command {
    let mut command = enter(pid, ["--mount"]);
    command.arg(bin.join("ctr")).args(["--address", CONTAINERD_SOCKET, "--namespace", "k8s.io"]);
    command
}

/// Copies the images of another running node to a node without sandbox image, which can start no pod yet. A node with one has
/// them, or got others since.
///
/// # Errors
/// Fails if containerd of the node does not answer. An image that cannot be copied is reported.
pub(crate) fn copy_to_new(plan: &Plan, node: &Node, pid: i32, bin: &Path, progress: &Progress) -> Result<()> {
    let present = digests_of(node, pid, bin)?;
    if present.contains_key(pause::IMAGE) {
        return Ok(());
    }
    let Some((first, other)) = running_nodes(plan).into_iter().find(|(other, _)| other.name != node.name) else {
        return Ok(());
    };
    let file = node.folder.join("image.tar");
    // The other node may be a new one of the same `up`, whose containerd does not answer yet: then it has no images.
    for name in missing(&digests_of(&first, other, bin).unwrap_or_default(), &present) {
        let step = format!("exporting {name}");
        let copied = run(&step, ctr(other, bin).arg("export").arg(&file).arg(&name))
            .and_then(|_| import(plan, node, pid, bin, &file));
        progress.step(match copied {
            Ok(()) => format!("{}: copied {name}", node.name),
            Err(error) => format!("{}: cannot copy {name}: {error}", node.name),
        });
    }
    if file.exists() {
        fs::remove_file(&file).at("remove", &file)?;
    }
    Ok(())
}

/// Returns the names of images that a node lacks. The sandbox image comes last, from its own archive; names of content have no
/// use without a name of an image.
fn missing(other: &BTreeMap<String, String>, present: &BTreeMap<String, String>) -> Vec<String> {
    let wanted = other.iter().filter(|(name, digest)| {
        *name != pause::IMAGE && !name.starts_with("sha256:") && present.get(*name) != Some(*digest)
    });
    wanted.map(|(name, _)| name.clone()).collect()
}

fn parse_digests(table: &str) -> BTreeMap<String, String> {
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            Some((words.next()?.to_owned(), words.nth(1)?.to_owned()))
        })
        .collect()
}

/// Imports one archive into one node, through the node's first process.
///
/// # Errors
/// Fails if the import fails.
pub fn import(plan: &Plan, node: &Node, pid: i32, bin: &Path, file: &Path) -> Result<()> {
    if node.is_vm() {
        return vm::import(plan, pid, file);
    }
    let step = format!("importing {} into {}", file.display(), node.name);
    run(&step, ctr(pid, bin).arg("import").arg(file)).map(drop)
}

/// Returns a command that runs in some of the namespaces of a node's first process.
#[must_use]
pub fn enter<'a>(pid: i32, namespaces: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = program("nsenter", ["--target", &pid.to_string()]);
    command.args(namespaces).arg("--");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_node_gets_the_images_of_another_but_the_sandbox_image() {
        let images = |names: &[(&str, &str)]| -> BTreeMap<String, String> {
            names.iter().map(|(name, digest)| ((*name).to_owned(), (*digest).to_owned())).collect()
        };
        let other = images(&[("a:1", "x"), ("b:1", "y"), ("c:1", "z"), ("sha256:1", "w"), (pause::IMAGE, "p")]);
        assert_eq!(missing(&other, &images(&[("b:1", "y"), ("c:1", "old")])), ["a:1", "c:1"]);
        assert!(missing(&images(&[(pause::IMAGE, "p")]), &BTreeMap::new()).is_empty());
    }

    #[test]
    fn digests_are_read_from_the_table() {
        let table =
            "REF TYPE DIGEST SIZE PLATFORMS LABELS\nexample.org/a:1 application/x sha256:1234 1.0 MiB linux/amd64 -\n";
        assert_eq!(parse_digests(table).get("example.org/a:1").map(String::as_str), Some("sha256:1234"));
    }
}
