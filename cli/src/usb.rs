//! `usbredir`: a USB device of this computer in a machine.

use std::{
    net::{IpAddr, SocketAddr},
    process::Stdio,
};

use clap::Args;
use tokio::net::TcpListener;

use crate::{
    Connection, Error,
    cluster::{PROGRAMS, local_address},
    machine_name, relay,
};

/// The program that reads the device and speaks usbredir.
const REDIRECTOR: &str = "usbredirect";
const CLOSED: &str = "the USB redirection was closed";

/// Options of `usbredir`.
#[derive(Args)]
pub struct UsbOptions {
    /// The device, VENDOR:PRODUCT or BUS-DEVICE as lsusb lists them (not with --no-launch), and the name of the machine
    #[arg(value_names = ["DEVICE", "VMI"], num_args = 1..=2, required = true)]
    words: Vec<String>,
    /// Only print the address that a usbredir client can connect to
    #[arg(long)]
    no_launch: bool,
    /// Local address to listen on
    #[arg(long, default_value = "127.0.0.1", value_parser = local_address)]
    address: IpAddr,
    /// Local port to listen on; 0 chooses a free one
    #[arg(long, default_value_t = 0)]
    port: u16,
}

/// What the words mean: the device, if it is to be redirected from here, and the machine.
fn meaning(options: &UsbOptions) -> Result<(Option<&str>, &str), Error> {
    match (options.words.as_slice(), options.no_launch) {
        ([device, vmi], false) if is_device(device) => Ok((Some(device), machine_name(vmi)?)),
        ([device, _], false) => {
            Err(Error::Usage(format!("{device:?} is no USB device: give VENDOR:PRODUCT or BUS-DEVICE")))
        }
        ([vmi], true) => Ok((None, machine_name(vmi)?)),
        (_, true) => Err(Error::Usage("with --no-launch only the machine is named".into())),
        (_, false) => Err(Error::Usage("name the USB device, and the machine".into())),
    }
}

/// Whether this is `VENDOR:PRODUCT` in hexadecimal, or `BUS-DEVICE`.
fn is_device(text: &str) -> bool {
    let number =
        |text: &str, radix: u32| !text.is_empty() && text.len() <= 4 && text.chars().all(|c| c.is_digit(radix));
    match (text.split_once(':'), text.split_once('-')) {
        (Some((vendor, product)), _) => number(vendor, 16) && number(product, 16),
        (None, Some((bus, device))) => number(bus, 10) && number(device, 10),
        (None, None) => false,
    }
}

pub async fn run(connection: &Connection, options: &UsbOptions) -> Result<(), Error> {
    let (device, vmi) = meaning(options)?;
    // Opened before the port, so that a machine without redirection is told at once.
    let mut stream = connection.stream(&connection.path("virtualmachineinstances", vmi, "usbredir")).await?;
    let wanted = SocketAddr::new(options.address, options.port);
    let listener = TcpListener::bind(wanted).await.map_err(Error::io(format!("cannot listen on {wanted}")))?;
    let address = listener.local_addr().map_err(Error::io("cannot tell the local port"))?;
    let Some(device) = device else {
        say!("User can connect usbredir client at: {address}")?;
        let client = relay::accept(&listener, &mut stream, "the usbredir client", CLOSED).await?;
        return relay::copy(stream, client, CLOSED).await;
    };
    let mut command = tokio::process::Command::new(REDIRECTOR);
    command.args(["--device", device, "--to", &address.to_string()]).stdin(Stdio::null()).kill_on_drop(true);
    if connection.verbosity >= PROGRAMS {
        eprintln!("running: {:?}", command.as_std());
    }
    let mut redirector =
        command.spawn().map_err(Error::io(format!("cannot start {REDIRECTOR}, which comes with usbredir")))?;
    let client = tokio::select! {
        client = relay::accept(&listener, &mut stream, REDIRECTOR, CLOSED) => client?,
        status = redirector.wait() => {
            let status = status.map_err(Error::io(format!("cannot wait for {REDIRECTOR}")))?;
            return Err(Error::Stream(format!("{REDIRECTOR} ended before it connected ({status})")));
        }
    };
    let copied = relay::copy(stream, client, CLOSED).await;
    let _ = redirector.kill().await;
    copied
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{Cli, Command};

    fn read(words: &[&str]) -> Result<(Option<String>, String), String> {
        let cli = Cli::try_parse_from([&["kubectl-virt", "usbredir"], words].concat()).map_err(|e| e.to_string())?;
        let Command::UsbRedir(options) = cli.command else { panic!("another command") };
        let (device, vmi) = meaning(&options).map_err(|error| error.to_string())?;
        Ok((device.map(str::to_owned), vmi.to_owned()))
    }

    #[test]
    fn device_and_machine_are_named() {
        assert_eq!(read(&["0951:1666", "vmi"]), Ok((Some("0951:1666".into()), "vmi".into())));
        assert_eq!(read(&["02-03", "vmi"]), Ok((Some("02-03".into()), "vmi".into())));
        assert_eq!(read(&["--no-launch", "vmi"]), Ok((None, "vmi".into())));
        for words in
            [&[][..], &["vmi"], &["disk", "vmi"], &["0951:xyz", "vmi"], &["1-", "vmi"], &["1-2", "vmi", "--no-launch"]]
        {
            assert!(read(words).is_err(), "{words:?}");
        }
    }
}
