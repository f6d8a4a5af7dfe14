//! `ssh` and `scp`: run the system's programs through `port-forward --stdio`.

use std::{ffi::OsString, os::unix::process::CommandExt, path::PathBuf};

use clap::Args;

use crate::{ClusterOptions, Connection, Error, cluster::VERBOSITY_COMMANDS, target::Target};

/// Connection to the SSH server of the guest.
#[derive(Args)]
pub(crate) struct Access {
    /// User to log in as; default: that of ssh
    #[arg(long, short = 'l')]
    username: Option<String>,
    /// Port of the guest's SSH server
    #[arg(long, short = 'p', default_value_t = 22)]
    port: u32,
    /// Private key for the login
    #[arg(long, short = 'i', value_name = "FILE")]
    identity_file: Option<PathBuf>,
    /// File with the known host keys
    #[arg(long, value_name = "FILE")]
    known_hosts: Option<PathBuf>,
    /// Option passed to ssh or scp, such as -t "-o StrictHostKeyChecking=no"; can be repeated
    #[arg(long = "local-ssh-opts", short = 't', value_name = "OPTION", allow_hyphen_values = true)]
    options: Vec<String>,
    /// Connect by VSOCK, which needs no network in the guest
    #[arg(long)]
    vsock: bool,
}

/// Options of `ssh`.
#[derive(Args)]
pub(crate) struct SshOptions {
    /// Target: [USER@]TYPE/NAME[/NAMESPACE], where TYPE is vm or vmi
    #[arg(value_name = "[USER@]TARGET")]
    target: String,
    #[command(flatten)]
    access: Access,
    /// Command to run in the guest instead of a shell
    #[arg(long, short = 'c')]
    command: Option<String>,
}

/// Options of `scp`.
#[derive(Args)]
pub(crate) struct ScpOptions {
    /// Source: a local path, or [USER@]TYPE/NAME[/NAMESPACE]:PATH, where TYPE is vm or vmi
    #[arg(value_name = "FROM")]
    from: String,
    /// Destination: a path of the same form. One of the two must be local
    #[arg(value_name = "TO")]
    to: String,
    #[command(flatten)]
    access: Access,
    /// Copy directories recursively
    #[arg(long, short)]
    recursive: bool,
    /// Preserve times and modes of files
    #[arg(long)]
    preserve: bool,
}

/// Replaces this process with ssh. Returns only errors.
pub(crate) fn run(connection: &Connection, cluster: &ClusterOptions, options: &SshOptions) -> Result<(), Error> {
    replaced_by("ssh", ssh_arguments(&own_path()?, &connection.namespace, cluster, options)?, cluster.verbosity)
}

/// Replaces this process with scp. Returns only errors.
pub(crate) fn run_scp(connection: &Connection, cluster: &ClusterOptions, options: &ScpOptions) -> Result<(), Error> {
    replaced_by("scp", scp_arguments(&own_path()?, &connection.namespace, cluster, options)?, cluster.verbosity)
}

fn own_path() -> Result<String, Error> {
    let program = std::env::current_exe().map_err(Error::io("cannot determine the path of this program"))?;
    program
        .into_os_string()
        .into_string()
        .map_err(|_| Error::Usage("the path of this program is not valid UTF-8".into()))
}

fn replaced_by(program: &str, arguments: Vec<OsString>, verbosity: u8) -> Result<(), Error> {
    let mut command = std::process::Command::new(program);
    command.args(arguments);
    if verbosity >= VERBOSITY_COMMANDS {
        eprintln!("running: {command:?}");
    }
    let error = command.exec();
    Err(Error::io(format!("cannot run {program}"))(error))
}

/// User and target of a login.
struct Login<'a> {
    user: Option<&'a str>,
    target: Target,
}

