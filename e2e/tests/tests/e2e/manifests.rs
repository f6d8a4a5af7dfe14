//! Manifests the stories share.

/// A machine from the tiny container disk, with a name for its guest and a known password.
pub fn vm(name: &str, run_strategy: &str) -> String {
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: {name}}}
spec:
  runStrategy: {run_strategy}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      terminationGracePeriodSeconds: 30
      domain:
        memory: {{guest: 128Mi}}
        devices:
          disks:
          - {{name: root, disk: {{bus: virtio}}}}
          - {{name: seed, disk: {{bus: virtio}}}}
      volumes:
      - {{name: root, containerDisk: {{image: 'ferrovirt.io/guests/tiny:devel', imagePullPolicy: IfNotPresent}}}}
      - name: seed
        cloudInitNoCloud:
          userData: |
            #cloud-config
            hostname: {name}-guest
            password: story
"
    )
}

/// A machine like that of [`vm`], but for its guest's address: that of its pod is translated to one of the guest's own.
pub fn masqueraded(name: &str, run_strategy: &str) -> String {
    vm(name, run_strategy).replace(
        "      volumes:\n",
        "          interfaces:
          - {name: default, masquerade: {}}
      networks:
      - {name: default, pod: {}}
      volumes:
",
    )
}

/// A machine from the Debian container disk: systemd, cloud-init, the guest agent and an SSH server that knows the key.
pub fn debian(name: &str, key: &str) -> String {
    vm(name, "Always")
        .replace("guests/tiny:devel", "guests/debian:devel")
        .replace("guest: 128Mi", "guest: 512Mi")
        .replace("            password: story\n", &format!("            ssh_authorized_keys: ['{key}']\n"))
}

/// A VM booted from a kernel image, without disks: the fastest to come up.
pub fn kernel_vm(name: &str, run_strategy: &str) -> String {
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: {name}}}
spec:
  runStrategy: {run_strategy}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        memory: {{guest: 128Mi}}
        firmware:
          kernelBoot:
            kernelArgs: console=ttyS0
            container:
              image: ferrovirt.io/guests/tiny-kernel:devel
              imagePullPolicy: IfNotPresent
              kernelPath: /boot/vmlinuz
              initrdPath: /boot/initrd
        devices: {{}}
"
    )
}

/// A machine instance of its own, booted from a kernel image: the fastest to come up.
pub fn kernel_vmi(name: &str) -> String {
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 10
  domain:
    memory: {{guest: 128Mi}}
    firmware:
      kernelBoot:
        kernelArgs: console=ttyS0 quiet
        container:
          image: ferrovirt.io/guests/tiny-kernel:devel
          imagePullPolicy: IfNotPresent
          kernelPath: /boot/vmlinuz
          initrdPath: /boot/initrd
    devices: {{}}
"
    )
}
