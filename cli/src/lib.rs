//! The kubectl plugin. Each command family has a module; `subresource` sends their requests.
//!
//! kubectl runs `kubectl-virt` for `kubectl virt ...` and `kubectl_complete-virt` (a link to the same program) for shell
//! completion.

/// Prints a line to standard output.
macro_rules! say {
    ($($text:tt)*) => {
        $crate::print(format_args!("{}\n", format_args!($($text)*)))
    };
}

mod cluster;
mod completion;
mod console;
mod drain;
mod evacuation;
mod examples;
mod expose;
mod forward;
mod graph;
mod guest;
mod kubeconfig;
mod lifecycle;
mod memory_dump;
mod migrate;
mod migrations;
mod option_value;
mod proxy;
mod relay;
mod resize;
mod running;
mod ssh;
mod state;
mod subresource;
mod support_bundle;
mod target;
mod terminal;
mod usb;
mod version;
mod vnc;
mod volumes;
mod wait;

use std::{ffi::OsString, io::Write, path::PathBuf};

use clap::{
    Arg, ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum,
    builder::BoolishValueParser,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::cluster::{ClusterOptions, Connection};

/// Failure of a command. The user reads its message.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubeconfig is unreadable or lacks the context.
    #[error("cannot load the kubeconfig: {0}")]
    Kubeconfig(String),
    /// The connection failed, or the response is not valid HTTP.
    #[error("cannot reach the API server: {0}")]
    Transport(String),
    /// The API server or virt-api answered with an error and this message.
    #[error("{message}")]
    Refused {
        /// HTTP status code.
        code: u16,
        /// Message of the answer's `Status`, or its body.
        message: String,
    },
    /// The arguments are invalid.
    #[error("{0}")]
    Usage(String),
    /// A local file, socket, terminal or program failed.
    #[error("{what}: {source}")]
    Io {
        /// The failed operation.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A stream ended unexpectedly.
    #[error("{0}")]
    Stream(String),
}

impl Error {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// Returns true if the API server does not know the object.
fn is_not_found(error: &Error) -> bool {
    matches!(error, Error::Refused { code: 404, .. })
}

/// Adds the failed operation to the message of a refusal.
fn failed_while(what: &str) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::Refused { code, message } => Error::Refused { code, message: format!("error {what}, {message}") },
        other => other,
    }
}

/// Prints to standard output. A closed pipe (`| head`) is not an error.
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
    /// Connect to the serial console of a running VMI
    Console(console::ConsoleOptions),
    /// Open the display of a running VMI, or save a screenshot of it
    Vnc(vnc::VncOptions),
    /// Start a virtual machine
    Start(lifecycle::StartOptions),
    /// Stop a virtual machine
    Stop(lifecycle::StopOptions),
    /// Restart a virtual machine
    Restart(lifecycle::RestartOptions),
    /// Pause a VM or VMI: its vCPUs stop, its memory is kept
    Pause(lifecycle::PauseOptions),
    /// Resume a paused VM or VMI
    Unpause(lifecycle::PauseOptions),
    /// Ask the guest to reboot
    SoftReboot(lifecycle::InstanceOptions),
    /// Reset a VMI without notifying the guest
    Reset(lifecycle::InstanceOptions),
    /// Migrate a virtual machine to another node
    Migrate(migrate::MigrateOptions),
    /// Cancel the migration of a virtual machine
    MigrateCancel(evacuation::MigrateCancelOptions),
    /// Cancel the evacuation of a VM, a VMI or all VMIs of a node
    EvacuateCancel(evacuation::EvacuateOptions),
    /// Print the VMIs that have to leave a node, and why they have not left it yet
    DrainStatus(drain::DrainOptions),
    /// Add a volume to a running VM or VMI
    #[command(name = "addvolume")]
    AddVolume(volumes::AddOptions),
    /// Remove a volume from a running VM or VMI
    #[command(name = "removevolume")]
    RemoveVolume(volumes::RemoveOptions),
    /// Set the CPUs or the memory of a VM: a running guest follows
    #[command(subcommand)]
    Set(resize::SetCommand),
    /// Dump the memory of a running virtual machine to a PersistentVolumeClaim
    MemoryDump(memory_dump::Options),
    /// Create a Service for a VM, a VMI or a replica set
    Expose(expose::ExposeOptions),
    /// Forward local ports to a VM or VMI
    PortForward(forward::ForwardOptions),
    /// Log in to a VM or VMI by SSH
    Ssh(ssh::SshOptions),
    /// Copy files to or from a VM or VMI by SSH
    Scp(ssh::ScpOptions),
    /// Redirect a local USB device to a running VMI
    #[command(name = "usbredir")]
    UsbRedir(usb::UsbOptions),
    /// Print the guest agent's report on the operating system
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
    /// Collect what a bug report needs in an archive, without secrets
    SupportBundle(support_bundle::Options),
    /// Print the versions of the client and of the server
    Version(version::VersionOptions),
    /// Print a completion script for a shell
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Kind of an object that runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A VirtualMachine
    #[value(alias = "vms", alias = "virtualmachine", alias = "virtualmachines")]
    Vm,
    /// A VirtualMachineInstance
    #[value(alias = "vmis", alias = "virtualmachineinstance", alias = "virtualmachineinstances")]
    Vmi,
}

