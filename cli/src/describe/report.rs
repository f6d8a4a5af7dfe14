//! From the objects of a VM to a report.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    data,
    objects::{Objects, age, array},
};
use crate::{
    guest::{size, text},
    migrations::{Migration, failure},
    running::started,
    state::strategy,
    wait::Progress,
};

/// Events in the report.
const EVENTS: usize = 20;
/// Final phase of a DataVolume.
const FILLED: &str = "Succeeded";

fn named<'a>(objects: &'a [Value], name: &str) -> Option<&'a Value> {
    objects.iter().find(|object| object["metadata"]["name"] == name)
}

/// Returns the name of the claim, or of the DataVolume, of a volume.
fn claim(volume: &Value) -> Option<&str> {
    volume["dataVolume"]["name"].as_str().or_else(|| volume["persistentVolumeClaim"]["claimName"].as_str())
}

/// Returns true for names that can be part of a path or of a selector.
fn is_name(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    name.len() <= 253 && name.bytes().all(is_inner) && name.split('.').all(|part| !part.is_empty())
}

/// Returns the names of the claims and DataVolumes of all volumes.
pub(super) fn claims(objects: &Objects) -> BTreeSet<String> {
    let claims = array(&objects.spec()["volumes"]).iter().filter_map(claim);
    claims.filter(|name| is_name(name)).map(str::to_owned).collect()
}

/// Returns the selectors of events: VM and VMI by their name, claims and DataVolumes by theirs, pods by UID.
pub(super) fn event_selectors(objects: &Objects) -> BTreeSet<String> {
    let names = claims(objects).into_iter().chain([objects.name.clone()]);
    let names = names.map(|name| format!("involvedObject.name={name}"));
    let pods = objects.vmi_status()["activePods"].as_object();
    let pods = pods.into_iter().flatten().map(|(uid, _)| uid.as_str()).filter(|uid| is_name(uid));
    names.chain(pods.map(|uid| format!("involvedObject.uid={uid}"))).collect()
}

/// Returns the report.
pub(super) fn report(objects: &Objects) -> Value {
    let (state, detail) = state(objects);
    let vm = objects.vm.as_ref().unwrap_or(&Value::Null);
    let status = objects.vmi_status();
    json!({
        "name": objects.name, "namespace": objects.namespace,
        "kind": if objects.vm.is_some() { "VirtualMachine" } else { "VirtualMachineInstance" },
        "state": state, "detail": detail,
        "runStrategy": objects.vm.as_ref().map(strategy),
        "instancetype": vm["spec"]["instancetype"]["name"], "preference": vm["spec"]["preference"]["name"],
        "node": status["nodeName"],
        "guest": status["guestOSInfo"]["prettyName"],
        "cpu": status["currentCPUTopology"],
        "memory": status["memory"]["guestCurrent"],
        "operation": data::operation(objects),
        "conditions": conditions(objects),
        "volumes": volumes(objects),
        "networks": networks(objects),
        "persistentState": data::state(objects),
        "copies": data::copies(objects),
        "lastMigration": last_migration(objects),
        "events": events(objects),
        "unreadable": objects.unreadable,
    })
}

/// Returns the state, and what the VM waits for or how it runs.
fn state(objects: &Objects) -> (String, String) {
    let vmi = objects.vmi.as_ref();
    let phase = vmi.map(|vmi| text(&vmi["status"]["phase"]));
    let unowned = json!({"spec": {"runStrategy": "Manual"}, "status": {"printableStatus": phase}});
    let vm = objects.vm.as_ref().unwrap_or(&unowned);
    let state = text(&vm["status"]["printableStatus"]);
    let is_stopped = match state.as_str() {
        "Stopped" => strategy(vm) != "Always",
        "-" => strategy(vm) == "Halted",
        _ => false,
    };
    if vmi.is_none() && is_stopped {
        return ("Stopped".to_owned(), format!("start it with: kubectl virt start {}", objects.name));
    }
    let detail = match started(&objects.name, Some(vm), vmi, None) {
        Progress::Done(text) | Progress::Failed(text) | Progress::Waiting(text) => text,
    };
    let imports = array(&objects.spec()["volumes"]).iter().filter_map(|volume| import(objects, volume));
    let waits = imports.filter(|(phase, _)| phase != FILLED).map(|(phase, detail)| format!("import {phase} {detail}"));
    let detail = [detail].into_iter().chain(waits.map(|wait| wait.trim_end().to_owned())).collect::<Vec<_>>();
    (state, detail.join("; "))
}

