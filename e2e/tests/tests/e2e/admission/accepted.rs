//! Valid VMs and VMIs and their defaults.

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::story;
use serde_json::{Value, json};

/// Returns a VM with the spec of a VMI (YAML without indentation).
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

/// Returns the VMI with the same spec.
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

/// JSON pointer into the spec of the VMI, and the default value.
type Default = (&'static str, Value);

/// A manifest with the defaults of its VMI.
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
                ("/domain/cpu", json!({"sockets": 1, "maxSockets": 4, "cores": 1, "threads": 1, "model": "host-model"})),
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
tolerations: [{key: dedicated, operator: Equal, value: kubevirt, effect: NoSchedule}]
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
fn vms_of_all_kinds_are_accepted_and_defaulted() {
    story("manifests", async |s| {
        for Manifest { name, spec, defaults } in accepted() {
            s.apply(&vm(name, spec)).await.with_context(|| name.to_owned())?;
            let stored = s.get("vm", name).await?;
            let template = &stored["spec"]["template"]["spec"];
            ensure!(template["architecture"] == "amd64", "{name} has no architecture: {template}");
            ensure!(template["domain"]["machine"]["type"] == "q35", "{name} has no machine type: {template}");
            // Guests identify their hardware by these: they must not change when the manifest is reapplied.
            let identity = &template["domain"]["firmware"]["uuid"];
            ensure!(identity.is_string(), "{name} has no firmware UUID: {template}");
            s.apply(&vm(name, spec)).await.with_context(|| format!("reapply {name}"))?;
            let reapplied = s.get("vm", name).await?;
            ensure!(
                reapplied["spec"] == stored["spec"],
                "{name} changed: {}\nto {}",
                stored["spec"],
                reapplied["spec"]
            );

            let vmi = s.dry_run(&vmi(name, spec)).await.with_context(|| name.to_owned())?;
            ensure!(vmi["status"]["phase"] == "Pending", "{name}: {}", vmi["status"]);
            for (path, default) in defaults {
                let found = vmi["spec"].pointer(path);
                ensure!(found == Some(&default), "{name}: {path} is {found:?}, not {default}");
            }
        }
        Ok(())
    });
}
