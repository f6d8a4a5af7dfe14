"""Writes objects like those of a KubeVirt installation, as manifests for kubectl: `kubevirt.py FOLDER`.

operator.yaml  what KubeVirt is installed with: definition of KubeVirt, virt-operator
cr.yaml        the KubeVirt object
definitions/   the definitions that virt-operator creates
managed/       everything else that virt-operator creates

Names, labels, versions and rules are those of KubeVirt 1.9. The pods do nothing, the schemas accept everything.
"""

import json
import pathlib
import sys

NAMESPACE = "kubevirt"
VERSION = "v1.9.0"
IMAGE = "ferrovirt.io/pause:devel"
# Label and annotations of all objects that virt-operator manages.
MANAGED = {"app.kubernetes.io/managed-by": "virt-operator", "app.kubernetes.io/component": "kubevirt"}
STRATEGY = {
    "kubevirt.io/install-strategy-version": VERSION,
    "kubevirt.io/install-strategy-registry": "quay.io/kubevirt",
    "kubevirt.io/install-strategy-identifier": "0f7a3d0e4b6c",
    "kubevirt.io/generation": "1",
}
NOBODY = "system:serviceaccount:nobody:nobody"

# Kind, plural, short names, scope, versions. `*` marks the stored version, `+` a status subresource, `#` a scale subresource.
DEFINITIONS = {
    "kubevirt.io": [
        ("KubeVirt", "kubevirts", "kv kvs", "+", "*v1 v1alpha3"),
        ("VirtualMachine", "virtualmachines", "vm vms", "+", "*v1 v1alpha3"),
        ("VirtualMachineInstance", "virtualmachineinstances", "vmi vmis", "", "*v1 v1alpha3"),
        ("VirtualMachineInstanceReplicaSet", "virtualmachineinstancereplicasets", "vmirs vmirss", "+#", "*v1 v1alpha3"),
        ("VirtualMachineInstanceMigration", "virtualmachineinstancemigrations", "vmim vmims", "+", "*v1 v1alpha3"),
        ("VirtualMachineInstancePreset", "virtualmachineinstancepresets", "vmipreset vmipresets", "", "v1 *v1alpha3"),
    ],
    "pool.kubevirt.io": [("VirtualMachinePool", "virtualmachinepools", "vmpool vmpools", "+#", "v1alpha1 *v1beta1")],
    "snapshot.kubevirt.io": [
        ("VirtualMachineSnapshot", "virtualmachinesnapshots", "vmsnapshot vmsnapshots", "+", "v1alpha1 *v1beta1"),
        ("VirtualMachineSnapshotContent", "virtualmachinesnapshotcontents", "vmsnapshotcontent vmsnapshotcontents", "+", "v1alpha1 *v1beta1"),
        ("VirtualMachineRestore", "virtualmachinerestores", "vmrestore vmrestores", "+", "v1alpha1 *v1beta1"),
    ],
    "export.kubevirt.io": [("VirtualMachineExport", "virtualmachineexports", "vmexport vmexports", "+", "v1beta1 *v1")],
    "backup.kubevirt.io": [
        ("VirtualMachineBackup", "virtualmachinebackups", "vmbackup vmbackups", "+", "*v1alpha1"),
        ("VirtualMachineBackupTracker", "virtualmachinebackuptrackers", "vmbackuptracker vmbackuptrackers", "+", "*v1alpha1"),
    ],
    "clone.kubevirt.io": [("VirtualMachineClone", "virtualmachineclones", "vmclone vmclones", "+", "v1alpha1 *v1beta1")],
    "instancetype.kubevirt.io": [
        ("VirtualMachineInstancetype", "virtualmachineinstancetypes", "vminstancetype vminstancetypes vmf vmfs", "", "*v1beta1"),
        ("VirtualMachineClusterInstancetype", "virtualmachineclusterinstancetypes", "vmclusterinstancetype vmclusterinstancetypes vmcf vmcfs", "", "*v1beta1"),
        ("VirtualMachinePreference", "virtualmachinepreferences", "vmpref vmprefs vmp vmps", "", "*v1beta1"),
        ("VirtualMachineClusterPreference", "virtualmachineclusterpreferences", "vmcp vmcps", "", "*v1beta1"),
    ],
    "migrations.kubevirt.io": [("MigrationPolicy", "migrationpolicies", "", "+", "*v1alpha1")],
    "plugin.kubevirt.io": [("Plugin", "plugins", "", "", "*v1alpha1")],
}
CLUSTER_SCOPED = ["VirtualMachineClusterInstancetype", "VirtualMachineClusterPreference", "MigrationPolicy", "Plugin"]

