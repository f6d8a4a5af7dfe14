//! Crates that are linked into programs, from `cargo metadata`.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    path::PathBuf,
    process::Command,
};

use serde::Deserialize;

use crate::{
    error::{Error, Result},
    run,
};

/// A crate of a program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Crate {
    pub name: String,
    pub version: String,
    /// SPDX expression.
    pub licence: Option<String>,
    /// Folder of its sources.
    pub folder: PathBuf,
    /// Address of its repository.
    pub repository: Option<String>,
    /// True for crates of this workspace.
    pub ours: bool,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
    #[serde(default)]
    repository: Option<String>,
    manifest_path: PathBuf,
    targets: Vec<Target>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Debug, Deserialize)]
struct DependencyKind {
    /// `None` for a normal dependency, else `dev` or `build`.
    kind: Option<String>,
}

/// The dependencies of the workspace on the platform of the images.
#[derive(Debug)]
pub(super) struct Graph {
    packages: BTreeMap<String, Package>,
    edges: BTreeMap<String, Vec<String>>,
}

impl Graph {
    /// Asks cargo.
    pub(super) fn of_workspace() -> Result<Self> {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(["metadata", "--format-version=1", "--locked", "--filter-platform=x86_64-unknown-linux-gnu"]);
        Self::parse(&run::run(&mut command, "Rust toolchain")?)
    }

    fn parse(metadata: &[u8]) -> Result<Self> {
        let metadata: Metadata = serde_json::from_slice(metadata)?;
        // Dependencies of tests and of build scripts are in no program.
        let normal = |dependency: &Dependency| dependency.dep_kinds.iter().any(|kind| kind.kind.is_none());
        let edges = metadata.resolve.nodes.into_iter().map(|node| {
            let to = node.deps.into_iter().filter(normal).map(|dependency| dependency.pkg).collect();
            (node.id, to)
        });
        // Nor are procedural macros and what these use.
        let is_macro = |package: &Package| {
            package.targets.iter().any(|target| target.kind.iter().any(|kind| kind == "proc-macro"))
        };
        let linked = metadata.packages.into_iter().filter(|package| !is_macro(package));
        let packages = linked.map(|package| (package.id.clone(), package));
        Ok(Self { packages: packages.collect(), edges: edges.collect() })
    }

    /// Returns the crates of programs of the workspace, in order. Features are those of a build of the whole workspace, so that
    /// an optional dependency may be listed that one program lacks.
    pub(super) fn linked_into(&self, programs: &[&str]) -> Result<Vec<Crate>> {
        let mut open = Vec::new();
        for program in programs {
            let is_program = |target: &Target| target.name == *program && target.kind.iter().any(|kind| kind == "bin");
            let of_program = |package: &&Package| package.source.is_none() && package.targets.iter().any(is_program);
            let package = self.packages.values().find(of_program);
            let package = package.ok_or_else(|| Error::NotReleasable(format!("no crate has the program {program}")))?;
            open.push(package.id.clone());
        }
        let mut seen = BTreeSet::new();
        while let Some(id) = open.pop() {
            if self.packages.contains_key(&id) && seen.insert(id.clone()) {
                open.extend(self.edges.get(&id).into_iter().flatten().cloned());
            }
        }
        let mut crates: Vec<Crate> = seen.iter().filter_map(|id| self.packages.get(id)).map(described).collect();
        crates.sort();
        Ok(crates)
    }
}

fn described(package: &Package) -> Crate {
    Crate {
        name: package.name.clone(),
        version: package.version.clone(),
        // Older crates separate alternatives by a slash.
        licence: package
            .license
            .as_ref()
            .map(|licence| licence.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ")),
        folder: package.manifest_path.parent().map(PathBuf::from).unwrap_or_default(),
        repository: package.repository.clone(),
        ours: package.source.is_none(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn graph() -> Graph {
        let package = |name: &str, source: Option<&str>, kind: &str, licence: &str| {
            json!({
                "id": name, "name": name, "version": "1.0.0", "license": licence, "source": source,
                "manifest_path": format!("/src/{name}/Cargo.toml"), "targets": [{"name": name, "kind": [kind]}],
            })
        };
        let dependency = |name: &str, kind: Option<&str>| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "packages": [
                package("program", None, "bin", "Apache-2.0"),
                package("used", Some("registry"), "lib", "MIT/Apache-2.0"),
                package("deep", Some("registry"), "lib", "MIT"),
                package("tests", Some("registry"), "lib", "MIT"),
                package("script", Some("registry"), "lib", "MIT"),
                package("macro", Some("registry"), "proc-macro", "MIT"),
                package("of-macro", Some("registry"), "lib", "MIT"),
            ],
            "resolve": {"nodes": [
                {"id": "program", "deps": [dependency("used", None), dependency("tests", Some("dev")), dependency("script", Some("build"))]},
                {"id": "macro", "deps": [dependency("of-macro", None)]},
                {"id": "used", "deps": [dependency("deep", None), dependency("macro", None), dependency("program", Some("dev"))]},
            ]},
        });
        Graph::parse(&serde_json::to_vec(&metadata).unwrap()).unwrap()
    }

    #[test]
    fn a_program_contains_its_normal_dependencies() {
        let crates = graph().linked_into(&["program"]).unwrap();
        let names: Vec<&str> = crates.iter().map(|krate| krate.name.as_str()).collect();
        assert_eq!(names, ["deep", "program", "used"]);
        assert_eq!(crates[2].licence.as_deref(), Some("MIT OR Apache-2.0"));
        assert_eq!((crates[1].ours, crates[2].ours), (true, false));
        assert_eq!(crates[2].folder, PathBuf::from("/src/used"));
        assert!(graph().linked_into(&["used"]).is_err(), "a library");
        assert!(graph().linked_into(&[]).unwrap().is_empty());
    }
}
