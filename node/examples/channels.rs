//! One end of the channels of a migration without a cluster, for measurements: `bench --channels` starts two of them.
//!
//! The target generates the certificates of both ends, writes them into the directory, and then prints `ready`. Each end relays
//! between the other one and a unix socket.
#![expect(clippy::disallowed_methods, reason = "no path is a pod's")]

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use api::tls::{HANDLER_CN, handler_server_name};
use clap::{Parser, ValueEnum};
use daemon::tls::{Identity, Roots, install_provider};
use node::StandaloneChannels;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// Relays channels of a migration
#[derive(Parser)]
struct Arguments {
    /// End of the migration
    end: End,
    /// Address of the target, at which it listens
    #[arg(long)]
    target: SocketAddr,
    /// Directory of the certificates
    #[arg(long)]
    directory: PathBuf,
    /// Socket of the launcher at the source, of QEMU at the target
    #[arg(long)]
    socket: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum End {
    Source,
    Target,
}

fn main() -> Result<()> {
    let Arguments { end, target, directory, socket } = Arguments::parse();
    install_provider();
    let _channels = match end {
        End::Source => {
            let (identity, roots) = read(&directory, StandaloneChannels::SOURCE)?;
            StandaloneChannels::source(target, &identity, &roots, socket)?
        }
        End::Target => {
            generate(&directory)?;
            let (identity, roots) = read(&directory, StandaloneChannels::TARGET)?;
            StandaloneChannels::target(target, &identity, &roots, socket)?
        }
    };
    println!("ready");
    loop {
        std::thread::park();
    }
}

/// Generates an authority and the certificates of both ends.
fn generate(directory: &Path) -> Result<()> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(Vec::<String>::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&key)?;
    fs::write(directory.join("authority.crt"), authority.pem()).context("cannot write the certificates")?;
    let issuer = Issuer::new(params, key);
    for node in [StandaloneChannels::SOURCE, StandaloneChannels::TARGET] {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new([handler_server_name(node)])?;
        params.distinguished_name.push(DnType::CommonName, HANDLER_CN);
        let certificate = params.signed_by(&key, &issuer)?;
        fs::write(directory.join(format!("{node}.crt")), certificate.pem())?;
        fs::write(directory.join(format!("{node}.key")), key.serialize_pem())?;
    }
    Ok(())
}

/// Reads the certificate of an end, and that of the authority.
fn read(directory: &Path, node: &str) -> Result<(Identity, Roots)> {
    let file = |name: String| {
        let path = directory.join(name);
        fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let (identity, roots) = (Identity::empty(), Roots::empty());
    identity.set_pem(&file(format!("{node}.crt"))?, &file(format!("{node}.key"))?)?;
    roots.set_pem(&file("authority.crt".to_owned())?)?;
    Ok((identity, roots))
}
