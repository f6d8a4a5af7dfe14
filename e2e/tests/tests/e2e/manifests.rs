//! Manifests that stories share.

/// Returns a VM from the tiny container disk with a host name and a known password.
pub(crate) fn vm(name: &str, run_strategy: &str) -> String {
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

/// Returns the VM of [`vm`] with masquerade binding.
pub(crate) fn masqueraded(name: &str, run_strategy: &str) -> String {
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

/// Returns a VM from the Debian container disk with systemd, cloud-init, guest agent and an SSH server that accepts the key.
pub(crate) fn debian(name: &str, key: &str) -> String {
    vm(name, "Always")
        .replace("guests/tiny:devel", "guests/debian:devel")
        .replace("guest: 128Mi", "guest: 512Mi")
        .replace("            password: story\n", &format!("            ssh_authorized_keys: ['{key}']\n{SILENT}"))
}

/// User data of cloud-init, whose last stage would write keys to the console, between the lines of a story.
const SILENT: &str = "            no_ssh_fingerprints: true\n            ssh: {emit_keys_to_console: false}\n";

/// Kernel arguments that save boot time under emulation.
const SAVING_ARGUMENTS: &str = include_str!("../../../guests/tiny/kernel-arguments").trim_ascii_end();

/// Returns a VM that boots a kernel image without disks, which is fastest.
pub(crate) fn kernel_vm(name: &str, run_strategy: &str) -> String {
    let arguments = SAVING_ARGUMENTS;
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
            kernelArgs: console=ttyS0 quiet {arguments}
            container:
              image: ferrovirt.io/guests/tiny-kernel:devel
              imagePullPolicy: IfNotPresent
              kernelPath: /boot/vmlinuz
              initrdPath: /boot/initrd
        devices: {{}}
"
    )
}

/// Returns a VM of [`kernel_vm`] with run strategy `Always` for the node with this host name.
pub(crate) fn kernel_vm_on(hostname: &str, name: &str) -> String {
    let on_node = format!("    spec:\n      nodeSelector: {{kubernetes.io/hostname: {hostname}}}\n      term");
    kernel_vm(name, "Always").replace("    spec:\n      term", &on_node)
}

/// Returns the VMI of [`kernel_vmi`] for the node with this host name.
pub(crate) fn kernel_vmi_on(hostname: &str, name: &str) -> String {
    kernel_vmi(name).replace("spec:\n", &format!("spec:\n  nodeSelector: {{kubernetes.io/hostname: {hostname}}}\n"))
}

/// Returns a VMI that boots a kernel image without disks, which is fastest.
pub(crate) fn kernel_vmi(name: &str) -> String {
    let arguments = SAVING_ARGUMENTS;
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
        kernelArgs: console=ttyS0 quiet {arguments}
        container:
          image: ferrovirt.io/guests/tiny-kernel:devel
          imagePullPolicy: IfNotPresent
          kernelPath: /boot/vmlinuz
          initrdPath: /boot/initrd
    devices: {{}}
"
    )
}
