//! `top`: CPU, memory, disk and network of running VMIs. The counters of a domain are read twice; their difference is the rate.

mod rates;

use std::{collections::HashMap, time::Duration};

use api::subresources::DomainUsage;
use clap::{Args, ValueEnum};
use futures::StreamExt;
use http::Method;
use serde_json::{Value, json};

use self::rates::{Rates, rates};
use crate::{
    Connection, Error,
    guest::{Format, aligned, size, text},
    lifecycle::labels,
    migrations, object_name,
    option_value::time_limit,
    output::print,
};

/// Requests that are under way at a time.
const AT_ONCE: usize = 8;

/// Options of `top`.
#[derive(Args)]
pub(crate) struct TopOptions {
    /// Names of VMs; default: all of the namespace
    #[arg(value_name = "VM")]
    vms: Vec<String>,
    /// Show the VMs of all namespaces
    #[arg(long, short = 'A', conflicts_with = "vms")]
    all_namespaces: bool,
    /// Show only VMs with these labels
    #[arg(long, short = 'l', value_name = "LABEL=VALUE,...", value_delimiter = ',')]
    selector: Vec<String>,
    /// Sort by this column
    #[arg(long, value_enum, default_value_t = Column::Name)]
    sort_by: Column,
    /// Show each disk and each interface
    #[arg(long)]
    devices: bool,
    /// Time between the two readings, such as 2s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = time_limit)]
    interval: Duration,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// Columns to sort by. All but the name are sorted from the largest value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Column {
    /// Namespace and name
    Name,
    /// CPU time
    Cpu,
    /// Memory in use
    Memory,
    /// Bytes read and written per second
    Disk,
    /// Bytes received and sent per second
    Network,
}

/// A VMI with its rates, or the reason why there are none.
#[derive(Debug)]
struct Row {
    namespace: String,
    name: String,
    node: String,
    usage: Result<Rates, String>,
}

pub(crate) async fn run(connection: &Connection, options: &TopOptions) -> Result<(), Error> {
    let vmis = running(connection, options).await?;
    let before = read_all(connection, &vmis).await;
    if !options.interval.is_zero() {
        tokio::time::sleep(options.interval).await;
    }
    let after = read_all(connection, &vmis).await;
    let mut rows = vmis.iter().map(|vmi| row(vmi, &before, &after)).collect::<Vec<_>>();
    sort(&mut rows, options.sort_by);
    match options.output {
        Format::Table => {
            print(format_args!("{}", table(&rows, options)))?;
            for row in &rows {
                if let Err(why) = &row.usage {
                    eprintln!("{}/{}: {why}", row.namespace, row.name);
                }
            }
            Ok(())
        }
        Format::Json => print(format_args!("{:#}\n", document(&rows))),
        Format::Yaml => print(format_args!("{}", crate::guest::Document::Yaml.rendered(&document(&rows))?)),
    }
}

/// Lists the running VMIs of the selection.
async fn running(connection: &Connection, options: &TopOptions) -> Result<Vec<Value>, Error> {
    let names = options.vms.iter().map(|vm| object_name(vm)).collect::<Result<Vec<_>, _>>()?;
    let namespace = match options.all_namespaces {
        true => String::new(),
        false => format!("namespaces/{}/", connection.namespace),
    };
    labels(&options.selector)?;
    let selector = match options.selector.join(",") {
        selector if selector.is_empty() => selector,
        selector => format!("?labelSelector={}", encoded(&selector)),
    };
    let path = format!("/apis/kubevirt.io/v1/{namespace}virtualmachineinstances{selector}");
    selected(migrations::all(connection, &path).await?, &names)
}

/// Returns the running VMIs, those of the names if there are any. Each name must be that of a running VMI.
fn selected(mut vmis: Vec<Value>, names: &[&str]) -> Result<Vec<Value>, Error> {
    vmis.retain(|vmi| vmi["status"]["phase"] == "Running");
    if names.is_empty() {
        return Ok(vmis);
    }
    vmis.retain(|vmi| vmi["metadata"]["name"].as_str().is_some_and(|name| names.contains(&name)));
    let is_missing = |name: &&&str| !vmis.iter().any(|vmi| vmi["metadata"]["name"] == **name);
    match names.iter().find(is_missing) {
        Some(name) => Err(Error::Usage(format!("VM {name} is not running; see: kubectl virt describe {name}"))),
        None => Ok(vmis),
    }
}

