//! Builds the programs of the cluster from Go modules and caches them by the hash of their sources.
//!
//! All programs are in one module because they share libraries, which are then compiled once. One module per group took
//! 50 % longer. The modules of other versions of Kubernetes contain only its own programs; the rest is that of the first module.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use sha2::{Digest, Sha256};

use crate::{
    command::{line, log_tail, open_log, run, start_error},
    error::{Error, FileContext, Result},
    hex::hex,
    kubernetes::Kubernetes,
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
    /// Version of Kubernetes that its programs report.
    kubernetes: Kubernetes,
}

/// The programs of the cluster.
pub const CLUSTER: Module = Module {
    folder: "e2e/cluster/components",
    packages: &["tool", "./coredns", "./etcd"],
    name: "the cluster's components; cold on two cores this takes about 10 minutes, once",
    kubernetes: Kubernetes::V1_36,
};

/// Modules with the programs of other versions of Kubernetes, kubectl included.
const OTHERS: [Module; 2] = [
    Module {
        folder: "e2e/cluster/kubernetes-1.35",
        packages: &["tool"],
        name: "Kubernetes 1.35; cold on two cores this takes about 6 minutes, once",
        kubernetes: Kubernetes::V1_35,
    },
    Module {
        folder: "e2e/cluster/kubernetes-1.37",
        packages: &["tool"],
        name: "Kubernetes 1.37; cold on two cores this takes about 6 minutes, once",
        kubernetes: Kubernetes::V1_37,
    },
];

/// KWOK, which simulates nodes and kubelets. Only the scale benchmark needs it.
pub const KWOK: Module =
    Module { folder: "e2e/cluster/kwok", packages: &["tool"], name: "KWOK", kubernetes: Kubernetes::V1_36 };

/// Helm alone, for checks of the chart and for a release on a host where the programs of the cluster are not built.
pub const HELM: Module = Module {
    folder: CLUSTER.folder,
    packages: &["helm.sh/helm/v4/cmd/helm"],
    name: "Helm; cold on two cores this takes about 2 minutes, once",
    kubernetes: Kubernetes::V1_36,
};

/// A container registry, for the test of releases.
pub const REGISTRY: Module = Module {
    folder: "e2e/cluster/registry",
    packages: &["tool"],
    name: "a container registry",
    kubernetes: Kubernetes::V1_36,
};

/// csi-sanity, which tests the storage driver.
pub const CSI_SANITY: Module =
    Module { folder: "e2e/cluster/csi-sanity", packages: &["tool"], name: "csi-sanity", kubernetes: Kubernetes::V1_36 };

/// kubeconform, which checks rendered manifests.
pub const KUBECONFORM: Module = Module {
    folder: "e2e/cluster/kubeconform",
    packages: &["tool"],
    name: "kubeconform",
    kubernetes: Kubernetes::V1_36,
};

/// metrics-server, which measures pods for autoscalers. Its libraries are those of [`CLUSTER`] and compiled with them.
pub const METRICS_SERVER: Module = Module {
    folder: "e2e/cluster/metrics-server",
    packages: &["tool"],
    name: "metrics-server",
    kubernetes: Kubernetes::V1_36,
};

/// promtool, which tests rules for Prometheus and checks metrics.
pub const PROMTOOL: Module = Module {
    folder: "e2e/cluster/promtool",
    packages: &["tool"],
    name: "promtool; this takes several minutes, once",
    kubernetes: Kubernetes::V1_36,
};

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

    /// Returns the flags of the linker, with the version: clients compare the server's.
    fn link_flags(&self) -> String {
        let prefix = "-X k8s.io/component-base/version.git";
        format!(
            "-s -w {prefix}Version=v{} {prefix}Major=1 {prefix}Minor={}",
            self.kubernetes.patch(),
            self.kubernetes.minor()
        )
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
    let Some(other) = other(plan.variant.kubernetes) else { return bin_of(plan, &CLUSTER) };
    Ok(cache()?.join(format!("{}-{}", hash_of(plan, other)?, hash_of(plan, &CLUSTER)?)).join("bin"))
}

/// Returns the module of a version of Kubernetes; `None` for the version of [`CLUSTER`].
fn other(kubernetes: Kubernetes) -> Option<&'static Module> {
    OTHERS.iter().find(|module| module.kubernetes == kubernetes)
}

fn bin_of(plan: &Plan, module: &Module) -> Result<PathBuf> {
    Ok(cache()?.join(hash_of(plan, module)?).join("bin"))
}

fn hash_of(plan: &Plan, module: &Module) -> Result<String> {
    fingerprint(&module.link_flags(), &plan.workspace.join(module.folder), module.packages)
}

