//! `guestosinfo`, `userlist`, `fslist`: reports of the guest agent. `expand`: a VM with its instance type applied.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use http::Method;
use serde_json::Value;

use crate::{Connection, Error, object_name, print};

/// Largest VirtualMachine file.
const MAX_FILE: u64 = 3 << 20;

/// Output formats of the guest agent's reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// JSON
    Json,
    /// YAML
    Yaml,
    /// A table
    Table,
}

/// Output formats of other documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Document {
    /// JSON
    Json,
    /// YAML
    Yaml,
}

impl Document {
    /// Renders an answer as text.
    pub(crate) fn rendered(self, answer: &Value) -> Result<String, Error> {
        match self {
            Self::Json => Ok(format!("{answer:#}\n")),
            Self::Yaml => serde_saphyr::to_string(answer)
                .map_err(|error| Error::Transport(format!("cannot render the answer: {error}"))),
        }
    }
}

/// Options of the guest agent commands.
#[derive(Args)]
pub(crate) struct QueryOptions {
    /// Name of the VirtualMachineInstance
    #[arg(value_name = "VMI")]
    vmi: String,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = Format::Json)]
    output: Format,
}

/// Options of `expand`.
#[derive(Args)]
pub(crate) struct ExpandOptions {
    /// Name of the VirtualMachine
    #[arg(long, required_unless_present = "file", conflicts_with = "file")]
    vm: Option<String>,
    /// File with a VirtualMachine as YAML or JSON ("-": standard input)
    #[arg(long, short)]
    file: Option<PathBuf>,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = Document::Yaml)]
    output: Document,
}

/// Report of the guest agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    /// The operating system.
    OsInfo,
    /// Users logged in.
    Users,
    /// Mounted file systems.
    FileSystems,
}

impl Query {
    fn subresource(self) -> &'static str {
        match self {
            Self::OsInfo => "guestosinfo",
            Self::Users => "userlist",
            Self::FileSystems => "filesystemlist",
        }
    }

    /// Renders the answer as rows, starting with the header.
    fn table(self, answer: &Value) -> Vec<Vec<String>> {
        let row = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let items = answer["items"].as_array().map(Vec::as_slice).unwrap_or_default();
        match self {
            Self::OsInfo => {
                let mut rows = vec![row(&["NAME", "VALUE"])];
                for (name, pointer) in [
                    ("Hostname", "/hostname"),
                    ("System", "/os/prettyName"),
                    ("Kernel", "/os/kernelRelease"),
                    ("Machine", "/os/machine"),
                    ("Time zone", "/timezone"),
                    ("Guest agent", "/guestAgentVersion"),
                    ("File systems", "/fsFreezeStatus"),
                ] {
                    if let Some(value) = answer.pointer(pointer).filter(|value| *value != "") {
                        rows.push(vec![name.to_owned(), text(value)]);
                    }
                }
                rows
            }
            Self::Users => {
                let mut rows = vec![row(&["USER", "DOMAIN", "LOGIN TIME"])];
                rows.extend(
                    items
                        .iter()
                        .map(|user| vec![text(&user["userName"]), text(&user["domain"]), time(&user["loginTime"])]),
                );
                rows
            }
            Self::FileSystems => {
                let mut rows = vec![row(&["DISK", "MOUNT POINT", "TYPE", "USED", "TOTAL"])];
                rows.extend(items.iter().map(|system| {
                    vec![
                        text(&system["diskName"]),
                        text(&system["mountPoint"]),
                        text(&system["fileSystemType"]),
                        size(&system["usedBytes"]),
                        size(&system["totalBytes"]),
                    ]
                }));
                rows
            }
        }
    }
}

/// Returns a value as text of one line, and `-` if there is none.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        // Text from the guest must not contain terminal control characters.
        Value::String(text) => text.chars().map(|c| if c.is_control() { '?' } else { c }).collect(),
        other => other.to_string(),
    }
}

fn time(value: &Value) -> String {
    #[expect(clippy::cast_possible_truncation, reason = "the library rejects values out of range")]
    let seconds = value.as_f64().map(|seconds| seconds as i64);
    seconds
        .and_then(|seconds| k8s_openapi::jiff::Timestamp::from_second(seconds).ok())
        .map_or_else(|| "-".to_owned(), |time| time.to_string())
}

/// Returns a number of bytes with its unit.
pub(crate) fn size(value: &Value) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let Some(mut number) = value.as_f64() else { return "-".to_owned() };
    let mut unit = 0;
    while number >= 1024.0 && unit + 1 < UNITS.len() {
        number /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{number} B") } else { format!("{number:.1} {}", UNITS[unit]) }
}