impl<'a> Login<'a> {
    fn parse(argument: &'a str, username: Option<&'a str>) -> Result<Self, Error> {
        let (user, target) = match argument.split_once('@') {
            None => (username, argument),
            Some(("", _)) => return Err(Error::Usage("expected username before '@'".into())),
            Some((user, target)) => (Some(user), target),
        };
        Ok(Self { user, target: Target::parse(target)? })
    }

    fn namespace<'n>(&'n self, namespace: &'n str) -> &'n str {
        self.target.namespace.as_deref().unwrap_or(namespace)
    }

    /// Returns the host name for ssh, under which it stores the host key.
    fn host(&self, namespace: &str) -> String {
        format!("{}.{}.{}", self.target.word(), self.target.name, self.namespace(namespace))
    }

    /// Returns the arguments common to ssh and scp.
    fn arguments(
        &self,
        program: &str,
        namespace: &str,
        cluster: &ClusterOptions,
        access: &Access,
    ) -> Result<Vec<OsString>, Error> {
        if !access.vsock && access.port > u32::from(u16::MAX) {
            return Err(Error::Usage(format!("port {} is larger than 65535, which only VSOCK ports are", access.port)));
        }
        let mut proxy = vec![program.to_owned(), "port-forward".to_owned(), "--stdio=true".to_owned()];
        if access.vsock {
            // SSH encrypts.
            proxy.extend(["--vsock".to_owned(), "--vsock-tls=false".to_owned()]);
        }
        proxy.extend(cluster.arguments()?);
        proxy.push(format!("{}/{}/{}", self.target.word(), self.target.name, self.namespace(namespace)));
        proxy.push(access.port.to_string());
        // ssh expands percent signs and passes the command to a shell.
        let proxy = proxy.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ").replace('%', "%%");
        let mut arguments: Vec<OsString> = vec!["-o".into(), format!("ProxyCommand={proxy}").into()];
        arguments.extend(access.options.iter().map(OsString::from));
        if let Some(file) = &access.identity_file {
            arguments.extend(["-i".into(), file.into()]);
        }
        if let Some(file) = &access.known_hosts {
            let mut option = OsString::from("UserKnownHostsFile=");
            option.push(file);
            arguments.extend(["-o".into(), option]);
        }
        Ok(arguments)
    }
}

fn ssh_arguments(
    program: &str,
    namespace: &str,
    cluster: &ClusterOptions,
    options: &SshOptions,
) -> Result<Vec<OsString>, Error> {
    let login = Login::parse(&options.target, options.access.username.as_deref())?;
    let mut arguments = login.arguments(program, namespace, cluster, &options.access)?;
    if let Some(user) = login.user {
        arguments.extend(["-l".into(), user.into()]);
    }
    arguments.extend(["--".into(), login.host(namespace).into()]);
    arguments.extend(options.command.as_ref().map(OsString::from));
    Ok(arguments)
}

fn scp_arguments(
    program: &str,
    namespace: &str,
    cluster: &ClusterOptions,
    options: &ScpOptions,
) -> Result<Vec<OsString>, Error> {
    let (target, path) = match (remote(&options.from), remote(&options.to)) {
        (Some(remote), None) | (None, Some(remote)) => remote,
        (None, None) => {
            return Err(Error::Usage("both paths are local: name one as TYPE/NAME:PATH".into()));
        }
        (Some(_), Some(_)) => return Err(Error::Usage("copying from VM to VM is not supported".into())),
    };
    let login = Login::parse(target, options.access.username.as_deref())?;
    let mut arguments = login.arguments(program, namespace, cluster, &options.access)?;
    arguments.extend(options.recursive.then(|| OsString::from("-r")));
    arguments.extend(options.preserve.then(|| OsString::from("-p")));
    arguments.push("--".into());
    let user = login.user.map(|user| format!("{user}@")).unwrap_or_default();
    let there = format!("{user}{}:{path}", login.host(namespace));
    for word in [&options.from, &options.to] {
        if remote(word).is_some() {
            arguments.push(there.clone().into());
        } else if word.contains(':') && !word.starts_with(['/', '.']) {
            // scp would parse it as a host.
            arguments.push(format!("./{word}").into());
        } else {
            arguments.push(word.into());
        }
    }
    Ok(arguments)
}

