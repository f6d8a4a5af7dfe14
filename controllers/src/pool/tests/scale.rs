//! Numbers of VMs: creation, deletion, selection and healing.

use jiff::SignedDuration;

use super::*;
use crate::vm::failed_at;

/// Returns the names of the VMs that are deleted, sorted unless the order counts.
fn deleted(observed: &Observed) -> Vec<String> {
    let lines = lines(observed).into_iter();
    lines.filter_map(|line| line.strip_prefix("delete VirtualMachine p-").map(str::to_owned)).collect()
}

#[test]
fn lowest_free_numbers_are_created_with_a_record_of_the_template() {
    let mut observed_ = observed(pool(&json!({"spec": {"replicas": 4}})), running(&[1, 3]));
    assert_eq!(lines(&observed_), ["create VirtualMachine p-0", "create VirtualMachine p-2"]);
    observed_.revisions.clear();
    observed_.members.clear();
    assert_eq!(
        lines(&observed_),
        ["create ControllerRevision p-1", "create VirtualMachine p-0", "create VirtualMachine p-2"]
    );
    let one = observed(pool(&json!({"spec": {"replicas": null}})), vec![]);
    assert_eq!(lines(&one), ["create VirtualMachine p-0"]);
}

#[test]
fn refused_record_holds_up_all_that_would_name_it() {
    let mut observed = observed(pool(&json!({"metadata": {"generation": 2}, "spec": {"replicas": 3}})), running(&[0]));
    observed.revisions.clear();
    observed.failure = failure("FailedCreate");
    assert_eq!(lines(&observed), ["event FailedScaleOut"]);
    observed.failure = None;
    assert_eq!(
        lines(&observed)[..2],
        ["create ControllerRevision p-2", "patch VirtualMachine p-0 metadata:labels spec:template"]
    );
}

#[test]
fn created_vm_has_names_of_its_own() {
    let pool = pool(&json!({"spec": {
        "replicas": 1,
        "nameGeneration": {"appendIndexToConfigMapRefs": true, "appendIndexToSecretRefs": true},
        "scaleInStrategy": {"proactive": {"statePreservation": "Offline"}},
        "virtualMachineTemplate": {
            "metadata": {"name": "ignored", "generateName": "ignored-", "annotations": {"a": "b", "ferrovirt.io/traceparent": "x"}},
            "spec": {
                "dataVolumeTemplates": [{"metadata": {"name": "disk"}, "spec": {}}],
                "template": {"metadata": {"labels": {"guest": "y"}}, "spec": {"volumes": [
                    {"name": "a", "dataVolume": {"name": "disk"}},
                    {"name": "b", "persistentVolumeClaim": {"claimName": "disk"}},
                    {"name": "c", "persistentVolumeClaim": {"claimName": "shared"}},
                    {"name": "d", "ephemeral": {"persistentVolumeClaim": {"claimName": "disk"}}},
                    {"name": "e", "configMap": {"name": "settings"}},
                    {"name": "f", "secret": {"secretName": "token"}},
                    {"name": "g", "cloudInitNoCloud": {"secretRef": {"name": "user"}, "networkDataSecretRef": {"name": "net"}}},
                    {"name": "h", "sysprep": {"secret": {"name": "answers"}}},
                ]}},
            },
        },
    }}));
    let decision = decide(&observed(pool, vec![])).unwrap();
    let Effect::Create { object, .. } = &decision.effects[0] else { panic!("{decision:?}") };
    let metadata = &object["metadata"];
    assert_eq!(metadata["name"], "p-0");
    assert_eq!(metadata["labels"], json!({"app": "x", "kubevirt.io/vm-pool-revision-name": "p-1"}));
    assert_eq!(metadata["annotations"]["a"], "b");
    assert_eq!(metadata["finalizers"], json!(["pool.kubevirt.io/finalizer"]));
    assert_eq!(metadata["generateName"], Value::Null);
    let owner = &metadata["ownerReferences"][0];
    assert_eq!(
        (&owner["uid"], &owner["controller"], &owner["blockOwnerDeletion"]),
        (&json!("pool"), &json!(true), &json!(true))
    );
    assert_eq!(object["spec"]["dataVolumeTemplates"][0]["metadata"]["name"], "disk-0");
    let template = &object["spec"]["template"];
    assert_eq!(template["metadata"]["labels"], json!({"guest": "y", "kubevirt.io/vm-pool-revision-name": "p-1"}));
    let volumes = &template["spec"]["volumes"];
    for (index, path, name) in [
        (0, "/dataVolume/name", "disk-0"),
        (1, "/persistentVolumeClaim/claimName", "disk-0"),
        (2, "/persistentVolumeClaim/claimName", "shared"),
        (3, "/ephemeral/persistentVolumeClaim/claimName", "disk-0"),
        (4, "/configMap/name", "settings-0"),
        (5, "/secret/secretName", "token-0"),
        (6, "/cloudInitNoCloud/secretRef/name", "user-0"),
        (6, "/cloudInitNoCloud/networkDataSecretRef/name", "net-0"),
        (7, "/sysprep/secret/name", "answers"),
    ] {
        assert_eq!(volumes[index].pointer(path), Some(&json!(name)), "{index} {path}");
    }
}

