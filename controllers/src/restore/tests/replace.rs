//! Tests of restores that replace claims in place.

use super::*;

/// Returns a restore in place of two disks whose claims are named.
pub(super) fn in_place() -> Observed {
    let mut status = named();
    status["spec"] = json!({"volumeRestorePolicy": "InPlace"});
    for (index, name) in ["root", "data"].into_iter().enumerate() {
        status["status"]["restores"][index]["persistentVolumeClaim"] = json!(name);
    }
    status["status"]["restores"][0]["dataVolumeName"] = json!("root");
    let mut observed = observed(&status);
    let owner = json!([{
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "name": "root", "uid": "dv", "controller": true,
    }]);
    let owned = json!({"metadata": {"ownerReferences": owner}});
    observed.claims = [claim("root", "Bound", &owned), claim("data", "Bound", &json!({}))].into();
    observed
}

fn data_volume(annotations: &Value) -> BTreeMap<String, Arc<DataVolume>> {
    let volume = json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "spec": {},
        "metadata": {"name": "root", "namespace": "n", "resourceVersion": "7", "annotations": annotations},
    });
    [("root".to_owned(), object(volume, &json!({})))].into()
}

#[test]
fn data_volume_does_not_fill_the_claim_that_is_replaced() {
    for (annotations, populating, patched) in [
        (json!({}), false, Some(true)),
        // The importer has filled the claim just now, and would remove its mark together with the other one.
        (
            json!({"ferrovirt.io/import": "u", "cdi.kubevirt.io/storage.prePopulated": "root", "restore.kubevirt.io/name": "r"}),
            false,
            Some(true),
        ),
        (json!({"cdi.kubevirt.io/storage.prePopulated": "root", "restore.kubevirt.io/name": "r"}), false, Some(false)),
        // That of another restore.
        (json!({"cdi.kubevirt.io/storage.prePopulated": "root", "restore.kubevirt.io/name": "x"}), false, Some(true)),
        (json!({}), true, None),
        // CDI has made it again before it saw the mark.
        (json!({"cdi.kubevirt.io/storage.prePopulated": "root", "restore.kubevirt.io/name": "r"}), true, Some(false)),
    ] {
        let mut observed = in_place();
        observed.data_volumes = data_volume(&annotations);
        let mut root = (*observed.claims["root"]).clone();
        root.populating = populating;
        observed.claims.insert("root".to_owned(), Arc::new(root));
        let is_deleted = lines(&observed).contains(&"delete PersistentVolumeClaim root".to_owned());
        assert_eq!(is_deleted, patched.is_some(), "{annotations}");
        let patch = patch(&observed, Kind::DataVolume, None);
        assert_eq!(!patch.is_null(), patched == Some(true), "{annotations}");
        if patched == Some(true) {
            let marks = json!({
                "cdi.kubevirt.io/storage.prePopulated": "root", "restore.kubevirt.io/name": "r", "ferrovirt.io/import": null,
            });
            assert_eq!(patch["metadata"]["annotations"], marks);
        }
    }
}

#[test]
fn only_present_disks_of_the_vm_alone_are_replaced() {
    let others = [("data".to_owned(), "w".to_owned())];
    let volumes = json!({"spec": {"template": {"spec": {"volumes": [
        {"name": "root", "dataVolume": {"name": "root"}}, {"name": "data", "persistentVolumeClaim": {"claimName": "x"}},
    ]}}}});
    for (others, vm_change, text) in [
        (&others[..0], json!({}), ""),
        (&others[..], json!({}), "True PVC n/data is a disk of VM w as well"),
        (&others[..0], volumes, "True PVC n/data exists and does not belong to this restore"),
    ] {
        let mut observed = in_place();
        observed.restore = restore(&json!({"spec": {"volumeRestorePolicy": "InPlace"}}));
        observed.others = others.iter().cloned().collect();
        observed.vm = Some(vm(&vm_change));
        assert_eq!(texts(&observed)[2], text);
        assert!(!lines(&observed).iter().any(|line| line.starts_with("delete")), "{text}");
    }
}

