"""Reads /metrics of all components as Prometheus does, and checks them with promtool.

usage: metrics.py NAMESPACE MANIFEST

MANIFEST is a file with a VM that has a login on its serial console. PROMTOOL is the path of promtool. The account that reads the
metrics is made as docs/guides/monitoring.md describes. metrics-lint.txt lists the complaints of promtool that are accepted, with
the reason; any other one fails.
"""

import fnmatch
import http.client
import os
import re
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kubernetes import client, config, stream

from common import arguments, ensure, eventually, step, vm_of

HERE = Path(__file__).parent
COMPONENTS = ("virt-api", "virt-controller", "virt-handler")
# Cluster-scoped, so that run.sh can delete it.
BINDING = "e2e-clients-metrics"
NAME = "by-metrics"
# Exit codes of promtool: 3 is a complaint of its lint.
COMPLAINTS = 3


def main(namespace: str, manifest: str) -> None:
    promtool = os.environ.get("PROMTOOL")
    ensure(promtool and os.access(promtool, os.X_OK), "PROMTOOL is not the path of promtool (cluster build-promtool prints it)")
    config.load_kube_config()
    core = client.CoreV1Api()
    run_vm(namespace, manifest)
    token = reader(core, namespace)

    pods = core.list_pod_for_all_namespaces(label_selector="prometheus.kubevirt.io=true").items
    scraped: dict[str, list[str]] = {component: [] for component in COMPONENTS}
    for pod in pods:
        component = pod.metadata.labels["kubevirt.io"]
        scraped[component].append(scrape(pod, token))
    for component, texts in scraped.items():
        ensure(texts, f"{component} has no pod with the label prometheus.kubevirt.io=true")
    described = documented()
    accepted = accepted_complaints()
    met: set[tuple[str, str]] = set()
    exported: set[str] = set()
    for component, texts in scraped.items():
        for text in texts:
            check(promtool, component, text, accepted, met)
            # promtool complains about a metric, not about a label. These are named after labels of users and of KubeVirt.
            mixed = {label for label in re.findall(r'[{,]([A-Za-z0-9_]+)="', text) if re.search("[a-z][A-Z]", label)}
            ensure(all(label.startswith("kubernetes_vmi_label_") for label in mixed), f"{component} has the labels {mixed}")
        families = {name for text in texts for name in re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)}
        ensure(families, f"{component} exports nothing")
        unknown = families - described[component]
        ensure(not unknown, f"{component} exports metrics that docs/reference/metrics.md does not list for it: {sorted(unknown)}")
        exported |= families
        series = sum(1 for text in texts for line in text.splitlines() if line and not line.startswith("#"))
        done(f"{component}: {len(texts)} pods, {len(families)} metrics with {series} series pass promtool check metrics")
    # A row is needed unless its metrics exist while a VM runs and promtool accepts them.
    stale = {f"{name} {message}" for name, message in accepted - met if fnmatch.filter(exported, name)}
    ensure(not stale, f"metrics-lint.txt lists what promtool accepts: {sorted(stale)}")
    for name in ("kubevirt_vm_info", "kubevirt_vmi_info", "kubevirt_vmi_cpu_usage_seconds_total", "kubevirt_virt_api_ready_status"):
        ensure(name in exported, f"no component exports {name}")
    labelled = f'kubevirt_vmi_memory_domain_bytes{{[^}}]*name="{NAME}"'
    ensure(any(re.search(labelled, text) for text in scraped["virt-handler"]), "virt-handler exports no metrics of the VMI")
    done(f"accepted complaints: {', '.join(sorted({name for name, _ in met})) or 'none'}")

    configuration = guide()
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        file.write(configuration)
        file.flush()
        call = [promtool, "check", "config", "--syntax-only", file.name]
        answer = subprocess.run(call, capture_output=True, text=True, check=False)
    ensure(answer.returncode == 0, f"promtool refuses the configuration of the guide: {answer.stdout}{answer.stderr}")
    done("the configuration of docs/guides/monitoring.md passes promtool check config")