/// Renders rows with columns of equal width.
pub(crate) fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max();
    let widths = (0..columns).map(|column| width(column).unwrap_or(0)).collect::<Vec<_>>();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect::<Vec<_>>();
        cells.join("   ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

fn rendered(answer: &Value, format: Format, query: Query) -> Result<String, Error> {
    match format {
        Format::Json => Document::Json.rendered(answer),
        Format::Yaml => Document::Yaml.rendered(answer),
        Format::Table => Ok(aligned(&query.table(answer))),
    }
}

/// Parses an answer as JSON.
pub(crate) fn read(answer: &[u8]) -> Result<Value, Error> {
    serde_json::from_slice(answer).map_err(|error| Error::Transport(format!("unreadable answer: {error}")))
}

pub(crate) async fn query(connection: &Connection, options: &QueryOptions, query: Query) -> Result<(), Error> {
    let name = object_name(&options.vmi)?;
    let path = connection.path("virtualmachineinstances", name, query.subresource());
    let answer = connection.call(Method::GET, &path, Vec::new()).await?;
    print(format_args!("{}", rendered(&read(&answer)?, options.output, query)?))
}

pub(crate) async fn expand(connection: &Connection, options: &ExpandOptions) -> Result<(), Error> {
    let answer = match (&options.vm, &options.file) {
        (Some(vm), _) => {
            let path = connection.path("virtualmachines", object_name(vm)?, "expand-spec");
            connection.call(Method::GET, &path, Vec::new()).await?
        }
        (None, Some(file)) => {
            let body = vm_of_file(file)?.to_string().into_bytes();
            connection.call(Method::PUT, &connection.namespaced("expand-vm-spec"), body).await?
        }
        (None, None) => return Err(Error::Usage("VirtualMachine name or file must be provided".into())),
    };
    print(format_args!("{}", options.output.rendered(&read(&answer)?)?))
}

fn vm_of_file(file: &Path) -> Result<Value, Error> {
    let failed = || Error::io(format!("cannot read {}", file.display()));
    let mut text = String::new();
    let source: Box<dyn Read> = if file == Path::new("-") {
        Box::new(std::io::stdin())
    } else {
        Box::new(std::fs::File::open(file).map_err(failed())?)
    };
    source.take(MAX_FILE).read_to_string(&mut text).map_err(failed())?;
    first_document(&text).map_err(|why| Error::Usage(format!("{} is not a VirtualMachine: {why}", file.display())))
}

/// Returns the first document that is not empty: virtctl reads no further either.
fn first_document(text: &str) -> Result<Value, String> {
    match serde_saphyr::read::<_, Value>(&mut text.as_bytes()).next() {
        None => Err("it has no document".to_owned()),
        Some(document) => document.map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn file_systems_are_printed_as_tables() {
        let answer = json!({"items": [
            {"diskName": "vda1", "mountPoint": "/", "fileSystemType": "ext4", "usedBytes": 1_610_612_736_u64, "totalBytes": 4_294_967_296_u64},
            {"diskName": "vda15", "mountPoint": "/boot/efi", "fileSystemType": "vfat", "usedBytes": 512},
        ]});
        assert_eq!(
            rendered(&answer, Format::Table, Query::FileSystems).unwrap(),
            "DISK    MOUNT POINT   TYPE   USED      TOTAL\n\
             vda1    /             ext4   1.5 GiB   4.0 GiB\n\
             vda15   /boot/efi     vfat   512 B     -\n"
        );
    }

    #[test]
    fn users_and_system_are_printed_as_tables() {
        let answer = json!({"items": [{"userName": "joe\u{1b}[2J", "loginTime": 1_700_000_000.5}]});
        assert_eq!(
            rendered(&answer, Format::Table, Query::Users).unwrap(),
            "USER      DOMAIN   LOGIN TIME\njoe?[2J   -        2023-11-14T22:13:20Z\n"
        );
        let answer = json!({"hostname": "h", "os": {"prettyName": "Debian"}, "fsFreezeStatus": ""});
        assert_eq!(
            rendered(&answer, Format::Table, Query::OsInfo).unwrap(),
            "NAME       VALUE\nHostname   h\nSystem     Debian\n"
        );
    }

    #[test]
    fn json_and_yaml_are_printed_in_full() {
        let answer = json!({"items": []});
        assert_eq!(rendered(&answer, Format::Json, Query::Users).unwrap(), "{\n  \"items\": []\n}\n");
        assert_eq!(rendered(&answer, Format::Yaml, Query::Users).unwrap(), "items: []\n");
    }

    #[test]
    fn first_document_of_a_file_counts() {
        for text in [
            "kind: VirtualMachine\n",
            "# A comment\n---\nkind: VirtualMachine\n---\nkind: Service\n",
            "---\n---\nkind: VirtualMachine\n",
            "{\"kind\": \"VirtualMachine\"}",
        ] {
            assert_eq!(first_document(text), Ok(json!({"kind": "VirtualMachine"})), "{text}");
        }
        for text in ["", "---\n", "kind: ["] {
            assert!(first_document(text).is_err(), "{text:?}");
        }
    }
}
