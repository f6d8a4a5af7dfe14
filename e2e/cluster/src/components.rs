//! Builds the programs of the cluster from a Go module and caches them by the hash of their sources.
//!
//! All programs are in one module because they share libraries, which are then compiled once. One module per group took
//! 50 % longer.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use sha2::{Digest, Sha256};

use crate::{
    command::{line, log_tail, open_log, run, start_error},
    error::{Error, FileContext, Result},
    hex::hex,
    plan::Plan,
    progress::Progress,
};

/// A Go module whose programs are built.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// Folder in the working tree.
    folder: &'static str,
    /// Packages to build: the `tool` directives of the module, and the programs in its own folders.
    packages: &'static [&'static str],
    /// Name in messages.
    name: &'static str,
}

/// The programs of the cluster.
pub const CLUSTER: Module = Module {
    folder: "e2e/cluster/components",
    packages: &["tool", "./coredns", "./etcd"],
    name: "the cluster's components; cold on two cores this takes about 10 minutes, once",
};

/// KWOK, which simulates nodes and kubelets. Only the scale benchmark needs it.
pub const KWOK: Module = Module { folder: "e2e/cluster/kwok", packages: &["tool"], name: "KWOK" };

/// Helm alone, for checks of the chart and for a release on a host where the programs of the cluster are not built.
pub const HELM: Module = Module {
    folder: CLUSTER.folder,
    packages: &["helm.sh/helm/v4/cmd/helm"],
    name: "Helm; cold on two cores this takes about 2 minutes, once",
};

/// A container registry, for the test of releases.
pub const REGISTRY: Module =
    Module { folder: "e2e/cluster/registry", packages: &["tool"], name: "a container registry" };

/// kubeconform, which checks rendered manifests.
pub const KUBECONFORM: Module = Module { folder: "e2e/cluster/kubeconform", packages: &["tool"], name: "kubeconform" };

/// promtool, which tests rules for Prometheus and checks metrics.
pub const PROMTOOL: Module =
    Module { folder: "e2e/cluster/promtool", packages: &["tool"], name: "promtool; this takes several minutes, once" };

/// Version flags: clients compare the server's version.
const LINK_FLAGS: &str = "-s -w \
    -X k8s.io/component-base/version.gitVersion=v1.36.3 \
    -X k8s.io/component-base/version.gitMajor=1 \
    -X k8s.io/component-base/version.gitMinor=36";

/// Flags of the compiler. Debug information is skipped, which the linker leaves out anyway: this saves a seventh of the compile
/// time. Packages that are large and not hot are compiled without inlining: this saves a quarter of theirs. The Makefile's
/// `ahead` target must use the same flags, or its results cannot be reused.
const COMPILE_FLAGS: &[&str] = &[
    "-gcflags=all=-dwarf=false",
    "-gcflags=k8s.io/kubernetes/...=-dwarf=false -l",
    "-gcflags=k8s.io/kubectl/...=-dwarf=false -l",
    "-gcflags=k8s.io/client-go/applyconfigurations/...=-dwarf=false -l",
    "-gcflags=k8s.io/client-go/informers/...=-dwarf=false -l",
    "-gcflags=helm.sh/helm/...=-dwarf=false -l",
];

/// Interval of progress messages during a long build.
const HEARTBEAT: Duration = Duration::from_secs(20);

impl Module {
    /// Returns the folder in the working tree.
    #[cfg(test)]
    pub(crate) const fn folder(&self) -> &'static str {
        self.folder
    }
}

/// Returns the folder of the cluster's module.
#[must_use]
pub fn sources(plan: &Plan) -> PathBuf {
    plan.workspace.join(CLUSTER.folder)
}

/// Returns the folder for the programs of the cluster.
///
/// # Errors
/// Fails if the sources cannot be read or HOME is not set.
pub fn bin(plan: &Plan) -> Result<PathBuf> {
    bin_of(plan, &CLUSTER)
}

fn bin_of(plan: &Plan, module: &Module) -> Result<PathBuf> {
    Ok(cache()?.join(fingerprint(&plan.workspace.join(module.folder), module.packages)?).join("bin"))
}

fn cache() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    base.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .map(|base| base.join("ferrovirt/components"))
        .ok_or_else(|| Error::Refused("HOME is not set: cannot find the cache for built components".into()))
}

/// Returns a hash of all inputs of the build.
fn fingerprint(sources: &Path, packages: &[&str]) -> Result<String> {
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update(bytes.len().to_le_bytes());
        hash.update(bytes);
    };
    add(LINK_FLAGS.as_bytes());
    for package in packages {
        add(package.as_bytes());
    }
    for file in files(sources)? {
        add(file.strip_prefix(sources).unwrap_or(&file).as_os_str().as_encoded_bytes());
        add(&fs::read(&file).at("read", &file)?);
    }
    let mut name = hex(&hash.finalize());
    name.truncate(16);
    Ok(name)
}

