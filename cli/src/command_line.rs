//! The command line: all commands with their arguments.

use std::ffi::OsString;

use clap::{
    Arg, ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand,
    builder::BoolishValueParser,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::{
    cluster::ClusterOptions, console, copies, create, credentials, describe, drain, error::Error, evacuation, examples,
    expose, forward, graph, guest, hibernate, image_upload, lifecycle, log_verbosity, memory_dump, migrate, resize,
    snapshot, ssh, support_bundle, top, ui, usb, version, vnc, volumes,
};

/// Control virtual machines
#[derive(Parser)]
#[command(name = "kubectl virt", bin_name = "kubectl virt", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub cluster: ClusterOptions,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Print a manifest, which kubectl apply takes
    #[command(subcommand)]
    Create(create::CreateCommand),
    /// Print a page about a VM: its state, why it waits, volumes, networks, migrations, events
    Describe(describe::DescribeOptions),
    /// Print CPU, memory, disk and network of running VMs
    Top(top::TopOptions),
    /// Connect to the serial console of a running VMI
    Console(console::ConsoleOptions),
    /// Open the display of a running VMI, or save a screenshot of it
    Vnc(vnc::VncOptions),
    /// Serve a local page that lists VMs and opens their consoles and displays in the browser
    Ui(ui::UiOptions),
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
    /// Save the memory of a running virtual machine to a claim and stop it: the next start continues
    Hibernate(hibernate::Options),
    /// Take a snapshot of a virtual machine
    Snapshot(snapshot::Options),
    /// Give a stopped VM the state that it had at a snapshot, or create a VM from one
    Restore(copies::RestoreOptions),
    /// Create a copy of a VM, or of a snapshot of one
    Clone(copies::CloneOptions),
    /// Upload an image to a DataVolume or claim; needs CDI
    ImageUpload(Box<image_upload::UploadOptions>),
    /// Change SSH keys and passwords that the guest agent sets
    #[command(subcommand)]
    Credentials(credentials::CredentialsCommand),
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
    /// Print the host devices that VMIs may use
    PermittedDevices,
    /// Administer the installation
    #[command(subcommand)]
    Adm(log_verbosity::AdmCommand),
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

/// Commands that only virtctl has, with the alternative here.
pub(crate) const VIRTCTL_ONLY: [(&str, &str); 4] = [
    ("config", "it stores the choice of a viewer; pass --vnc-path to vnc"),
    (
        "guestfs",
        "Ferrovirt has no image with libguestfs. `virtctl guestfs --image` takes one of yours, and the value \
         image.overrides.libguestfs-tools of the chart makes it the default",
    ),
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
pub(crate) fn definition() -> clap::Command {
    with_values(examples::with_examples(Cli::command()))
}

/// Parses a command line. The first word is the name of the program.
pub(crate) fn parse<W: Into<OsString> + Clone>(words: Vec<W>) -> Result<Cli, clap::Error> {
    let mut matches = definition().try_get_matches_from(words).map_err(without_commands)?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut definition()))
}

/// Removes similar commands from an error: `stop` must not be the advice for `sto`.
fn without_commands(mut error: clap::Error) -> clap::Error {
    error.remove(ContextKind::SuggestedSubcommand);
    error
}

/// Returns the alternative to a command that only virtctl has.
pub(crate) fn advice(error: &clap::Error) -> Option<Error> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    let (_, instead) = VIRTCTL_ONLY.iter().find(|(command, _)| command == word)?;
    Some(Error::Usage(format!("kubectl virt has no command {word:?}: {instead}")))
}

/// Returns the exit code for a command line that runs nothing: 0 for help and for no arguments, 1 for wrong arguments, as
/// kubectl and virtctl do.
pub(crate) fn exit_code(error: &clap::Error) -> i32 {
    let helped = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    );
    i32::from(!helped)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn command_line_definition_is_consistent() {
        definition().debug_assert();
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
        for words in [&["tops"][..], &["reste"], &["set", "cpus"], &["start", "a", "--guest=1"]] {
            let error = parse([&["kubectl-virt"], words].concat()).err().map(|error| error.to_string());
            assert!(error.as_deref().is_some_and(|text| !text.contains("similar subcommand")), "{error:?}");
        }
    }

    #[test]
    fn missing_virtctl_commands_name_an_alternative() {
        let said = |word: &str| advice(&parse(["kubectl-virt", word].to_vec()).err().unwrap()).map(|e| e.to_string());
        assert!(said("vmexport").is_some_and(|text| text.contains("exports")));
        assert_eq!(said("nothing"), None);
        for (word, _) in VIRTCTL_ONLY {
            assert!(Cli::command().find_subcommand(word).is_none(), "{word}");
        }
    }
}
