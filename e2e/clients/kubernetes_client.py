"""Uses VMs by the official Python client: custom objects, watches, and subresources by their paths.

usage: kubernetes_client.py NAMESPACE MANIFEST

MANIFEST is a file with a VM that has a login on its serial console.
"""

import json
from typing import Any

from kubernetes import client, config, watch
from kubernetes.client.rest import ApiException

from common import BOOTED, LIMIT, arguments, ensure, eventually, step, vm_of

VMS = {"group": "kubevirt.io", "version": "v1", "plural": "virtualmachines"}
VMIS = {"group": "kubevirt.io", "version": "v1", "plural": "virtualmachineinstances"}
SUBRESOURCE = "/apis/subresources.kubevirt.io/v1/namespaces/{namespace}/{plural}/{name}/{subresource}"
NAME = "by-kubernetes"


def main(namespace: str, manifest: str) -> None:
    config.load_kube_config()
    objects = client.CustomObjectsApi()
    vms, vmis = {**VMS, "namespace": namespace}, {**VMIS, "namespace": namespace}

    vm = objects.create_namespaced_custom_object(body=vm_of(manifest, NAME, "Manual"), **vms)
    done(f"created the VM with uid {vm['metadata']['uid']}")
    vm = objects.get_namespaced_custom_object(name=NAME, **vms)
    ensure(vm["kind"] == "VirtualMachine", f"the VM has kind {vm['kind']}")
    eventually("the VM is Stopped", lambda: status(objects.get_namespaced_custom_object(name=NAME, **vms)) == "Stopped")

    listed = objects.list_namespaced_custom_object(limit=1, **vms)
    since = listed["metadata"]["resourceVersion"]
    code, answer = put(namespace, "virtualmachines", "start", {})
    ensure(code == 202, f"start was answered with {code} {answer!r}")
    shown = watch_until(objects, vms, since, "the VM is Running", lambda event: status(event["object"]) == "Running")
    ensure(shown[-1] == "Running" and "Starting" in shown, f"the watch showed {shown}")
    done(f"started the VM; the watch showed {', '.join(shown)}")
    ready = {"type": "Ready", "status": "True"}
    eventually("the VMI is Ready", lambda: has(objects.get_namespaced_custom_object(name=NAME, **vmis), ready))
    vmi = objects.get_namespaced_custom_object(name=NAME, **vmis)
    ensure(vmi["status"]["phase"] == "Running", f"the VMI is {vmi['status']['phase']}")
    done(f"the VMI is Ready on {vmi['status']['nodeName']} with {vmi['status']['interfaces'][0]['ipAddress']}")

    try:
        put(namespace, "virtualmachines", "start", {})
        ensure(False, "a running VM was started")
    except ApiException as error:
        ensure(error.status == 409, f"start of a running VM was answered with {error.status}")
        ensure(json.loads(error.body)["reason"] == "Conflict", error.body)
    done("starting it again is a conflict")

    core = client.CoreV1Api()
    selector = f"kubevirt.io=virt-launcher,kubevirt.io/created-by={vmi['metadata']['uid']}"
    [pod] = core.list_namespaced_pod(namespace, label_selector=selector).items
    log = {"name": pod.metadata.name, "namespace": namespace, "container": "compute"}
    eventually("the log shows that the guest is up", lambda: BOOTED in core.read_namespaced_pod_log(**log))
    done(f"read the serial console from the log of {pod.metadata.name}")

    label = {"metadata": {"labels": {"tier": "test"}, "annotations": {"example.com/owner": "kubernetes"}}}
    vm = objects.patch_namespaced_custom_object(name=NAME, body=label, **vms)
    ensure(vm["metadata"]["labels"]["tier"] == "test", f"the labels are {vm['metadata']['labels']}")
    listed = objects.list_namespaced_custom_object(label_selector="tier=test", **vms)
    ensure([item["metadata"]["name"] for item in listed["items"]] == [NAME], "the label selects another list")
    vm["metadata"]["labels"]["tier"] = "replaced"
    vm["metadata"].pop("managedFields", None)
    replaced = eventually("the VM can be replaced", lambda: replace(objects, vms, vm))
    ensure(replaced["metadata"]["labels"]["tier"] == "replaced", f"the labels are {replaced['metadata']['labels']}")
    done("patched and replaced the VM, and selected it by its label")

    wrong = {"spec": {"template": {"spec": {"domain": {"devices": {"disks": [{"name": "ghost"}]}}}}}}
    try:
        objects.patch_namespaced_custom_object(name=NAME, body=wrong, **vms)
        ensure(False, "a disk without a volume was accepted")
    except ApiException as error:
        ensure(error.status == 422, f"a disk without a volume was answered with {error.status} {error.body}")
        [cause] = json.loads(error.body)["details"]["causes"]
        ensure(cause["field"] == "spec.template.spec.domain.devices.disks[0].name", f"the cause is {cause}")
    done("an invalid patch is refused with the field named")

    for action, condition in (("pause", True), ("unpause", False)):
        code, answer = put(namespace, "virtualmachineinstances", action, {})
        ensure(code == 200, f"{action} was answered with {code} {answer!r}")
        paused = {"type": "Paused", "status": "True"}
        eventually(
            f"{action} is shown",
            lambda: has(objects.get_namespaced_custom_object(name=NAME, **vmis), paused) == condition,
        )
    done("paused and unpaused the VMI")

    # A request without body, as many scripts send it.
    code, answer = put(namespace, "virtualmachines", "stop", None)
    ensure(code == 202, f"stop was answered with {code} {answer!r}")
    eventually("the VM is Stopped", lambda: status(objects.get_namespaced_custom_object(name=NAME, **vms)) == "Stopped")
    eventually("the VMI is deleted", lambda: not objects.list_namespaced_custom_object(**vmis)["items"])
    done("stopped the VM")

    since = objects.list_namespaced_custom_object(**vms)["metadata"]["resourceVersion"]
    answer = objects.delete_namespaced_custom_object(name=NAME, propagation_policy="Foreground", **vms)
    watch_until(objects, vms, since, "the VM is deleted", lambda event: event["type"] == "DELETED")
    done(f"deleted the VM; the answer was a {answer['kind']}, the watch showed DELETED")


