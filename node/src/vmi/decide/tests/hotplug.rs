//! Starts with hot-plugged volumes.

use serde_json::Value;

use super::*;

/// Returns a VMI with this spec that can start, and whose hot-plugged volume has this phase.
fn startable(spec: &Value, phase: &str) -> Observed {
    let mut object = serde_json::to_value(vmi("Scheduling")).unwrap();
    let entry = json!({"name": "data", "target": "", "phase": phase, "hotplugVolume": {}});
    json_patch::merge(&mut object, &json!({"spec": spec, "status": {"volumeStatus": [entry]}}));
    let mut observed = prepared("Scheduling", Lifecycle::NoDomain, "");
    observed.apply_object(Arc::new(serde_json::from_value(object).unwrap()), NODE);
    observed
}

#[test]
fn a_start_waits_without_a_limit_for_the_volume_of_the_boot_disk_only() {
    let data = json!({"name": "data", "dataVolume": {"name": "c", "hotpluggable": true}});
    let image = json!({"name": "root", "containerDisk": {"image": "i"}});
    let config = json!({"name": "root", "cloudInitNoCloud": {"userData": "x"}});
    let (root, plugged) = (json!({"name": "root"}), json!({"name": "data"}));
    let cdrom = json!({"name": "data", "cdrom": {"bus": "sata"}});
    let ordered = |name: &str, order: u64| json!({"name": name, "bootOrder": order});
    let kernel = json!({"kernelBoot": {"container": {"image": "i"}}});
    // Starts after 5, 11 and 61 seconds.
    for (volumes, disks, firmware, phase, expected) in [
        (json!([data]), json!([plugged]), json!({}), "Pending", [false; 3]),
        (json!([data]), json!([plugged]), json!({}), "MountedToPod", [true; 3]),
        (json!([config, data]), json!([root, plugged]), json!({}), "Pending", [false; 3]),
        (json!([image, data]), json!([ordered("root", 2), ordered("data", 1)]), json!({}), "Bound", [false; 3]),
        (json!([image, data]), json!([root, ordered("data", 5)]), json!({}), "Bound", [false; 3]),
        (json!([image, data]), json!([root, plugged]), json!({}), "Pending", [false, true, true]),
        (json!([image, data]), json!([cdrom, root]), json!({}), "Pending", [false, true, true]),
        (json!([data]), json!([plugged]), kernel, "Pending", [false, true, true]),
    ] {
        let spec = json!({"volumes": volumes, "domain": {"devices": {"disks": disks}, "firmware": firmware}});
        let observed = startable(&spec, phase);
        let starts = [5, 11, 61].map(|second| names(&decide(&observed, at(second))).contains(&"sync"));
        assert_eq!(starts, expected, "{spec} {phase}");
    }
}