/// Returns the conditions that say more than that all is well.
fn conditions(objects: &Objects) -> Vec<Value> {
    let of = |kind: &'static str, object: Option<&Value>| {
        let conditions = object.map_or(&[][..], |object| array(&object["status"]["conditions"]));
        let says_more =
            |one: &&Value| one["status"] == "False" || one["message"].as_str().is_some_and(|m| !m.is_empty());
        let shown = |one: &Value| {
            json!({
                "object": kind, "type": one["type"], "status": one["status"],
                "reason": one["reason"], "message": one["message"],
            })
        };
        conditions.iter().filter(says_more).map(shown).collect::<Vec<_>>()
    };
    [of("VM", objects.vm.as_ref()), of("VMI", objects.vmi.as_ref())].concat()
}

/// Returns phase and details of the import of a volume.
fn import(objects: &Objects, volume: &Value) -> Option<(String, String)> {
    let found = named(&objects.data_volumes, claim(volume)?)?;
    let status = &found["status"];
    let phase = status["phase"].as_str().filter(|phase| !phase.is_empty()).unwrap_or("Pending");
    let progress = status["progress"].as_str().filter(|progress| !["", "N/A"].contains(progress) && phase != FILLED);
    let is_unmet = |one: &&Value| one["status"] != "True" && one["message"].as_str().is_some_and(|m| !m.is_empty());
    let message = array(&status["conditions"]).iter().rfind(is_unmet).filter(|_| phase != FILLED);
    let message = message.map(|one| text(&one["message"]));
    let detail = progress.map(str::to_owned).into_iter().chain(message).collect::<Vec<_>>().join(": ");
    Some((phase.to_owned(), detail))
}

/// Returns kind and source of a volume.
fn source(volume: &Value) -> (String, Value) {
    let kind = volume.as_object().and_then(|fields| fields.keys().find(|field| *field != "name"));
    let Some(kind) = kind else { return ("-".to_owned(), Value::Null) };
    let fields = ["image", "claimName", "name", "secretName", "serviceAccountName", "path"];
    let named = fields.iter().map(|field| &volume[kind][field]).find(|value| value.is_string());
    let named = named.or_else(|| Some(&volume[kind]["persistentVolumeClaim"]["claimName"]));
    (kind.clone(), named.cloned().unwrap_or_default())
}

/// Returns the device by which the guest uses a volume.
fn device(spec: &Value, volume: &Value) -> Option<&'static str> {
    let devices = &spec["domain"]["devices"];
    let named = |list: &str| array(&devices[list]).iter().find(|device| device["name"] == *volume);
    let disk = || {
        let disk = named("disks")?;
        Some(["cdrom", "lun"].into_iter().find(|kind| !disk[kind].is_null()).unwrap_or("disk"))
    };
    named("filesystems").map(|_| "filesystem").or_else(disk)
}

fn volumes(objects: &Objects) -> Vec<Value> {
    let statuses = array(&objects.vmi_status()["volumeStatus"]);
    let volume = |volume: &Value| {
        let (kind, source) = source(volume);
        let claim = claim(volume).and_then(|name| named(&objects.claims, name));
        let status = statuses.iter().find(|status| status["name"] == volume["name"]);
        let import = import(objects, volume);
        json!({
            "name": volume["name"], "kind": kind, "source": source, "device": device(objects.spec(), &volume["name"]),
            "target": status.map(|status| &status["target"]),
            "phase": status.map(|status| &status["phase"]), "message": status.map(|status| &status["message"]),
            "claim": claim.map(|claim| json!({
                "phase": claim["status"]["phase"], "size": claim["status"]["capacity"]["storage"],
                "storageClass": claim["spec"]["storageClassName"], "mode": claim["spec"]["volumeMode"],
            })),
            "import": import.map(|(phase, detail)| json!({"phase": phase, "detail": detail})),
        })
    };
    array(&objects.spec()["volumes"]).iter().map(volume).collect()
}

fn networks(objects: &Objects) -> Vec<Value> {
    let spec = objects.spec();
    let statuses = array(&objects.vmi_status()["interfaces"]);
    let network = |interface: &Value| {
        let name = &interface["name"];
        let network = array(&spec["networks"]).iter().find(|network| network["name"] == *name);
        let attachment = network.and_then(|network| network["multus"]["networkName"].as_str()).unwrap_or("pod");
        let binding = ["masquerade", "bridge", "sriov", "passt", "passtBinding", "slirp", "macvtap"];
        let binding = binding.into_iter().find(|binding| !interface[binding].is_null());
        let status = statuses.iter().find(|status| status["name"] == *name);
        let addresses = status.map(|status| match array(&status["ipAddresses"]) {
            [] => vec![status["ipAddress"].clone()],
            addresses => addresses.to_vec(),
        });
        json!({
            "name": name, "network": attachment,
            "binding": binding.or_else(|| interface["binding"]["name"].as_str()),
            "mac": status.map(|status| &status["mac"]), "addresses": addresses.unwrap_or_default(),
            "state": interface["state"],
        })
    };
    array(&spec["domain"]["devices"]["interfaces"]).iter().map(network).collect()
}