#[test]
fn surplus_is_deleted_by_policy() {
    let lowest = json!({"metadata": {"labels": {"drain": "yes"}}});
    let members = |of_zero: &Value| {
        let mut members = running(&[0, 1, 2, 10]);
        members[0] = member(0, of_zero, &json!({}));
        members
    };
    // members are created in descending order of their numbers
    for (policy, expected) in [
        (json!({"sortPolicy": "AscendingOrder"}), vec!["0", "1"]),
        (json!({"sortPolicy": "DescendingOrder"}), vec!["10", "2"]),
        (json!({"sortPolicy": "Oldest"}), vec!["10", "2"]),
        (json!({"sortPolicy": "Newest"}), vec!["0", "1"]),
        // The count is limited by the VMs that are selected.
        (json!({"selectors": {"labelSelector": {"matchLabels": {"drain": "yes"}}}}), vec!["0"]),
        (
            json!({
                "sortPolicy": "DescendingOrder",
                "selectors": {"labelSelector": {"matchExpressions": [{"key": "drain", "operator": "DoesNotExist"}]}},
            }),
            vec!["10", "2"],
        ),
        (json!({"selectors": {"labelSelector": {"matchLabels": {"no": "such"}}}}), vec![]),
    ] {
        let pool = pool(&json!({"spec": {"scaleInStrategy": {"proactive": {"selectionPolicy": policy}}}}));
        assert_eq!(deleted(&observed(pool, members(&lowest))), expected, "{policy}");
    }
}

#[test]
fn random_order_is_the_same_for_each_leader() {
    let first = deleted(&observed(pool(&json!({})), running(&[0, 1, 2, 3, 4])));
    assert_eq!(first.len(), 3);
    let mut reversed = running(&[0, 1, 2, 3, 4]);
    reversed.reverse();
    assert_eq!(deleted(&observed(pool(&json!({})), reversed)), first);
}

#[test]
fn node_requirements_are_compared_with_the_node_selector() {
    let table: [(&str, &[&str], bool); 11] = [
        ("In", &["a", "b"], true),
        ("In", &["b"], false),
        ("NotIn", &["a"], false),
        ("NotIn", &["b"], true),
        ("Exists", &[], true),
        ("DoesNotExist", &[], false),
        ("Gt", &["1"], false),
        ("Lt", &["1"], false),
        ("Near", &["a"], false),
        ("In", &[], false),
        ("NotIn", &[], true),
    ];
    for (operator, values, selected) in table {
        let matcher = json!([{"key": "zone", "operator": operator, "values": values}]);
        let policy = json!({"selectors": {"nodeSelectorRequirementMatcher": matcher}});
        let pool =
            pool(&json!({"spec": {"replicas": 0, "scaleInStrategy": {"proactive": {"selectionPolicy": policy}}}}));
        let placed = json!({"spec": {"template": {"spec": {"nodeSelector": {"zone": "a"}}}}});
        let found = deleted(&observed(pool, vec![member(0, &placed, &json!({}))]));
        assert_eq!(found.len(), usize::from(selected), "{operator} {values:?}");
    }
}

