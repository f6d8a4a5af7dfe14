"""Uses VMs by openshift-python-wrapper: its classes, and the waiting that their methods do.

usage: openshift_wrapper.py NAMESPACE MANIFEST

MANIFEST is a file with a VM that has a login on its serial console. An image of a guest with the guest agent must be in the same
registry under the name `debian`. The library writes a log to standard error.
"""

from typing import Any

from kubernetes.dynamic import DynamicClient
from ocp_resources.kubevirt import KubeVirt
from ocp_resources.node import Node
from ocp_resources.resource import ResourceEditor, get_client
from ocp_resources.virtual_machine import VirtualMachine
from ocp_resources.virtual_machine_cluster_preference import VirtualMachineClusterPreference
from ocp_resources.virtual_machine_instance import VirtualMachineInstance
from ocp_resources.virtual_machine_instance_migration import VirtualMachineInstanceMigration
from ocp_resources.virtual_machine_instancetype import VirtualMachineInstancetype

from common import BOOTED, arguments, ensure, eventually, step, vm_of

NAME = "by-openshift"
# A whole distribution boots under software emulation.
BOOT = 900


def main(namespace: str, manifest: str) -> None:
    client = get_client()
    kubevirts = list(KubeVirt.get(client=client))
    ensure(kubevirts, "there is no KubeVirt object")
    kubevirts[0].wait_for_status(status="Deployed", timeout=60)
    kubevirts[0].wait_for_condition(condition="Available", status="True", timeout=60)
    done(f"KubeVirt {kubevirts[0].namespace}/{kubevirts[0].name} is Deployed and Available")

    # Boots while the other steps run.
    with VirtualMachine(client=client, name="agent", namespace=namespace, body=debian(manifest)) as guest:
        with VirtualMachine(client=client, name=NAME, namespace=namespace, body=vm_of(manifest, NAME, "Halted")) as vm:
            lifecycle(vm)
            migrate(client, vm)
            stop(vm)
        ensure(not vm.exists and not vm.vmi.exists, "the VM or its VMI exists after the deletion")
        done("deleted the VM")
        instancetype(client, namespace, manifest)
        agent(guest)


def lifecycle(vm: VirtualMachine) -> None:
    eventually("the VM is Stopped", lambda: vm.printable_status == VirtualMachine.Status.STOPPED)
    vm.wait_for_ready_status(status=None)
    done("created a halted VM; its status ready is None")

    vm.start(wait=True)
    vmi = vm.vmi
    vmi.wait_until_running()
    ensure(vm.ready is True and vm.printable_status == "Running", f"the VM is {vm.printable_status}")
    vmi.wait_for_condition(condition=VirtualMachineInstance.Condition.READY, status="True")
    done(f"started the VM; the VMI runs on {vmi.get_node().name}")

    ensure(vmi.interfaces[0].ipAddress == vmi.get_virt_launcher_pod().ip, f"the VMI has {vmi.interfaces}")
    ensure(vmi.get_virt_handler_pod().node.name == vmi.get_node().name, "virt-handler is on another node")
    booted = lambda: BOOTED in vmi.get_virt_launcher_pod().log(container="compute")
    eventually("the log shows that the guest is up", booted)
    done("found node, address, launcher pod and virt-handler, and read the console from the log")
    name = vmi.get_xml_dict()["domain"]["name"]
    ensure(name == f"{vm.namespace}_{vm.name}", f"the domain is {name}")
    ensure("actual" in vmi.get_dommemstat(), "virsh dommemstat shows no memory")
    done("read the domain XML and the memory statistics by virsh in the launcher pod")

    vmi.pause(wait=True)
    eventually("the VM is Paused", lambda: vm.printable_status == VirtualMachine.Status.PAUSED)
    vmi.unpause(wait=True)
    eventually("the VM is Running", lambda: vm.printable_status == VirtualMachine.Status.RUNNING)
    done("paused and unpaused the VMI")

    former = vmi.instance.metadata.uid
    vm.restart(wait=True)
    ensure(vm.vmi.instance.metadata.uid != former, "the VMI is the same after the restart")
    vm.wait_for_ready_status(status=True)
    done("restarted the VM")

    labels = {"spec": {"template": {"metadata": {"labels": {"tier": "test"}}}}}
    with ResourceEditor(patches={vm: labels}):
        ensure(vm.instance.spec.template.metadata.labels.tier == "test", "the template has not the label")
    ensure(vm.instance.spec.template.metadata.labels.tier is None, "the template has the label still")
    done("edited the template and took the edit back")


