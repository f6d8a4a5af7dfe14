//! `adm log-verbosity`: shows and sets the verbosity of components and of VMs.

use api::constants::label;
use clap::{Args, Subcommand};
use http::Method;
use serde_json::{Map, Value, json};

use crate::{Connection, Error, guest::read, object_name, permitted_devices::kubevirt};

/// Value of a flag without a level.
const SHOW: &str = "show";
/// Value of `--reset` without a name, and name of the flag for all components.
const ALL: &str = "all";
/// Verbosity without a setting.
const DEFAULT: u64 = 2;
/// Label of a VMI with the verbosity of its launcher.
const LABEL: &str = "logVerbosity";
/// Variable of the launcher's container with its verbosity.
const VARIABLE: &str = "VIRT_LAUNCHER_LOG_VERBOSITY";

/// Commands for administrators.
#[derive(Subcommand)]
pub(crate) enum AdmCommand {
    /// Show, set or reset the log verbosity (0 to 9) of components and VMs
    LogVerbosity(Options),
}

/// Options of `adm log-verbosity`. A component without a level is shown.
#[derive(Args)]
pub(crate) struct Options {
    /// Show or set the verbosity of virt-api
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true, default_missing_value = SHOW)]
    virt_api: Option<String>,
    /// Show or set the verbosity of virt-controller
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true, default_missing_value = SHOW)]
    virt_controller: Option<String>,
    /// Show or set the verbosity of virt-handler
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true, default_missing_value = SHOW)]
    virt_handler: Option<String>,
    /// Show or set the verbosity of virt-launcher
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true, default_missing_value = SHOW)]
    virt_launcher: Option<String>,
    /// Show or set the field of virt-operator, which Ferrovirt does not have
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true, default_missing_value = SHOW)]
    virt_operator: Option<String>,
    /// Show or set the verbosity of all components
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true, default_missing_value = SHOW)]
    all: Option<String>,
    /// Reset the verbosity of all components, or of these VMs
    #[arg(
        long,
        value_name = "VM",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = ALL,
        value_delimiter = ','
    )]
    reset: Vec<String>,
    /// Show or set the verbosity of this VM; can be repeated
    #[arg(long, value_name = "VM", value_delimiter = ',')]
    vm: Vec<String>,
    /// Verbosity of the VM at the same position; can be repeated
    #[arg(long, value_delimiter = ',')]
    level: Vec<String>,
}

/// An operation.
#[derive(Debug, PartialEq, Eq)]
enum Operation {
    /// Print the verbosity of these components, by their fields, and VMs.
    Show { components: Vec<usize>, vms: Vec<String> },
    /// Change settings.
    Set(Changes),
}

/// Changes of settings.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    /// True if all components are reset first.
    reset: bool,
    /// Levels by the index of the component.
    levels: Vec<(usize, u64)>,
    /// VMs that lose their label.
    reset_vms: Vec<String>,
    /// VMs with their new levels.
    vms: Vec<(String, u64)>,
}

/// Components with their fields.
const COMPONENTS: [(&str, &str); 5] = [
    ("virt-api", "virtAPI"),
    ("virt-controller", "virtController"),
    ("virt-handler", "virtHandler"),
    ("virt-launcher", "virtLauncher"),
    ("virt-operator", "virtOperator"),
];

fn level(of: &str, text: &str) -> Result<u64, Error> {
    let level = text.parse().ok().filter(|level| *level <= 9);
    level.ok_or_else(|| Error::Usage(format!("{of}: log verbosity must be 0-9")))
}

/// Decides what the flags ask for.
fn operation(options: &Options) -> Result<Operation, Error> {
    let given = [
        &options.virt_api,
        &options.virt_controller,
        &options.virt_handler,
        &options.virt_launcher,
        &options.virt_operator,
    ];
    let mut components = Vec::new();
    let mut changes = Changes { reset: options.reset.iter().any(|name| name == ALL), ..Changes::default() };
    if let Some(text) = &options.all {
        for at in 0..COMPONENTS.len() {
            if text == SHOW { components.push(at) } else { changes.levels.push((at, level(ALL, text)?)) }
        }
    }
    for (at, text) in given.iter().enumerate() {
        match text.as_deref() {
            None => {}
            Some(SHOW) if components.contains(&at) => {}
            Some(SHOW) => components.push(at),
            Some(text) => {
                changes.levels.retain(|(known, _)| *known != at);
                changes.levels.push((at, level(COMPONENTS[at].0, text)?));
            }
        }
    }
    changes.reset_vms = options.reset.iter().filter(|name| *name != ALL).cloned().collect();
    let (names, levels) = (options.vm.len(), options.level.len());
    match (names, levels) {
        (0, 1..) => return Err(Error::Usage("level: need vm flag".to_owned())),
        (_, 0) => {}
        _ if names != levels => {
            let why = format!("number of vm flags {names} not equal to number of level flags {levels}");
            return Err(Error::Usage(why));
        }
        _ => {
            for (vm, text) in options.vm.iter().zip(&options.level) {
                changes.vms.push((vm.clone(), level(vm, text)?));
            }
        }
    }
    let shown_vms = if levels == 0 { options.vm.clone() } else { Vec::new() };
    let shows = !components.is_empty() || !shown_vms.is_empty();
    match (shows, changes == Changes::default()) {
        (true, true) => Ok(Operation::Show { components, vms: shown_vms }),
        (true, false) => Err(Error::Usage("only show or set is allowed".to_owned())),
        (false, true) => Err(Error::Usage("no flag specified - expecting at least one flag".to_owned())),
        (false, false) => Ok(Operation::Set(changes)),
    }
}