fn last_migration(objects: &Objects) -> Value {
    let created = |one: &&Value| text(&one["metadata"]["creationTimestamp"]);
    let Some(newest) = objects.migrations.iter().max_by_key(created) else { return Value::Null };
    let migration = Migration(newest.clone());
    let state = &newest["status"]["migrationState"];
    let detail = match migration.phase() {
        "Failed" => Some(failure(state)),
        "Succeeded" => None,
        _ => migration.detail(objects.vmi.as_ref()),
    };
    json!({
        "name": migration.name(), "phase": migration.phase(), "source": state["sourceNode"], "target": state["targetNode"],
        "start": state["startTimestamp"], "end": state["endTimestamp"], "detail": detail,
        "age": age(newest["metadata"]["creationTimestamp"].as_str(), objects.now),
    })
}

/// Returns the newest time of an event.
fn time(event: &Value) -> &str {
    let series = &event["series"]["lastObservedTime"];
    let times = [series, &event["lastTimestamp"], &event["eventTime"], &event["metadata"]["creationTimestamp"]];
    times.into_iter().find_map(Value::as_str).unwrap_or_default()
}

/// Returns the newest events, the last one at the end.
fn events(objects: &Objects) -> Vec<Value> {
    let mut events = objects.events.iter().collect::<Vec<_>>();
    events.sort_by_key(|event| time(event).parse::<Timestamp>().unwrap_or(Timestamp::UNIX_EPOCH));
    events.dedup_by_key(|event| &event["metadata"]["uid"]);
    let newest = events.split_off(events.len().saturating_sub(EVENTS));
    let event = |event: &Value| {
        let count = event["series"]["count"].as_u64().or_else(|| event["count"].as_u64()).unwrap_or(1);
        json!({
            "age": age(Some(time(event)), objects.now), "type": event["type"], "reason": event["reason"],
            "object": format!("{}/{}", text(&event["involvedObject"]["kind"]), text(&event["involvedObject"]["name"])),
            "message": event["message"], "count": count,
        })
    };
    newest.into_iter().map(event).collect()
}

