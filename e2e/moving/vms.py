"""Creates VMs and what belongs to them as KubeVirt stores them, and compares them later.

vms.py create NAMESPACE   reads a VM as JSON from standard input, and creates all objects
vms.py record FILE        writes all objects of users into a file
vms.py compare FILE [VM]  fails if one of them is lost or changed, but for a VM that was deleted
"""

import copy
import json
import subprocess
import sys

# Kinds of users.
KINDS = [
    "virtualmachines.kubevirt.io",
    "virtualmachineinstancepresets.kubevirt.io",
    "virtualmachinepools.pool.kubevirt.io",
    "virtualmachinesnapshots.snapshot.kubevirt.io",
    "virtualmachineclusterinstancetypes.instancetype.kubevirt.io",
    "virtualmachinepreferences.instancetype.kubevirt.io",
]
VM_FINALIZER = "kubevirt.io/virtualMachineControllerFinalize"
POOL_FINALIZER = "pool.kubevirt.io/finalizer"
# Finalizers that Ferrovirt has as well, so that it may add and remove them.
SHARED_FINALIZERS = {VM_FINALIZER, POOL_FINALIZER, "snapshot.kubevirt.io/vmsnapshot-protection"}
OBSERVED = {"kubevirt.io/latest-observed-api-version": "v1", "kubevirt.io/storage-observed-api-version": "v1"}
# Memory of the instance type when the VM was created, and now.
COPIED_MEMORY, PRESENT_MEMORY = "160Mi", "1Ti"


def kubectl(*arguments, text=None):
    """Runs kubectl and returns its output."""
    return subprocess.run(["kubectl", *arguments], input=text, check=True, stdout=subprocess.PIPE, text=True).stdout


def create(thing, status=None):
    """Creates an object, with a status, and returns it."""
    made = json.loads(kubectl("create", "--filename=-", "--output=json", text=json.dumps(thing)))
    if status:
        kind, _, name = kubectl("get", "--filename=-", "--output=name", text=json.dumps(made)).strip().partition("/")
        patch = json.dumps({"status": status})
        kubectl("patch", kind, name, "--namespace", made["metadata"].get("namespace", ""), "--subresource=status", "--type=merge", "--patch", patch)
    return made


def thing(api_version, kind, name, namespace=None, spec=None, **metadata):
    """Returns an object."""
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": namespace, **metadata}, "spec": spec or {}}


def stopped(example, namespace, name, number):
    """Returns a stopped VM with the defaults of KubeVirt."""
    vm = copy.deepcopy(example)
    vm["metadata"] = {"name": name, "namespace": namespace, "labels": {"team": "a"}, "annotations": dict(OBSERVED), "finalizers": [VM_FINALIZER]}
    vm["spec"]["runStrategy"] = "Halted"
    vm["spec"]["template"]["metadata"]["annotations"] = {"kubevirt.io/pci-topology-version": "v3"}
    template = vm["spec"]["template"]["spec"]
    template["architecture"] = "amd64"
    template["domain"]["machine"] = {"type": "q35"}
    identity = f"{number:08x}-0000-4000-8000-000000000000"
    template["domain"]["firmware"] = {"uuid": identity, "serial": identity}
    template["domain"]["resources"] = {}
    return vm


def status():
    """Returns the status of a stopped VM."""
    condition = {"type": "Ready", "status": "False", "reason": "VMINotExists", "message": "VMI does not exist", "lastProbeTime": "2026-01-01T00:00:00Z", "lastTransitionTime": None}
    return {"printableStatus": "Stopped", "conditions": [condition], "desiredGeneration": 1, "observedGeneration": 1, "volumeSnapshotStatuses": [{"name": "root", "enabled": False, "reason": "Snapshot is not supported for this volumeSource type [root]"}]}


def owned_by(owner, controller=True):
    """Returns the owner reference to an object."""
    metadata = owner["metadata"]
    return [{"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"], "controller": controller, "blockOwnerDeletion": controller}]


def copy_for(vm, original, kind):
    """Creates the copy of an instance type or a preference for a VM, and returns its name."""
    metadata = original["metadata"]
    name = f"{vm['metadata']['name']}-{metadata['name']}-v1beta1-{metadata['uid']}-{metadata['generation']}"
    labels = {
        "instancetype.kubevirt.io/object-generation": str(metadata["generation"]),
        "instancetype.kubevirt.io/object-kind": kind,
        "instancetype.kubevirt.io/object-name": metadata["name"],
        "instancetype.kubevirt.io/object-uid": metadata["uid"],
        "instancetype.kubevirt.io/object-version": "v1beta1",
    }
    data = copy.deepcopy(original)
    data["metadata"].pop("managedFields", None)
    revision = {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {"name": name, "namespace": vm["metadata"]["namespace"], "labels": labels, "ownerReferences": owned_by(vm)},
        "data": data,
        "revision": 0,
    }
    create(revision)
    return name


