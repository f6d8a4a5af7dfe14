//! Debian packages unpacked into directories.
//!
//! Packages for images are only unpacked, without maintainer scripts. Files are then selected from the result. Unpacked roots
//! are cached by the hash of the request, with the package versions that the mirror had at that time. Removing `roots/` from
//! the cache fetches newer versions.

use std::{
    env, fs,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    EPOCH,
    cache::{Cache, Key},
    error::{At, Result},
    run,
};

/// Debian release of all images.
pub(crate) const SUITE: &str = "trixie";

/// Extent of the installation by mmdebstrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Unpacks packages and their dependencies without running anything.
    Extract,
    /// The same for packages of arm64, none of whose programs can run.
    ExtractArm64,
    /// Installs and configures a bootable system with the required packages and the listed ones.
    Installed,
}

/// Packages to unpack or install into a directory.
#[derive(Debug, Clone)]
pub(crate) struct Request<'a> {
    /// Extent of the installation.
    pub variant: Variant,
    /// Names of packages. Dependencies are included, recommendations are not.
    pub packages: &'a [&'a str],
    /// Shell commands run at the end with the root as `$1`, see `--customize-hook` of mmdebstrap.
    pub hooks: &'a [String],
}

/// An unpacked root and the metadata of its packages.
#[derive(Debug, Clone)]
pub(crate) struct Root {
    /// The root directory.
    pub path: PathBuf,
    /// One `NAME.control` and one `NAME.list` for each package, for roots without installed packages.
    pub packages: PathBuf,
    /// Identifies this root in the keys of entries built from it.
    pub key: String,
}

/// Writes control data and file list of each downloaded package to the directory `OUT`.
const RECORD_PACKAGES: &str = r#"for deb in "$1"/var/cache/apt/archives/*.deb; do
name=$(dpkg-deb -f "$deb" Package)
dpkg-deb -f "$deb" > "OUT/$name.control"
dpkg-deb --fsys-tarfile "$deb" | tar -t > "OUT/$name.list"
done"#;

fn sources() -> String {
    let mirror = env::var("DEBIAN_MIRROR").unwrap_or_else(|_| "http://deb.debian.org/debian".to_owned());
    let security =
        env::var("DEBIAN_SECURITY_MIRROR").unwrap_or_else(|_| "http://deb.debian.org/debian-security".to_owned());
    format!("deb {mirror} {SUITE} main\ndeb {mirror} {SUITE}-updates main\ndeb {security} {SUITE}-security main\n")
}

/// Returns the root for `request`, from the cache or newly built.
pub(crate) fn root(cache: &Cache, request: &Request<'_>) -> Result<Root> {
    let sources = sources();
    let mut key = Key::default().with(&sources).with(RECORD_PACKAGES).with(format!("{:?}", request.variant));
    for item in request.packages {
        key.add(item);
    }
    for hook in request.hooks {
        key.add(hook);
    }
    let key = key.finish();
    let entry = cache.entry("roots", &key, |dir| make(dir, &sources, request))?;
    Ok(Root { path: entry.join("root"), packages: entry.join("packages"), key })
}

fn make(dir: &Path, sources: &str, request: &Request<'_>) -> Result<()> {
    eprintln!("images: unpacking Debian packages {} ...", request.packages.join(" "));
    let packages = dir.join("packages");
    fs::create_dir(&packages).at(&packages)?;
    let list = dir.join("sources.list");
    fs::write(&list, sources).at(&list)?;
    // A separate mount namespace removes the mounts inside the root when the command ends, so that no later clean-up can reach
    // the host's devices through a leftover mount.
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--", "mmdebstrap"])
        .env("SOURCE_DATE_EPOCH", EPOCH.to_string())
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["--mode=root", "--components=main"])
        .arg("--aptopt=Acquire::Retries \"3\"")
        .arg(format!("--include={}", request.packages.join(",")));
    let architecture = if request.variant == Variant::ExtractArm64 { "arm64" } else { "amd64" };
    command.arg(format!("--architectures={architecture}"));
    match request.variant {
        Variant::Extract | Variant::ExtractArm64 => {
            command.args(["--variant=extract", "--skip=output/dev", "--skip=check/qemu"]);
            command.arg(format!("--extract-hook={}", RECORD_PACKAGES.replace("OUT", &packages.to_string_lossy())));
        }
        Variant::Installed => {
            command.args(["--variant=minbase", "--skip=output/dev"]);
        }
    }
    for hook in request.hooks {
        command.arg(format!("--customize-hook={hook}"));
    }
    command.arg(SUITE).arg(dir.join("root")).arg(&list);
    run::run(&mut command, "Debian packages util-linux and mmdebstrap")?;
    // apt assigns this folder to its own user only if that user can reach it, which depends on the path of the cache.
    let partial = dir.join("root/var/lib/apt/lists/partial");
    if partial.is_dir() { chown(&partial, Some(0), Some(0)).at(&partial) } else { Ok(()) }
}
