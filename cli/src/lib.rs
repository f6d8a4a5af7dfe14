//! The kubectl plugin: one module per command family, `subresource` for the requests they share.
//!
//! kubectl runs `kubectl-virt` for `kubectl virt ...` and `kubectl_complete-virt` (a link to the same program) for
//! shell completion of it.

mod completion;
mod console;
mod evacuation;
mod forward;
mod graph;
mod guest;
mod lifecycle;
mod relay;
mod ssh;
mod subresource;
mod target;
mod terminal;
mod usb;
mod vnc;
mod volumes;

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use kube::config::{KubeConfigOptions, Kubeconfig};

/// What can go wrong in a command; the message is what the user reads.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubeconfig could not be read or names a context that is not there.
    #[error("cannot load the kubeconfig: {0}")]
    Kubeconfig(String),
    /// No connection, or a response that is not HTTP as expected.
    #[error("cannot reach the API server: {0}")]
    Transport(String),
    /// The API server or virt-api answered with an error; the message is theirs.
    #[error("{message}")]
    Refused {
        /// HTTP status code.
        code: u16,
        /// Text of the answer's `Status`, or its body.
        message: String,
    },
    /// The arguments do not fit together.
    #[error("{0}")]
    Usage(String),
    /// A local file, socket, terminal or program failed.
    #[error("{what}: {source}")]
    Io {
        /// What was attempted.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A stream ended otherwise than by its user's wish.
    #[error("{0}")]
    Stream(String),
}

impl Error {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// Control virtual machines
#[derive(Parser)]
#[command(name = "kubectl virt", bin_name = "kubectl virt", version, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    cluster: ClusterOptions,
    #[command(subcommand)]
    command: Command,
}

/// The connection flags of kubectl that plugins are expected to know.
#[derive(Args)]
struct ClusterOptions {
    /// Path to the kubeconfig file to use
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The name of the kubeconfig context to use
    #[arg(long, global = true)]
    context: Option<String>,
    /// The name of the kubeconfig cluster to use
    #[arg(long, global = true)]
    cluster: Option<String>,
    /// The name of the kubeconfig user to use
    #[arg(long, global = true)]
    user: Option<String>,
    /// The namespace of the machine; default: that of the context
    #[arg(long, short, global = true)]
    namespace: Option<String>,
    /// Username to impersonate for the operation
    #[arg(long = "as", global = true, value_name = "USER")]
    impersonate: Option<String>,
    /// Group to impersonate for the operation, can be repeated
    #[arg(long = "as-group", global = true, value_name = "GROUP")]
    impersonate_groups: Vec<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Connect to the serial console of a running machine
    Console(console::ConsoleOptions),
    /// Open the display of a running machine, or save a picture of it
    Vnc(vnc::VncOptions),
    /// Start a virtual machine
    Start(lifecycle::StartOptions),
    /// Stop a virtual machine
    Stop(lifecycle::StopOptions),
    /// Restart a virtual machine
    Restart(lifecycle::RestartOptions),
    /// Pause a machine: its processors stop, its memory stays
    Pause(lifecycle::PauseOptions),
    /// Let a paused machine go on
    Unpause(lifecycle::PauseOptions),
    /// Ask the guest to reboot
    SoftReboot(lifecycle::InstanceOptions),
    /// Reset a machine without asking the guest
    Reset(lifecycle::InstanceOptions),
    /// Move a virtual machine to another node
    Migrate(lifecycle::MigrateOptions),
    /// Give up moving a virtual machine to another node
    MigrateCancel(evacuation::MigrateCancelOptions),
    /// Have a machine, or all machines of a node, stay though they were asked to leave their node
    EvacuateCancel(evacuation::EvacuateOptions),
    /// Add a volume to a running machine
    #[command(name = "addvolume")]
    AddVolume(volumes::AddOptions),
    /// Remove a volume from a running machine
    #[command(name = "removevolume")]
    RemoveVolume(volumes::RemoveOptions),
    /// Write the memory of a running virtual machine to a claim
    MemoryDump(volumes::DumpOptions),
    /// Forward local ports to a machine
    PortForward(forward::ForwardOptions),
    /// Log in to a machine by SSH
    Ssh(ssh::SshOptions),
    /// Copy files to or from a machine by SSH
    Scp(ssh::ScpOptions),
    /// Lend a USB device of this computer to a running machine
    #[command(name = "usbredir")]
    UsbRedir(usb::UsbOptions),
    /// Print what the guest agent says about the system
    #[command(name = "guestosinfo")]
    GuestOsInfo(guest::QueryOptions),
    /// Print the users logged in to the guest
    #[command(name = "userlist")]
    UserList(guest::QueryOptions),
    /// Print the file systems mounted in the guest
    #[command(name = "fslist")]
    FsList(guest::QueryOptions),
    /// Print a virtual machine with its instance type and preference applied
    Expand(guest::ExpandOptions),
    /// Print the objects that a virtual machine depends on
    #[command(name = "objectgraph")]
    ObjectGraph(graph::GraphOptions),
    /// Print the versions of this program and of the server
    Version {
        /// Print only the version of this program
        #[arg(long, short)]
        client: bool,
    },
    /// Print a completion script for a shell
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// The two kinds of machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A VirtualMachine
    #[value(alias = "vms", alias = "virtualmachine", alias = "virtualmachines")]
    Vm,
    /// A VirtualMachineInstance
    #[value(alias = "vmis", alias = "virtualmachineinstance", alias = "virtualmachineinstances")]
    Vmi,
}