pub(crate) async fn run(connection: &Connection, options: &Options) -> Result<(), Error> {
    match operation(options)? {
        Operation::Show { components, vms } => show(connection, &components, &vms).await,
        Operation::Set(changes) => set(connection, &changes).await,
    }
}

async fn show(connection: &Connection, components: &[usize], vms: &[String]) -> Result<(), Error> {
    let levels = kubevirt(connection).await?;
    let levels = &levels["spec"]["configuration"]["developerConfiguration"]["logVerbosity"];
    for at in components {
        let (name, field) = COMPONENTS[*at];
        say!("{name} = {}", levels[field].as_u64().unwrap_or(DEFAULT))?;
    }
    let cluster = levels["virtLauncher"].as_u64().unwrap_or(DEFAULT);
    for name in vms {
        let vm = read(&connection.call(Method::GET, &vm_path(connection, name)?, Vec::new()).await?)?;
        let wanted = labelled(&vm["spec"]["template"]).unwrap_or(cluster);
        let running = launcher_level(connection, name).await?.unwrap_or(wanted);
        say!("{name} = {running}")?;
        if running != wanted {
            say!("{name}: updated verbosity {wanted} will be applied after the VM is restarted")?;
        }
    }
    Ok(())
}

/// Returns the verbosity of the running launcher of a VM.
async fn launcher_level(connection: &Connection, vm: &str) -> Result<Option<u64>, Error> {
    let path = connection.object_path("virtualmachineinstances", object_name(vm)?);
    let Some(vmi) = connection.find(&path).await? else {
        return Ok(None);
    };
    let Some(uid) = vmi["metadata"]["uid"].as_str() else { return Ok(None) };
    let pods = format!(
        "/api/v1/namespaces/{}/pods?labelSelector={}%3D{uid}",
        connection.namespace,
        label::CREATED_BY.replace('/', "%2F")
    );
    let pods: Vec<Value> = crate::migrations::all(connection, &pods).await?;
    let pod = pods.iter().find(|pod| !["Succeeded", "Failed"].contains(&pod["status"]["phase"].as_str().unwrap_or("")));
    Ok(pod.and_then(level_of_pod))
}

/// Returns the verbosity in the environment of the launcher's container.
fn level_of_pod(pod: &Value) -> Option<u64> {
    let compute = pod["spec"]["containers"].as_array()?.iter().find(|container| container["name"] == "compute")?;
    let variable = compute["env"].as_array()?.iter().find(|variable| variable["name"] == VARIABLE)?;
    variable["value"].as_str()?.parse().ok()
}

/// Returns the verbosity in the labels of a template.
fn labelled(template: &Value) -> Option<u64> {
    template["metadata"]["labels"][LABEL].as_str()?.parse().ok()
}

fn vm_path(connection: &Connection, name: &str) -> Result<String, Error> {
    Ok(connection.object_path("virtualmachines", object_name(name)?))
}

/// Returns the merge patch of the `KubeVirt` object.
fn patch(changes: &Changes) -> Value {
    let mut levels = Map::new();
    if changes.reset {
        levels.extend(COMPONENTS.iter().map(|(_, field)| ((*field).to_owned(), Value::Null)));
    }
    levels.extend(changes.levels.iter().map(|(at, level)| (COMPONENTS[*at].1.to_owned(), json!(level))));
    json!({"spec": {"configuration": {"developerConfiguration": {"logVerbosity": levels}}}})
}