/// Returns all files below a folder in a fixed order.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).at("list", &folder)?.flatten() {
            let path = entry.path();
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the path of Helm: that of the cluster's programs, or one that is built alone.
///
/// # Errors
/// Fails if the build fails.
pub fn helm(plan: &Plan, progress: &Progress) -> Result<PathBuf> {
    let all = bin(plan)?;
    let bin = if all.is_dir() { all } else { ensure_module(plan, &HELM, progress)? };
    Ok(bin.join("helm"))
}

/// Returns the folder with the sources of another module that a module requires. Downloads them if they are missing.
///
/// # Errors
/// Fails if the sources cannot be downloaded.
pub fn module_folder(plan: &Plan, module: &Module, required: &str) -> Result<PathBuf> {
    let mut command = Command::new("go");
    command.current_dir(plan.workspace.join(module.folder)).args(["mod", "download", "-json", required]);
    let text = run(&format!("downloading {required}"), &mut command)?;
    let answer: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| Error::Refused(format!("go mod download {required}: {error}")))?;
    let folder = answer["Dir"].as_str().map(PathBuf::from);
    folder.ok_or_else(|| Error::Refused(format!("go mod download {required} names no folder")))
}

/// Builds the missing programs of the cluster and returns their folder.
///
/// # Errors
/// Fails if the build fails.
pub fn ensure(plan: &Plan, progress: &Progress) -> Result<PathBuf> {
    ensure_module(plan, &CLUSTER, progress)
}

/// Builds the missing programs of a module and returns their folder.
///
/// # Errors
/// Fails if the build fails.
pub fn ensure_module(plan: &Plan, module: &Module, progress: &Progress) -> Result<PathBuf> {
    let bin = bin_of(plan, module)?;
    if bin.is_dir() {
        return Ok(bin);
    }
    progress.step(format!("building {}", module.name));
    let partial = bin.with_extension("partial");
    fs::create_dir_all(&partial).at("create", &partial)?;
    build(plan, module, &partial, progress)?;
    fs::rename(&partial, &bin).at("rename", &partial)?;
    progress.step(format!("built: {}", bin.display()));
    Ok(bin)
}

fn build(plan: &Plan, module: &Module, into: &Path, progress: &Progress) -> Result<()> {
    let log = plan.build().join("components.log");
    let _ = fs::remove_file(&log);
    let output = open_log(&log)?;
    let mut command = Command::new("go");
    command
        .current_dir(plan.workspace.join(module.folder))
        .env("CGO_ENABLED", "0")
        .args(["build", "-trimpath", "-buildvcs=false"])
        .args(COMPILE_FLAGS)
        .args([&format!("-ldflags={LINK_FLAGS}"), "-o"])
        // go treats a path with a trailing slash as a folder.
        .arg(into.join(""))
        .args(module.packages)
        .stdin(Stdio::null())
        .stdout(output.try_clone().at("open", &log)?)
        .stderr(output);
    let step = "building Go programs";
    let mut child = command.spawn().map_err(|source| start_error(step, &command, source))?;
    let started = Instant::now();
    let mut reported = started;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => std::thread::sleep(Duration::from_millis(200)),
            Err(source) => return Err(start_error(step, &command, source)),
        }
        if reported.elapsed() > HEARTBEAT {
            reported = Instant::now();
            progress.step(format!("  still building ({} s)", started.elapsed().as_secs()));
        }
    };
    if status.success() {
        return Ok(());
    }
    Err(Error::Command {
        step: step.to_owned(),
        command: line(&command),
        status: status.to_string(),
        output: log_tail(&log),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprint_follows_the_sources() {
        let folder = std::env::temp_dir().join(format!("ferrovirt-components-{}", std::process::id()));
        fs::create_dir_all(folder.join("etcd")).unwrap();
        fs::write(folder.join("go.mod"), "module x").unwrap();
        fs::write(folder.join("etcd/main.go"), "package main").unwrap();
        let before = fingerprint(&folder, &["tool"]).unwrap();
        assert_eq!(before, fingerprint(&folder, &["tool"]).unwrap());
        assert_eq!(before.len(), 16);
        fs::write(folder.join("etcd/main.go"), "changed").unwrap();
        assert_ne!(before, fingerprint(&folder, &["tool"]).unwrap());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn makefile_compiles_with_the_same_flags() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Makefile");
        let makefile = fs::read_to_string(path).unwrap();
        for flag in COMPILE_FLAGS {
            assert!(makefile.contains(&format!("'{flag}'")), "{flag}");
        }
        assert_eq!(makefile.matches("-gcflags=").count(), COMPILE_FLAGS.len());
    }

    #[test]
    fn module_exists_in_the_working_tree() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("components/go.mod");
        assert!(path.is_file(), "{}", path.display());
    }
}
