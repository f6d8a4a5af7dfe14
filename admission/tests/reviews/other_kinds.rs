//! Reviews of other kinds.

use serde_json::{Value, json};

use crate::{Call, preset, vm, vmi};

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
    let merging = json!({"configuration": {"ksmConfiguration": {}}});
    update(merging.clone(), merging.clone()).allowed();
    update(merging, json!({})).refused("spec.configuration.ksmConfiguration is not supported yet");
    let short = json!({"certificateRotateStrategy": {"selfSigned": {"ca": {"duration": "1h"}}}});
    update(short.clone(), short.clone()).allowed();
    update(short, json!({})).refused("Certificate duration cannot exceed CA");
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
fn applied_fields_of_a_preset_are_validated() {
    let call = |object| Call::new("/vmipreset-validate", "virtualmachineinstancepresets", "CREATE", object);
    call(preset("p", json!({"devices": {"tpm": {}}, "cpu": {"cores": 2}}))).allowed();
    call(preset("p", json!({"devices": {}, "cpu": {"dedicatedCpuPlacement": true}})))
        .refused("spec.domain.cpu.dedicatedCpuPlacement is not supported yet");
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
fn valid_objects_of_unsupported_kinds_are_refused() {
    let mut running = vmi();
    running["status"] = json!({"phase": "Running"});
    let migration = json!({"metadata": {"name": "m"}, "spec": {"vmiName": "m"}});
    Call::new("/migration-validate-create", "virtualmachineinstancemigrations", "CREATE", migration)
        .beside("virtualmachineinstances", running)
        .refused("VirtualMachineInstanceMigration is not supported yet: live migration");

    let policy = json!({"metadata": {"name": "p"}, "spec": {"selectors": {}}});
    let call = Call::new("/migration-policy-validate-create", "migrationpolicies", "CREATE", policy.clone());
    Call { group: "migrations.kubevirt.io", ..call }.refused("MigrationPolicy is not supported yet: live migration");
    let call =
        Call::new("/migration-policy-validate-create", "migrationpolicies", "UPDATE", policy.clone()).was(policy);
    Call { group: "migrations.kubevirt.io", ..call }.allowed();

    let pool = json!({
        "metadata": {"name": "p"},
        "spec": {
            "selector": {"matchLabels": {"app": "web"}},
            "virtualMachineTemplate": {"metadata": {"labels": {"app": "web"}}, "spec": vm()["spec"]},
        },
    });
    let call = Call::new("/virtualmachinepool-validate", "virtualmachinepools", "CREATE", pool);
    Call { group: "pool.kubevirt.io", ..call }.refused("VirtualMachinePool is not supported yet");
}