impl ClusterOptions {
    /// The flags that make another run of this program reach the same cluster as the same user.
    fn arguments(&self) -> Result<Vec<String>, Error> {
        let mut words = Vec::new();
        let mut add = |flag: &str, value: Option<&str>| {
            if let Some(value) = value {
                words.extend([flag.to_owned(), value.to_owned()]);
            }
        };
        let kubeconfig = match &self.kubeconfig {
            None => None,
            Some(path) => {
                Some(path.to_str().ok_or_else(|| Error::Usage("the path of the kubeconfig is not text".into()))?)
            }
        };
        add("--kubeconfig", kubeconfig);
        add("--context", self.context.as_deref());
        add("--cluster", self.cluster.as_deref());
        add("--user", self.user.as_deref());
        add("--as", self.impersonate.as_deref());
        for group in &self.impersonate_groups {
            add("--as-group", Some(group));
        }
        Ok(words)
    }
}

/// A client and the namespace that commands work in.
struct Connection {
    client: kube::Client,
    namespace: String,
}

impl Connection {
    async fn open(options: &ClusterOptions) -> Result<Self, Error> {
        let chosen = KubeConfigOptions {
            context: options.context.clone(),
            cluster: options.cluster.clone(),
            user: options.user.clone(),
        };
        let failed = |error: &dyn std::fmt::Display| Error::Kubeconfig(error.to_string());
        let mut config = match &options.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).map_err(|e| failed(&e))?;
                kube::Config::from_custom_kubeconfig(file, &chosen).await.map_err(|e| failed(&e))?
            }
            None => match kube::Config::from_kubeconfig(&chosen).await {
                Ok(config) => config,
                // In a pod there is no kubeconfig but a service account.
                Err(error) => kube::Config::incluster().map_err(|_| failed(&error))?,
            },
        };
        // Streams stay open for as long as the user wants.
        config.read_timeout = None;
        config.write_timeout = None;
        if options.impersonate.is_some() {
            config.auth_info.impersonate.clone_from(&options.impersonate);
        }
        if !options.impersonate_groups.is_empty() {
            config.auth_info.impersonate_groups = Some(options.impersonate_groups.clone());
        }
        let namespace = options.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = kube::Client::try_from(config).map_err(|e| failed(&e))?;
        Ok(Self { client, namespace })
    }

    /// The same in another namespace, if one is given.
    fn within(self, namespace: Option<&str>) -> Self {
        match namespace {
            Some(namespace) => Self { namespace: namespace.to_owned(), ..self },
            None => self,
        }
    }
}

