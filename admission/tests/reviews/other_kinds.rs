//! Reviews of other kinds.

use api::FeatureGate;
use serde_json::{Value, json};

use crate::{CONTROLLER, Call, preset, vm, vmi};

#[test]
fn stored_invalid_configuration_blocks_no_other_change() {
    let object = |label: &str, spec: Value| {
        json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "default", "labels": {"app": label}}, "spec": spec,
        })
    };
    let update = |spec: Value, old: Value| {
        Call::new("/kubevirt-validate-update", "kubevirts", "UPDATE", object("new", spec)).was(object("old", old))
    };
    let other = json!({"configuration": {"hypervisors": [{"name": "hyperv-direct"}]}});
    update(other.clone(), other.clone()).allowed();
    update(other, json!({})).refused("spec.configuration.hypervisors is not supported yet");
    let short = json!({"certificateRotateStrategy": {"selfSigned": {"ca": {"duration": "1h"}}}});
    update(short.clone(), short.clone()).allowed();
    update(short, json!({})).refused("Certificate duration cannot exceed CA");
}

#[test]
fn placement_of_workloads_is_validated_from_the_creation_on() {
    let placed = |key: &str| {
        let spec = json!({"workloads": {"nodePlacement": {"nodeSelector": {key: "a"}}}});
        let object = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "default"}, "spec": spec,
        });
        Call::new("/kubevirt-validate-create", "kubevirts", "CREATE", object)
    };
    placed("zone").allowed();
    placed("no key").refused("DaemonSet.apps \"placement-validation-webhook\" is invalid");
}

#[test]
fn installation_is_not_deleted_while_workloads_need_it() {
    const FINALIZER: &str = "kubevirt.io/foregroundDeleteKubeVirt";
    let blocked = |name: &str| Some(format!("Rejecting the uninstall request, since there are still {name} present."));
    let vmis = blocked("Virtual Machine Instances");
    let not_held = Some(format!("virt-controller has not added the finalizer {FINALIZER} yet"));
    // strategy, existing workload, finalizer is set, object is being deleted; refusal
    for (strategy, plural, held, deleting, refusal) in [
        ("", "", false, false, None),
        ("", "virtualmachineinstances", true, false, vmis.clone()),
        ("", "virtualmachineinstances", false, false, vmis.clone()),
        ("", "virtualmachineinstances", true, true, None),
        // Stopped VMs remain.
        ("", "virtualmachines", false, false, None),
        ("BlockUninstallIfWorkloadsExist", "", false, false, None),
        ("BlockUninstallIfWorkloadsExist", "virtualmachineinstances", true, false, vmis),
        ("BlockUninstallIfWorkloadsExist", "virtualmachines", true, false, blocked("Virtual Machines")),
        (
            "BlockUninstallIfWorkloadsExist",
            "virtualmachineinstancereplicasets",
            true,
            false,
            blocked("Virtual Machine Instance Replica Sets"),
        ),
        ("RemoveWorkloads", "", false, false, None),
        ("RemoveWorkloads", "virtualmachines", true, false, None),
        ("RemoveWorkloads", "virtualmachines", false, false, not_held),
    ] {
        let old = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "spec": {"uninstallStrategy": strategy},
            "metadata": {
                "name": "kubevirt", "namespace": "default", "finalizers": if held { json!([FINALIZER]) } else { json!([]) },
                "deletionTimestamp": deleting.then_some("2030-01-01T00:00:00Z"),
            },
        });
        let mut call = Call::new("/kubevirt-validate-delete", "kubevirts", "DELETE", Value::Null).was(old);
        if !plural.is_empty() {
            call = call.beside(plural, json!({"metadata": {"name": "a"}}));
        }
        match refusal {
            Some(message) => call.refused(&message),
            None => drop(call.allowed()),
        }
    }
}

#[test]
fn replica_set_selects_its_own_vmis() {
    let call =
        |object| Call::new("/virtualmachinereplicaset-validate", "virtualmachineinstancereplicasets", "CREATE", object);
    let mut object = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceReplicaSet",
        "metadata": {"name": "r"},
        "spec": {
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": vmi()["spec"]},
        },
    });
    call(object.clone()).allowed();
    object["spec"]["template"]["metadata"]["labels"]["app"] = json!("db");
    call(object.clone()).refused("selector does not match labels.");
    object["spec"]["template"] = json!({});
    call(object).refused("missing virtual machine template.");
}

#[test]
fn stored_replica_set_that_breaks_a_rule_can_end() {
    let broken = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceReplicaSet",
        "metadata": {"name": "r", "finalizers": ["foregroundDeletion"]},
        "spec": {
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "db"}}, "spec": vmi()["spec"]},
        },
    });
    let call = |change: Value| {
        let mut object = broken.clone();
        json_patch::merge(&mut object, &change);
        Call::new("/virtualmachinereplicaset-validate", "virtualmachineinstancereplicasets", "UPDATE", object)
            .was(broken.clone())
    };
    call(json!({"metadata": {"labels": {"a": "b"}}})).allowed();
    call(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": null}})).allowed();
    call(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"replicas": 0}})).allowed();
    call(json!({"spec": {"replicas": 2}})).refused("selector does not match labels.");
}

