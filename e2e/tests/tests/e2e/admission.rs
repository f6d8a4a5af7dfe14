//! Manifests as users write them: good ones are taken, with their defaults visible; wrong ones are refused with a
//! message that names the field. Nothing starts here.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::story;
use serde_json::{Value, json};

/// A virtual machine around a machine's spec (YAML, from the left margin).
fn vm(name: &str, spec: &str) -> String {
    let spec: String = spec.trim().lines().map(|line| format!("      {line}\n")).collect();
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: {name}}}
spec:
  runStrategy: Halted
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
{spec}"
    )
}

/// The machine that would be made of it.
fn vmi(name: &str, spec: &str) -> String {
    let spec: String = spec.trim().lines().map(|line| format!("  {line}\n")).collect();
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {{name: {name}}}
spec:
{spec}"
    )
}

/// Where a default is seen in the machine's spec, and what it is.
type Default = (&'static str, Value);

/// A manifest, by what it is about, with defaults that its machine gets.
struct Manifest {
    name: &'static str,
    spec: &'static str,
    defaults: Vec<Default>,
}

fn accepted() -> Vec<Manifest> {
    vec![
        Manifest {
            name: "cloud-init",
            spec: "
domain:
  memory: {guest: 1Gi}
  devices:
    disks:
    - {name: root, disk: {bus: virtio}}
    - {name: seed, disk: {bus: virtio}}
volumes:
- {name: root, containerDisk: {image: 'quay.io/containerdisks/fedora'}}
- name: seed
  cloudInitNoCloud:
    userData: |
      #cloud-config
      users: [{name: jane, ssh_authorized_keys: [ssh-ed25519 AAAA]}]
    networkData: |
      version: 2
      ethernets: {enp1s0: {dhcp4: true}}
",
            defaults: vec![
                ("/architecture", json!("amd64")),
                ("/domain/machine/type", json!("q35")),
                ("/domain/cpu", json!({"sockets": 1, "cores": 1, "threads": 1, "model": "host-model"})),
                ("/domain/features/acpi/enabled", json!(true)),
                ("/domain/devices/interfaces", json!([{"name": "default", "bridge": {}}])),
                ("/networks", json!([{"name": "default", "pod": {}}])),
                // An image without a tag may change under its name.
                ("/volumes/0/containerDisk/imagePullPolicy", json!("Always")),
            ],
        },
        Manifest {
            name: "pvc",
            spec: "
domain:
  resources: {requests: {memory: 2Gi}}
  devices:
    disks:
    - {name: root, bootOrder: 1, disk: {}}
    - {name: install, bootOrder: 2, cdrom: {}}
volumes:
- {name: root, persistentVolumeClaim: {claimName: root}}
- {name: install, persistentVolumeClaim: {claimName: iso}}
- {name: scratch, emptyDisk: {capacity: 10Gi}}
",
            defaults: vec![
                ("/domain/memory/guest", json!("2Gi")),
                ("/domain/devices/disks/0/disk/bus", json!("sata")),
                ("/domain/devices/disks/1/cdrom", json!({"bus": "sata", "readonly": true, "tray": "closed"})),
                // A volume that nothing uses becomes a disk.
                ("/domain/devices/disks/2", json!({"name": "scratch", "disk": {"bus": "sata"}})),
            ],
        },
        Manifest {
            name: "two-networks",
            spec: "
domain:
  memory: {guest: 1Gi}
  devices:
    disks: [{name: root, disk: {bus: virtio}}]
    interfaces:
    - {name: default, masquerade: {}}
    - {name: lan, bridge: {}, model: e1000e, macAddress: '02:00:00:00:00:0a'}
networks:
- {name: default, pod: {}}
- {name: lan, multus: {networkName: depot/lan}}
volumes: [{name: root, containerDisk: {image: 'registry.example/web:1'}}]
",
            defaults: vec![("/networks/1/multus", json!({"networkName": "depot/lan"}))],
        },
        Manifest {
            name: "efi",
            spec: "
domain:
  memory: {guest: 1Gi}
  firmware: {bootloader: {efi: {secureBoot: false}}, serial: e4686d2c-6e8d-4335-b8fd-81bee22f4814}
  devices: {disks: [{name: root, disk: {bus: virtio}}]}
volumes: [{name: root, containerDisk: {image: 'quay.io/containerdisks/fedora:42'}}]
",
            defaults: vec![
                ("/domain/firmware/bootloader/efi/secureBoot", json!(false)),
                ("/volumes/0/containerDisk/imagePullPolicy", json!("IfNotPresent")),
            ],
        },
        Manifest {
            name: "secure-boot",
            spec: "
domain:
  memory: {guest: 1Gi}
  features: {smm: {}}
  firmware: {bootloader: {efi: {secureBoot: true}}}
  devices: {disks: [{name: root, disk: {bus: virtio}}]}
volumes: [{name: root, containerDisk: {image: 'quay.io/containerdisks/fedora:42'}}]
",
            defaults: vec![("/domain/features/smm/enabled", json!(true))],
        },
        Manifest {
            name: "probes",
            spec: "
domain:
  memory: {guest: 512Mi}
  devices:
    disks: [{name: root, disk: {bus: virtio}}]
    interfaces: [{name: default, masquerade: {}, ports: [{name: http, port: 80}, {port: 53, protocol: UDP}]}]
readinessProbe: {httpGet: {port: 80, path: /healthy}, initialDelaySeconds: 60, periodSeconds: 5}
livenessProbe: {tcpSocket: {port: 22}, failureThreshold: 10}
networks: [{name: default, pod: {}}]
volumes: [{name: root, containerDisk: {image: 'registry.example/web:1'}}]
",
            defaults: vec![
                ("/readinessProbe/periodSeconds", json!(5)),
                ("/readinessProbe/failureThreshold", json!(3)),
                ("/livenessProbe/periodSeconds", json!(10)),
                ("/livenessProbe/timeoutSeconds", json!(1)),
                ("/livenessProbe/successThreshold", json!(1)),
            ],
        },
        Manifest {
            name: "windows",
            spec: "
terminationGracePeriodSeconds: 3600
domain:
  cpu: {sockets: 1, cores: 4, threads: 1}
  memory: {guest: 8Gi}
  clock:
    utc: {}
    timer: {hpet: {present: false}, pit: {tickPolicy: delay}, rtc: {tickPolicy: catchup}, hyperv: {}}
  features:
    acpi: {}
    apic: {}
    smm: {}
    hyperv:
      relaxed: {}
      vapic: {}
      vpindex: {}
      synic: {}
      synictimer: {direct: {}}
      spinlocks: {spinlocks: 8191}
      tlbflush: {}
      frequencies: {}
      reenlightenment: {}
      runtime: {}
      ipi: {}
      reset: {}
  firmware: {bootloader: {efi: {secureBoot: true}}}
  devices:
    disks:
    - {name: root, disk: {bus: sata}}
    - {name: answers, cdrom: {bus: sata}}
    interfaces: [{name: default, masquerade: {}, model: e1000e}]
    inputs: [{name: tablet, type: tablet, bus: usb}]
networks: [{name: default, pod: {}}]
volumes:
- {name: root, persistentVolumeClaim: {claimName: windows}}
- {name: answers, sysprep: {configMap: {name: autounattend}}}
",
            defaults: vec![
                ("/domain/features/hyperv/relaxed/enabled", json!(true)),
                ("/domain/features/hyperv/spinlocks", json!({"enabled": true, "spinlocks": 8191})),
                ("/domain/features/hyperv/synictimer", json!({"enabled": true, "direct": {"enabled": true}})),
                ("/domain/features/apic/enabled", json!(true)),
                ("/domain/clock/timer/hyperv/present", json!(true)),
                ("/domain/clock/timer/hpet/present", json!(false)),
            ],
        },
        Manifest {
            name: "scheduling",
            spec: "
nodeSelector: {example.org/rack: a}
tolerations: [{key: dedicated, operator: Equal, value: machines, effect: NoSchedule}]
topologySpreadConstraints:
- {maxSkew: 1, topologyKey: topology.kubernetes.io/zone, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app: a}}}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms: [{matchExpressions: [{key: example.org/disk, operator: In, values: [ssd]}]}]
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
    - {weight: 1, podAffinityTerm: {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: a}}}}
