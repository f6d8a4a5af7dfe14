//! `describe`: one page about a VM: its state, why it waits, volumes with their imports, networks, state that is kept, snapshots and
//! other copies, the last migration, events.

mod data;
mod objects;
mod page;
mod report;

use std::collections::BTreeSet;

use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::Value;

use self::objects::{CopyKind, Objects};
use crate::{
    Connection, Error,
    error::is_not_found,
    guest::{Document, Format},
    migrations, object_name,
    output::print,
};

/// Options of `describe`.
#[derive(Args)]
pub(crate) struct DescribeOptions {
    /// Name of the VM, or of a VMI without a VM
    #[arg(value_name = "VM")]
    vm: String,
    /// Output format; a table is a page of text
    #[arg(long, short, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub(crate) async fn run(connection: &Connection, options: &DescribeOptions) -> Result<(), Error> {
    let name = object_name(&options.vm)?;
    let report = report::report(&gathered(connection, name).await?);
    match options.output {
        Format::Table => print(format_args!("{}", page::page(&report))),
        Format::Json => print(format_args!("{}", Document::Json.rendered(&report)?)),
        Format::Yaml => print(format_args!("{}", Document::Yaml.rendered(&report)?)),
    }
}

/// Reads the objects. Only the VM or VMI must be readable; the page names what else is not.
async fn gathered(connection: &Connection, name: &str) -> Result<Objects, Error> {
    let mut objects = Objects { name: name.to_owned(), now: Timestamp::now(), ..Objects::default() };
    objects.namespace.clone_from(&connection.namespace);
    let vm = connection.find(&connection.object_path("virtualmachines", name)).await;
    let vmi = connection.find(&connection.object_path("virtualmachineinstances", name)).await;
    match (vm, vmi) {
        (Err(error), Err(_)) => return Err(error),
        (Ok(None), Ok(None)) => {
            let namespace = &connection.namespace;
            return Err(Error::Usage(format!("no VM or VMI {name} in namespace {namespace}")));
        }
        (vm, vmi) => {
            objects.vm = noted(vm, "VM", &mut objects.unreadable).flatten();
            objects.vmi = noted(vmi, "VMI", &mut objects.unreadable).flatten();
        }
    }
    for claim in report::claims(&objects) {
        let namespace = &connection.namespace;
        let path = format!("/apis/cdi.kubevirt.io/v1beta1/namespaces/{namespace}/datavolumes/{claim}");
        let found = noted(connection.find(&path).await, "DataVolumes", &mut objects.unreadable);
        objects.data_volumes.extend(found.flatten());
        let path = format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}");
        let found = noted(connection.find(&path).await, "PersistentVolumeClaims", &mut objects.unreadable);
        objects.claims.extend(found.flatten());
    }
    let selector = format!("{}={}", api::persistent_state::LABEL, api::names::label_value(name));
    let path = format!("/api/v1/namespaces/{}/persistentvolumeclaims?labelSelector={selector}", connection.namespace);
    let found = noted(list(connection, &path).await, "PersistentVolumeClaims", &mut objects.unreadable);
    objects.state_claims = found.unwrap_or_default();
    for copy in CopyKind::ALL {
        let (version, plural) = copy.resource();
        let path = format!("/apis/{version}/namespaces/{}/{plural}", connection.namespace);
        let found: Option<Vec<Value>> = noted(list(connection, &path).await, plural, &mut objects.unreadable);
        let own = found.into_iter().flatten().filter(|object| copy.is_about(object, name));
        objects.copies.extend(own.map(|object| (copy, object)));
    }
    let found = list(connection, &migrations::path(Some(&connection.namespace))).await;
    let found: Vec<Value> = noted(found, "migrations", &mut objects.unreadable).unwrap_or_default();
    objects.migrations = found.into_iter().filter(|one| one["spec"]["vmiName"] == name).collect();
    for field in report::event_selectors(&objects) {
        let path = format!("/api/v1/namespaces/{}/events?fieldSelector={field}", connection.namespace);
        let found: Option<Vec<Value>> = noted(list(connection, &path).await, "events", &mut objects.unreadable);
        objects.events.extend(found.unwrap_or_default());
    }
    Ok(objects)
}

/// Lists objects; none if the cluster does not have their kind.
async fn list<T: DeserializeOwned>(connection: &Connection, path: &str) -> Result<Vec<T>, Error> {
    match migrations::all(connection, path).await {
        Err(error) if is_not_found(&error) => Ok(Vec::new()),
        listed => listed,
    }
}

/// Notes what could not be read.
fn noted<T>(read: Result<T, Error>, kind: &str, unreadable: &mut BTreeSet<String>) -> Option<T> {
    match read {
        Ok(found) => Some(found),
        Err(error) => {
            unreadable.insert(format!("{kind}: {error}"));
            None
        }
    }
}
