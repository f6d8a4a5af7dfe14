//! `images`: builds, lists, pushes and releases the images of this project.

use std::{
    env,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use images::{Image, Options, archive_path, cache::Cache, oci, registry, release, resolve, source::Source};

#[derive(Parser)]
#[command(about = "Builds service and guest images as OCI archives, without daemon or registry")]
struct Arguments {
    /// Directory for the archives
    #[arg(long, global = true, default_value = "build/images")]
    out: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build images; without names all of them
    Build {
        /// Names of images, or the groups services, guests, all
        names: Vec<String>,
        /// Directory of the release binaries [default: release/ in CARGO_TARGET_DIR or target]
        #[arg(long)]
        bin_dir: Option<PathBuf>,
        /// Prefix of image names
        #[arg(long, default_value = "ferrovirt.io")]
        prefix: String,
        /// Tag of the images
        #[arg(long, default_value = "devel")]
        tag: String,
    },
    /// Show names, sizes and digests of the archives
    List,
    /// Check domain XML with virt-xml-validate and libvirtd of the launcher image
    CheckDomains {
        /// The files
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Build the disk of the node in a VM of the test cluster; prints its folder, and those with QEMU and tools, as JSON
    Node,
    /// Push archives to a registry
    Push {
        /// Registry host and path for the images, such as registry.example.org/ferrovirt
        #[arg(long, env = "REGISTRY")]
        registry: String,
        /// Tag in the registry
        #[arg(long, default_value = "devel")]
        tag: String,
        /// Allow a registry that uses plain HTTP or has a certificate that cannot be verified
        #[arg(long)]
        insecure: bool,
        /// Names of images or groups; default: all archives that exist
        names: Vec<String>,
    },
    /// Push images and chart of a release, and write its files
    Release {
        /// Registry host and path for the images, such as registry.example.org/ferrovirt
        #[arg(long, env = "REGISTRY")]
        registry: String,
        /// Version of chart and images [default: appVersion of the chart]
        #[arg(long)]
        version: Option<String>,
        /// Folder for the files; its former content is removed
        #[arg(long, default_value = "build/release")]
        files: PathBuf,
        /// Directory of the release binaries [default: release/ in CARGO_TARGET_DIR or target]
        #[arg(long)]
        bin_dir: Option<PathBuf>,
        /// The program helm
        #[arg(long, default_value = "helm")]
        helm: PathBuf,
        /// Packaged chart of the former release, whose rights are compared
        #[arg(long)]
        former: Option<PathBuf>,
        /// Allow a registry that uses plain HTTP
        #[arg(long)]
        insecure: bool,
        /// Replace images and a chart of this version that exist with another content
        #[arg(long)]
        overwrite: bool,
        /// Private key that signs images and SHA256SUMS: ECDSA with curve P-256, PEM of PKCS#8
        #[arg(long, value_name = "FILE")]
        sign_key: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("images: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    let out = arguments.out;
    match arguments.command {
        Command::Build { names, bin_dir, prefix, tag } => {
            let source = Source::of(Path::new("."));
            let bin_dir = bin_dir.unwrap_or_else(release_binaries);
            let options = Options { bin_dir, out, prefix, tag, cache: Cache::of_user(), source };
            for name in resolve(&names)? {
                let start = Instant::now();
                let summary = images::build(name, &options).with_context(|| format!("image {name}"))?;
                print(name, &summary, Some(start));
            }
        }
        Command::List => {
            for name in resolve(&[])? {
                let path = archive_path(&out, name);
                if path.exists() {
                    print(name, &oci::read(&path)?, None);
                } else {
                    println!("{name:<18} not built");
                }
            }
        }
        Command::CheckDomains { files } => {
            images::domains::check(&Cache::of_user(), &files)?;
            println!("{} domains are valid and were defined", files.len());
        }
        Command::Node => println!("{}", images::node::node(&Cache::of_user())?),
        Command::Push { registry, tag, insecure, names } => {
            let mut pushed = 0;
            for name in resolve(&names)? {
                let path = archive_path(&out, name);
                if !path.exists() {
                    if names.is_empty() {
                        continue;
                    }
                    bail!("{} does not exist: build it first", path.display());
                }
                let image = Image::find(name).with_context(|| format!("{name} is not an image"))?;
                let target = registry::push(&path, &registry, image.path, &image.tag(&tag), insecure)?;
                println!("{name:<18} {target}");
                pushed += 1;
            }
            if pushed == 0 {
                bail!("no archives in {}: run images build first", out.display());
            }
        }
        Command::Release { registry, version, files, bin_dir, helm, former, insecure, overwrite, sign_key } => {
            let options = release::Options {
                registry,
                version,
                images: out,
                bin_dir: bin_dir.unwrap_or_else(release_binaries),
                out: files,
                helm,
                former,
                insecure,
                overwrite,
                sign_key,
            };
            for line in release::release(&options)? {
                println!("{line}");
            }
        }
    }
    Ok(())
}

/// Returns the directory of the release binaries.
fn release_binaries() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from).join("release")
}

fn print(name: &str, summary: &oci::Summary, since: Option<Instant>) {
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    let (packed, unpacked) = (megabytes(summary.compressed), megabytes(summary.unpacked));
    let time = since.map(|start| format!("  {:.1} s", start.elapsed().as_secs_f64())).unwrap_or_default();
    println!(
        "{name:<18} {packed:>7.1} MB  {unpacked:>7.1} MB unpacked  {}  {}{time}",
        summary.digest, summary.reference
    );
}