evictionStrategy: None
domain:
  memory: {guest: 512Mi}
  devices: {disks: [{name: root, disk: {bus: virtio}}]}
volumes: [{name: root, containerDisk: {image: 'registry.example/web:1'}}]
",
            defaults: vec![("/nodeSelector", json!({"example.org/rack": "a"})), ("/evictionStrategy", json!("None"))],
        },
        Manifest {
            name: "resources",
            spec: "
domain:
  resources: {requests: {memory: 1Gi}, limits: {cpu: 2, memory: 2Gi}}
  devices: {disks: [{name: root, disk: {bus: virtio}, cache: none, io: native}], blockMultiQueue: true}
volumes: [{name: root, persistentVolumeClaim: {claimName: root}}]
",
            defaults: vec![
                ("/domain/memory/guest", json!("1Gi")),
                ("/domain/cpu/sockets", json!(2)),
                ("/domain/resources/requests/cpu", json!("2")),
            ],
        },
        Manifest {
            name: "kernel-boot",
            spec: "
domain:
  memory: {guest: 256Mi}
  firmware:
    kernelBoot:
      kernelArgs: console=ttyS0
      container: {image: 'registry.example/kernel:1', kernelPath: /boot/vmlinuz, initrdPath: /boot/initrd}
  devices: {}
",
            defaults: vec![("/domain/features/acpi/enabled", json!(true))],
        },
        Manifest {
            name: "configuration-disks",
            spec: "
serviceAccountName: robot
domain:
  memory: {guest: 512Mi}
  devices:
    disks:
    - {name: root, disk: {bus: virtio}}
    - {name: settings, serial: SETTINGS, disk: {bus: virtio}}
    - {name: password, serial: PASSWORD, disk: {bus: virtio}}
    - {name: account, disk: {bus: virtio}}
    - {name: labels, disk: {bus: virtio}}
volumes:
- {name: root, containerDisk: {image: 'registry.example/web:1'}}
- {name: settings, configMap: {name: settings}}
- {name: password, secret: {secretName: password}}
- {name: account, serviceAccount: {serviceAccountName: robot}}
- {name: labels, downwardAPI: {fields: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}
",
            defaults: vec![("/serviceAccountName", json!("robot"))],
        },
        Manifest {
            name: "ssh-key",
            spec: "
domain:
  memory: {guest: 512Mi}
  devices:
    disks:
    - {name: root, disk: {bus: virtio}}
    - {name: seed, disk: {bus: virtio}}
accessCredentials:
- sshPublicKey: {source: {secret: {secretName: keys}}, propagationMethod: {noCloud: {}}}
volumes:
- {name: root, containerDisk: {image: 'registry.example/web:1'}}
- {name: seed, cloudInitNoCloud: {userData: '#cloud-config'}}
",
            defaults: vec![("/evictionStrategy", json!("None"))],
        },
        Manifest {
            name: "gpu",
            spec: "
domain:
  memory: {guest: 4Gi}
  devices:
    disks: [{name: root, disk: {bus: virtio}}]
    gpus: [{name: gpu1, deviceName: nvidia.com/TU104GL_Tesla_T4}]
volumes: [{name: root, containerDisk: {image: 'registry.example/cuda:1'}}]
",
            defaults: vec![("/domain/devices/gpus/0/deviceName", json!("nvidia.com/TU104GL_Tesla_T4"))],
        },
        Manifest {
            name: "names",
            spec: "
hostname: db-0
subdomain: db
dnsPolicy: None
dnsConfig: {nameservers: [10.0.0.10], searches: [example.org], options: [{name: ndots, value: '2'}]}
domain:
  memory: {guest: 512Mi}
  devices:
    disks: [{name: root, disk: {bus: virtio}}]
    interfaces: [{name: default, masquerade: {}, macAddress: '02:00:00:00:00:01', model: virtio}]
    watchdog: {name: dog, i6300esb: {}}
    rng: {}
    autoattachInputDevice: true
networks: [{name: default, pod: {vmNetworkCIDR: 10.11.0.0/24}}]
volumes: [{name: root, containerDisk: {image: 'registry.example/db:1'}}]
",
            defaults: vec![
                ("/domain/devices/watchdog/i6300esb/action", json!("reset")),
                ("/domain/devices/inputs", json!([{"name": "default-0", "type": "tablet", "bus": "usb"}])),
            ],
        },
    ]
}

