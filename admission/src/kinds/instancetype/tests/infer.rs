use super::*;

/// Returns an object with the labels that name an instance type.
fn labelled(spec: Value) -> Value {
    json!({
        "metadata": {"labels": {
            "instancetype.kubevirt.io/default-instancetype": "small",
            "instancetype.kubevirt.io/default-instancetype-kind": "VirtualMachineInstancetype",
        }},
        "spec": spec,
    })
}

fn plain(spec: Value) -> Value {
    json!({"metadata": {}, "spec": spec})
}

#[test]
fn instance_types_are_inferred_from_labels_of_volumes() {
    let claim =
        |namespace: &str, name: &str| ObjectQuery::get("", "v1", "persistentvolumeclaims", Some(namespace), name);
    let cdi = |plural: &str, namespace: &str, name: &str| {
        ObjectQuery::get("cdi.kubevirt.io", "v1beta1", plural, Some(namespace), name)
    };
    let snapshot = ObjectQuery::get("snapshot.storage.k8s.io", "v1", "volumesnapshots", Some("d"), "s");
    let of_claim = json!({"name": "root", "persistentVolumeClaim": {"claimName": "c"}});
    let of_data_volume = json!({"name": "root", "dataVolume": {"name": "dv"}});
    let source_ref = json!({"sourceRef": {"kind": "DataSource", "name": "ds", "namespace": "images"}, "storage": {}});
    let from_claim = json!({"source": {"pvc": {"name": "c", "namespace": "images"}}, "storage": {}});
    let missing = "unable to find required instancetype.kubevirt.io/default-instancetype label on the volume";
    // volume, spec of a DataVolume template, objects, message of a failure
    type Row<'a> = (Value, Option<Value>, Vec<(ObjectQuery, Value)>, Option<&'a str>);
    let table: Vec<Row<'_>> = vec![
        (of_claim.clone(), None, vec![(claim("d", "c"), labelled(json!({})))], None),
        (of_claim.clone(), None, vec![(claim("d", "c"), plain(json!({})))], Some(missing)),
        (of_claim, None, vec![], Some("persistentvolumeclaims \"c\" not found")),
        (of_data_volume.clone(), None, vec![(cdi("datavolumes", "d", "dv"), labelled(json!({})))], None),
        // A finished DataVolume can be deleted.
        (of_data_volume.clone(), None, vec![(claim("d", "dv"), labelled(json!({})))], None),
        (
            of_data_volume.clone(),
            None,
            vec![
                (cdi("datavolumes", "d", "dv"), plain(from_claim.clone())),
                (claim("images", "c"), labelled(json!({}))),
            ],
            None,
        ),
        (of_data_volume.clone(), Some(from_claim), vec![(claim("images", "c"), labelled(json!({})))], None),
        (
            of_data_volume.clone(),
            Some(json!({"source": {"snapshot": {"name": "s", "namespace": ""}}})),
            vec![(snapshot, labelled(json!({})))],
            None,
        ),
        (
            of_data_volume.clone(),
            Some(source_ref.clone()),
            vec![(cdi("datasources", "images", "ds"), labelled(json!({})))],
            None,
        ),
        (
            of_data_volume.clone(),
            Some(source_ref.clone()),
            vec![
                (cdi("datasources", "images", "ds"), plain(json!({"source": {"dataSource": {"name": "other"}}}))),
                (cdi("datasources", "images", "other"), plain(json!({"source": {"pvc": {"name": "c"}}}))),
                (claim("images", "c"), labelled(json!({}))),
            ],
            None,
        ),
        (
            of_data_volume.clone(),
            Some(source_ref.clone()),
            vec![
                (cdi("datasources", "images", "ds"), plain(json!({"source": {"dataSource": {"name": "other"}}}))),
                (cdi("datasources", "images", "other"), plain(json!({"source": {"dataSource": {"name": "third"}}}))),
            ],
            Some(
                "unable to infer defaults from DataSource that doesn't provide DataVolumeSourcePVC or DataVolumeSourceSnapshot",
            ),
        ),
        (
            of_data_volume.clone(),
            Some(source_ref.clone()),
            vec![(cdi("datasources", "images", "ds"), plain(json!({"source": {}})))],
            Some(
                "unable to infer defaults from DataSource that doesn't provide DataVolumeSourcePVC or DataVolumeSourceSnapshot",
            ),
        ),
        (of_data_volume.clone(), Some(source_ref), vec![], Some("datasources.cdi.kubevirt.io \"ds\" not found")),
        (
            of_data_volume.clone(),
            Some(json!({"sourceRef": {"kind": "Thing", "name": "x"}})),
            vec![],
            Some("unable to infer defaults from DataVolumeSourceRef as Kind Thing is not supported"),
        ),
        (
            of_data_volume,
            Some(json!({"source": {"blank": {}}})),
            vec![],
            Some("unable to infer defaults from DataVolumeSpec as DataVolumeSource is not supported"),
        ),
        (
            json!({"name": "root", "containerDisk": {"image": "i"}}),
            None,
            vec![],
            Some("unable to infer defaults from volume root as type is not supported"),
        ),
        (json!({"name": "other"}), None, vec![], Some("unable to find volume root to infer defaults")),
    ];
    for (volume, template, known, failure) in table {
        let mut vmi = vm(json!({
            "instancetype": {"inferFromVolume": "root"}, "template": {"spec": {"volumes": [volume]}},
        }));
        if let Some(spec) = &template {
            vmi["spec"]["dataVolumeTemplates"] = json!([{"metadata": {"name": "dv"}, "spec": spec}]);
        }
        match (mutated(&vmi, None, &known), failure) {
            (Ok(vm), None) => assert_eq!(
                vm["spec"]["instancetype"],
                json!({"name": "small", "kind": "VirtualMachineInstancetype"}),
                "{volume} {template:?}"
            ),
            (Err(status), Some(message)) => {
                assert_eq!((&status["message"], &status["code"]), (&json!(message), &json!(400)), "{volume}");
            }
            (found, expected) => panic!("{volume} {template:?}: {found:?}, expected {expected:?}"),
        }
    }
}

#[test]
fn policy_ignore_removes_the_matcher_if_nothing_is_inferred() {
    let claim = ObjectQuery::get("", "v1", "persistentvolumeclaims", Some("d"), "c");
    let vmi = vm(json!({
        "instancetype": {"inferFromVolume": "root", "inferFromVolumeFailurePolicy": "Ignore"},
        "template": {"spec": {
            "domain": {"memory": {"guest": "1Gi"}},
            "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "c"}}],
        }},
    }));
    let nothing = mutated(&vmi, None, &[(claim.clone(), plain(json!({})))]).unwrap();
    assert_eq!(nothing["spec"].get("instancetype"), None);
    assert_eq!(nothing["spec"]["template"]["spec"]["domain"]["memory"]["guest"], "1Gi");
    let found = mutated(&vmi, None, &[(claim, labelled(json!({})))]).unwrap();
    assert_eq!(found["spec"]["instancetype"]["name"], "small");
    assert_eq!(found["spec"]["template"]["spec"]["domain"].get("memory"), None);
    // The policy does not cover a missing claim.
    assert!(mutated(&vmi, None, &[]).is_err());
}
