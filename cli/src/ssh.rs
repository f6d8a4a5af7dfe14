//! `ssh`: the system's ssh, connected through `port-forward --stdio`.

use std::{ffi::OsString, os::unix::process::CommandExt, path::PathBuf};

use clap::Args;

use crate::{ClusterOptions, Connection, Error, target::Target};

/// Options of `ssh`.
#[derive(Args)]
pub struct SshOptions {
    /// The machine: [USER@]TYPE/NAME[/NAMESPACE], where TYPE is vm or vmi
    #[arg(value_name = "[USER@]TARGET")]
    target: String,
    /// User to log in as; default: what ssh takes
    #[arg(long, short = 'l')]
    username: Option<String>,
    /// Port of the guest that its SSH server listens at
    #[arg(long, short = 'p', default_value_t = 22)]
    port: u16,
    /// Private key to log in with
    #[arg(long, short = 'i', value_name = "FILE")]
    identity_file: Option<PathBuf>,
    /// File with the keys of known hosts
    #[arg(long, value_name = "FILE")]
    known_hosts: Option<PathBuf>,
    /// Option passed on to ssh, such as -t "-o StrictHostKeyChecking=no"; can be repeated
    #[arg(long = "local-ssh-opts", short = 't', value_name = "OPTION", allow_hyphen_values = true)]
    options: Vec<String>,
    /// Command to run in the guest instead of a shell
    #[arg(long, short = 'c')]
    command: Option<String>,
}

/// Runs ssh in place of this program; comes back only with an error.
pub fn run(connection: &Connection, cluster: &ClusterOptions, options: &SshOptions) -> Result<(), Error> {
    let program = std::env::current_exe().map_err(Error::io("cannot tell the path of this program"))?;
    let program = program.to_str().ok_or_else(|| Error::Usage("the path of this program is not text".into()))?;
    let arguments = arguments(program, &connection.namespace, cluster, options)?;
    let error = std::process::Command::new("ssh").args(arguments).exec();
    Err(Error::io("cannot run ssh")(error))
}

fn arguments(
    program: &str,
    namespace: &str,
    cluster: &ClusterOptions,
    options: &SshOptions,
) -> Result<Vec<OsString>, Error> {
    let (user, target) = match options.target.split_once('@') {
        None => (options.username.as_deref(), options.target.as_str()),
        Some(("", _)) => return Err(Error::Usage("expected username before '@'".into())),
        Some((user, target)) => (Some(user), target),
    };
    let target = Target::parse(target)?;
    let namespace = target.namespace.as_deref().unwrap_or(namespace);
    let mut proxy = vec![program.to_owned(), "port-forward".to_owned(), "--stdio=true".to_owned()];
    proxy.extend(cluster.arguments()?);
    proxy.push(format!("{}/{}/{namespace}", target.word(), target.name));
    proxy.push(options.port.to_string());
    // A shell reads it, after ssh has replaced what follows percent signs.
    let proxy = proxy.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ").replace('%', "%%");
    let mut arguments: Vec<OsString> = vec!["-o".into(), format!("ProxyCommand={proxy}").into()];
    arguments.extend(options.options.iter().map(OsString::from));
    if let Some(file) = &options.identity_file {
        arguments.extend(["-i".into(), file.into()]);
    }
    if let Some(file) = &options.known_hosts {
        let mut option = OsString::from("UserKnownHostsFile=");
        option.push(file);
        arguments.extend(["-o".into(), option]);
    }
    if let Some(user) = user {
        arguments.extend(["-l".into(), user.into()]);
    }
    arguments.extend(["--".into(), format!("{}.{}.{namespace}", target.word(), target.name).into()]);
    arguments.extend(options.command.as_ref().map(OsString::from));
    Ok(arguments)
}

/// A word as a shell takes it literally.
fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./=:,@%+".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{Cli, Command};

    fn made(words: &[&str]) -> Vec<String> {
        let cli = Cli::parse_from([&["kubectl-virt", "ssh"], words].concat());
        let Command::Ssh(options) = cli.command else { panic!("another command") };
        let made = arguments("/bin/kubectl-virt", "ns", &cli.cluster, &options).unwrap();
        made.iter().map(|word| word.to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn ssh_connects_through_this_program() {
        assert_eq!(
            made(&["vm/a"]),
            ["-o", "ProxyCommand=/bin/kubectl-virt port-forward --stdio=true vm/a/ns 22", "--", "vm.a.ns"]
        );
        assert_eq!(
            made(&["-p", "2222", "-i", "key", "-t", "-o StrictHostKeyChecking=no", "-c", "ls /", "joe@vmi/a/other"]),
            [
                "-o",
                "ProxyCommand=/bin/kubectl-virt port-forward --stdio=true vmi/a/other 2222",
                "-o StrictHostKeyChecking=no",
                "-i",
                "key",
                "-l",
                "joe",
                "--",
                "vmi.a.other",
                "ls /",
            ]
        );
    }

    #[test]
    fn proxy_reaches_the_same_cluster() {
        let made = made(&["--context", "it's mine", "--kubeconfig", "/k 100%", "vmi/a"]);
        assert_eq!(
            made[1],
            r"ProxyCommand=/bin/kubectl-virt port-forward --stdio=true --kubeconfig '/k 100%%' --context 'it'\''s mine' vmi/a/ns 22"
        );
    }
}
