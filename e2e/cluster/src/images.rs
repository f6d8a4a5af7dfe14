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
    host,
    plan::{Node, Plan},
    progress::Progress,
    render::node::CONTAINERD_SOCKET,
};

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
        for (node, pid) in &nodes {
            import(node, *pid, bin, &file)?;
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
    let Some((_, pid)) = running_nodes(plan).into_iter().next() else { return Ok(BTreeMap::new()) };
    let mut command = enter(pid, ["--mount"]);
    command.arg(bin.join("ctr")).args(["--address", CONTAINERD_SOCKET, "--namespace", "k8s.io", "images", "list"]);
    Ok(parse_digests(&run("listing the images", &mut command)?))
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
pub fn import(node: &Node, pid: i32, bin: &Path, file: &Path) -> Result<()> {
    let step = format!("importing {} into {}", file.display(), node.name);
    let mut command = enter(pid, ["--mount"]);
    command
        .arg(bin.join("ctr"))
        .args(["--address", CONTAINERD_SOCKET, "--namespace", "k8s.io", "images", "import"])
        .arg(file);
    run(&step, &mut command).map(drop)
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
    fn digests_are_read_from_the_table() {
        let table =
            "REF TYPE DIGEST SIZE PLATFORMS LABELS\nexample.org/a:1 application/x sha256:1234 1.0 MiB linux/amd64 -\n";
        assert_eq!(parse_digests(table).get("example.org/a:1").map(String::as_str), Some("sha256:1234"));
    }
}
