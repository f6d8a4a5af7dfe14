//! Invalid VMs.

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::story;
use serde_json::{Value, json};

use super::plain;

/// Changes that make the plain VM's template invalid, each with the field in the refusal.
fn wrong() -> Vec<(Value, &'static str)> {
    let domain = |domain: Value| json!({"domain": domain});
    let devices = |devices: Value| json!({"domain": {"devices": devices}});
    let disk = |disk: Value| json!({"domain": {"devices": {"disks": [disk]}}});
    let interface = |interface: Value| json!({"domain": {"devices": {"interfaces": [interface]}}});
    let volume = |volume: Value| json!({"volumes": [volume]});
    vec![
        (disk(json!({"name": "lost"})), "spec.template.spec.domain.devices.disks[0].name"),
        (devices(json!({"disks": [{"name": "root"}, {"name": "root"}]})), "domain.devices.disks[1].name"),
        (disk(json!({"name": "root", "disk": {"bus": "ide"}})), "disks[0].disk.bus"),
        (disk(json!({"name": "root", "disk": {"bus": "sata", "readonly": true}})), "disks[0].disk.bus"),
        (disk(json!({"name": "root", "cdrom": {"bus": "virtio"}})), "disks[0].cdrom.bus"),
        (disk(json!({"name": "root", "bootOrder": 0})), "disks[0].bootOrder"),
        (disk(json!({"name": "root", "cache": "lots"})), "disks[0].cache"),
        (disk(json!({"name": "root", "serial": "a b"})), "disks[0].serial"),
        (disk(json!({"name": "root", "disk": {}, "cdrom": {}})), "disks[0]"),
        (domain(json!({"memory": {"guest": "0"}})), "domain.memory.guest"),
        (domain(json!({"memory": {"guest": "much"}})), "domain.memory.guest"),
        (domain(json!({"cpu": {"cores": "two"}})), "domain.cpu.cores"),
        (domain(json!({"cpu": {"model": "best of all"}})), "domain.cpu.model"),
        (domain(json!({"machine": {"type": "pc-i440fx-2.12"}})), "domain.machine.type"),
        (
            domain(json!({"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}})),
            "domain.resources.requests.memory",
        ),
        (domain(json!({"firmware": {"bootloader": {"efi": {"secureBoot": false}, "bios": {}}}})), "bootloader"),
        (domain(json!({"firmware": {"bootloader": {"efi": {}}}})), "SecureBoot requires SMM"),
        (domain(json!({"firmware": {"uuid": "me"}})), "domain.firmware.uuid"),
        (
            domain(json!({"firmware": {"kernelBoot": {"container": {"image": "a:b", "kernelPath": "/../etc"}}}})),
            "kernelBoot.container.kernelPath",
        ),
        (interface(json!({"name": "other", "masquerade": {}})), "interfaces[0].name"),
        (interface(json!({"name": "default", "masquerade": {}, "bridge": {}})), "interfaces[0]"),
        (interface(json!({"name": "default", "masquerade": {}, "macAddress": "de:ad"})), "interfaces[0].macAddress"),
        (interface(json!({"name": "default", "masquerade": {}, "ports": [{"port": 70000}]})), "interfaces[0].ports[0]"),
        (interface(json!({"name": "default", "slirp": {}})), "interfaces[0].slirp"),
        (json!({"networks": [{"name": "default"}]}), "networks[0]"),
        (volume(json!({"name": "root"})), "volumes[0]"),
        (
            volume(json!({"name": "root", "containerDisk": {"image": "a:b"}, "emptyDisk": {"capacity": "1Gi"}})),
            "volumes[0]",
        ),
        (volume(json!({"name": "root", "containerDisk": {"image": ""}})), "volumes[0].containerDisk.image"),
        (
            volume(json!({"name": "root", "persistentVolumeClaim": {"claimName": ""}})),
            "volumes[0].persistentVolumeClaim.claimName",
        ),
        (volume(json!({"name": "root", "emptyDisk": {"capacity": "0"}})), "volumes[0].emptyDisk.capacity"),
        (volume(json!({"name": "root", "cloudInitNoCloud": {"userDataBase64": "%"}})), "volumes[0].cloudInitNoCloud"),
        (json!({"readinessProbe": {"periodSeconds": 5}}), "readinessProbe"),
        (json!({"livenessProbe": {"tcpSocket": {"port": 0}}}), "livenessProbe.tcpSocket.port"),
        (json!({"hostname": "Db_0"}), "spec.template.spec.hostname"),
        (json!({"dnsPolicy": "Whatever"}), "dnsPolicy"),
        (json!({"evictionStrategy": "Kick"}), "evictionStrategy"),
        (json!({"startStrategy": "Later"}), "startStrategy"),
        (json!({"serviceAccountName": "Robot!"}), "serviceAccountName"),
        (json!({"nodeSelector": {"not a key": "a"}}), "nodeSelector"),
        (json!({"terminationGracePeriodSeconds": "soon"}), "terminationGracePeriodSeconds"),
        // Misspelt.
        (json!({"nodeSelectors": {"a": "b"}}), "nodeSelectors"),
        (devices(json!({"disk": []})), "spec.template.spec.domain.devices.disk"),
    ]
}

#[test]
fn invalid_vms_are_refused_with_the_field_named() {
    story("wrong", async |s| {
        for (change, field) in wrong() {
            let mut vm = plain();
            json_patch::merge(&mut vm["spec"]["template"]["spec"], &change);
            let message = s.refused(&vm.to_string()).await?;
            ensure!(message.contains(field), "{change} is refused without naming {field}: {message}");
        }
        ensure!(s.list("vm", "").await?.is_empty(), "a refused VM exists");
        // The unchanged VM is valid.
        s.apply(&plain().to_string()).await
    });
}

/// Returns changes of a VM and the text that kubectl prints for each.
fn printed() -> Vec<(Value, &'static str)> {
    let devices = |devices: Value| json!({"domain": {"devices": devices}});
    let disks = json!([{"name": "root", "disk": {}}, {"name": "seed", "disk": {}}]);
    vec![
        (
            devices(json!({"gpus": [{"name": "g", "deviceName": "v/g", "virtualGPUOptions": {"display": {}}}]})),
            ".virtualGPUOptions.display: is not supported yet: displays of virtual GPUs",
        ),
        (devices(json!({"disks": disks})), ".disks[1].name: 'seed' not found. No volume has this name."),
        (json!({"domain": {"memory": {"guest": "128MB"}}}), ": write 128M or 128Mi"),
        (json!({"domain": {"memory": {"guest": "128m"}}}), ".memory.guest: '128m': must be"),
        (json!({"domain": {"cpu": {"sockets": 4, "maxSockets": 2}}}), "allowed: 4 of at most 2"),
        (json!({"evictionStrategy": "Kick"}), "accepted values: None, LiveMigrate"),
    ]
}

#[test]
fn kubectl_prints_the_field_of_a_refusal_once_and_what_to_write_instead() {
    story("printed", async |s| {
        s.apply(&plain().to_string()).await?;
        for (change, text) in printed() {
            let patch = json!({"spec": {"template": {"spec": change}}}).to_string();
            let refused = s.kubectl(&["patch", "vm", "plain", "--type=merge", "--patch", &patch]).await.err();
            let refused = refused.with_context(|| format!("{change} is accepted"))?.to_string();
            ensure!(refused.contains(text), "{change}: {refused}");
            ensure!(!refused.contains(": :"), "a path is empty: {refused}");
        }
        let data = json!([{"op": "add", "path": "/spec/template/spec/volumes/-", "value": {
            "name": "seed", "cloudInitNoCloud": {"userData": "hostname: a"},
        }}, {"op": "add", "path": "/spec/template/spec/domain/devices/disks/-", "value": {"name": "seed", "disk": {}}}]);
        s.kubectl(&["patch", "vm", "plain", "--type=json", "--patch", &data.to_string()]).await.map(drop)
    });
}