#[test]
fn machines_of_all_sorts_are_taken_and_completed() {
    story("manifests", async |s| {
        for Manifest { name, spec, defaults } in accepted() {
            s.apply(&vm(name, spec)).await.with_context(|| name.to_owned())?;
            let stored = s.get("vm", name).await?;
            let template = &stored["spec"]["template"]["spec"];
            ensure!(template["architecture"] == "amd64", "{name} has no architecture: {template}");
            ensure!(template["domain"]["machine"]["type"] == "q35", "{name} has no board: {template}");
            // A guest knows its hardware by these: they stay when the manifest is applied again.
            let identity = &template["domain"]["firmware"]["uuid"];
            ensure!(identity.is_string(), "{name} has no firmware UUID: {template}");
            s.apply(&vm(name, spec)).await.with_context(|| format!("{name} again"))?;
            let again = s.get("vm", name).await?;
            ensure!(again["spec"] == stored["spec"], "{name} changed: {}\nto {}", stored["spec"], again["spec"]);

            let made = s.dry_run(&vmi(name, spec)).await.with_context(|| name.to_owned())?;
            ensure!(made["status"]["phase"] == "Pending", "{name}: {}", made["status"]);
            for (path, default) in defaults {
                let found = made["spec"].pointer(path);
                ensure!(found == Some(&default), "{name}: {path} is {found:?}, not {default}");
            }
        }
        Ok(())
    });
}