# Webhooks of each configuration: name, operations, group, versions, resources. All fail closed.
CORE = ("kubevirt.io", ["v1alpha3", "v1"])
WEBHOOKS = {
    ("MutatingWebhookConfiguration", "virt-api-mutator", "virt-api"): [
        ("virtualmachines-mutator.kubevirt.io", "CU", *CORE, ["virtualmachines"]),
        ("virtualmachineinstances-mutator.kubevirt.io", "CU", *CORE, ["virtualmachineinstances"]),
        ("migrations-mutator.kubevirt.io", "C", *CORE, ["virtualmachineinstancemigrations"]),
        ("virtualmachineclones-mutator.kubevirt.io", "C", "clone.kubevirt.io", ["v1beta1"], ["virtualmachineclones"]),
    ],
    ("ValidatingWebhookConfiguration", "virt-api-validator", "virt-api"): [
        ("virtualmachineinstances-create-validator.kubevirt.io", "C", *CORE, ["virtualmachineinstances"]),
        ("virtualmachineinstances-update-validator.kubevirt.io", "U", *CORE, ["virtualmachineinstances"]),
        ("virtualmachine-validator.kubevirt.io", "CU", *CORE, ["virtualmachines"]),
        ("virtualmachinereplicaset-validator.kubevirt.io", "CU", *CORE, ["virtualmachineinstancereplicasets"]),
        ("virtualmachinepool-validator.kubevirt.io", "CU", "pool.kubevirt.io", ["v1beta1"], ["virtualmachinepools"]),
        ("virtualmachinepreset-validator.kubevirt.io", "CU", *CORE, ["virtualmachineinstancepresets"]),
        ("migration-create-validator.kubevirt.io", "C", *CORE, ["virtualmachineinstancemigrations"]),
        ("migration-update-validator.kubevirt.io", "U", *CORE, ["virtualmachineinstancemigrations"]),
        ("virtualmachinesnapshot-validator.snapshot.kubevirt.io", "CU", "snapshot.kubevirt.io", ["v1beta1"], ["virtualmachinesnapshots"]),
        ("virtualmachineclusterinstancetype-validator.instancetype.kubevirt.io", "CU", "instancetype.kubevirt.io", ["v1beta1"], ["virtualmachineclusterinstancetypes"]),
        ("kubevirt-crd-status-validator.kubevirt.io", "CU", *CORE, ["virtualmachines/status"]),
    ],
    ("ValidatingWebhookConfiguration", "virt-operator-validator", "kubevirt-operator-webhook"): [
        ("kubevirt-validator.kubevirt.io", "D", *CORE, ["kubevirts"]),
        ("kubevirt-update-validator.kubevirt.io", "U", *CORE, ["kubevirts"]),
        ("kubevirt-create-validator.kubevirt.io", "C", *CORE, ["kubevirts"]),
    ],
}
OPERATIONS = {"C": "CREATE", "U": "UPDATE", "D": "DELETE"}