fn cache() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    base.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .map(|base| base.join("ferrovirt/components"))
        .ok_or_else(|| Error::Refused("HOME is not set: cannot find the cache for built components".into()))
}

/// Returns a hash of all inputs of the build.
fn fingerprint(link_flags: &str, sources: &Path, packages: &[&str]) -> Result<String> {
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update(bytes.len().to_le_bytes());
        hash.update(bytes);
    };
    add(link_flags.as_bytes());
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
    let all = bin_of(plan, &CLUSTER)?;
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
    let default = ensure_module(plan, &CLUSTER, progress)?;
    let Some(other) = other(plan.variant.kubernetes) else { return Ok(default) };
    let own = ensure_module(plan, other, progress)?;
    let bin = bin(plan)?;
    if !bin.is_dir() {
        combine(&[&default, &own], &bin)?;
    }
    Ok(bin)
}

/// Creates a folder with links to the programs in other folders, of which later ones win.
fn combine(folders: &[&Path], into: &Path) -> Result<()> {
    let partial = into.with_extension("partial");
    if partial.exists() {
        fs::remove_dir_all(&partial).at("remove", &partial)?;
    }
    fs::create_dir_all(&partial).at("create", &partial)?;
    for folder in folders {
        for program in files(folder)? {
            let link = partial.join(program.strip_prefix(folder).unwrap_or(&program));
            if link.is_symlink() {
                fs::remove_file(&link).at("remove", &link)?;
            }
            symlink(&program, &link).at("create", &link)?;
        }
    }
    fs::rename(&partial, into).at("rename", &partial)
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
        .args([&format!("-ldflags={}", module.link_flags()), "-o"])
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
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn fingerprint_follows_the_sources() {
        let folder = std::env::temp_dir().join(format!("ferrovirt-components-{}", std::process::id()));
        fs::create_dir_all(folder.join("etcd")).unwrap();
        fs::write(folder.join("go.mod"), "module x").unwrap();
        fs::write(folder.join("etcd/main.go"), "package main").unwrap();
        let before = fingerprint("-s", &folder, &["tool"]).unwrap();
        assert_eq!(before, fingerprint("-s", &folder, &["tool"]).unwrap());
        assert_eq!(before.len(), 16);
        assert_ne!(before, fingerprint("-w", &folder, &["tool"]).unwrap());
        fs::write(folder.join("etcd/main.go"), "changed").unwrap();
        assert_ne!(before, fingerprint("-s", &folder, &["tool"]).unwrap());
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
    fn modules_require_the_version_that_their_programs_report() {
        for module in OTHERS.iter().chain([&CLUSTER]) {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(module.folder).join("go.mod");
            let text = fs::read_to_string(&path).unwrap();
            let (patch, minor) = (module.kubernetes.patch(), module.kubernetes.minor());
            let required = text.lines().filter_map(|line| line.trim().strip_prefix("k8s.io/kubernetes v"));
            let required: Vec<_> = required.map(|version| version.trim_end_matches(" // indirect")).collect();
            assert_eq!(required, [patch], "{}", path.display());
            assert_eq!(patch.split('.').nth(1), Some(minor));
            // Its libraries are released beside it.
            let libraries = text.lines().filter_map(|line| line.split_once(" => k8s.io/"));
            let libraries: Vec<_> = libraries.filter(|(_, library)| !library.contains(" v0.0.0-")).collect();
            let all_match = libraries.iter().all(|(_, library)| library.ends_with(&format!(" v0.{}", &patch[2..])));
            assert!(libraries.len() > 30 && all_match, "{}", path.display());
        }
        assert_eq!(
            CLUSTER.link_flags(),
            "-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3 -X k8s.io/component-base/version.gitMajor=1 \
             -X k8s.io/component-base/version.gitMinor=36"
        );
    }

    #[test]
    fn every_version_has_a_module() {
        for kubernetes in Kubernetes::value_variants() {
            let is_default = *kubernetes == Kubernetes::default();
            assert_eq!(other(*kubernetes).is_none(), is_default, "{kubernetes}");
        }
        assert_eq!(CLUSTER.kubernetes, Kubernetes::default());
    }

    #[test]
    fn programs_of_another_version_win() {
        let folder = std::env::temp_dir().join(format!("ferrovirt-combine-{}", std::process::id()));
        for (path, content) in [("a/etcd", "a"), ("a/kubelet", "a"), ("b/kubelet", "b")] {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        combine(&[&folder.join("a"), &folder.join("b")], &folder.join("both")).unwrap();
        let content = |name: &str| fs::read_to_string(folder.join("both").join(name)).unwrap();
        assert_eq!((content("etcd"), content("kubelet")), ("a".to_owned(), "b".to_owned()));
        fs::remove_dir_all(folder).unwrap();
    }
}