def run_vm(namespace: str, manifest: str) -> None:
    objects = client.CustomObjectsApi()
    vms = {"group": "kubevirt.io", "version": "v1", "plural": "virtualmachines", "namespace": namespace}
    objects.create_namespaced_custom_object(body=vm_of(manifest, NAME, "Always"), **vms)
    ready = lambda: objects.get_namespaced_custom_object(name=NAME, **vms).get("status", {}).get("ready")
    eventually("the VM is ready", ready)


def reader(core: Any, namespace: str) -> str:
    """Returns a token of an account that may read the metrics."""
    account = {"metadata": {"name": "reader"}}
    core.create_namespaced_service_account(namespace, account)
    binding = {
        "metadata": {"name": BINDING},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kubevirt.io:metrics-reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}],
    }
    client.RbacAuthorizationV1Api().create_cluster_role_binding(binding)
    request = {"spec": {"expirationSeconds": 600}}
    return core.create_namespaced_service_account_token("reader", namespace, request).status.token


def scrape(pod: Any, token: str) -> str:
    """Returns the metrics of a pod, through a forwarded port."""
    [port] = [port for container in pod.spec.containers for port in container.ports or [] if port.name == "metrics"]
    forward = stream.portforward(
        client.CoreV1Api().connect_get_namespaced_pod_portforward,
        pod.metadata.name,
        pod.metadata.namespace,
        ports=str(port.container_port),
    )
    # The installation's own authority signs the certificates, and they do not contain the addresses of pods.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    raw = forward.socket(port.container_port)._socket
    raw.settimeout(30)
    connection = http.client.HTTPSConnection("localhost", context=context)
    connection.sock = context.wrap_socket(raw)
    accept = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}", "Accept": accept})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    ensure(answer.status == 200, f"{pod.metadata.name} answered with {answer.status} {body[:200]}")
    kind = answer.headers["Content-Type"]
    ensure(kind.startswith("text/plain; version=0.0.4"), f"{pod.metadata.name} answered with {kind}")
    return body


def accepted_complaints() -> set[tuple[str, str]]:
    """Returns the accepted complaints: names, in which * stands for any letters, and messages."""
    found = set()
    for line in (HERE / "metrics-lint.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        parts = line.split(" | ")
        ensure(len(parts) == 3 and all(parts), f"metrics-lint.txt: not a name, a message and a reason: {line}")
        found.add((parts[0], parts[1]))
    return found


def check(promtool: str, component: str, text: str, accepted: set, met: set) -> None:
    """Checks metrics with promtool."""
    call = [promtool, "check", "metrics"]
    answer = subprocess.run(call, input=text, capture_output=True, text=True, check=False)
    ensure(
        answer.returncode in (0, COMPLAINTS),
        f"promtool cannot read the metrics of {component}: {answer.stdout}{answer.stderr}",
    )
    lines = [line for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
    ensure(answer.returncode == 0 or lines, f"promtool fails without a message for {component}")
    refused = []
    for line in lines:
        name, _, message = line.partition(" ")
        rows = {row for row in accepted if row[1] == message and fnmatch.fnmatchcase(name, row[0])}
        met |= rows
        if not rows:
            refused.append(line)
    ensure(not refused, f"promtool complains about {component}:\n" + "\n".join(refused))


def documented() -> dict[str, set[str]]:
    """Returns the names of the metrics in the list of the documents, by component."""
    found: dict[str, set[str]] = {component: set() for component in COMPONENTS}
    exporters: list[str] = []
    for line in (HERE / "../../docs/reference/metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## Exported by "):
            exporters = [component for component in COMPONENTS if component in line]
        elif name := re.match(r"\| `(\w+)` \|", line):
            for component in exporters:
                found[component].add(name[1])
    ensure(all(found.values()), "docs/reference/metrics.md lists no metrics")
    return found


def guide() -> str:
    """Returns the configuration of Prometheus in the guide."""
    text = (HERE / "../../docs/guides/monitoring.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```yaml prometheus\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return block


def done(text: str) -> None:
    step("promtool", text)


if __name__ == "__main__":
    sys.exit(main(*arguments(__doc__)))