/// Encodes a label selector for a query.
fn encoded(selector: &str) -> String {
    let encode = |byte: u8| match byte {
        byte if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    selector.bytes().map(encode).collect()
}

fn key(vmi: &Value) -> (String, String) {
    (text(&vmi["metadata"]["namespace"]), text(&vmi["metadata"]["name"]))
}

type Readings = HashMap<(String, String), Result<DomainUsage, String>>;

/// Reads the counters of all VMIs, a few at a time.
async fn read_all(connection: &Connection, vmis: &[Value]) -> Readings {
    let read = |(namespace, name): (String, String)| async move {
        let path =
            format!("/apis/subresources.kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances/{name}/usage");
        let answer = connection.call(Method::GET, &path, Vec::new()).await;
        let usage = answer
            .map_err(|error| error.to_string())
            .and_then(|body| serde_json::from_slice(&body).map_err(|error| format!("unreadable counters: {error}")));
        ((namespace, name), usage)
    };
    futures::stream::iter(vmis.iter().map(key)).map(read).buffer_unordered(AT_ONCE).collect().await
}

fn row(vmi: &Value, before: &Readings, after: &Readings) -> Row {
    let key = key(vmi);
    let usage = match (before.get(&key), after.get(&key)) {
        (Some(Ok(before)), Some(Ok(after))) => Ok(rates(before, after)),
        (_, Some(Err(why))) | (Some(Err(why)), _) => Err(why.clone()),
        _ => Err("no counters were read".to_owned()),
    };
    let (namespace, name) = key;
    Row { namespace, name, node: text(&vmi["status"]["nodeName"]), usage }
}

fn sort(rows: &mut [Row], column: Column) {
    rows.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    let value = |row: &Row| {
        let rates = row.usage.as_ref().ok()?;
        match column {
            Column::Name => None,
            Column::Cpu => rates.cpu,
            #[expect(clippy::cast_precision_loss, reason = "the order of close sizes does not matter")]
            Column::Memory => rates.memory_used.map(|bytes| bytes as f64),
            Column::Disk => rates.disk().map(|(read, written)| read + written),
            Column::Network => rates.network().map(|(received, sent)| received + sent),
        }
    };
    rows.sort_by(|a, b| value(b).unwrap_or(-1.0).total_cmp(&value(a).unwrap_or(-1.0)));
}

/// Returns a rate in bytes per second as text.
fn per_second(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{}/s", size(&json!(rate.round()))))
}

fn percent(part: Option<f64>) -> String {
    part.filter(|part| part.is_finite()).map_or_else(|| "-".to_owned(), |part| format!("{:.0}%", part * 100.0))
}

fn table(rows: &[Row], options: &TopOptions) -> String {
    let header = ["NAME", "NODE", "CPU", "CPU%", "MEMORY", "MEMORY%", "READ", "WRITE", "RECEIVE", "SEND"];
    let mut lines = vec![header.map(str::to_owned).to_vec()];
    for row in rows {
        let mut line = vec![row.name.clone(), row.node.clone()];
        match &row.usage {
            Ok(rates) => line.extend(cells(rates)),
            Err(_) => line.extend(std::iter::repeat_n("-".to_owned(), 8)),
        }
        lines.push(line);
        if let (true, Ok(rates)) = (options.devices, &row.usage) {
            lines.extend(device_lines(rates));
        }
    }
    if options.all_namespaces {
        let mut namespaces = vec!["NAMESPACE".to_owned()];
        for row in rows {
            namespaces.push(row.namespace.clone());
            let devices = row.usage.as_ref().map_or(0, |rates| rates.disks.len() + rates.interfaces.len());
            namespaces.extend(std::iter::repeat_n(String::new(), if options.devices { devices } else { 0 }));
        }
        for (line, namespace) in lines.iter_mut().zip(namespaces) {
            line.insert(0, namespace);
        }
    }
    aligned(&lines)
}

fn cells(rates: &Rates) -> [String; 8] {
    let (disk, network) = (rates.disk(), rates.network());
    let memory = rates.memory_used.map_or_else(|| "-".to_owned(), |bytes| size(&json!(bytes)));
    [
        rates.cpu.map_or_else(|| "-".to_owned(), |cpu| format!("{:.0}m", cpu * 1000.0)),
        percent(rates.cpu.map(|cpu| cpu / f64::from(rates.vcpus.max(1)))),
        memory,
        percent(rates.memory_share()),
        per_second(disk.map(|(read, _)| read)),
        per_second(disk.map(|(_, written)| written)),
        per_second(network.map(|(received, _)| received)),
        per_second(network.map(|(_, sent)| sent)),
    ]
}

/// Returns a line for each disk and each interface.
fn device_lines(rates: &Rates) -> Vec<Vec<String>> {
    let line = |name: &str, at: usize, rates: Option<(f64, f64)>| {
        let mut line = vec![String::new(); 10];
        line[0] = format!("  {name}");
        line[at] = per_second(rates.map(|(first, _)| first));
        line[at + 1] = per_second(rates.map(|(_, second)| second));
        line
    };
    let disks = rates.disks.iter().map(|device| line(&device.name, 6, device.bytes));
    disks.chain(rates.interfaces.iter().map(|device| line(&device.name, 8, device.bytes))).collect()
}

/// Returns the rows as a document.
fn document(rows: &[Row]) -> Value {
    let item = |row: &Row| {
        let mut item = json!({"namespace": row.namespace, "name": row.name, "node": row.node});
        match &row.usage {
            Ok(rates) => item["usage"] = rates.document(),
            Err(why) => item["error"] = json!(why),
        }
        item
    };
    json!({"items": rows.iter().map(item).collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{Command, parse};

    fn options(words: &[&str]) -> TopOptions {
        let cli = parse([&["kubectl-virt", "top"], words].concat()).unwrap();
        let Command::Top(options) = cli.command else { panic!("another command") };
        options
    }

    /// Recorded answers of virt-api, one second apart.
    fn rows() -> Vec<Row> {
        let reading = |second: u64| -> DomainUsage {
            serde_json::from_value(json!({
                "timestamp": format!("2026-11-29T06:00:0{second}.000000Z"), "vcpus": 2,
                "cpuNanoseconds": 5_000_000_000_u64 + 500_000_000 * second,
                "memory": {"domainBytes": 134_217_728, "availableBytes": 104_857_600, "usableBytes": 52_428_800},
                "disks": [{"name": "root", "readBytes": 1024 * second, "writeBytes": 4096 * second}],
                "interfaces": [{"name": "default", "receiveBytes": 100 * second, "transmitBytes": 7}],
            }))
            .unwrap()
        };
        let key = |name: &str| ("ns".to_owned(), name.to_owned());
        let before = Readings::from([(key("busy"), Ok(reading(0))), (key("gone"), Ok(reading(0)))]);
        let after = Readings::from([(key("busy"), Ok(reading(1))), (key("gone"), Err("VMI is not running".into()))]);
        let vmi = |name: &str| json!({"metadata": {"namespace": "ns", "name": name}, "status": {"nodeName": "n1", "phase": "Running"}});
        ["gone", "busy"].iter().map(|name| row(&vmi(name), &before, &after)).collect()
    }

    #[test]
    fn table_has_rates_and_a_dash_where_none_is_known() {
        let mut rows = rows();
        sort(&mut rows, Column::Name);
        assert_eq!(
            table(&rows, &options(&[])),
            "NAME   NODE   CPU    CPU%   MEMORY     MEMORY%   READ        WRITE       RECEIVE   SEND\n\
             busy   n1     500m   25%    50.0 MiB   50%       1.0 KiB/s   4.0 KiB/s   100 B/s   0 B/s\n\
             gone   n1     -      -      -          -         -           -           -         -\n"
        );
        let shown = table(&rows, &options(&["-A", "--devices"]));
        let lines = shown.lines().collect::<Vec<_>>();
        assert!(lines[0].starts_with("NAMESPACE   NAME"), "{shown}");
        assert!(lines[2].contains("  root") && lines[2].ends_with("4.0 KiB/s"), "{shown}");
        assert!(lines[3].contains("  default") && lines[3].ends_with("0 B/s"), "{shown}");
        assert!(lines[4].starts_with("ns") && lines[4].contains("gone"), "{shown}");
    }

    #[test]
    fn rows_are_sorted_from_the_largest_value() {
        for (column, first) in [(Column::Name, "busy"), (Column::Cpu, "busy"), (Column::Network, "busy")] {
            let mut rows = rows();
            sort(&mut rows, column);
            assert_eq!(rows[0].name, first, "{column:?}");
        }
    }

    #[test]
    fn document_has_numbers_and_errors() {
        let document = document(&rows());
        assert_eq!(document["items"][0]["error"], "VMI is not running");
        let usage = &document["items"][1]["usage"];
        assert_eq!((&usage["cpuCores"], &usage["vcpus"]), (&json!(0.5), &json!(2)), "{usage}");
        assert_eq!(usage["memory"], json!({"usedBytes": 52_428_800, "guestBytes": 104_857_600}));
        assert_eq!(
            usage["disks"][0],
            json!({"name": "root", "readBytesPerSecond": 1024.0, "writeBytesPerSecond": 4096.0})
        );
        assert_eq!(usage["interfaces"][0]["receiveBytesPerSecond"], 100.0);
    }

    #[test]
    fn named_vms_must_run() {
        let vmi = |name: &str, phase: &str| json!({"metadata": {"name": name}, "status": {"phase": phase}});
        let vmis = || vec![vmi("a", "Running"), vmi("b", "Scheduling"), vmi("c", "Running")];
        for (names, expected) in [
            (&[][..], Ok(vec!["a", "c"])),
            (&["c"], Ok(vec!["c"])),
            (&["a", "b"], Err("VM b is not running; see: kubectl virt describe b")),
            (&["none"], Err("VM none is not running; see: kubectl virt describe none")),
        ] {
            match (selected(vmis(), names), expected) {
                (Ok(found), Ok(expected)) => {
                    assert_eq!(found.iter().map(|vmi| text(&vmi["metadata"]["name"])).collect::<Vec<_>>(), expected);
                }
                (Err(error), Err(expected)) => assert_eq!(error.to_string(), expected),
                (found, expected) => panic!("{found:?} instead of {expected:?}"),
            }
        }
    }

    #[test]
    fn selector_becomes_part_of_a_query() {
        assert_eq!(encoded("a.io/b=c,d=e"), "a.io%2Fb%3Dc%2Cd%3De");
    }
}
