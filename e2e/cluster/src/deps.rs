//! List of everything that the host needs.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use rustix::process::geteuid;

use crate::{
    command::{program, run_visibly},
    error::{Error, Result},
    progress::Progress,
};

/// A program or file that the host needs.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// Name of a program on the PATH, or an absolute path.
    pub what: &'static str,
    /// Debian package that contains it; `None` if the version in Debian 12 is too old.
    pub package: Option<&'static str>,
    /// Purpose.
    pub why: &'static str,
}

const fn need(what: &'static str, package: &'static str, why: &'static str) -> Need {
    Need { what, package: Some(package), why }
}

/// Needs for running the cluster.
pub const RUN: [Need; 11] = [
    need("runc", "runc", "runs the containers"),
    need("ip", "iproute2", "creates network namespaces and links"),
    need("nft", "nftables", "service and pod network rules"),
    need("iptables", "iptables", "host ports of pods"),
    need("conntrack", "conntrack", "removes connections of deleted pods"),
    need("nsenter", "util-linux", "enters a node"),
    need("setsid", "util-linux", "starts the nodes"),
    need("mount", "mount", "mounts volumes for the kubelet"),
    need("losetup", "mount", "devices of the storage driver"),
    need("mkfs.ext4", "e2fsprogs", "file systems of the storage driver"),
    need("/etc/ssl/certs/ca-certificates.crt", "ca-certificates", "downloads of modules"),
];

/// Needs for using an existing cluster.
pub const CLIENT: [Need; 2] = [
    Need { what: "kubectl", package: None, why: "talks to the cluster of KUBECONFIG" },
    Need { what: "helm", package: None, why: "installs the chart into the cluster of KUBECONFIG" },
];

/// Further needs for building.
pub const BUILD: [Need; 6] = [
    Need { what: "go", package: None, why: "builds the cluster's components; Go 1.26 or later from https://go.dev/dl" },
    Need { what: "cargo", package: None, why: "builds Ferrovirt; Rust 1.95 or later from https://rustup.rs" },
    need("cc", "gcc", "links programs"),
    need("pkg-config", "pkg-config", "finds libvirt"),
    need("/usr/include/libvirt/libvirt.h", "libvirt-dev", "compiles the launcher against libvirt"),
    need("mmdebstrap", "mmdebstrap", "builds the images"),
];

/// Returns the needs that are missing.
#[must_use]
pub fn missing<'a>(needs: impl IntoIterator<Item = &'a Need>, exists: impl Fn(&str) -> bool) -> Vec<&'a Need> {
    needs.into_iter().filter(|need| !exists(need.what)).collect()
}

/// Returns true if a program is on the PATH (or in a folder of system programs) or an absolute path exists.
#[must_use]
pub fn exists(what: &str) -> bool {
    if what.starts_with('/') {
        return Path::new(what).exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .any(|folder| folder.join(what).is_file())
}

/// Lists needs with their packages, one per line.
#[must_use]
pub fn list(needs: &[&Need]) -> String {
    let mut text = String::new();
    for need in needs {
        let package = need.package.map_or(String::new(), |package| format!(" (Debian: {package})"));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}{package}: {}", need.what, need.why);
    }
    text
}

/// Checks that the cluster can run on this host.
///
/// # Errors
/// Fails with the list of missing needs.
pub fn check() -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        return Err(Error::Refused(format!("the test cluster requires x86_64, not {}", std::env::consts::ARCH)));
    }
    if !geteuid().is_root() {
        return Err(Error::Refused("the test cluster creates namespaces and mounts: run it as root".into()));
    }
    let missing = missing(&RUN, exists);
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Refused(format!("missing on this host (run `cluster deps` to install):\n{}", list(&missing))))
}

/// Checks all needs and installs the Debian packages for missing ones: for building, and for running a cluster or using an
/// existing one.
///
/// # Errors
/// Fails if a need is still missing.
pub fn install(own_cluster: bool, progress: &Progress) -> Result<()> {
    let run: &[Need] = if own_cluster { &RUN } else { &CLIENT };
    let all = || run.iter().chain(&BUILD);
    let absent = missing(all(), exists);
    let mut packages: Vec<&str> = absent.iter().filter_map(|need| need.package).collect();
    packages.dedup();
    if !packages.is_empty() && geteuid().is_root() && exists("apt-get") {
        progress.step(format!("installing {}", packages.join(" ")));
        run_visibly("updating the package lists", program("apt-get", ["update", "-q"]).env("LC_ALL", "C"))?;
        run_visibly(
            "installing packages",
            program("apt-get", ["install", "-q", "-y", "--no-install-recommends"])
                .args(&packages)
                .env("DEBIAN_FRONTEND", "noninteractive"),
        )?;
    }
    let absent = missing(all(), exists);
    if absent.is_empty() {
        progress.step("all dependencies are installed");
        return Ok(());
    }
    Err(Error::Refused(format!("missing on this host:\n{}", list(&absent))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_things_are_listed_with_package_and_reason() {
        let absent = missing(RUN.iter().chain(&BUILD), |what| what != "runc" && what != "go");
        let text = list(&absent);
        assert_eq!(absent.len(), 2);
        assert!(text.contains("runc (Debian: runc): runs the containers"));
        assert!(text.contains("go: builds") && text.contains("https://go.dev/dl"));
    }

    #[test]
    fn programs_are_found_on_the_path_and_files_by_their_path() {
        assert!(exists("sh") && exists("/etc/passwd"));
        assert!(!exists("no-such-program-here") && !exists("/no/such/file"));
    }
}