ACCOUNTS = ["apiserver", "controller", "handler", "exportproxy", "synchronization-controller"]
SECRETS = ["ca", "export-ca", "operator-certs", "virt-api-certs", "controller-certs", "virt-handler-certs", "virt-handler-server-certs"]
CONFIG_MAPS = ["kubevirt-ca", "kubevirt-export-ca", "kubevirt-install-strategy-x7k2p"]
USER_ROLES = {
    "kubevirt.io:default": {"kubernetes.io/bootstrapping": "rbac-defaults"},
    "kubevirt.io:admin": {"rbac.authorization.k8s.io/aggregate-to-admin": "true"},
    "kubevirt.io:edit": {"rbac.authorization.k8s.io/aggregate-to-edit": "true"},
    "kubevirt.io:view": {"rbac.authorization.k8s.io/aggregate-to-view": "true"},
    "kubevirt.io:migrate": {},
    "instancetype.kubevirt.io:view": {},
}


def thing(api_version, kind, name, labels=None, namespace=None, managed=True, annotations=None, **rest):
    """Returns an object. Managed objects have the metadata of virt-operator."""
    metadata = {"name": name, "labels": {"kubevirt.io": ""}}
    if namespace:
        metadata["namespace"] = namespace
    if managed:
        metadata["labels"].update(MANAGED)
        metadata["annotations"] = dict(STRATEGY)
    metadata["labels"].update(labels or {})
    if annotations:
        metadata.setdefault("annotations", {}).update(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **rest}


def definition(group, kind, plural, short, features, versions):
    """Returns the definition of a kind."""
    subresources = {}
    if "+" in features:
        subresources["status"] = {}
    if "#" in features:
        subresources["scale"] = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas", "labelSelectorPath": ".status.labelSelector"}
    listed = []
    for version in versions.split():
        entry = {
            "name": version.lstrip("*"),
            "served": True,
            "storage": version.startswith("*"),
            "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        }
        if subresources:
            entry["subresources"] = subresources
        listed.append(entry)
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    if short:
        names["shortNames"] = short.split()
    cluster = kind in CLUSTER_SCOPED
    if not cluster:
        names["categories"] = ["all"]
    spec = {"group": group, "names": names, "scope": "Cluster" if cluster else "Namespaced", "versions": listed}
    own = kind == "KubeVirt"
    made = thing("apiextensions.k8s.io/v1", "CustomResourceDefinition", f"{plural}.{group}", managed=not own, spec=spec)
    if own:
        made["metadata"]["labels"] = {"operator.kubevirt.io": ""}
    return made


def definitions():
    """Returns the definitions of all kinds."""
    return [definition(group, *row) for group, rows in DEFINITIONS.items() for row in rows]


def role(kind, name, rules, labels=None, managed=True, namespace=None):
    """Returns a role."""
    return thing("rbac.authorization.k8s.io/v1", kind, name, labels, namespace, managed, rules=rules)


def binding(kind, name, of, subject, managed=True, namespace=None):
    """Returns a binding of a role of the same or another name."""
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind.removesuffix("Binding"), "name": of}
    return thing("rbac.authorization.k8s.io/v1", kind, name, None, namespace, managed, roleRef=reference, subjects=[subject])


def account(name):
    """Returns the subject of a service account."""
    return {"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}


def workload(kind, name, managed=True):
    """Returns a Deployment or DaemonSet whose pods do nothing."""
    labels = {"kubevirt.io": name}
    pod_labels = {**labels, "prometheus.kubevirt.io": "true"}
    spec = {
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": pod_labels},
            "spec": {
                "priorityClassName": "kubevirt-cluster-critical",
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": name, "image": IMAGE, "imagePullPolicy": "IfNotPresent"}],
            },
        },
    }
    if kind == "Deployment":
        spec["replicas"] = 2
    return thing("apps/v1", kind, name, labels, NAMESPACE, managed, spec=spec)


def service(name, selected):
    """Returns a Service."""
    ports = [{"port": 443, "targetPort": 8443}]
    return thing("v1", "Service", name, None, NAMESPACE, spec={"selector": {"kubevirt.io": selected}, "ports": ports})


