use super::*;

#[test]
fn instance_types_and_preferences_are_validated() {
    let class = |change: Value| {
        let mut spec = json!({"cpu": {"guest": 1}, "memory": {"guest": "1Gi"}});
        json_patch::merge(&mut spec, &change);
        object("VirtualMachineClusterInstancetype", spec)
    };
    let preference = |spec: Value| object("VirtualMachineClusterPreference", spec);
    let percent = "spec.memory.overcommitPercent";
    for (plural, object, refused, warning) in [
        (CLASS, class(json!({})), None, None),
        (CLASS, class(json!({"memory": {"overcommitPercent": 100}})), None, None),
        (
            CLASS,
            class(json!({"memory": {"overcommitPercent": 101}})),
            Some((percent, "'101': must be in range between 0 and 100.")),
            None,
        ),
        (
            CLASS,
            class(json!({"memory": {"overcommitPercent": -1}})),
            Some((percent, "'-1': must be in range between 0 and 100.")),
            None,
        ),
        (
            CLASS,
            class(json!({"memory": {"overcommitPercent": 5, "hugepages": {}}})),
            Some((
                percent,
                "spec.memory.overcommitPercent and spec.memory.hugepages should not be requested together.",
            )),
            None,
        ),
        (
            CLASS,
            class(json!({"launchSecurity": {"sev": {}}})),
            None,
            Some("launchSecurity is deprecated and will be removed in a future release. Use preference instead."),
        ),
        (PREFERENCE, preference(json!({})), None, None),
        (PREFERENCE, preference(json!({"cpu": {"preferredCPUTopology": "any"}})), None, None),
        (
            PREFERENCE,
            preference(json!({"cpu": {"preferredCPUTopology": "round"}})),
            Some((
                "spec.cpu.preferredCPUTopology",
                "unknown preferredCPUTopology round, accepted values: sockets, cores, threads, spread, any",
            )),
            None,
        ),
        (
            PREFERENCE,
            preference(json!({"cpu": {"preferredCPUTopology": "preferCores"}})),
            None,
            Some(
                "PreferredCPUTopology preferCores is deprecated for removal in a future release, please use cores instead",
            ),
        ),
        (
            PREFERENCE,
            preference(json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": {"across": "Mars"}}})),
            Some(("spec.cpu.spreadOptions.across", "across Mars is not supported")),
            None,
        ),
        (
            PREFERENCE,
            preference(
                json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": {"across": "CoresThreads", "ratio": 3}}}),
            ),
            Some((
                "spec.cpu.spreadOptions.ratio",
                "only a ratio of 2 (1 core 2 threads) is allowed when spreading vCPUs over cores and threads",
            )),
            None,
        ),
        // Options of the spread topology are ignored for other topologies.
        (PREFERENCE, preference(json!({"cpu": {"spreadOptions": {"across": "Mars"}}})), None, None),
    ] {
        for plural in [plural.to_owned(), plural.replace("cluster", "")] {
            let response = review(&format!("/{plural}-validate"), GROUP, &plural, &object, None, &[]);
            let found: Vec<_> =
                field_errors(&response).into_iter().map(|(_, message, field)| (field, message)).collect();
            let expected: Vec<_> =
                refused.iter().map(|(field, message)| ((*field).to_owned(), (*message).to_owned())).collect();
            assert_eq!(found, expected, "{object}");
            assert_eq!(response["allowed"], refused.is_none());
            assert_eq!(response["warnings"].get(0).and_then(Value::as_str), warning, "{object}");
        }
    }
}