/// Commands that only virtctl has, with the alternative here.
const VIRTCTL_ONLY: [(&str, &str); 8] = [
    ("adm", "log levels are set in spec.configuration.developerConfiguration.logVerbosity of the KubeVirt object"),
    ("create", "write the manifest; `kubectl explain vm.spec` documents it"),
    ("credentials", "access credentials are part of the VM's manifest"),
    (
        "guestfs",
        "Ferrovirt has no image with libguestfs. `virtctl guestfs --image` takes one of yours, and the value \
         image.overrides.libguestfs-tools of the chart makes it the default",
    ),
    (
        "image-upload",
        "Ferrovirt does not import images, and `virtctl image-upload` fails without CDI in the cluster: write a raw image to \
         disk.img in a claim, or to a block device, with a pod that mounts it",
    ),
    ("permitted-devices", "they are listed in spec.configuration.permittedHostDevices of the KubeVirt object"),
    ("template", "templates are not available yet"),
    ("vmexport", "exports are not available yet"),
];

/// Lets switches take a value, as all switches of kubectl and virtctl do: `--force`, `--force=true`, `--force=false`.
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

/// Builds the definition of the command line.
fn definition() -> clap::Command {
    with_values(examples::with_examples(Cli::command()))
}

/// Parses a command line. The first word is the name of the program.
fn parse<W: Into<OsString> + Clone>(words: Vec<W>) -> Result<Cli, clap::Error> {
    let mut matches = definition().try_get_matches_from(words).map_err(without_commands)?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut definition()))
}

/// Removes similar commands from an error: `stop` must not be the advice for `top`.
fn without_commands(mut error: clap::Error) -> clap::Error {
    error.remove(ContextKind::SuggestedSubcommand);
    error
}

/// Returns the alternative to a command that only virtctl has.
fn advice(error: &clap::Error) -> Option<Error> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    let (_, instead) = VIRTCTL_ONLY.iter().find(|(command, _)| command == word)?;
    Some(Error::Usage(format!("kubectl virt has no command {word:?}: {instead}")))
}

/// Returns the exit code for a command line that runs nothing: 0 for help and for no arguments, 1 for wrong arguments, as
/// kubectl and virtctl do.
fn exit_code(error: &clap::Error) -> i32 {
    let helped = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    );
    i32::from(!helped)
}

/// Runs the command that the arguments select. The first argument is the name of the program.
///
/// # Errors
/// Fails with the command's error. Wrong arguments end the process with clap's message instead.
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
                // A closed pipe must not change the exit code.
                let _ = error.print();
                std::process::exit(exit_code(&error))
            }));
        }
    };
    let done = runtime.block_on(execute(cli));
    // A thread may still be blocked in a read of the terminal.
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
        Command::Version(options) => {
            let connection = if options.client { None } else { Some(Connection::open(&cli.cluster).await) };
            version::run(connection, &options).await
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
                Command::Migrate(options) => migrate::migrate(&connection, &options).await,
                Command::MigrateCancel(options) => evacuation::migrate_cancel(&connection, &options).await,
                Command::EvacuateCancel(options) => evacuation::evacuate_cancel(connection, &options).await,
                Command::DrainStatus(options) => drain::status(&connection, &options).await,
                Command::AddVolume(options) => volumes::add(&connection, &options).await,
                Command::RemoveVolume(options) => volumes::remove(&connection, &options).await,
                Command::Set(command) => resize::set(&connection, &command).await,
                Command::MemoryDump(options) => memory_dump::run(&connection, &options).await,
                Command::Expose(options) => expose::run(&connection, &options).await,
                Command::PortForward(options) => forward::run(connection, &options).await,
                Command::Ssh(options) => ssh::run(&connection, &cli.cluster, &options),
                Command::Scp(options) => ssh::run_scp(&connection, &cli.cluster, &options),
                Command::UsbRedir(options) => usb::run(&connection, &options).await,
                Command::GuestOsInfo(options) => guest::query(&connection, &options, guest::Query::OsInfo).await,
                Command::UserList(options) => guest::query(&connection, &options, guest::Query::Users).await,
                Command::FsList(options) => guest::query(&connection, &options, guest::Query::FileSystems).await,
                Command::Expand(options) => guest::expand(&connection, &options).await,
                Command::ObjectGraph(options) => graph::run(&connection, &options).await,
                Command::SupportBundle(options) => support_bundle::run(&connection, &options).await,
                Command::Version(_) | Command::Completion { .. } => Ok(()),
            }
        }
    }
}