#[test]
fn what_is_not_carried_out_yet_is_refused_by_name() {
    story("unsupported", async |s| {
        for (name, change, field) in refused() {
            let mut machine = plain();
            json_patch::merge(&mut machine["spec"]["template"]["spec"], &change);
            let said = s.refused(&machine.to_string()).await.with_context(|| name.to_owned())?;
            ensure!(said.contains(field), "{name} is refused without naming {field}: {said}");
        }
        ensure!(s.list("vm", "").await?.is_empty(), "a refused machine exists");
        Ok(())
    });
}

/// What is known and not there yet; a line goes when it works, and becomes one of the manifests above.
fn refused() -> Vec<(&'static str, Value, &'static str)> {
    let domain = |domain: Value| json!({"domain": domain});
    let devices = |devices: Value| json!({"domain": {"devices": devices}});
    vec![
        (
            "a network card of the host",
            devices(json!({"interfaces": [{"name": "default", "sriov": {}}]})),
            "domain.devices.interfaces[0].sriov",
        ),
        (
            "a device by a claim",
            json!({
                "domain": {"devices": {"gpus": [{"name": "gpu", "claimName": "gpu", "requestName": "one"}]}},
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
            }),
            "domain.devices.gpus[0].claimName",
        ),
        (
            "a display of a virtual GPU",
            devices(json!({"gpus": [
                {"name": "gpu", "deviceName": "example.org/gpu", "virtualGPUOptions": {"display": {"enabled": true}}},
            ]})),
            "gpus[0].virtualGPUOptions.display",
        ),
        ("huge pages", domain(json!({"memory": {"hugepages": {"pageSize": "2Mi"}}})), "domain.memory.hugepages"),
        (
            "pinned CPUs",
            domain(json!({"cpu": {"cores": 2, "dedicatedCpuPlacement": true}})),
            "domain.cpu.dedicatedCpuPlacement",
        ),
        (
            "an encrypted guest",
            domain(json!({
                "launchSecurity": {"sev": {}},
                "firmware": {"bootloader": {"efi": {"secureBoot": false}}},
            })),
            "domain.launchSecurity",
        ),
        ("a TPM", devices(json!({"tpm": {}})), "domain.devices.tpm"),
    ]
}

/// A machine that breaks no rule.
fn plain() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "plain"},
        "spec": {"runStrategy": "Halted", "template": {"metadata": {"labels": {"app": "plain"}}, "spec": {
            "domain": {
                "memory": {"guest": "256Mi"},
                "devices": {
                    "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                    "interfaces": [{"name": "default", "masquerade": {}}],
                },
            },
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "root", "containerDisk": {"image": "registry.example/web:1"}}],
        }}},
    })
}