def webhooks():
    """Returns the configurations of webhooks."""
    made = []
    for (kind, name, served_by), rows in WEBHOOKS.items():
        hooks = [
            {
                "name": hook,
                "rules": [{"apiGroups": [group], "apiVersions": versions, "operations": [OPERATIONS[one] for one in operations], "resources": resources}],
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "timeoutSeconds": 10,
                "clientConfig": {"service": {"namespace": NAMESPACE, "name": served_by, "path": f"/{hook}"}},
            }
            for hook, operations, group, versions, resources in rows
        ]
        # That of virt-operator itself has only its own label.
        labels = {"kubevirt.io": name}
        made.append(thing("admissionregistration.k8s.io/v1", kind, name, labels, managed=served_by == "virt-api", webhooks=hooks))
    return made


def policy():
    """Returns the policy about nodes and its binding."""
    rule = {"apiGroups": [""], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["nodes"]}
    spec = {
        "matchConstraints": {"resourceRules": [rule]},
        "matchConditions": [{"name": "virt-handler-user-only", "expression": f"request.userInfo.username == '{NOBODY}'"}],
        "validations": [{"expression": "object.spec == oldObject.spec", "message": "this user cannot modify spec of node"}],
    }
    group = "admissionregistration.k8s.io/v1"
    name = "kubevirt-node-restriction"
    return [
        thing(group, "ValidatingAdmissionPolicy", f"{name}-policy", {"kubevirt.io": name}, spec=spec),
        thing(group, "ValidatingAdmissionPolicyBinding", f"{name}-binding", {"kubevirt.io": name}, spec={"policyName": f"{name}-policy", "validationActions": ["Deny"]}),
    ]


