//! Fields of VMs and VMIs that the page shows.

use api::constants::condition;
use serde_json::{Value, json};

use crate::{
    running::{failure, is_true, obstacle},
    state::{find, strategy},
};

/// Returns the fields of a VM.
pub(super) fn vm(object: &Value) -> Value {
    let mut row = identity(object);
    row["status"] = object["status"]["printableStatus"].clone();
    row["strategy"] = json!(strategy(object));
    row["message"] = json!(failure(object));
    row
}

/// Returns the fields of a VMI.
pub(super) fn vmi(object: &Value) -> Value {
    let (status, devices) = (&object["status"], &object["spec"]["domain"]["devices"]);
    let is_running = status["phase"] == "Running";
    let interfaces = status["interfaces"].as_array().into_iter().flatten();
    let migratable = find(object, condition::LIVE_MIGRATABLE);
    let mut row = identity(object);
    row["phase"] = status["phase"].clone();
    row["node"] = status["nodeName"].clone();
    row["addresses"] = interfaces.map(|one| one["ipAddress"].clone()).filter(|one| one.as_str() > Some("")).collect();
    row["paused"] = json!(is_true(object, condition::PAUSED));
    row["migratable"] = json!(is_true(object, condition::LIVE_MIGRATABLE));
    row["whyNot"] = migratable.map_or(Value::Null, |condition| condition["message"].clone());
    row["system"] = status["guestOSInfo"]["prettyName"].clone();
    row["console"] = json!(is_running && devices["autoattachSerialConsole"] != false);
    row["display"] = json!(is_running && devices["autoattachGraphicsDevice"] != false);
    row["message"] = json!(obstacle(object).filter(|_| !is_running));
    row
}

/// Returns namespace and name of an object.
pub(super) fn identity(object: &Value) -> Value {
    json!({"namespace": object["metadata"]["namespace"], "name": object["metadata"]["name"]})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_have_their_state_and_the_reason_of_a_failure() {
        let metadata = json!({"namespace": "a", "name": "box", "labels": {"secret": "no"}});
        let failure = json!([{"type": "Failure", "status": "True", "message": "no quota"}]);
        for (object, expected) in [
            (
                json!({"metadata": metadata, "spec": {"running": true}, "status": {"printableStatus": "Running"}}),
                json!({"namespace": "a", "name": "box", "status": "Running", "strategy": "Always", "message": null}),
            ),
            (
                json!({"metadata": metadata, "status": {"conditions": failure}}),
                json!({"namespace": "a", "name": "box", "status": null, "strategy": "Halted", "message": "no quota"}),
            ),
        ] {
            assert_eq!(vm(&object), expected);
        }
    }

    #[test]
    fn vmis_have_their_node_addresses_and_abilities() {
        let is =
            |type_: &str, status: &str, message: &str| json!({"type": type_, "status": status, "message": message});
        let object = |phase: &str, devices: Value, conditions: Value| {
            let interfaces = json!([{"ipAddress": "192.0.2.7"}, {"ipAddress": ""}, {}]);
            json!({
                "metadata": {"namespace": "a", "name": "box"}, "spec": {"domain": {"devices": devices}},
                "status": {"phase": phase, "nodeName": "n", "interfaces": interfaces, "conditions": conditions},
            })
        };
        let running =
            vmi(&object("Running", json!({}), json!([is("Paused", "True", ""), is("LiveMigratable", "True", "")])));
        assert_eq!(running["addresses"], json!(["192.0.2.7"]));
        for (field, expected) in [("paused", true), ("migratable", true), ("console", true), ("display", true)] {
            assert_eq!(running[field], expected, "{field}");
        }
        let devices = json!({"autoattachSerialConsole": false, "autoattachGraphicsDevice": false});
        let bare = vmi(&object("Running", devices, json!([is("LiveMigratable", "False", "a disk of one node")])));
        for (field, expected) in [("paused", false), ("migratable", false), ("console", false), ("display", false)] {
            assert_eq!(bare[field], expected, "{field}");
        }
        assert_eq!(bare["whyNot"], "a disk of one node");
        let waiting =
            vmi(&object("Scheduling", json!({}), json!([is("PodScheduled", "False", "Insufficient memory")])));
        assert_eq!((&waiting["message"], &waiting["console"]), (&json!("Insufficient memory"), &json!(false)));
    }
}
