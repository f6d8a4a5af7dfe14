//! The kubectl plugin: one module per command family, `subresource` for the requests they share.
//!
//! kubectl runs `kubectl-virt` for `kubectl virt ...` and `kubectl_complete-virt` (a link to the same program) for
//! shell completion of it.

/// Prints a line to standard output.
macro_rules! say {
    ($($text:tt)*) => {
        $crate::print(format_args!("{}\n", format_args!($($text)*)))
    };
}

mod cluster;
mod completion;
mod console;
mod evacuation;
mod expose;
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

use std::{ffi::OsString, io::Write, path::PathBuf};

use clap::{
    Arg, ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum,
    builder::BoolishValueParser,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::cluster::{ClusterOptions, Connection};

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

/// Prints to standard output. That a reader has heard enough and gone, as `head` does, is no failure.
fn print(text: std::fmt::Arguments<'_>) -> Result<(), Error> {
    let mut output = std::io::stdout().lock();
    match output.write_fmt(text).and_then(|()| output.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io("cannot write to standard output")(error))
        }
        _ => Ok(()),
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
    /// Make a Service that leads to a machine
    Expose(expose::ExposeOptions),
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

/// What virtctl has besides, and what takes its place here.
const ELSEWHERE: [(&str, &str); 8] = [
    ("adm", "log levels are set in spec.configuration.developerConfiguration.logVerbosity of the KubeVirt object"),
    ("create", "write the manifest, with `kubectl explain vm.spec` at hand"),
    ("credentials", "access credentials are a part of the machine's manifest"),
    ("guestfs", "virtctl starts a pod with libguestfs for it, which this program does not"),
    ("image-upload", "it sends images to CDI, which virtctl does here as well"),
    ("permitted-devices", "they are in spec.configuration.permittedHostDevices of the KubeVirt object"),
    ("template", "templates are not available yet"),
    ("vmexport", "exports are not available yet"),
];

/// Switches take a value as well, as all switches of kubectl and virtctl do: `--force`, `--force=true`, `--force=false`.
fn with_values(command: clap::Command) -> clap::Command {
    let switch = |argument: Arg| match argument.get_action() {
        ArgAction::SetTrue => argument
            .action(ArgAction::Set)
            .value_parser(BoolishValueParser::new())
            .value_name("true|false")
            .num_args(0..=1)
            .require_equals(true)
            .default_value("false")
            .default_missing_value("true")
            .hide_default_value(true)
            .hide_possible_values(true),
        _ => argument,
    };
    command.mut_args(switch).mut_subcommands(with_values)
}

/// The definition of the command line.
fn definition() -> clap::Command {
    with_values(Cli::command())
}

/// Reads a command line; the first word is the program's own name.
fn parse<W: Into<OsString> + Clone>(words: Vec<W>) -> Result<Cli, clap::Error> {
    let mut matches = definition().try_get_matches_from(words)?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut definition()))
}

/// Advice to who takes this program for virtctl.
fn advice(error: &clap::Error) -> Option<Error> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    let (_, instead) = ELSEWHERE.iter().find(|(command, _)| command == word)?;
    Some(Error::Usage(format!("kubectl virt has no command {word:?}: {instead}")))
}

/// The code that the process ends with when there is nothing to run: as that of kubectl and virtctl, 0 where help is what
/// was asked for, or nothing at all, and 1 after wrong arguments.
fn exit_code(error: &clap::Error) -> i32 {
    let helped = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    );
    i32::from(!helped)
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
    let cli = match parse(args) {
        Ok(cli) => cli,
        Err(error) => {
            return Err(advice(&error).unwrap_or_else(|| {
                // A reader that has gone is no reason for another code.
                let _ = error.print();
                std::process::exit(exit_code(&error))
            }));
        }
    };
    let done = runtime.block_on(execute(cli));
    // A thread may still wait for the terminal's next key.
    runtime.shutdown_background();
    done
}

async fn execute(cli: Cli) -> Result<(), Error> {
    match cli.command {
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut definition(), "kubectl-virt", &mut script);
            print(format_args!("{}", String::from_utf8_lossy(&script)))
        }
        Command::Version { client: true } => {
            say!("Client Version: v{}", env!("CARGO_PKG_VERSION"))
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
                Command::Expose(options) => expose::run(&connection, &options).await,
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
        definition().debug_assert();
    }

    #[test]
    fn help_is_no_failure_and_wrong_arguments_fail_as_those_of_kubectl_do() {
        for (words, code) in [
            (&["--help"][..], 0),
            (&[], 0),
            (&["start", "--help"], 0),
            (&["start"], 1),
            (&["start", "a", "--nothing"], 1),
            (&["nothing"], 1),
        ] {
            let words = [&["kubectl-virt"], words].concat();
            assert_eq!(parse(words.clone()).err().map(|error| exit_code(&error)), Some(code), "{words:?}");
        }
    }

    #[test]
    fn commands_of_virtctl_that_are_missing_come_with_advice() {
        let said = |word: &str| advice(&parse(["kubectl-virt", word].to_vec()).err().unwrap()).map(|e| e.to_string());
        assert!(said("create").is_some_and(|text| text.contains("manifest")));
        assert_eq!(said("nothing"), None);
        for (word, _) in ELSEWHERE {
            assert!(Cli::command().find_subcommand(word).is_none(), "{word}");
        }
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
