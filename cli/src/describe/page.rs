//! The report as a page of text.

use serde_json::Value;

use super::report::shown_size;
use crate::guest::{aligned, text};

/// Lines of the head: titles and fields of the report.
const HEAD: [(&str, &str); 12] = [
    ("Name", "name"),
    ("Namespace", "namespace"),
    ("Kind", "kind"),
    ("State", "state"),
    ("", "detail"),
    ("Operation", "operation"),
    ("Run strategy", "runStrategy"),
    ("Instance type", "instancetype"),
    ("Preference", "preference"),
    ("Node", "node"),
    ("Guest", "guest"),
    ("Memory", "memory"),
];

/// Returns the page.
pub(super) fn page(report: &Value) -> String {
    let head = HEAD.iter().filter(|(_, field)| !report[field].is_null());
    let head = head.map(|(title, field)| {
        let title = if title.is_empty() { String::new() } else { format!("{title}:") };
        vec![title, if *field == "memory" { shown_size(&report[field]) } else { text(&report[field]) }]
    });
    let mut page = aligned(&head.collect::<Vec<_>>());
    let sections = [
        ("Conditions", &["OBJECT", "TYPE", "STATUS", "REASON", "MESSAGE"][..], rows(&report["conditions"], condition)),
        (
            "Volumes",
            &["NAME", "KIND", "SOURCE", "DEVICE", "TARGET", "SIZE", "CLASS", "STATE"],
            rows(&report["volumes"], volume),
        ),
        (
            "TPM and UEFI variables",
            &["DEVICE", "KEPT", "CLAIM", "SIZE", "CLASS", "STATE"],
            rows(&report["persistentState"], persistent),
        ),
        ("Networks", &["NAME", "NETWORK", "BINDING", "MAC", "ADDRESSES"], rows(&report["networks"], network)),
        (
            "Snapshots, restores and clones",
            &["OBJECT", "OTHER", "STATE", "AGE", "DETAIL"],
            rows(&report["copies"], copy),
        ),
        ("Last migration", &["NAME", "PHASE", "FROM", "TO", "AGE", "DETAIL"], migration(&report["lastMigration"])),
        ("Events", &["AGE", "TYPE", "REASON", "OBJECT", "MESSAGE"], rows(&report["events"], event)),
    ];
    for (title, header, rows) in sections {
        if rows.is_empty() {
            continue;
        }
        let header = header.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let table = aligned(&[vec![header], rows].concat());
        page.push_str(&format!("\n{title}:\n"));
        table.lines().for_each(|line| page.push_str(&format!("  {line}\n")));
    }
    let unreadable = report["unreadable"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !unreadable.is_empty() {
        page.push_str("\nNot readable:\n");
        unreadable.iter().for_each(|what| page.push_str(&format!("  {}\n", text(what))));
    }
    page
}

fn rows(items: &Value, row: impl Fn(&Value) -> Vec<String>) -> Vec<Vec<String>> {
    items.as_array().map(|items| items.iter().map(row).collect()).unwrap_or_default()
}

fn condition(one: &Value) -> Vec<String> {
    ["object", "type", "status", "reason", "message"].iter().map(|field| text(&one[field])).collect()
}

fn volume(one: &Value) -> Vec<String> {
    let (claim, import) = (&one["claim"], &one["import"]);
    let states = [&import["phase"], &import["detail"], &claim["phase"], &one["phase"], &one["message"]];
    let states = states.into_iter().filter(|state| state.as_str().is_some_and(|state| !state.is_empty()));
    let states = states.map(text).collect::<Vec<_>>();
    vec![
        text(&one["name"]),
        text(&one["kind"]),
        text(&one["source"]),
        text(&one["device"]),
        text(&one["target"]),
        shown_size(&claim["size"]),
        text(&claim["storageClass"]),
        if states.is_empty() { "-".to_owned() } else { states.join(", ") },
    ]
}

/// Several claims exist while a migration moves the state.
fn persistent(one: &Value) -> Vec<String> {
    let claims = one["claims"].as_array().map(Vec::as_slice).unwrap_or_default();
    let of_claims = |shown: &dyn Fn(&Value) -> String| match claims {
        [] => "-".to_owned(),
        claims => claims.iter().map(shown).collect::<Vec<_>>().join(", "),
    };
    vec![
        text(&one["device"]),
        if one["kept"] == true { "yes" } else { "no" }.to_owned(),
        of_claims(&|claim| text(&claim["name"])),
        of_claims(&|claim| shown_size(&claim["size"])),
        of_claims(&|claim| text(&claim["storageClass"])),
        of_claims(&|claim| text(&claim["phase"])),
    ]
}

fn copy(one: &Value) -> Vec<String> {
    ["object", "other", "state", "age", "detail"].iter().map(|field| text(&one[field])).collect()
}

fn network(one: &Value) -> Vec<String> {
    let addresses = one["addresses"].as_array().map(Vec::as_slice).unwrap_or_default();
    let addresses = addresses.iter().map(text).collect::<Vec<_>>().join(", ");
    let addresses = if addresses.is_empty() { "-".to_owned() } else { addresses };
    vec![text(&one["name"]), text(&one["network"]), text(&one["binding"]), text(&one["mac"]), addresses]
}

fn migration(one: &Value) -> Vec<Vec<String>> {
    let fields = ["name", "phase", "source", "target", "age", "detail"];
    if one.is_null() { Vec::new() } else { vec![fields.iter().map(|field| text(&one[field])).collect()] }
}

fn event(one: &Value) -> Vec<String> {
    let count = one["count"].as_u64().filter(|count| *count > 1);
    let age = text(&one["age"]);
    vec![
        count.map_or_else(|| age.clone(), |count| format!("{age} (x{count})")),
        text(&one["type"]),
        text(&one["reason"]),
        text(&one["object"]),
        text(&one["message"]),
    ]
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            data::tests::kept,
            report::{
                report,
                tests::{importing, migrated},
            },
        },
        *,
    };

    #[test]
    fn page_of_a_waiting_vm_is_complete() {
        assert_eq!(
            page(&report(&importing())),
            "Name:            m
Namespace:       ns
Kind:            VirtualMachine
State:           Provisioning
                 the state of VM m is Provisioning; import ImportInProgress 12.50%: connection refused
Run strategy:    Always
Instance type:   u1.nano

Conditions:
  OBJECT   TYPE    STATUS   REASON         MESSAGE
  VM       Ready   False    VMINotExists   VMI does not exist

Volumes:
  NAME   KIND               SOURCE   DEVICE   TARGET   SIZE      CLASS   STATE
  root   dataVolume         disk     -        -        1.0 GiB   fast    ImportInProgress, 12.50%: connection refused, Bound
  seed   cloudInitNoCloud   -        -        -        -         -       -

Networks:
  NAME      NETWORK   BINDING      MAC   ADDRESSES
  default   pod       masquerade   -     -

Events:
  AGE       TYPE     REASON   OBJECT             MESSAGE
  4m (x3)   Normal   Early    DataVolume/m       m
  4m (x3)   Normal   Late     VirtualMachine/m   m
"
        );
    }

    #[test]
    fn page_shows_what_happens_to_the_data_of_a_vm() {
        let page = page(&report(&kept()));
        for part in [
            "Operation:      restore \"r\" in progress for 30s\n",
            "  share   configMap       c        filesystem   -        -      -       -\n",
            "  tools   containerDisk   i:1      cdrom        -        -      -       -\n",
            "TPM and UEFI variables:\n",
            "  TPM              yes    persistent-state-for-m-x   10.0 MiB   fast    Bound\n",
            "  UEFI variables   no     -                          -          -       -\n",
            "Snapshots, restores and clones:\n",
            "  VirtualMachineRestore/r    s       Unfinished   30s   Waiting\n",
        ] {
            assert!(page.contains(part), "{part:?} is not in\n{page}");
        }
    }

    #[test]
    fn page_names_what_could_not_be_read() {
        let page = page(&report(&migrated()));
        assert!(page.contains("Last migration:\n  NAME   PHASE    FROM   TO   AGE   DETAIL\n  new    Failed   n1     n2   60s   stuck\n"), "{page}");
        assert!(page.ends_with("\nNot readable:\n  events: forbidden\n"), "{page}");
        assert!(page.contains("Memory:      128.0 MiB\n"), "{page}");
    }
}