def create_all(namespace):
    """Creates the objects."""
    example = json.load(sys.stdin)

    create(stopped(example, namespace, "my-vm", 1), status())
    create(stopped(example, namespace, "other", 2), status())

    # Ferrovirt stores it, and does not start it.
    unsupported = stopped(example, namespace, "with-display", 3)
    unsupported["spec"]["template"]["spec"]["domain"]["devices"]["gpus"] = [
        {"name": "g", "deviceName": "example.org/gpu", "virtualGPUOptions": {"display": {}}}]
    create(unsupported, status())

    # One of those that virt-operator creates, so with its label.
    group = "instancetype.kubevirt.io/v1beta1"
    labels = {"app.kubernetes.io/managed-by": "virt-operator", "app.kubernetes.io/component": "kubevirt"}
    size = create(thing(group, "VirtualMachineClusterInstancetype", "u1.test", spec={"cpu": {"guest": 1}, "memory": {"guest": COPIED_MEMORY}}, labels=labels))
    preference = create(thing(group, "VirtualMachinePreference", "linux", namespace, {"devices": {"preferredDiskBus": "virtio"}}))
    sized = stopped(example, namespace, "sized", 4)
    del sized["spec"]["template"]["spec"]["domain"]["memory"]
    sized["spec"]["instancetype"] = {"kind": "virtualmachineclusterinstancetype", "name": "u1.test"}
    sized["spec"]["preference"] = {"kind": "virtualmachinepreference", "name": "linux"}
    sized = create(sized)
    references = {
        "instancetypeRef": {"kind": "virtualmachineclusterinstancetype", "name": "u1.test", "controllerRevisionRef": {"name": copy_for(sized, size, "VirtualMachineClusterInstancetype")}},
        "preferenceRef": {"kind": "virtualmachinepreference", "name": "linux", "controllerRevisionRef": {"name": copy_for(sized, preference, "VirtualMachinePreference")}},
    }
    patch = json.dumps({"status": {**status(), **references}})
    kubectl("patch", "vm", "sized", "--namespace", namespace, "--subresource=status", "--type=merge", "--patch", patch)
    # The VM keeps its copy.
    patch = json.dumps({"spec": {"memory": {"guest": PRESENT_MEMORY}}})
    kubectl("patch", "virtualmachineclusterinstancetype", "u1.test", "--type=merge", "--patch", patch)

    template = {"metadata": {"labels": {"pool": "pool"}}, "spec": example["spec"]}
    pool = thing("pool.kubevirt.io/v1beta1", "VirtualMachinePool", "pool", namespace, {"replicas": 2, "paused": True, "selector": {"matchLabels": {"pool": "pool"}}, "virtualMachineTemplate": template}, finalizers=[POOL_FINALIZER])
    pool = create(pool)
    of_revision = {"kubevirt.io/vm-pool-revision-name": "pool-1"}
    for number, name in enumerate(["pool-0", "pool-1"], 5):
        member = stopped(example, namespace, name, number)
        member["metadata"]["labels"] = {"pool": "pool", **of_revision}
        member["metadata"]["ownerReferences"] = owned_by(pool)
        member["metadata"]["finalizers"].append(POOL_FINALIZER)
        member["spec"]["template"]["metadata"].setdefault("labels", {}).update(of_revision)
        create(member, status())

    held = stopped(example, namespace, "held", 7)
    held["metadata"]["finalizers"].append("backup.example.com/finalizer")
    create(held, status())

    source = {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "my-vm"}
    create(thing("snapshot.kubevirt.io/v1beta1", "VirtualMachineSnapshot", "before", namespace, {"source": source}, finalizers=["snapshot.kubevirt.io/vmsnapshot-protection"]))
    # The only kind that is not stored in its newest version. No VM has the label.
    create(thing("kubevirt.io/v1alpha3", "VirtualMachineInstancePreset", "preset", namespace, {"selector": {"matchLabels": {"flavor": "small"}}, "domain": {"devices": {}, "resources": {"requests": {"memory": "64Mi"}}}}))


def recorded():
    """Returns all objects of users by kind, namespace and name."""
    found = {}
    for kind in [*KINDS, "controllerrevisions.apps"]:
        selector = ["--selector=instancetype.kubevirt.io/object-name"] if kind.startswith("controllerrevisions") else []
        for one in json.loads(kubectl("get", kind, "--all-namespaces", "--output=json", *selector))["items"]:
            metadata = one["metadata"]
            found[f"{kind} {metadata.get('namespace', '')}/{metadata['name']}"] = one
    return found


def lacks(before, after, path=""):
    """Lists what an object has lost of its annotations, labels or fields. Defaults may be added."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [lost for key, value in before.items() for lost in lacks(value, after.get(key), f"{path}.{key}")]
    # An empty object says as much as none.
    return [] if before == after or (before in ({}, None) and after in ({}, None)) else [f"{path}: {before!r} became {after!r}"]


def compare(path, deleted=None):
    """Compares the objects with those of a file."""
    with open(path) as file:
        former = {key: one for key, one in json.load(file).items() if one["kind"] != "VirtualMachine" or one["metadata"]["name"] != deleted}
    present = recorded()
    failures = [f"{key} is lost" for key in former if key not in present]
    for key, before in former.items():
        if key not in present:
            continue
        after = present[key]
        for field in ["uid", "creationTimestamp", "ownerReferences", "labels", "annotations"]:
            failures += [f"{key}: {lost}" for lost in lacks(before["metadata"].get(field), after["metadata"].get(field), field)]
        if after["metadata"].get("deletionTimestamp"):
            failures.append(f"{key} is being deleted")
        finalizers = [set(one["metadata"].get("finalizers", [])) - SHARED_FINALIZERS for one in [before, after]]
        if finalizers[0] != finalizers[1]:
            failures.append(f"{key}: finalizers {finalizers[0]} became {finalizers[1]}")
        for field in ["spec", "data"]:
            failures += [f"{key}: {lost}" for lost in lacks(before.get(field), after.get(field), field)]
    if failures:
        sys.exit("\n".join(failures))
    print(f"{len(former)} objects are there, unchanged")


def main():
    """Runs one of the commands."""
    command, argument, *more = sys.argv[1:]
    if command == "create":
        create_all(argument)
    elif command == "record":
        with open(argument, "w") as file:
            json.dump(recorded(), file, indent=1)
    else:
        compare(argument, *more)


main()