/// Returns a size as text.
pub(super) fn shown_size(quantity: &Value) -> String {
    use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
    let bytes = quantity.as_str().and_then(|text| api::quantity::units(&Quantity(text.to_owned())).ok());
    bytes.map_or_else(|| text(quantity), |bytes| size(&json!(bytes)))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A VM whose import is under way.
    pub(in super::super) fn importing() -> Objects {
        let event = |second: u32, reason: &str, kind: &str| {
            json!({
                "metadata": {"uid": format!("{second}{reason}")}, "type": "Normal", "reason": reason, "count": 3,
                "message": "m", "lastTimestamp": format!("2026-11-29T06:00:{second:02}Z"),
                "involvedObject": {"kind": kind, "name": "m"},
            })
        };
        Objects {
            name: "m".into(),
            namespace: "ns".into(),
            vm: Some(json!({
                "spec": {"runStrategy": "Always", "instancetype": {"name": "u1.nano"}, "template": {"spec": {
                    "domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}]}},
                    "networks": [{"name": "default", "pod": {}}],
                    "volumes": [
                        {"name": "root", "dataVolume": {"name": "disk"}},
                        {"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config"}},
                    ],
                }}},
                "status": {"printableStatus": "Provisioning", "conditions": [
                    {"type": "Ready", "status": "False", "reason": "VMINotExists", "message": "VMI does not exist"},
                    {"type": "Initialized", "status": "True"},
                ]},
            })),
            data_volumes: vec![json!({"metadata": {"name": "disk"}, "status": {
                "phase": "ImportInProgress", "progress": "12.50%", "conditions": [
                    {"type": "Bound", "status": "True", "message": "bound"},
                    {"type": "Running", "status": "False", "message": "connection refused"},
                ],
            }})],
            claims: vec![json!({
                "metadata": {"name": "disk"}, "spec": {"storageClassName": "fast", "volumeMode": "Block"},
                "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
            })],
            events: vec![
                event(9, "Late", "VirtualMachine"),
                event(1, "Early", "DataVolume"),
                event(1, "Early", "DataVolume"),
            ],
            now: "2026-11-29T06:05:00Z".parse().unwrap(),
            ..Objects::default()
        }
    }

    /// A VM that has been migrated.
    pub(in super::super) fn migrated() -> Objects {
        let migration = |name: &str, created: &str, phase: &str| {
            json!({
                "metadata": {"name": name, "creationTimestamp": created}, "spec": {"vmiName": "m"},
                "status": {"phase": phase, "migrationState": {"sourceNode": "n1", "targetNode": "n2", "failureReason": "stuck"}},
            })
        };
        let vmi = json!({
            "spec": {
                "domain": {"devices": {"interfaces": [{"name": "blue", "bridge": {}}]}},
                "networks": [{"name": "blue", "multus": {"networkName": "nets/blue"}}],
                "volumes": [{"name": "root", "containerDisk": {"image": "i:1"}}],
            },
            "status": {
                "phase": "Running", "nodeName": "n1", "activePods": {"0a-1b": "n1"}, "memory": {"guestCurrent": "128Mi"},
                "interfaces": [{"name": "blue", "mac": "02:00:00:00:00:01", "ipAddress": "192.0.2.1", "ipAddresses": ["192.0.2.1", "fd00::1"]}],
                "volumeStatus": [{"name": "root", "target": "vda"}],
                "conditions": [{"type": "Ready", "status": "True"}, {"type": "LiveMigratable", "status": "False", "reason": "DisksNotLiveMigratable", "message": "disk"}],
            },
        });
        Objects {
            name: "m".into(),
            vmi: Some(vmi),
            migrations: vec![
                migration("new", "2026-11-29T06:00:00Z", "Failed"),
                migration("old", "2026-11-28T06:00:00Z", "Succeeded"),
            ],
            unreadable: BTreeSet::from(["events: forbidden".to_owned()]),
            now: "2026-11-29T06:01:00Z".parse().unwrap(),
            ..Objects::default()
        }
    }

    #[test]
    fn waiting_vm_names_what_it_waits_for() {
        let report = report(&importing());
        assert_eq!(report["state"], "Provisioning");
        assert_eq!(
            report["detail"],
            "the state of VM m is Provisioning; import ImportInProgress 12.50%: connection refused"
        );
        let volume = &report["volumes"][0];
        assert_eq!((&volume["kind"], &volume["source"]), (&json!("dataVolume"), &json!("disk")));
        assert_eq!(volume["claim"]["size"], "1Gi");
        assert_eq!(report["volumes"][1]["kind"], "cloudInitNoCloud");
        assert_eq!(report["conditions"].as_array().map(Vec::len), Some(1));
        let reasons = report["events"].as_array().unwrap().iter().map(|event| event["reason"].as_str().unwrap());
        assert_eq!(reasons.collect::<Vec<_>>(), ["Early", "Late"]);
        assert_eq!(report["events"][1]["age"], "4m");
    }

    #[test]
    fn running_vmi_has_networks_and_its_last_migration() {
        let objects = migrated();
        let report = report(&objects);
        assert_eq!((&report["kind"], &report["state"]), (&json!("VirtualMachineInstance"), &json!("Running")));
        assert_eq!(report["detail"], "VM m runs on node n1 with address 192.0.2.1");
        let network = &report["networks"][0];
        assert_eq!((&network["network"], &network["binding"]), (&json!("nets/blue"), &json!("bridge")));
        assert_eq!(network["addresses"], json!(["192.0.2.1", "fd00::1"]));
        let migration = &report["lastMigration"];
        assert_eq!((&migration["name"], &migration["detail"]), (&json!("new"), &json!("stuck")));
        assert_eq!(report["unreadable"], json!(["events: forbidden"]));
        let selectors = event_selectors(&objects).into_iter().collect::<Vec<_>>();
        assert_eq!(selectors, ["involvedObject.name=m", "involvedObject.uid=0a-1b"]);
    }

    #[test]
    fn stopped_vm_names_the_command_that_starts_it() {
        for (strategy, state) in [("Halted", "Stopped"), ("Manual", "Stopped"), ("Halted", "")] {
            let vm = json!({"spec": {"runStrategy": strategy}, "status": {"printableStatus": state}});
            let report = report(&Objects { name: "m".into(), vm: Some(vm), ..Objects::default() });
            assert_eq!(
                (&report["state"], &report["detail"]),
                (&json!("Stopped"), &json!("start it with: kubectl virt start m"))
            );
        }
    }

    #[test]
    fn names_from_objects_that_are_none_are_not_requested() {
        let vm = json!({"spec": {"template": {"spec": {"volumes": [
            {"name": "a", "persistentVolumeClaim": {"claimName": "../secrets"}},
            {"name": "b", "dataVolume": {"name": "b"}},
        ]}}}});
        let objects = Objects { name: "m".into(), vm: Some(vm), ..Objects::default() };
        assert_eq!(claims(&objects).into_iter().collect::<Vec<_>>(), ["b"]);
    }
}