def managed():
    """Returns what virt-operator creates beside the definitions."""
    everything = [{"apiGroups": ["kubevirt.io"], "resources": ["*"], "verbs": ["*"]}]
    reading = [{"apiGroups": ["kubevirt.io"], "resources": ["kubevirts"], "verbs": ["get", "list"]}]
    users = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:authenticated"}
    made = []
    for name, labels in USER_ROLES.items():
        made.append(role("ClusterRole", name, reading, labels))
    for name in ["kubevirt.io:default", "instancetype.kubevirt.io:view"]:
        made.append(binding("ClusterRoleBinding", name, name, users))
    for part in ACCOUNTS:
        name = f"kubevirt-{part}"
        made.append(thing("v1", "ServiceAccount", name, None, NAMESPACE))
        made.append(role("ClusterRole", name, everything))
        made.append(binding("ClusterRoleBinding", name, name, account(name)))
        made.append(role("Role", name, [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch"]}], namespace=NAMESPACE))
        made.append(binding("RoleBinding", name, name, account(name), namespace=NAMESPACE))
    made.append(binding("ClusterRoleBinding", "kubevirt-apiserver-auth-delegator", "system:auth-delegator", account("kubevirt-apiserver")))
    for name in SECRETS:
        made.append(thing("v1", "Secret", f"kubevirt-{name}", None, NAMESPACE, annotations={"kubevirt.io/duration": "24h0m0s"}, stringData={"tls.crt": "of KubeVirt", "tls.key": "of KubeVirt"}))
    for name in CONFIG_MAPS:
        labels = {"kubevirt.io/install-strategy": ""} if "strategy" in name else None
        made.append(thing("v1", "ConfigMap", name, labels, NAMESPACE, data={"ca-bundle": "of KubeVirt"}))
    made.append(service("virt-api", "virt-api"))
    made.append(service("kubevirt-operator-webhook", "virt-operator"))
    made.append(service("virt-exportproxy", "virt-exportproxy"))
    made.append(service("kubevirt-prometheus-metrics", "virt-api"))
    for name in ["virt-api", "virt-controller", "virt-exportproxy"]:
        made.append(workload("Deployment", name))
        budget = {"minAvailable": 1, "selector": {"matchLabels": {"kubevirt.io": name}}}
        made.append(thing("policy/v1", "PodDisruptionBudget", f"{name}-pdb", {"kubevirt.io": f"{name}-pdb"}, NAMESPACE, spec=budget))
    made.append(workload("DaemonSet", "virt-handler"))
    for version in ["v1", "v1alpha3"]:
        spec = {
            "group": "subresources.kubevirt.io",
            "version": version,
            "groupPriorityMinimum": 1000,
            "versionPriority": 15,
            "service": {"namespace": NAMESPACE, "name": "virt-api", "port": 443},
            "insecureSkipTLSVerify": True,
        }
        made.append(thing("apiregistration.k8s.io/v1", "APIService", f"{version}.subresources.kubevirt.io", {"kubevirt.io": "virt-api-aggregator"}, spec=spec))
    for name in ["virt-controller", "virt-operator"]:
        lease = thing("coordination.k8s.io/v1", "Lease", name, None, NAMESPACE, managed=False, spec={"holderIdentity": "of KubeVirt", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"})
        made.append(lease)
    return made + policy()


def operator():
    """Returns the manifest that KubeVirt is installed with."""
    name = "kubevirt-operator"
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    made = [
        thing("v1", "Namespace", NAMESPACE, {"pod-security.kubernetes.io/enforce": "privileged"}, managed=False),
        definitions()[0],
        thing("scheduling.k8s.io/v1", "PriorityClass", "kubevirt-cluster-critical", managed=False, value=1000000000, globalDefault=False, description="Used for KubeVirt's components."),
        thing("v1", "ServiceAccount", name, None, NAMESPACE, managed=False),
        role("ClusterRole", "kubevirt.io:operator", [{"apiGroups": ["kubevirt.io"], "resources": ["kubevirts"], "verbs": ["*"]}], {"rbac.authorization.k8s.io/aggregate-to-admin": "true"}, managed=False),
        role("Role", name, rules, managed=False, namespace=NAMESPACE),
        binding("RoleBinding", f"{name}-rolebinding", name, account(name), managed=False, namespace=NAMESPACE),
        role("ClusterRole", name, rules, managed=False),
        binding("ClusterRoleBinding", name, name, account(name), managed=False),
        workload("Deployment", "virt-operator", managed=False),
    ]
    for part, selected in [("ingress-to-metrics", "virt-operator"), ("ingress-to-virt-api-webhook-server", "virt-api"), ("virt-api-to-virt-handler", "virt-handler")]:
        spec = {"podSelector": {"matchLabels": {"kubevirt.io": selected}}, "policyTypes": ["Ingress"], "ingress": [{"ports": [{"port": 8443}]}]}
        made.append(thing("networking.k8s.io/v1", "NetworkPolicy", f"kubevirt-allow-{part}", None, NAMESPACE, managed=False, spec=spec))
    return made


def kubevirt():
    """Returns the KubeVirt object, with settings that Ferrovirt has and others that it refuses."""
    spec = {
        "imagePullPolicy": "IfNotPresent",
        "configuration": {
            "developerConfiguration": {"featureGates": ["ObjectGraph"], "useEmulation": True},
            "ksmConfiguration": {"nodeLabelSelector": {}},
        },
        "customizeComponents": {"flags": {"api": {"v": "5"}}},
        "infra": {"replicas": 2},
        "uninstallStrategy": "RemoveWorkloads",
        "workloadUpdateStrategy": {"workloadUpdateMethods": ["LiveMigrate"]},
    }
    made = thing("kubevirt.io/v1", "KubeVirt", "kubevirt", None, NAMESPACE, managed=False, spec=spec)
    del made["metadata"]["labels"]
    return [made]


def main():
    """Writes the files."""
    folder = pathlib.Path(sys.argv[1])
    for path, objects in [
        ("operator.yaml", operator()),
        ("cr.yaml", kubevirt()),
        ("definitions/definitions.yaml", definitions()[1:]),
        ("managed/objects.yaml", managed()),
        ("managed/webhooks.yaml", webhooks()),
    ]:
        path = folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"---\n{json.dumps(one, indent=1)}\n" for one in objects))


main()