/// A change of the plain machine's template that makes it wrong, and what the refusal names.
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
fn wrong_machines_are_refused_with_the_field_named() {
    story("wrong", async |s| {
        for (change, field) in wrong() {
            let mut machine = plain();
            json_patch::merge(&mut machine["spec"]["template"]["spec"], &change);
            let said = s.refused(&machine.to_string()).await?;
            ensure!(said.contains(field), "{change} is refused without naming {field}: {said}");
        }
        ensure!(s.list("vm", "").await?.is_empty(), "a refused machine exists");
        // What was changed each time is good.
        s.apply(&plain().to_string()).await
    });
}

/// Objects other than VMs that are wrong, by kind, and what the refusal names.
fn wrong_objects() -> Vec<(&'static str, &'static str, Value, &'static str)> {
    let machines = "kubevirt.io/v1";
    let mut template = plain()["spec"]["template"].take();
    template["metadata"]["labels"] = json!({"app": "a"});
    let vm = json!({"runStrategy": "Halted", "template": template});
    let selector = |app: &str| json!({"matchLabels": {"app": app}});
    let pool = |change: Value| {
        let mut pool = json!({
            "selector": selector("a"), "virtualMachineTemplate": {"metadata": {"labels": {"app": "a"}}, "spec": vm},
        });
        json_patch::merge(&mut pool, &change);
        pool
    };
    let reference = |group: &str, kind: &str| json!({"apiGroup": group, "kind": kind, "name": "a"});
    vec![
        (machines, "VirtualMachineInstance", json!({"domain": {"devices": {}}}), "spec.domain.memory.guest"),
        (
            machines,
            "VirtualMachineInstance",
            json!({"domain": {"devices": {}, "memory": {"guest": "much"}}}),
            "spec.domain.memory.guest",
        ),
        (
            machines,
            "VirtualMachineInstance",
            json!({"domain": {"devices": {}, "resources": {"requests": {"memory": "much"}, "limits": {"cpu": "1"}}}}),
            "spec.domain.resources.requests.memory",
        ),
        (
            machines,
            "VirtualMachineInstanceReplicaSet",
            json!({"selector": selector("b"), "template": template}),
            "spec.selector",
        ),
        (
            machines,
            "VirtualMachineInstancePreset",
            json!({"selector": selector("a"), "domain": {"devices": {"disks": [{"name": "a", "disk": {"bus": "ide"}}]}}}),
            "spec.domain.devices.disks[0].disk.bus",
        ),
        (machines, "VirtualMachineInstanceMigration", json!({"vmiName": ""}), "spec.vmiName"),
        (
            "instancetype.kubevirt.io/v1beta1",
            "VirtualMachineInstancetype",
            json!({"cpu": {"guest": 1}, "memory": {"guest": "1Gi", "overcommitPercent": 101}}),
            "spec.memory.overcommitPercent",
        ),
        (
            "instancetype.kubevirt.io/v1beta1",
            "VirtualMachinePreference",
            json!({"cpu": {"preferredCPUTopology": "wide"}}),
            "spec.cpu.preferredCPUTopology",
        ),
        ("pool.kubevirt.io/v1beta1", "VirtualMachinePool", pool(json!({"maxUnavailable": "5"})), "spec.maxUnavailable"),
        (
            "pool.kubevirt.io/v1beta1",
            "VirtualMachinePool",
            pool(json!({"virtualMachineTemplate": {"spec": {"template": {"spec": {"hostname": "Db_0"}}}}})),
            "spec.virtualMachineTemplate.spec.template.spec.hostname",
        ),
        (
            "clone.kubevirt.io/v1beta1",
            "VirtualMachineClone",
            json!({"source": reference("apps", "Deployment")}),
            "spec.Source.Kind",
        ),
        (
            "snapshot.kubevirt.io/v1beta1",
            "VirtualMachineSnapshot",
            json!({"source": {"kind": "VirtualMachine", "name": "a"}}),
            "spec.source.apiGroup",
        ),
        (
            "snapshot.kubevirt.io/v1beta1",
            "VirtualMachineRestore",
            json!({"target": reference("apps", "Deployment"), "virtualMachineSnapshotName": "a"}),
            "spec.target.apiGroup",
        ),
        (
            "export.kubevirt.io/v1",
            "VirtualMachineExport",
            json!({"source": reference("apps", "Deployment")}),
            "spec.source.kind",
        ),
    ]
}

