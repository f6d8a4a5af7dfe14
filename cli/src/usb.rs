//! `usbredir`: redirects a local USB device to a VMI.

use std::{
    net::{IpAddr, SocketAddr},
    process::Stdio,
};

use clap::Args;
use tokio::net::TcpListener;

use crate::{Connection, Error, cluster::VERBOSITY_COMMANDS, object_name, option_value::local_address, relay};

/// Program that reads the device and speaks the usbredir protocol.
const REDIRECTOR: &str = "usbredirect";
const CLOSED: &str = "the USB redirection was closed";

/// Options of `usbredir`.
#[derive(Args)]
pub(crate) struct UsbOptions {
    /// The device as VENDOR:PRODUCT or BUS-DEVICE (see lsusb; omit with --no-launch) and the name of the VirtualMachineInstance
    #[arg(value_names = ["DEVICE", "VMI"], num_args = 1..=2, required = true)]
    words: Vec<String>,
    /// Only print the address for a usbredir client
    #[arg(long)]
    no_launch: bool,
    /// Local address to listen on
    #[arg(long, default_value = "127.0.0.1", value_parser = local_address)]
    address: IpAddr,
    /// Local port to listen on; 0 chooses a free one
    #[arg(long, default_value_t = 0)]
    port: u16,
}

/// Returns the device, unless --no-launch is set, and the name of the VMI.
fn parse_names(options: &UsbOptions) -> Result<(Option<&str>, &str), Error> {
    match (options.words.as_slice(), options.no_launch) {
        ([device, vmi], false) if is_device(device) => Ok((Some(device), object_name(vmi)?)),
        ([device, _], false) => {
            Err(Error::Usage(format!("{device:?} is not a USB device: use VENDOR:PRODUCT or BUS-DEVICE")))
        }
        ([vmi], true) => Ok((None, object_name(vmi)?)),
        (_, true) => Err(Error::Usage("--no-launch takes only the name of the VMI".into())),
        (_, false) => Err(Error::Usage("name the USB device and the VMI".into())),
    }
}

/// Returns true for `VENDOR:PRODUCT` in hexadecimal and for `BUS-DEVICE`.
fn is_device(text: &str) -> bool {
    let number =
        |text: &str, radix: u32| !text.is_empty() && text.len() <= 4 && text.chars().all(|c| c.is_digit(radix));
    match (text.split_once(':'), text.split_once('-')) {
        (Some((vendor, product)), _) => number(vendor, 16) && number(product, 16),
        (None, Some((bus, device))) => number(bus, 10) && number(device, 10),
        (None, None) => false,
    }
}

pub(crate) async fn run(connection: &Connection, options: &UsbOptions) -> Result<(), Error> {
    let (device, vmi) = parse_names(options)?;
    // The stream is opened before the port so that a VMI without redirection fails at once.
    let path = connection.path("virtualmachineinstances", vmi, "usbredir");
    let mut stream = connection.stream_of(vmi, false, &path).await?;
    let wanted = SocketAddr::new(options.address, options.port);
    let listener = TcpListener::bind(wanted).await.map_err(Error::io(format!("cannot listen on {wanted}")))?;
    let address = listener.local_addr().map_err(Error::io("cannot determine the local port"))?;
    let Some(device) = device else {
        say!("User can connect usbredir client at: {address}")?;
        let client = relay::accept(&listener, &mut stream, "the usbredir client", CLOSED).await?;
        return relay::copy(stream, client, CLOSED).await;
    };
    let mut command = tokio::process::Command::new(REDIRECTOR);
    command.args(["--device", device, "--to", &address.to_string()]).stdin(Stdio::null()).kill_on_drop(true);
    if connection.verbosity >= VERBOSITY_COMMANDS {
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
    use crate::command_line::{Cli, Command};

    fn read(words: &[&str]) -> Result<(Option<String>, String), String> {
        let cli = Cli::try_parse_from([&["kubectl-virt", "usbredir"], words].concat()).map_err(|e| e.to_string())?;
        let Command::UsbRedir(options) = cli.command else { panic!("another command") };
        let (device, vmi) = parse_names(&options).map_err(|error| error.to_string())?;
        Ok((device.map(str::to_owned), vmi.to_owned()))
    }

    #[test]
    fn device_and_vmi_are_named() {
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