#[test]
fn deleted_restore_makes_the_claims_that_it_has_deleted() {
    let replaced = json!({"metadata": {"annotations": {"ferrovirt.io/replaced-by-restore": ID}}});
    let going = json!({"metadata": {
        "deletionTimestamp": "2030-01-01T00:00:30Z", "annotations": {"ferrovirt.io/replaced-by-restore": ID},
    }});
    let former = json!({});
    let shown = ["patch VirtualMachineRestore r status"];
    let (made, ends) = (
        [shown[0], "create PersistentVolumeClaim data"],
        ["patch VirtualMachine v status", shown[0], "patch VirtualMachineRestore r"],
    );
    let unmarked = ["patch PersistentVolumeClaim root", ends[0], ends[1], ends[2]];
    let replaces = [
        shown[0],
        "create PersistentVolumeClaim hold-restore-uid-root",
        "read snap-root-content",
        "create PersistentVolumeClaim hold-restore-uid-data",
        "read snap-data-content",
        "patch PersistentVolumeClaim root",
        "delete PersistentVolumeClaim root",
        "patch PersistentVolumeClaim data",
        "delete PersistentVolumeClaim data",
    ];
    let as_is = |_: &mut Observed| {};
    let late = |o: &mut Observed| o.now = "2030-01-01T00:05:00Z".parse().unwrap();
    let vm_goes =
        |o: &mut Observed| o.vm = Some(vm(&json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}})));
    // Claims, another change; writes.
    for (root, data, change, expected) in [
        (Some(&former), Some(&former), &as_is as &dyn Fn(&mut Observed), &ends[..]),
        (Some(&replaced), Some(&former), &as_is, &replaces),
        (Some(&going), None, &as_is, &made),
        // Another party keeps it.
        (Some(&going), Some(&own()), &as_is, &shown),
        (Some(&going), Some(&own()), &late, &ends),
        // Its deletion was refused.
        (Some(&replaced), Some(&former), &late, &unmarked),
        (Some(&own()), None, &as_is, &made),
        (Some(&own()), None, &vm_goes, &ends),
        (Some(&own()), None, &|o| o.vm = None, &ends[1..]),
        (Some(&own()), None, &|o| o.snapshot = None, &ends),
        // The other one is lost.
        (Some(&own()), None, &|o| drop(o.volume_snapshots.remove("snap-data")), &shown),
        (None, None, &|o| drop(o.volume_snapshots.remove("snap-root")), &made),
        (Some(&own()), Some(&own()), &as_is, &ends),
    ] {
        let mut observed = in_place();
        let mut restore = (*observed.restore).clone();
        restore.metadata.deletion_timestamp = Some(Time("2030-01-01T00:00:00Z".parse().unwrap()));
        observed.restore = Arc::new(restore);
        let claims = [("root", root), ("data", data)];
        observed.claims = claims.into_iter().filter_map(|(name, of)| Some(claim(name, "Bound", of?))).collect();
        change(&mut observed);
        assert_eq!(lines(&observed), expected, "{root:?} {data:?}");
    }
}

#[test]
fn claims_in_place_with_new_names_replace_nothing() {
    let since = json!([{"type": "Progressing", "status": "False", "lastTransitionTime": "2030-01-01T00:10:00Z"}]);
    let restores = |name: &str| {
        let mut observed = in_place();
        let status = Arc::make_mut(&mut observed.restore).status.as_mut().unwrap();
        if name == "x" {
            // By an override.
            status.restores[1].persistent_volume_claim = name.to_owned();
        } else {
            let state = "persistent-state-for-v";
            let restored =
                json!({"volumeName": state, "persistentVolumeClaim": name, "volumeSnapshotName": "snap-data"});
            status.restores.push(serde_json::from_value(restored).unwrap());
            let content = Arc::make_mut(observed.content.as_mut().unwrap());
            content.spec.volume_backups.push(serde_json::from_value(backup(state)).unwrap());
        }
        observed
    };
    let missing = |o: &mut Observed| {
        o.volume_snapshots.remove("snap-root");
        o.vm = Some(vm(&json!({"status": {"operation": {"since": "2030-01-01T00:00:00Z"}}})));
        o.now = "2030-01-01T00:15:00Z".parse().unwrap();
        let status = Arc::make_mut(&mut o.restore).status.as_mut().unwrap();
        status.conditions = serde_json::from_value(since.clone()).unwrap();
    };
    let refused = |o: &mut Observed| {
        let message = "denied".to_owned();
        o.failure = Some(Failure { reason: REFUSED, message, retry_at: o.now, attempts: ATTEMPTS });
    };
    let deleted = |o: &mut Observed| Arc::make_mut(&mut o.restore).metadata.deletion_timestamp = Some(Time(o.now));
    // Name of the new claim, the end, text of the failure.
    for name in ["x", "restore-restore-uid-state"] {
        for (end, text) in [
            (&missing as &dyn Fn(&mut Observed), "True missing volumeSnapshot snap-root"),
            (&refused, "True denied"),
            (&deleted, ""),
        ] {
            for is_made in [false, true] {
                let mut observed = restores(name);
                observed.claims.extend(is_made.then(|| claim(name, "Bound", &own())));
                end(&mut observed);
                assert_eq!(texts(&observed)[2], text, "{name} {is_made}");
                let lines = lines(&observed);
                assert!(lines.contains(&"patch VirtualMachine v status".to_owned()), "{name} {is_made}: {lines:?}");
                let of_claims = lines.into_iter().filter(|line| line.contains("PersistentVolumeClaim"));
                let expected = is_made.then(|| format!("delete PersistentVolumeClaim {name}"));
                assert_eq!(of_claims.collect::<Vec<_>>(), expected.into_iter().collect::<Vec<_>>(), "{name} {text}");
            }
        }
    }
    // A replaced disk is made before the end, and the new claim goes.
    let mut begun = restores("x");
    begun.claims = [claim("x", "Bound", &own())].into();
    deleted(&mut begun);
    assert!(lines(&begun).contains(&"create PersistentVolumeClaim root".to_owned()));
    begun.claims.extend([claim("root", "Pending", &own())]);
    let deletions: Vec<String> = lines(&begun).into_iter().filter(|line| line.starts_with("delete")).collect();
    assert_eq!(deletions, ["delete PersistentVolumeClaim x"]);
}