def put(namespace: str, plural: str, subresource: str, body: Any) -> tuple[int, Any]:
    """Calls a subresource, and returns the status code and the answer."""
    path = {"namespace": namespace, "plural": plural, "name": NAME, "subresource": subresource}
    answer, code, _headers = client.ApiClient().call_api(
        SUBRESOURCE,
        "PUT",
        path_params=path,
        body=body,
        header_params={"Accept": "application/json"},
        response_type="str",
        auth_settings=["BearerToken"],
    )
    return code, answer


def watch_until(objects: Any, where: dict, since: str, what: str, holds: Any) -> list[str]:
    """Watches the VM until an event shows something. Returns the statuses that the watch showed, without repetitions."""
    shown: list[str] = []
    stream = watch.Watch()
    events = stream.stream(
        objects.list_namespaced_custom_object, resource_version=since, timeout_seconds=LIMIT, **where
    )
    for event in events:
        now = status(event["object"])
        if now and shown[-1:] != [now]:
            shown.append(now)
        if holds(event):
            stream.stop()
            return shown
    ensure(False, f"not within {LIMIT} s: {what}; the watch showed {shown}")
    return shown


def replace(objects: Any, where: dict, vm: dict) -> dict | None:
    """Replaces the VM, or refreshes its version if another writer was faster."""
    try:
        return objects.replace_namespaced_custom_object(name=NAME, body=vm, **where)
    except ApiException as error:
        ensure(error.status == 409, f"the replacement was answered with {error.status} {error.body}")
        current = objects.get_namespaced_custom_object(name=NAME, **where)
        vm["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"]
        return None


def status(vm: dict) -> str | None:
    return vm.get("status", {}).get("printableStatus")


def has(item: dict, condition: dict) -> bool:
    return any(condition.items() <= known.items() for known in item.get("status", {}).get("conditions", []))


def done(text: str) -> None:
    step("kubernetes", text)


if __name__ == "__main__":
    main(*arguments(__doc__))
