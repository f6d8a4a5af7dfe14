"""Uses VMs by kr8s: a VM as a class of its own, conditions, logs, and the console by a websocket.

usage: kr8s_client.py NAMESPACE MANIFEST

MANIFEST is a file with a VM that has a login on its serial console.
"""

import anyio
import kr8s
from kr8s import asyncio as kr8s_asyncio
from kr8s.objects import APIObject, Pod, new_class

from common import BOOTED, LIMIT, arguments, ensure, eventually, step, vm_of

VirtualMachine = new_class(kind="VirtualMachine", version="kubevirt.io/v1")
VirtualMachineInstance = new_class(kind="VirtualMachineInstance", version="kubevirt.io/v1")
ReplicaSet = new_class(kind="VirtualMachineInstanceReplicaSet", version="kubevirt.io/v1", scalable=True)
NAME = "by-kr8s"


def main(namespace: str, manifest: str) -> None:
    api = kr8s.api()
    for name in ("vm", "virtualmachine", "VirtualMachine", "virtualmachines.kubevirt.io", "vmi", "vmim"):
        kind, plural, namespaced = api.lookup_kind(name)
        ensure("kubevirt.io/v1" in kind and "/" not in plural and namespaced, f"{name} is {kind} {plural}")
    done("found the kinds by name, plural and short name")

    vm = VirtualMachine(vm_of(manifest, NAME, "Always"), namespace=namespace)
    vm.create()
    ensure(vm.exists(), "the VM does not exist")
    eventually("the VM has a status", lambda: has_status(vm))
    vm.wait("condition=Ready", timeout=LIMIT)
    vm.refresh()
    ensure(vm.status.printableStatus == "Running", f"the VM is {vm.status.printableStatus}")
    ensure(vm.status.ready is True, "the VM is Ready, its field ready is not true")
    done("created the VM and waited for condition Ready")

    vmi = VirtualMachineInstance.get(NAME, namespace=namespace)
    conditions = ["condition=Ready", "condition=LiveMigratable", "jsonpath='{.status.phase}'=Running"]
    vmi.wait(conditions, mode="all", timeout=LIMIT)
    [listed] = kr8s.get("vmi", namespace=namespace, label_selector={"app": NAME})
    ensure(listed.metadata.uid == vmi.metadata.uid, "the list by label shows another VMI")
    ensure(vmi.metadata.ownerReferences[0].uid == vm.metadata.uid, "the VM does not own its VMI")
    done("waited for conditions and phase of the VMI, and listed it by its label")

    selector = {"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": vmi.metadata.uid}
    [pod] = kr8s.get("pods", namespace=namespace, label_selector=selector)
    ensure(isinstance(pod, Pod) and pod.ready(), "the launcher pod is not ready")
    log = pod.logs(container="compute", follow=True, timeout=LIMIT)
    ensure(any(BOOTED in line for line in log), "the log ends without the guest's message")
    done(f"followed the serial console in the log of {pod.name}")

    shown = anyio.run(login, namespace)
    done(f"logged in at the console: {shown}")

    vm.label({"tier": "test"})
    vm.annotate({"example.com/owner": "kr8s"})
    vm.patch({"metadata": {"labels": {"tier": None}}})
    vm.patch([{"op": "add", "path": "/spec/template/metadata/labels/tier", "value": "test"}], type="json")
    ensure(vm.annotations["example.com/owner"] == "kr8s" and "tier" not in vm.labels, f"the VM has {vm.metadata}")
    ensure(vm.spec.template.metadata.labels.tier == "test", "the label of the template is missing")
    done("labelled, annotated and patched the VM")

    put(namespace, "virtualmachineinstances", "pause")
    vmi.wait("condition=Paused", timeout=LIMIT)
    put(namespace, "virtualmachineinstances", "unpause")
    while any(known.type == "Paused" for known in vmi.status.conditions):
        next(iter(vmi.watch()))
    done("paused and unpaused the VMI")

    put(namespace, "virtualmachines", "restart")

    def successor() -> VirtualMachineInstance | None:
        found = list(kr8s.get("vmi", namespace=namespace, label_selector={"app": NAME}))
        return next((item for item in found if item.metadata.uid != vmi.metadata.uid), None)

    vmi = eventually("the restart makes another VMI", successor)
    vmi.wait("condition=Ready", timeout=LIMIT)
    done("restarted the VM; another VMI is Ready")

    vm.delete()
    vm.wait("delete", timeout=LIMIT)
    ensure(not vmi.exists(), "the VMI of a deleted VM exists")
    done("deleted the VM")

    template = vm_of(manifest, NAME, "Always")["spec"]["template"]
    replicas = ReplicaSet(
        {
            "metadata": {"name": NAME},
            "spec": {"replicas": 0, "selector": {"matchLabels": {"app": NAME}}, "template": template},
        },
        namespace=namespace,
    )
    replicas.create()
    replicas.scale(1)
    ready = lambda: has_status(replicas) and "readyReplicas" in replicas.status
    eventually("the replica set has a ready replica", ready)
    replicas.wait("jsonpath='{.status.readyReplicas}'=1", timeout=LIMIT)
    replicas.delete()
    replicas.wait("delete", timeout=LIMIT)
    done("scaled a replica set to one and deleted it")


def has_status(item: APIObject) -> bool:
    """Returns true if an object has a status: kr8s cannot wait for conditions before."""
    item.refresh()
    return "status" in item.raw


async def login(namespace: str) -> str:
    """Logs in at the console, and returns what a command shows."""
    api = await kr8s_asyncio.api()
    path = f"virtualmachineinstances/{NAME}/console"
    with anyio.fail_after(LIMIT):
        async with api.open_websocket(
            version="subresources.kubevirt.io/v1", namespace=namespace, url=path, subprotocols=["plain.kubevirt.io"]
        ) as console:
            ensure(console.subprotocol == "plain.kubevirt.io", f"the subprotocol is {console.subprotocol}")

            async def expect(text: str) -> str:
                seen = ""
                while text not in seen:
                    seen += (await console.receive_bytes()).decode(errors="replace")
                return seen

            await console.send_bytes(b"\n")
            for prompt, answer in (("login:", b"root\n"), ("Password:", b"ferrovirt\n"), ("#", b"echo $((6 * 7))-$USER\n")):
                await expect(prompt)
                await console.send_bytes(answer)
            seen = await expect("42-root")
            return next(line for line in seen.splitlines() if "42-root" in line)


def put(namespace: str, plural: str, subresource: str) -> None:
    """Calls a subresource. The class of the library that has no coroutines offers no requests of this kind."""

    async def call() -> int:
        api = await kr8s_asyncio.api()
        async with api.call_api(
            "PUT", version="subresources.kubevirt.io/v1", namespace=namespace, url=f"{plural}/{NAME}/{subresource}"
        ) as response:
            return response.status_code

    code = anyio.run(call)
    ensure(code in (200, 202), f"{subresource} was answered with {code}")


def done(text: str) -> None:
    step("kr8s", text)


if __name__ == "__main__":
    main(*arguments(__doc__))