async fn set(connection: &Connection, changes: &Changes) -> Result<(), Error> {
    if changes.reset || !changes.levels.is_empty() {
        let found = kubevirt(connection).await?;
        let named = |field: &str| found["metadata"][field].as_str().unwrap_or_default();
        let path = format!("/apis/kubevirt.io/v1/namespaces/{}/kubevirts/{}", named("namespace"), named("name"));
        connection.patch(&path, patch(changes).to_string().into_bytes()).await?;
        if changes.reset {
            say!("successfully reset the verbosity of all KubeVirt components to default (2)")?;
        }
        if !changes.levels.is_empty() {
            say!("successfully set the verbosity of the KubeVirt component(s)")?;
        }
    }
    let label = |level: Value| json!({"spec": {"template": {"metadata": {"labels": {LABEL: level}}}}});
    for name in &changes.reset_vms {
        connection.patch(&vm_path(connection, name)?, label(Value::Null).to_string().into_bytes()).await?;
        say!("{name}: successfully removed the logVerbosity label - need to (re)start vm to apply the reset")?;
    }
    for (name, level) in &changes.vms {
        let patch = label(json!(level.to_string())).to_string().into_bytes();
        connection.patch(&vm_path(connection, name)?, patch).await?;
        say!("{name}: successfully set the logVerbosity label - need to (re)start vm to apply the new verbosity")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{Command, parse};

    fn decided(words: &[&str]) -> Result<Operation, String> {
        let words = [&["kubectl-virt", "adm", "log-verbosity"], words].concat();
        let cli = parse(words).map_err(|error| error.to_string())?;
        let Command::Adm(AdmCommand::LogVerbosity(options)) = cli.command else { panic!("another command") };
        operation(&options).map_err(|error| error.to_string())
    }

    #[test]
    fn flags_show_or_set() {
        let show = |components: &[usize], vms: &[&str]| {
            let vms = vms.iter().map(|vm| (*vm).to_owned()).collect();
            Ok(Operation::Show { components: components.to_vec(), vms })
        };
        let set = |reset: bool, levels: &[(usize, u64)], reset_vms: &[&str], vms: &[(&str, u64)]| {
            Ok(Operation::Set(Changes {
                reset,
                levels: levels.to_vec(),
                reset_vms: reset_vms.iter().map(|vm| (*vm).to_owned()).collect(),
                vms: vms.iter().map(|(vm, level)| ((*vm).to_owned(), *level)).collect(),
            }))
        };
        let refused = |text: &str| Err(text.to_owned());
        for (words, expected) in [
            (&["--virt-handler", "--virt-launcher"][..], show(&[2, 3], &[])),
            (&["--all"], show(&[0, 1, 2, 3, 4], &[])),
            (&["--vm=a", "--vm=b", "--virt-api"], show(&[0], &["a", "b"])),
            (&["--virt-handler=7"], set(false, &[(2, 7)], &[], &[])),
            (&["--all=3", "--virt-api=9"], set(false, &[(1, 3), (2, 3), (3, 3), (4, 3), (0, 9)], &[], &[])),
            (&["--reset"], set(true, &[], &[], &[])),
            (&["--reset=a", "--vm=b", "--level=5"], set(false, &[], &["a"], &[("b", 5)])),
            (&[], refused("no flag specified - expecting at least one flag")),
            (&["--virt-api", "--virt-handler=1"], refused("only show or set is allowed")),
            (&["--virt-api=10"], refused("virt-api: log verbosity must be 0-9")),
            (&["--vm=a", "--level=x"], refused("a: log verbosity must be 0-9")),
            (&["--level=1"], refused("level: need vm flag")),
            (&["--vm=a", "--vm=b", "--level=1"], refused("number of vm flags 2 not equal to number of level flags 1")),
        ] {
            assert_eq!(decided(words), expected, "{words:?}");
        }
    }

    #[test]
    fn a_reset_removes_what_is_not_set_again() {
        let changes = Changes { reset: true, levels: vec![(2, 7)], ..Changes::default() };
        let levels = &patch(&changes)["spec"]["configuration"]["developerConfiguration"]["logVerbosity"];
        assert_eq!(
            *levels,
            json!({"virtAPI": null, "virtController": null, "virtHandler": 7, "virtLauncher": null, "virtOperator": null})
        );
    }

    #[test]
    fn verbosity_of_a_running_launcher_is_in_its_environment() {
        let pod = json!({"spec": {"containers": [
            {"name": "hook"}, {"name": "compute", "env": [{"name": VARIABLE, "value": "6"}]},
        ]}});
        assert_eq!((level_of_pod(&pod), level_of_pod(&json!({}))), (Some(6), None));
        assert_eq!(labelled(&json!({"metadata": {"labels": {LABEL: "4"}}})), Some(4));
    }
}