def migrate(client: DynamicClient, vm: VirtualMachine) -> None:
    nodes = [node for node in Node.get(client=client) if node.instance.metadata.labels["kubevirt.io/schedulable"] == "true"]
    if len(nodes) < 2:
        done("SKIPPED migration: the cluster has one node for VMs")
        return
    vmi = vm.vmi
    vmi.wait_for_condition(condition="LiveMigratable", status="True")
    former, pod = vmi.get_node().name, vmi.get_virt_launcher_pod().name
    with VirtualMachineInstanceMigration(
        client=client, name=NAME, namespace=vm.namespace, vmi_name=vm.name
    ) as migration:
        migration.wait_for_status(status=migration.Status.SUCCEEDED, timeout=300)
        state = vmi.instance.status.migrationState
        ensure(state.completed and not state.failed, f"the state of the migration is {state}")
        ensure(vmi.get_node().name not in (former, None), f"the VMI is on {vmi.get_node().name} still")
        ensure(vmi.get_virt_launcher_pod().name not in (pod, None), "the launcher pod is that of the source")
        ensure(vmi.get_virt_launcher_pod().node.name == vmi.get_node().name, "the launcher pod is on another node")
    vm.wait_for_ready_status(status=True)
    done(f"migrated the VMI from {former} to {vmi.get_node().name}")


def stop(vm: VirtualMachine) -> None:
    vm.stop(wait=True)
    ensure(not vm.vmi.exists, "a stopped VM has a VMI")
    eventually("the VM is Stopped", lambda: vm.printable_status == VirtualMachine.Status.STOPPED)
    done("stopped the VM; its status ready is None")


def instancetype(client: DynamicClient, namespace: str, manifest: str) -> None:
    body = vm_of(manifest, f"{NAME}-sized", "Halted")
    del body["spec"]["template"]["spec"]["domain"]["memory"]
    for disk in body["spec"]["template"]["spec"]["domain"]["devices"]["disks"]:
        disk["disk"] = {}
    # Named after the namespace: it belongs to the whole cluster.
    preference = VirtualMachineClusterPreference(
        client=client, name=namespace, devices={"preferredDiskBus": "virtio"}
    )
    size = VirtualMachineInstancetype(
        client=client, name="small", namespace=namespace, cpu={"guest": 1}, memory={"guest": "128Mi"}
    )
    with preference, size:
        body["spec"]["instancetype"] = {"name": "small", "kind": "VirtualMachineInstancetype"}
        body["spec"]["preference"] = {"name": namespace, "kind": "VirtualMachineClusterPreference"}
        with VirtualMachine(client=client, name=f"{NAME}-sized", namespace=namespace, body=body) as vm:
            vm.start(wait=True)
            domain = vm.vmi.instance.spec.domain
            ensure(domain.memory.guest == "128Mi", f"the memory is {domain.memory}")
            ensure(domain.devices.disks[0].disk.bus == "virtio", f"the disk is {domain.devices.disks[0]}")
            expanded = vm.api_request(method="GET", action="expand-spec")
            spec = expanded["spec"]
            ensure("instancetype" not in spec and "preference" not in spec, "expand-spec shows the instance type")
            ensure(spec["template"]["spec"]["domain"]["memory"]["guest"] == "128Mi", "expand-spec shows no memory")
    done("ran a VM of an instance type and a preference, and read its expanded spec")


def debian(manifest: str) -> dict[str, Any]:
    """Returns a VM whose guest has the guest agent."""
    vm = vm_of(manifest, "agent", "Always")
    template = vm["spec"]["template"]["spec"]
    template["domain"]["memory"]["guest"] = "512Mi"
    disk = template["volumes"][0]["containerDisk"]
    disk["image"] = disk["image"].replace("/guests/tiny:", "/guests/debian:")
    return vm


def agent(vm: VirtualMachine) -> None:
    vmi = vm.vmi
    vmi.wait_for_condition(condition="AgentConnected", status="True", timeout=BOOT)

    def named() -> str | None:
        return vmi.interfaces[0].interfaceName if vmi.os_version else None

    interface = eventually("the guest agent reports interfaces and system", named, limit=180)
    address = vmi.interface_ip(interface=interface)
    ensure(address and address == vmi.interfaces[0].ipAddress, f"interface_ip returns {address}")
    ensure(vmi.interface_ip(interface="absent0") is None, "an absent interface has an address")
    done(f"the guest agent reports {interface} with {address}")

    system = vmi.guest_os_info
    ensure(system["os"]["id"] == "debian", f"guestosinfo is {system}")
    ensure(any(disk["mountPoint"] == "/" for disk in vmi.guest_fs_info["items"]), f"filesystemlist is {vmi.guest_fs_info}")
    ensure(isinstance(vmi.guest_user_info["items"], list), f"userlist is {vmi.guest_user_info}")
    done(f"read system ({system['os']['prettyName']}), file systems and users of the guest")


def done(text: str) -> None:
    step("openshift-python-wrapper", text)


if __name__ == "__main__":
    main(*arguments(__doc__))
