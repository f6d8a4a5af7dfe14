//! Tests of restores that meet other operations, other owners of claims, and objects that are gone.

use super::*;
use crate::resources::instancetype_revisions::InstancetypeRevision;

fn instance(phase: &str) -> Option<Arc<VirtualMachineInstance>> {
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "v", "uid": "vmi-uid"},
        "spec": {"domain": {"devices": {}}}, "status": {"phase": phase},
    });
    Some(object(vmi, &json!({})))
}

/// Returns a restore in place of two disks whose claims are named.
fn in_place() -> Observed {
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
fn start_in_the_instant_of_the_lease_is_undone() {
    // Phase, lease; the VMI is deleted, and the lease is kept.
    for (phase, holds, is_deleted) in
        [("Pending", true, true), ("Scheduling", true, false), ("Running", true, false), ("Pending", false, false)]
    {
        for is_done in [false, true] {
            let mut observed = if is_done { end::done() } else { observed(&named()) };
            observed.claims = bound();
            observed.vmi = instance(phase);
            if !holds {
                observed.vm = Some(vm(&json!({"status": {"operation": null, "restoreInProgress": null}})));
            }
            let lines = lines(&observed);
            let found = lines.contains(&"delete VirtualMachineInstance v".to_owned());
            assert_eq!(found, is_deleted, "{phase} {holds} {is_done}: {lines:?}");
            if found {
                assert!(!lines.contains(&"patch VirtualMachine v status".to_owned()), "{lines:?}");
            }
        }
    }
}

#[test]
fn restore_that_holds_its_vm_does_not_wait_for_ever() {
    let since = json!([{"type": "Progressing", "status": "False", "lastTransitionTime": "2030-01-01T00:10:00Z"}]);
    let without = |now: &str, lease: &str, lose: &dyn Fn(&mut Observed)| {
        let mut change = named();
        change["status"]["conditions"] = since.clone();
        let mut observed = observed(&change);
        observed.vm = Some(vm(&json!({"status": {"operation": {"since": lease}}})));
        observed.now = format!("2030-01-01T00:{now}:00Z").parse().unwrap();
        lose(&mut observed);
        let has_failed = texts(&observed)[2].starts_with("True");
        assert_eq!(lines(&observed).contains(&"patch VirtualMachine v status".to_owned()), has_failed, "the lease");
        has_failed
    };
    for lose in [&(|o: &mut Observed| o.snapshot = None) as &dyn Fn(&mut Observed), &|o| o.content = None, &|o| {
        o.volume_snapshots.remove("snap-data");
    }] {
        let early = "2030-01-01T00:00:00Z";
        assert!(!without("14", early, lose) && without("15", early, lose));
        // The error was there before the lease.
        assert!(!without("15", "2030-01-01T00:14:00Z", lose));
    }
    // A new VM has no lease, but its clone waits.
    for (lose, status, fails) in [
        (&(|o: &mut Observed| drop(o.volume_snapshots.remove("snap-data"))) as &dyn Fn(&mut Observed), named(), true),
        (&|o| o.classes.clear(), named(), true),
        // Nothing was begun.
        (&|o| o.snapshot = None, json!({}), false),
    ] {
        let mut change = status;
        change["status"]["conditions"] = since.clone();
        let mut observed = observed(&change);
        (observed.vm, observed.now) = (None, "2030-01-01T00:14:00Z".parse().unwrap());
        lose(&mut observed);
        assert!(!texts(&observed)[2].starts_with("True"));
        observed.now = "2030-01-01T00:15:00Z".parse().unwrap();
        assert_eq!(texts(&observed)[2].starts_with("True"), fails);
    }
    // A VM that has lost a disk gets it back.
    let mut begun = in_place();
    begun.claims.remove("root");
    begun.volume_snapshots.remove("snap-data");
    begun.vm = Some(vm(&json!({"status": {"operation": {"since": "2029-01-01T00:00:00Z"}}})));
    assert_eq!(texts(&begun)[2], "");
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
fn data_volume_of_a_disk_without_a_snapshot_stays() {
    let mut observed = observed(&json!({}));
    let mut content = (**observed.content.as_ref().unwrap()).clone();
    content.spec.volume_backups.retain(|backup| backup.volume_name != "root");
    // The template was added later.
    content.spec.source.virtual_machine.as_mut().unwrap().spec.as_mut().unwrap().data_volume_templates.clear();
    observed.content = Some(Arc::new(content));
    let status = patch(&observed, Kind::VmRestore, Some("status"))["status"].clone();
    assert_eq!(status["restores"].as_array().unwrap().len(), 1);
    assert!(status["deletedDataVolumes"].as_array().is_none_or(Vec::is_empty), "{status}");
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
            (&missing as &dyn Fn(&mut Observed), "True VolumeSnapshot missing snap-root"),
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
        observed.vmi = instance("Running");
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
    for (is_replaced, text, made) in [
        (false, "False VolumeSnapshot snap-root is being deleted", &[][..]),
        // The pending claim keeps the content.
        (true, "True Creating new PVCs", &["create PersistentVolumeClaim root"][..]),
    ] {
        let mut observed = in_place();
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
        assert_eq!(snapshot == "False VMSnapshot s is being deleted", waits, "{snapshot}");
        assert_eq!(content == "False VMSnapshotContent c is being deleted", waits, "{content}");
    }
}

#[test]
fn copies_of_instance_types_are_reused_or_made_again() {
    let owner = |uid: &str| {
        let name = if uid == "other" { "w" } else { "v" };
        json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": name, "uid": uid, "controller": true}])
    };
    let revision = |name: &str, cpus: u32, uid: &str| {
        let revision = json!({
            "apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": 1,
            "metadata": {"name": name, "namespace": "n", "uid": name, "ownerReferences": owner(uid)},
            "data": {
                "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineInstancetype",
                "metadata": {"name": "small"}, "spec": {"cpu": {"guest": cpus}, "memory": {"guest": "1Gi"}},
            },
        });
        let revision: k8s_openapi::api::apps::v1::ControllerRevision = serde_json::from_value(revision).unwrap();
        (name.to_owned(), Arc::new(InstancetypeRevision::from(revision)))
    };
    for (present, made, text) in [
        (None, Some(false), ""),
        (Some((1, "vm-uid")), None, ""),
        (Some((2, "vm-uid")), Some(true), ""),
        (Some((1, "other")), None, ""),
        (Some((1, "former")), Some(true), ""),
        (Some((2, "other")), None, "True found existing ControllerRevision with unexpected data: v-small"),
    ] {
        let mut observed = observed(&named());
        observed.claims = bound();
        let mut content = (**observed.content.as_ref().unwrap()).clone();
        let captured = content.spec.source.virtual_machine.as_mut().unwrap().spec.as_mut().unwrap();
        captured.instancetype = serde_json::from_value(json!({"name": "small", "revisionName": "s-small"})).unwrap();
        observed.content = Some(Arc::new(content));
        observed.revisions = [revision("s-small", 1, "vm-uid")].into();
        observed.revisions.extend(present.map(|(cpus, uid)| revision("v-small", cpus, uid)));
        assert_eq!(texts(&observed)[2], text, "{present:?}");
        let effects = effects(&observed);
        let copies = effects.iter().filter(|effect| matches!(effect, Effect::CopyRevision { .. })).count();
        let deleted =
            effects.iter().any(|effect| matches!(effect, Effect::Delete { kind: Kind::ControllerRevision, .. }));
        assert_eq!((copies, deleted), (usize::from(made.is_some()), made == Some(true)), "{present:?}");
    }
}

#[test]
fn restored_copies_get_the_name_of_the_revision() {
    let snapshot = ObjectMeta { name: Some("s".to_owned()), uid: Some("u".to_owned()), ..ObjectMeta::default() };
    let end = format!("-{}", api::names::hash("u"));
    for (copy, target, name) in [
        ("v-small".to_owned() + &end, "v", "v-small"),
        ("v-small".to_owned() + &end, "w", "w-small"),
        ("mine".to_owned() + &end, "w", "mine"),
        // By a former release.
        ("mine".to_owned(), "w", "mine"),
        ("s-small".to_owned(), "w", "w-small"),
    ] {
        assert_eq!(crate::snapshot::restored_copy_name(&copy, "v", &snapshot, target), name, "{copy}");
    }
}

#[test]
fn templates_are_matched_by_name_and_hot_plugged_cpus_are_restored() {
    let mut observed = observed(&named());
    observed.claims = bound();
    let mut content = (**observed.content.as_ref().unwrap()).clone();
    let captured = content.spec.source.virtual_machine.as_mut().unwrap().spec.as_mut().unwrap();
    let first = json!({"metadata": {"name": "first"}, "spec": {"source": {"blank": {}}}});
    captured.data_volume_templates.insert(0, serde_json::from_value(first).unwrap());
    captured.template.spec.as_mut().unwrap().domain.cpu =
        serde_json::from_value(json!({"sockets": 3, "maxSockets": 4})).unwrap();
    observed.content = Some(Arc::new(content));
    let spec = patch(&observed, Kind::VirtualMachine, None)["spec"].clone();
    let names: Vec<&Value> =
        spec["dataVolumeTemplates"].as_array().unwrap().iter().map(|one| &one["metadata"]["name"]).collect();
    assert_eq!(names, ["first", "restore-restore-uid-root"]);
    assert_eq!(spec["template"]["spec"]["domain"]["cpu"], json!({"sockets": 3, "maxSockets": 4}));
}

#[test]
fn names_of_claims_fit_their_limits() {
    let long = "v".repeat(63);
    for (policy, limit) in [("RandomizeNames", 253), ("PrefixTargetName", 63)] {
        let change = json!({"spec": {"volumeRestorePolicy": policy, "target": {"name": "t".repeat(60)}}});
        let mut observed = observed(&change);
        observed.vm = None;
        let mut content = (**observed.content.as_ref().unwrap()).clone();
        for (backup, end) in content.spec.volume_backups.iter_mut().zip(["a", "b"]) {
            backup.volume_name = format!("{long}{end}");
        }
        observed.content = Some(Arc::new(content));
        let status = patch(&observed, Kind::VmRestore, Some("status"))["status"].clone();
        let names: Vec<&str> = status["restores"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["persistentVolumeClaim"].as_str().unwrap())
            .collect();
        assert!(names.iter().all(|name| name.len() <= limit) && names[0] != names[1], "{names:?}");
    }
}

#[test]
fn restore_outlives_its_target() {
    // Only one that completes is owned by the VM, until that is deleted.
    for observed in [observed(&json!({"metadata": {"finalizers": null}})), observed(&named())] {
        for effect in effects(&observed) {
            if let Effect::Patch { kind: Kind::VmRestore, patch, .. } = effect {
                assert_eq!(patch["metadata"]["ownerReferences"], Value::Null);
            }
        }
    }
    let mut complete = end::done();
    complete.vm = None;
    complete.restore = restore(&json!({"status": {"complete": true}}));
    assert!(effects(&complete).is_empty());
    // One that was refused because of a foreign VM says so after that is gone.
    let failure = json!([{"type": "Failure", "status": "True", "reason": "x"}]);
    complete.restore = restore(&json!({"status": {"complete": false, "conditions": failure}}));
    assert!(effects(&complete).is_empty());
}

#[test]
fn restore_fails_when_its_target_is_deleted() {
    let deleted = |at: &str| Some(vm(&json!({"metadata": {"deletionTimestamp": at}})));
    let (failed, waits) = ("True restore target was deleted", "True restore target is being deleted");
    let made = || Observed { claims: bound(), ..observed(&named()) };
    let runs = || Observed { vmi: instance("Running"), ..made() };
    let refused = || {
        let mut refused = made();
        let (message, retry_at) = ("denied".to_owned(), refused.now + jiff::SignedDuration::from_secs(9));
        refused.failure = Some(Failure { reason: REFUSED, message, retry_at, attempts: 1 });
        refused
    };
    let begun = || {
        let mut begun = in_place();
        begun.claims.remove("root");
        begun
    };
    // The restore, true if it was created before the deletion, true if it fails.
    for (restore, is_older, fails) in [
        (&made as &dyn Fn() -> Observed, true, true),
        (&runs, true, true),
        (&refused, true, true),
        (&in_place, true, true),
        // The VM would lack a disk.
        (&begun, true, false),
        // The VM is to be made again.
        (&made, false, false),
    ] {
        let mut observed = restore();
        observed.vm = deleted(if is_older { "2030-01-01T00:00:30Z" } else { "2029-12-31T23:59:59Z" });
        let claims: Vec<String> = observed.claims.keys().filter(|name| name.starts_with("restore-")).cloned().collect();
        let shown = texts(&observed);
        assert_eq!(if fails { &shown[2] } else { &shown[0] }, if fails { failed } else { waits });
        let mut expected: Vec<String> =
            claims.iter().map(|name| format!("delete PersistentVolumeClaim {name}")).collect();
        expected.retain(|_| fails);
        expected.push("patch VirtualMachineRestore r status".to_owned());
        assert_eq!(lines(&observed), expected);
    }
}

#[test]
fn claims_of_a_former_vm_are_not_used() {
    let (updating, creating) = ("True Updating target spec", "True Creating new PVCs");
    let name = "restore-restore-uid-data";
    for (owner, has_vm, text) in [
        (None, false, updating),
        (Some("vm-uid"), true, updating),
        (Some("vm-uid"), false, creating),
        (Some("former"), true, creating),
    ] {
        let mut observed = observed(&named());
        observed.claims = bound();
        let mut change = own();
        change["metadata"]["ownerReferences"] = owner.map_or(Value::Null, |uid| {
            json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": uid, "controller": true}])
        });
        observed.claims.extend([claim(name, "Bound", &change)]);
        observed.vm = observed.vm.filter(|_| has_vm);
        assert_eq!(texts(&observed)[0], text, "{owner:?} {has_vm}");
        assert_eq!(lines(&observed).iter().any(|line| line.ends_with("VirtualMachine v")), text == updating);
    }
}

#[test]
fn deleted_vm_is_made_again_with_its_state() {
    for (exists, labelled) in [(false, true), (true, false)] {
        let mut status = named();
        let state = json!({
            "volumeName": "persistent-state-for-v", "persistentVolumeClaim": "state-2", "volumeSnapshotName": "snap-data",
        });
        status["status"]["restores"].as_array_mut().unwrap().push(state);
        let mut observed = observed(&status);
        let mut content = (**observed.content.as_ref().unwrap()).clone();
        content.spec.volume_backups.push(serde_json::from_value(backup("persistent-state-for-v")).unwrap());
        observed.content = Some(Arc::new(content));
        if !exists {
            observed.vm = None;
        }
        let claim = effects(&observed).into_iter().find_map(|effect| match effect {
            Effect::Create { object, .. } if object["metadata"]["name"] == "state-2" => Some(object),
            _ => None,
        });
        let label = claim.unwrap()["metadata"]["labels"]["persistent-state-for"].clone();
        assert_eq!(label == "v", labelled, "{exists}");
    }
}