#[test]
fn wrong_objects_of_other_kinds_are_refused_with_the_field_named() {
    story("wrong-kinds", async |s| {
        for (version, kind, spec, field) in wrong_objects() {
            let object = json!({"apiVersion": version, "kind": kind, "metadata": {"name": "a"}, "spec": spec});
            let said = s.refused(&object.to_string()).await?;
            ensure!(said.contains(field), "{object} is refused without naming {field}: {said}");
            // Nobody is told about fields that the user did not write.
            ensure!(!said.contains("status."), "{object}: {said}");
        }
        Ok(())
    });
}

#[test]
fn a_machine_is_sized_by_its_instance_type() {
    story("instancetype", async |s| {
        s.apply(
            "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineInstancetype
metadata: {name: small}
spec: {cpu: {guest: 2}, memory: {guest: 256Mi}}
",
        )
        .await?;
        let sized = |name: &str, domain: Value| -> Result<String> {
            let mut machine = plain();
            machine["metadata"]["name"] = json!(name);
            machine["spec"]["instancetype"] = json!({"kind": "VirtualMachineInstancetype", "name": "small"});
            let template = &mut machine["spec"]["template"]["spec"];
            template["domain"].as_object_mut().context("no domain")?.remove("memory");
            json_patch::merge(template, &json!({"domain": domain}));
            Ok(machine.to_string())
        };
        s.apply(&sized("sized", json!({}))?).await?;
        let stored = s.get("vm", "sized").await?;
        ensure!(stored["spec"]["instancetype"]["name"] == "small", "{}", stored["spec"]);
        // Two words about the same thing.
        for (domain, field) in [
            (json!({"memory": {"guest": "1Gi"}}), "spec.template.spec.domain.memory"),
            (json!({"cpu": {"cores": 2}}), "spec.template.spec.domain.cpu"),
        ] {
            let said = s.refused(&sized("torn", domain.clone())?).await?;
            ensure!(said.contains(field), "{domain} is refused without naming {field}: {said}");
        }
        Ok(())
    });
}

#[test]
fn machines_get_what_presets_of_their_namespace_give() {
    story("presets", async |s| {
        let preset = |name: &str, cores: u32| {
            format!(
                "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstancePreset
metadata: {{name: {name}}}
spec:
  selector: {{matchLabels: {{size: large}}}}
  domain: {{cpu: {{cores: {cores}}}, devices: {{}}}}
"
            )
        };
        let machine = |size: &str| {
            json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                "metadata": {"name": "box", "labels": {"size": size}},
                "spec": {"domain": {"memory": {"guest": "64Mi"}, "devices": {}}},
            })
            .to_string()
        };
        s.apply(&preset("large", 3)).await?;
        // virt-api hears of a preset a moment after its user.
        let told = tokio::time::Instant::now();
        loop {
            let made = s.dry_run(&machine("large")).await?;
            if made["spec"]["domain"]["cpu"]["cores"] == 3 {
                let noted = &made["metadata"]["annotations"]["virtualmachinepreset.kubevirt.io/large"];
                ensure!(noted == "kubevirt.io/v1", "the preset is not noted: {}", made["metadata"]);
                break;
            }
            ensure!(told.elapsed().as_secs() < 20, "the preset reaches no machine: {}", made["spec"]);
        }
        println!("a preset counts {} ms after it was made", told.elapsed().as_millis());
        let other = s.dry_run(&machine("small")).await?;
        ensure!(other["spec"]["domain"]["cpu"]["cores"] == 1, "it reaches others: {}", other["spec"]["domain"]);

        s.apply(&preset("larger", 4)).await?;
        loop {
            let said = match s.dry_run(&machine("large")).await {
                Ok(made) => format!("made {}", made["spec"]),
                Err(error) => format!("{error:#}"),
            };
            if said.contains("presets 'larger' and 'large' conflict: spec.cpu") {
                break;
            }
            ensure!(told.elapsed().as_secs() < 60, "presets that contradict each other are not refused: {said}");
        }
        Ok(())
    });
}