/// Runs the command that the arguments name (the first argument is the program's own name).
///
/// # Errors
/// The command's failure, with the text for the user. Wrong arguments end the process with clap's message instead.
pub fn run(args: Vec<OsString>) -> Result<(), Error> {
    let called_as =
        args.first().map(PathBuf::from).and_then(|p| p.file_name().map(|n| n.to_string_lossy().into_owned()));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Error::io("cannot start the runtime"))?;
    if called_as.is_some_and(|name| name.starts_with("kubectl_complete-virt")) {
        let words: Vec<String> = args.iter().skip(1).map(|w| w.to_string_lossy().into_owned()).collect();
        return runtime.block_on(completion::complete(&words));
    }
    let cli = Cli::parse_from(args);
    let done = runtime.block_on(execute(cli));
    // A thread may still wait for the terminal's next key.
    runtime.shutdown_background();
    done
}

async fn execute(cli: Cli) -> Result<(), Error> {
    match cli.command {
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "kubectl-virt", &mut std::io::stdout());
            Ok(())
        }
        Command::Version { client: true } => {
            println!("Client Version: v{}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        command => {
            let connection = Connection::open(&cli.cluster).await?;
            match command {
                Command::Console(options) => console::run(&connection, &options).await,
                Command::Vnc(options) => vnc::run(&connection, &options).await,
                Command::Start(options) => lifecycle::start(&connection, &options).await,
                Command::Stop(options) => lifecycle::stop(&connection, &options).await,
                Command::Restart(options) => lifecycle::restart(&connection, &options).await,
                Command::Pause(options) => lifecycle::pause(&connection, &options, "pause").await,
                Command::Unpause(options) => lifecycle::pause(&connection, &options, "unpause").await,
                Command::SoftReboot(options) => lifecycle::act_on_instance(&connection, &options, "soft-reboot").await,
                Command::Reset(options) => lifecycle::act_on_instance(&connection, &options, "reset").await,
                Command::Migrate(options) => lifecycle::migrate(&connection, &options).await,
                Command::MigrateCancel(options) => evacuation::migrate_cancel(&connection, &options).await,
                Command::EvacuateCancel(options) => evacuation::evacuate_cancel(connection, &options).await,
                Command::AddVolume(options) => volumes::add(&connection, &options).await,
                Command::RemoveVolume(options) => volumes::remove(&connection, &options).await,
                Command::MemoryDump(options) => volumes::memory_dump(&connection, &options).await,
                Command::PortForward(options) => forward::run(connection, &options).await,
                Command::Ssh(options) => ssh::run(&connection, &cli.cluster, &options),
                Command::Scp(options) => ssh::run_scp(&connection, &cli.cluster, &options),
                Command::UsbRedir(options) => usb::run(&connection, &options).await,
                Command::GuestOsInfo(options) => guest::ask(&connection, &options, guest::Query::OsInfo).await,
                Command::UserList(options) => guest::ask(&connection, &options, guest::Query::Users).await,
                Command::FsList(options) => guest::ask(&connection, &options, guest::Query::FileSystems).await,
                Command::Expand(options) => guest::expand(&connection, &options).await,
                Command::ObjectGraph(options) => graph::run(&connection, &options).await,
                Command::Version { .. } => lifecycle::version(&connection).await,
                Command::Completion { .. } => Ok(()),
            }
        }
    }
}

/// The name of a machine, given as `NAME`, `vmi/NAME` or `vm/NAME`.
fn machine_name(argument: &str) -> Result<&str, Error> {
    let name = match argument.split_once('/') {
        None => argument,
        Some((kind, name)) if Kind::from_str(kind, true).is_ok() => name,
        Some((kind, _)) => {
            return Err(Error::Usage(format!("unknown resource type {kind:?}: use vm/NAME or vmi/NAME")));
        }
    };
    // What goes into a URL path is checked here; the API server checks that it exists.
    let valid = !name.is_empty()
        && name.len() <= 253
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.');
    if valid { Ok(name) } else { Err(Error::Usage(format!("{name:?} is not the name of a machine"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn machine_names_are_taken_with_and_without_kind() {
        for (argument, expected) in [("a", Some("a")), ("vmi/a.b-1", Some("a.b-1")), ("vm/a", Some("a"))] {
            assert_eq!(machine_name(argument).ok(), expected);
        }
        for argument in ["", "pod/a", "vm/", "a/../b", "A", "a?b=c", "a b"] {
            assert!(machine_name(argument).is_err(), "{argument}");
        }
    }
}