/// Parses `NAME`, `vmi/NAME` or `vm/NAME` and returns the name.
fn object_name(argument: &str) -> Result<&str, Error> {
    let name = match argument.split_once('/') {
        None => argument,
        Some((kind, name)) if Kind::from_str(kind, true).is_ok() => name,
        Some((kind, _)) => {
            return Err(Error::Usage(format!("unknown resource type {kind:?}: use vm/NAME or vmi/NAME")));
        }
    };
    // The name becomes part of a URL path.
    let valid = !name.is_empty()
        && name.len() <= 253
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.');
    if valid { Ok(name) } else { Err(Error::Usage(format!("{name:?} is not a valid name of a VM or VMI"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn error_names_the_failed_operation() {
        let refused = Error::Refused { code: 501, message: "this volume is not available yet".into() };
        let said = failed_while("adding volume")(refused).to_string();
        assert_eq!(said, "error adding volume, this volume is not available yet");
    }

    /// Returns the commands of this plugin in the blocks `console` of a document.
    fn commands(markdown: &str) -> Vec<Vec<String>> {
        let blocks = markdown.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
        let joined = blocks.map(|block| block.replace("\\\n", " ")).collect::<Vec<_>>();
        let lines = joined.iter().flat_map(|block| block.lines());
        let ours = lines.filter_map(|line| line.strip_prefix("$ kubectl virt "));
        let words = ours.map(|line| {
            let words = line.split_whitespace().take_while(|word| !["#", "&", "|", ">"].contains(word));
            words.map(str::to_owned).collect()
        });
        words.collect()
    }

    #[test]
    fn commands_in_the_guides_are_accepted() {
        assert_eq!(commands("```console\n$ kubectl virt a \\\n  b  # c\n$ x\n```\n"), [["a", "b"]]);
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
        let guides = std::fs::read_dir(root.join("docs/guides")).unwrap().map(|entry| entry.unwrap().path());
        let mut found = 0;
        for document in guides.chain([root.join("README.md"), root.join("CONTRIBUTING.md")]) {
            for words in commands(&std::fs::read_to_string(&document).unwrap()) {
                let line = [vec!["kubectl-virt".to_owned()], words].concat();
                let error = parse(line.clone()).err().map(|error| error.to_string());
                assert_eq!(error, None, "{}: {line:?}", document.display());
                found += 1;
            }
        }
        assert!(found > 30, "{found} commands");
    }

    #[test]
    fn exit_codes_match_those_of_kubectl() {
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
    fn similar_commands_are_not_advised() {
        for words in [&["top"][..], &["reste"], &["set", "cpus"], &["start", "a", "--guest=1"]] {
            let error = parse([&["kubectl-virt"], words].concat()).err().map(|error| error.to_string());
            assert!(error.as_deref().is_some_and(|text| !text.contains("similar subcommand")), "{error:?}");
        }
    }

    #[test]
    fn missing_virtctl_commands_name_an_alternative() {
        let said = |word: &str| advice(&parse(["kubectl-virt", word].to_vec()).err().unwrap()).map(|e| e.to_string());
        assert!(said("create").is_some_and(|text| text.contains("manifest")));
        assert_eq!(said("nothing"), None);
        for (word, _) in VIRTCTL_ONLY {
            assert!(Cli::command().find_subcommand(word).is_none(), "{word}");
        }
    }

    #[test]
    fn object_names_are_taken_with_and_without_kind() {
        for (argument, expected) in [("a", Some("a")), ("vmi/a.b-1", Some("a.b-1")), ("vm/a", Some("a"))] {
            assert_eq!(object_name(argument).ok(), expected);
        }
        for argument in ["", "pod/a", "vm/", "a/../b", "A", "a?b=c", "a b"] {
            assert!(object_name(argument).is_err(), "{argument}");
        }
    }
}