#[test]
fn refused_deletion_of_a_claim_ends_a_restore_in_place() {
    let marked = |id: &str| json!({"metadata": {"annotations": {"ferrovirt.io/replaced-by-restore": id}}});
    let going = |id: &str| {
        let mut claim = marked(id);
        claim["metadata"]["deletionTimestamp"] = json!("2030-01-01T00:00:30Z");
        claim
    };
    let in_place = |root: &Value| {
        let mut observed = in_place();
        observed.claims.extend([claim("root", "Bound", root)]);
        observed
    };
    // The claim, refusals; the restore fails, and the mark goes.
    for (root, attempts, fails, is_unmarked) in [
        (marked(ID), ATTEMPTS - 1, false, false),
        (marked(ID), ATTEMPTS, true, true),
        // The removal of the mark was refused as well.
        (marked(ID), ATTEMPTS + 1, true, false),
        (marked("other"), ATTEMPTS, true, false),
        (going(ID), ATTEMPTS, false, false),
        (going("other"), ATTEMPTS, false, false),
    ] {
        let mut observed = in_place(&root);
        let retry_at = observed.now + jiff::SignedDuration::from_secs(1);
        observed.failure = Some(Failure { reason: REFUSED, message: "denied".to_owned(), retry_at, attempts });
        assert_eq!(texts(&observed)[2], if fails { "True denied" } else { "" }, "{root} {attempts}");
        assert_eq!(lines(&observed).contains(&"patch VirtualMachine v status".to_owned()), fails, "{root} {attempts}");
        let unmarked = json!({"metadata": {"annotations": {"ferrovirt.io/replaced-by-restore": null}}});
        let expected = if is_unmarked { unmarked } else { Value::Null };
        assert_eq!(patch(&observed, Kind::Claim, None), expected, "{root} {attempts}");
    }
    // The mark of another restore is no beginning of this one.
    for (root, fails) in [(marked("other"), true), (marked(ID), false), (going("other"), false)] {
        let mut observed = in_place(&root);
        Arc::make_mut(&mut observed.restore).spec.target_readiness_policy = Some("FailImmediate".to_owned());
        observed.vmi = vmi();
        assert_eq!(texts(&observed)[2].starts_with("True"), fails, "{root}");
    }
}