#[test]
fn fields_of_a_preset_are_validated() {
    let call = |object| Call::new("/vmipreset-validate", "virtualmachineinstancepresets", "CREATE", object);
    call(preset("p", json!({"devices": {"tpm": {}}, "cpu": {"cores": 2}}))).allowed();
    let both = json!({"efi": {}, "bios": {}});
    call(preset("p", json!({"devices": {}, "firmware": {"bootloader": both}}))).refused("mutually exclusive");
    // Fields that presets do not apply.
    call(preset("p", json!({"devices": {}, "launchSecurity": {"snp": {}}}))).allowed();
}

#[test]
fn new_migration_is_labelled_with_its_vmi() {
    let mut object = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": "m", "namespace": "default"},
        "spec": {"vmiName": "web"},
    });
    for _ in 0..2 {
        let call = Call::new("/migration-mutate-create", "virtualmachineinstancemigrations", "CREATE", object.clone());
        object = call.patched();
        assert_eq!(
            object["metadata"],
            json!({
                "name": "m",
                "namespace": "default",
                "labels": {"kubevirt.io/vmi-name": "web"},
                "finalizers": ["kubevirt.io/migrationJobFinalize"],
            })
        );
    }
}

#[test]
fn label_of_a_migration_fits_for_every_name_of_a_vmi() {
    for length in [1, 63, 64, 169, 253] {
        let object = json!({"metadata": {"name": "m"}, "spec": {"vmiName": "a".repeat(length)}});
        let call = Call::new("/migration-mutate-create", "virtualmachineinstancemigrations", "CREATE", object);
        let label = call.patched()["metadata"]["labels"]["kubevirt.io/vmi-name"].as_str().unwrap().to_owned();
        assert_eq!(label.len(), length.min(63), "{label}");
    }
}

#[test]
fn migrations_within_the_cluster_are_accepted() {
    let mut running = vmi();
    running["status"] = json!({"phase": "Running", "conditions": [{"type": "LiveMigratable", "status": "True"}]});
    let call = |change: Value| {
        let mut object = json!({"metadata": {"name": "m"}, "spec": {"vmiName": "m"}});
        json_patch::merge(&mut object, &change);
        Call::new("/migration-validate-create", "virtualmachineinstancemigrations", "CREATE", object)
            .beside("virtualmachineinstances", running.clone())
    };
    call(json!({})).allowed();
    call(json!({"spec": {"addedNodeSelector": {"kubernetes.io/hostname": "n2"}}})).allowed();
    for (side, value) in
        [("sendTo", json!({"migrationID": "a", "connectURL": "u"})), ("receive", json!({"migrationID": "a"}))]
    {
        let call = call(json!({"spec": {side: value}})).with(FeatureGate::DecentralizedLiveMigration);
        call.refused(&format!("spec.{side} is not supported yet: decentralized live migration"));
    }
}

#[test]
fn unsupported_fields_of_policies_are_refused_unless_they_are_stored() {
    let policy = |spec: Value| {
        let mut object = json!({"metadata": {"name": "p"}, "spec": {"selectors": {}}});
        json_patch::merge(&mut object["spec"], &spec);
        object
    };
    let review = |operation, object| Call {
        group: "migrations.kubevirt.io",
        ..Call::new("/migration-policy-validate-create", "migrationpolicies", operation, object)
    };
    let plain = policy(json!({"allowAutoConverge": true, "allowPostCopy": true}));
    let stalls = policy(json!({"experimental": {"compression": "zstd"}}));
    review("CREATE", plain.clone()).allowed();
    review("CREATE", stalls.clone()).refused("spec.experimental is not supported yet");
    review("UPDATE", stalls.clone()).was(plain).refused("spec.experimental is not supported yet");
    review("UPDATE", stalls.clone()).was(stalls).allowed();
}

#[test]
fn pools_are_validated_until_they_are_deleted() {
    let pool = json!({
        "metadata": {"name": "p"},
        "spec": {
            "selector": {"matchLabels": {"app": "web"}},
            "virtualMachineTemplate": {"metadata": {"labels": {"app": "web"}}, "spec": vm()["spec"]},
        },
    });
    let changed = |change: Value| {
        let mut object = pool.clone();
        json_patch::merge(&mut object, &change);
        object
    };
    let call = |operation, object| {
        let call = Call::new("/virtualmachinepool-validate", "virtualmachinepools", operation, object);
        Call { group: "pool.kubevirt.io", ..call }
    };
    call("CREATE", pool.clone()).allowed();
    let refusal = "maxUnavailable must be greater than 0";
    let wrong = changed(json!({"spec": {"maxUnavailable": 0}}));
    call("CREATE", wrong.clone()).refused(refusal);
    call("UPDATE", wrong.clone()).was(pool.clone()).refused(refusal);
    // One that was stored earlier gets finalizers, and loses them.
    let labelled =
        changed(json!({"spec": {"maxUnavailable": 0}, "metadata": {"finalizers": ["pool.kubevirt.io/finalizer"]}}));
    call("UPDATE", labelled).was(wrong.clone()).by(CONTROLLER).allowed();
    let deleted = json!({"spec": {"maxUnavailable": -1}, "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
    call("UPDATE", changed(deleted)).was(wrong).allowed();
}
