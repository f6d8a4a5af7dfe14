//! From the arguments of the program to the command that they select.

use std::{ffi::OsString, path::PathBuf};

use crate::{
    cluster::Connection,
    command_line::{Cli, Command, advice, definition, exit_code, parse},
    completion, console, copies, create, credentials, describe, drain,
    error::Error,
    evacuation, expose, forward, graph, guest, hibernate, image_upload, lifecycle, log_verbosity, memory_dump, migrate,
    output::print,
    permitted_devices, resize, snapshot, ssh, support_bundle, top, ui, usb, version, vnc, volumes,
};

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

async fn execute(mut cli: Cli) -> Result<(), Error> {
    if matches!(cli.command, Command::Credentials(_)) {
        // Its option --user names a user of the guest, not of the kubeconfig.
        cli.cluster.user = None;
    }
    match cli.command {
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut definition(), "kubectl-virt", &mut script);
            print(format_args!("{}", String::from_utf8_lossy(&script)))
        }
        Command::Create(command) => create::run(&cli.cluster, &command),
        Command::Version(options) => {
            let connection = if options.client { None } else { Some(Connection::open(&cli.cluster).await) };
            version::run(connection, &options).await
        }
        command => {
            let connection = Connection::open(&cli.cluster).await?;
            match command {
                Command::Describe(options) => describe::run(&connection, &options).await,
                Command::Top(options) => top::run(&connection, &options).await,
                Command::ImageUpload(options) => image_upload::run(&connection, &options).await,
                Command::Credentials(command) => credentials::run(&connection, &command).await,
                Command::PermittedDevices => permitted_devices::run(&connection).await,
                Command::Adm(log_verbosity::AdmCommand::LogVerbosity(options)) => {
                    log_verbosity::run(&connection, &options).await
                }
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
                Command::Hibernate(options) => hibernate::run(&connection, &options).await,
                Command::Snapshot(options) => snapshot::run(&connection, &options).await,
                Command::Restore(options) => copies::restore(&connection, &options).await,
                Command::Clone(options) => copies::clone(&connection, &options).await,
                Command::Expose(options) => expose::run(&connection, &options).await,
                Command::Ui(options) => ui::run(connection, &options).await,
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
                Command::Create(_) | Command::Version(_) | Command::Completion { .. } => Ok(()),
            }
        }
    }
}