#[test]
fn snapshot_is_held_while_its_claim_is_replaced() {
    let hold = |change: &Value| claim("hold-restore-uid-root", "Pending", change);
    let mut going = own();
    going["metadata"]["deletionTimestamp"] = json!("2030-01-01T00:00:30Z");
    let create = "create PersistentVolumeClaim hold-restore-uid-root";
    let delete = "delete PersistentVolumeClaim hold-restore-uid-root";
    let read = "read snap-root-content";
    // The claim of the volume, and that which holds its snapshot; the writes about the latter.
    for (root, held, expected) in [
        (Some(json!({})), None, vec![create, read]),
        (Some(json!({})), Some(own()), vec![read]),
        (None, Some(own()), vec![]),
        (Some(own()), Some(own()), vec![delete]),
        (Some(own()), Some(going), vec![]),
        (Some(own()), None, vec![]),
    ] {
        let mut observed = in_place();
        observed.claims = [claim("data", "Bound", &own())].into();
        observed.claims.extend(root.as_ref().map(|change| claim("root", "Bound", change)));
        observed.claims.extend(held.as_ref().map(hold));
        let mut writes = lines(&observed);
        writes.retain(|line| line.contains("hold-") || line.starts_with("read"));
        assert_eq!(writes, expected, "{root:?} {held:?}");
    }
    // A restore that fails before it deletes a claim holds nothing any more.
    let mut refused = in_place();
    refused.claims.extend([hold(&own())]);
    refused.failure =
        Some(Failure { reason: REFUSED, message: "denied".to_owned(), retry_at: refused.now, attempts: ATTEMPTS });
    assert!(lines(&refused).contains(&delete.to_owned()));
    // Nor does one that has failed, whose deletion of the hold was refused, or one that is deleted and gives up.
    let failure = json!([{"type": "Failure", "status": "True", "reason": "x"}]);
    let mut failed = in_place();
    Arc::make_mut(&mut failed.restore).status.as_mut().unwrap().conditions = serde_json::from_value(failure).unwrap();
    refused.failure = refused.failure.map(|failure| Failure { attempts: ATTEMPTS + 1, ..failure });
    Arc::make_mut(&mut refused.restore).metadata.deletion_timestamp = Some(Time(refused.now));
    failed.claims.extend([hold(&own())]);
    for observed in [failed, refused] {
        assert_eq!(lines(&observed).iter().filter(|line| **line == delete).count(), 1);
    }
    // The storage class does not exist, so that the claim stays pending.
    let claims = effects(&in_place()).into_iter().filter_map(|effect| match effect {
        Effect::Create { kind: Kind::Claim, object, .. } => Some(object),
        _ => None,
    });
    for (claim, snapshot) in claims.zip(["snap-root", "snap-data"]) {
        assert_eq!(claim["spec"]["storageClassName"], "none.ferrovirt.io");
        let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": snapshot});
        assert_eq!(claim["spec"]["dataSource"], source);
        assert_eq!(claim["metadata"]["annotations"], own()["metadata"]["annotations"]);
        assert_eq!(claim["metadata"]["ownerReferences"][0]["uid"], "vm-uid");
    }
}

#[test]
fn claim_is_not_replaced_by_a_snapshot_that_is_being_deleted() {
    for (is_replaced, name, text, made) in [
        (false, "root", "False VolumeSnapshot snap-root is being deleted", &[][..]),
        // The pending claim keeps the content.
        (true, "root", "True Creating new PVCs", &["create PersistentVolumeClaim root"][..]),
        // Nothing was deleted for the claim with a new name.
        (true, "x", "False VolumeSnapshot snap-root is being deleted", &[][..]),
    ] {
        let mut observed = in_place();
        let status = Arc::make_mut(&mut observed.restore).status.as_mut().unwrap();
        status.restores[0].persistent_volume_claim = name.to_owned();
        let mut snapshot = (*observed.volume_snapshots["snap-root"]).clone();
        snapshot.metadata.deletion_timestamp = Some(Time(observed.now));
        observed.volume_snapshots.insert("snap-root".to_owned(), Arc::new(snapshot));
        if is_replaced {
            observed.claims = [claim("data", "Bound", &own())].into();
        }
        assert_eq!(texts(&observed)[0], text);
        let mut writes = lines(&observed);
        writes.retain(|line| line.starts_with("delete") || line.starts_with("create"));
        assert_eq!(writes, made, "{text}");
    }
}

#[test]
fn restore_in_place_does_not_begin_while_its_snapshot_is_deleted() {
    let policy = |name: &str| observed(&json!({"spec": {"volumeRestorePolicy": name}}));
    for (new, waits) in [
        (&(|| policy("InPlace")) as &dyn Fn() -> Observed, true),
        // The snapshot stays until the restore has ended.
        (&in_place, false),
        (&|| policy("RandomizeNames"), false),
    ] {
        let (mut of_snapshot, mut of_content) = (new(), new());
        let deleted = Some(Time(of_snapshot.now));
        Arc::make_mut(of_snapshot.snapshot.as_mut().unwrap()).metadata.deletion_timestamp.clone_from(&deleted);
        Arc::make_mut(of_content.content.as_mut().unwrap()).metadata.deletion_timestamp = deleted;
        let (snapshot, content) = (texts(&of_snapshot)[0].clone(), texts(&of_content)[0].clone());
        assert_eq!(snapshot == "False VMSnapshot n/s is being deleted", waits, "{snapshot}");
        assert_eq!(content == "False VMSnapshotContent n/c is being deleted", waits, "{content}");
    }
}