#[test]
fn vms_that_others_delete_count_until_they_are_gone() {
    let leaving = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}});
    let members = |indices: &[u32]| {
        let mut members = running(indices);
        members.push(member(7, &leaving, &json!({})));
        members
    };
    for (strategy, replicas, expected) in [
        (json!(null), 2, vec![]),
        (json!(null), 3, vec![]),
        (json!(null), 4, vec!["create VirtualMachine p-2"]),
        (json!(null), 0, vec!["delete VirtualMachine p-0", "delete VirtualMachine p-1"]),
        (json!({"unmanaged": {}}), 0, vec![]),
        (json!({"opportunistic": {}}), 1, vec![]),
    ] {
        let pool = pool(&json!({"spec": {"replicas": replicas, "scaleInStrategy": strategy}}));
        let mut found = lines(&observed(pool, members(&[0, 1])));
        found.sort();
        assert_eq!(found, expected, "{strategy} {replicas}");
    }
}

#[test]
fn deleted_pool_makes_and_deletes_nothing() {
    let deleted = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}});
    for indices in [&[][..], &[0, 1, 2][..]] {
        assert_eq!(lines(&observed(pool(&deleted), running(indices))), Vec::<String>::new());
    }
}

#[test]
fn vm_that_fails_to_start_is_replaced() {
    let failing = |status: &str, since: &str, count: u32| {
        json!({"status": {
            "printableStatus": status, "startFailure": {"consecutiveFailCount": count},
            "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": since}],
        }})
    };
    let (early, late) = ("2030-01-01T00:50:00Z", "2030-01-01T00:59:00Z");
    for (healing, status, expected, wake) in [
        (json!(null), failing("ErrorUnschedulable", early, 9), false, None),
        (json!({}), failing("ErrorUnschedulable", early, 0), true, None),
        (json!({}), failing("ErrorUnschedulable", late, 0), false, Some(240)),
        (json!({"minFailingToStartDuration": "30s"}), failing("ErrImagePull", late, 0), true, None),
        (json!({}), failing("Starting", early, 2), false, None),
        (json!({}), failing("Starting", early, 3), true, None),
        (json!({"startUpFailureThreshold": 5}), failing("Starting", early, 4), false, None),
        // The VM is young, and has no condition.
        (
            json!({}),
            json!({"metadata": {"creationTimestamp": late}, "status": {"printableStatus": "DataVolumeError", "conditions": null}}),
            false,
            Some(240),
        ),
    ] {
        let pool = pool(&json!({"spec": {"autohealing": healing}}));
        let members = vec![member(0, &status, &json!(null)), member(1, &json!({}), &json!({}))];
        let observed = observed(pool, members);
        assert_eq!(deleted(&observed) == ["0"], expected, "{healing} {status}");
        let wait = decide(&observed).unwrap().wake_after.map(|wait| wait.as_secs());
        assert_eq!(wait, wake, "{healing} {status}");
    }
}

#[test]
fn vm_that_failed_for_the_last_time_is_shown_before_it_is_replaced() {
    let failure = |count: u32| json!({"consecutiveFailCount": count, "lastFailedVMIUID": "u", "retryAfterTimestamp": "2030-01-01T01:02:00Z"});
    let failed = failed_at(&serde_json::from_value(failure(3)).unwrap()).unwrap();
    // Milliseconds since the failure; the VM is replaced, and milliseconds until the next look.
    for (count, passed, expected, wake) in [
        (3, 0, false, Some(3000)),
        (3, 2500, false, Some(500)),
        (3, 3000, true, None),
        // The clock of the process that recorded it is ahead.
        (3, -1000, false, Some(4000)),
        (3, -60_000, true, None),
        (2, 0, false, None),
    ] {
        let status = json!({"status": {
            "printableStatus": "Starting", "startFailure": failure(count), "conditions": [{"type": "Ready", "status": "False"}],
        }});
        let pool = pool(&json!({"spec": {"autohealing": {}}}));
        let members = vec![member(0, &status, &json!(null)), member(1, &json!({}), &json!({}))];
        let mut observed = observed(pool, members);
        observed.now = failed.checked_add(SignedDuration::from_millis(passed)).unwrap();
        assert_eq!(deleted(&observed) == ["0"], expected, "{count} {passed}");
        let wait = decide(&observed).unwrap().wake_after.map(|wait| wait.as_millis());
        assert_eq!(wait, wake, "{count} {passed}");
    }
}