/// Splits an argument into target and path if it names a path in a guest. A local path with a colon must begin with a slash
/// or a dot, as for scp.
fn remote(argument: &str) -> Option<(&str, &str)> {
    if argument.starts_with(['/', '.', '~']) { None } else { argument.split_once(':') }
}

/// Quotes a word for a shell.
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
    use crate::command_line::{Cli, Command};

    fn made(words: &[&str]) -> Result<Vec<String>, Error> {
        let cli = Cli::parse_from([&["kubectl-virt"], words].concat());
        let made = match cli.command {
            Command::Ssh(options) => ssh_arguments("/bin/kubectl-virt", "ns", &cli.cluster, &options)?,
            Command::Scp(options) => scp_arguments("/bin/kubectl-virt", "ns", &cli.cluster, &options)?,
            _ => panic!("another command"),
        };
        Ok(made.iter().map(|word| word.to_str().unwrap().to_owned()).collect())
    }

    #[test]
    fn ssh_connects_through_this_program() {
        assert_eq!(
            made(&["ssh", "vm/a"]).unwrap(),
            ["-o", "ProxyCommand=/bin/kubectl-virt port-forward --stdio=true vm/a/ns 22", "--", "vm.a.ns"]
        );
        let words =
            ["ssh", "-p", "2222", "-i", "key", "-t", "-o StrictHostKeyChecking=no", "-c", "ls /", "joe@vmi/a/other"];
        assert_eq!(
            made(&words).unwrap(),
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
    fn ssh_connects_by_vsock() {
        assert_eq!(
            made(&["ssh", "--vsock", "vm/a"]).unwrap()[1],
            "ProxyCommand=/bin/kubectl-virt port-forward --stdio=true --vsock --vsock-tls=false vm/a/ns 22"
        );
        assert!(made(&["ssh", "--vsock", "-p", "70000", "vm/a"]).unwrap()[1].ends_with(" vm/a/ns 70000"));
        assert!(made(&["ssh", "-p", "70000", "vm/a"]).is_err());
    }

    #[test]
    fn proxy_reaches_the_same_cluster() {
        let made = made(&["ssh", "--context", "it's mine", "--kubeconfig", "/k 100%", "vmi/a"]).unwrap();
        assert_eq!(
            made[1],
            r"ProxyCommand=/bin/kubectl-virt port-forward --stdio=true --kubeconfig '/k 100%%' --context 'it'\''s mine' vmi/a/ns 22"
        );
    }

    #[test]
    fn files_are_copied_to_and_from_vms() {
        let paths = |words: &[&str]| {
            let made = made(&[&["scp"], words].concat()).unwrap();
            made[made.iter().position(|word| word == "--").unwrap() + 1..].to_vec()
        };
        assert_eq!(paths(&["a.txt", "joe@vm/a:b.txt"]), ["a.txt", "joe@vm.a.ns:b.txt"]);
        assert_eq!(paths(&["-l", "joe", "vmi/a/other:/etc/x:y", "./x:y"]), ["joe@vmi.a.other:/etc/x:y", "./x:y"]);
        assert_eq!(paths(&["joe@a:.", "/tmp"]), ["joe@vmi.a.ns:.", "/tmp"]);
        let made = made(&["scp", "-r", "--preserve", "dir", "vm/a:dir"]).unwrap();
        assert_eq!(made[2..5], ["-r", "-p", "--"]);
    }

    #[test]
    fn invalid_copies_are_rejected() {
        for words in [["a", "b"], ["vm/a:x", "vm/b:x"], ["pod/a:x", "b"], ["@vm/a:x", "b"]] {
            assert!(made(&[&["scp"][..], &words].concat()).is_err(), "{words:?}");
        }
    }
}
