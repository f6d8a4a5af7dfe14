//! `evacuate-cancel` keeps VMIs on their node. `migrate-cancel` ends a running migration.

use clap::{Args, ValueEnum};
use http::Method;
use serde::Deserialize;

use crate::{Connection, Error, lifecycle::body, migrations, object_name};

/// Object whose evacuation is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Subject {
    /// A VirtualMachine
    #[value(alias = "vms", alias = "virtualmachine", alias = "virtualmachines")]
    Vm,
    /// A VirtualMachineInstance
    #[value(alias = "vmis", alias = "virtualmachineinstance", alias = "virtualmachineinstances")]
    Vmi,
    /// All VMIs on a node
    #[value(alias = "nodes", alias = "no")]
    Node,
}

/// Options of `evacuate-cancel`.
#[derive(Args)]
pub(crate) struct EvacuateOptions {
    /// Type of the object: vm, vmi or node
    #[arg(ignore_case = true)]
    kind: Subject,
    /// Name of the object
    name: String,
    /// Cancel a running migration as well
    #[arg(long)]
    migrate_cancel: bool,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

/// Options of `migrate-cancel`.
#[derive(Args)]
pub(crate) struct MigrateCancelOptions {
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    #[serde(default)]
    namespace: String,
}

#[derive(Deserialize)]
struct Vmi {
    metadata: Metadata,
    #[serde(default)]
    status: VmiStatus,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct VmiStatus {
    evacuation_node_name: String,
}

async fn cancel_evacuation(
    connection: &Connection,
    kind: Subject,
    name: &str,
    options: &EvacuateOptions,
) -> Result<(), Error> {
    let (resource, word) = match kind {
        Subject::Vm => ("virtualmachines", "VM"),
        Subject::Vmi | Subject::Node => ("virtualmachineinstances", "VMI"),
    };
    let path = connection.path(resource, name, "evacuate/cancel");
    connection.call(Method::PUT, &path, body(&[], options.dry_run)).await?;
    say!("{word} {}/{name} was canceled evacuation", connection.namespace)?;
    if options.migrate_cancel { cancel_migration(connection, name, options.dry_run).await } else { Ok(()) }
}

pub(crate) async fn evacuate_cancel(connection: Connection, options: &EvacuateOptions) -> Result<(), Error> {
    let name = object_name(&options.name)?;
    if options.kind != Subject::Node {
        return cancel_evacuation(&connection, options.kind, name, options).await;
    }
    connection.call(Method::GET, &format!("/api/v1/nodes/{name}"), Vec::new()).await?;
    let vmis: Vec<Vmi> = migrations::all(&connection, "/apis/kubevirt.io/v1/virtualmachineinstances").await?;
    let (mut connection, mut failed, mut asked) = (connection, 0, 0);
    for vmi in vmis.iter().filter(|vmi| vmi.status.evacuation_node_name == name) {
        connection = connection.within(Some(&vmi.metadata.namespace));
        asked += 1;
        if let Err(error) = cancel_evacuation(&connection, Subject::Vmi, &vmi.metadata.name, options).await {
            failed += 1;
            eprintln!("VMI {}/{}: {error}", vmi.metadata.namespace, vmi.metadata.name);
        }
    }
    if failed > 0 {
        return Err(Error::Stream(format!("cannot cancel the evacuation of {failed} of {asked} VMIs")));
    }
    Ok(())
}

pub(crate) async fn migrate_cancel(connection: &Connection, options: &MigrateCancelOptions) -> Result<(), Error> {
    let vm = object_name(&options.vm)?;
    cancel_migration(connection, vm, options.dry_run).await?;
    say!("VM {vm} was scheduled to migrate-cancel")?;
    Ok(())
}

async fn cancel_migration(connection: &Connection, vmi: &str, dry_run: bool) -> Result<(), Error> {
    let found = migrations::in_namespace(connection).await?;
    let Some(migration) = found.iter().find(|migration| migration.vmi_name() == vmi && migration.is_active()) else {
        return Err(Error::Usage(format!("Found no migration to cancel for {vmi}")));
    };
    let query = if dry_run { "?dryRun=All" } else { "" };
    let path = format!("{}/{}{query}", migrations::path(Some(&connection.namespace)), migration.name());
    connection.call(Method::DELETE, &path, Vec::new()).await.map(drop)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::command_line::Cli;

    #[test]
    fn kinds_are_taken_by_their_names() {
        for (words, taken) in [
            (&["evacuate-cancel", "vm", "a"][..], true),
            (&["evacuate-cancel", "VirtualMachineInstances", "a", "--migrate-cancel", "--dry-run"], true),
            (&["evacuate-cancel", "no", "n1"], true),
            (&["evacuate-cancel", "pod", "a"], false),
            (&["evacuate-cancel", "vm"], false),
            (&["migrate-cancel", "a"], true),
            (&["migrate-cancel"], false),
        ] {
            assert_eq!(Cli::try_parse_from([&["kubectl-virt"], words].concat()).is_ok(), taken, "{words:?}");
        }
    }
}
