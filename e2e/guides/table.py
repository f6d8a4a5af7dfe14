"""The guides in the order of the test, and what their commands need. See README.md.

A command is written as in the guide, without its comment and with single spaces.
"""

import dataclasses

# The installation comes first, its end last.
FIRST = ["install", "upgrade"]
LAST = ["uninstall"]
# Another test executes all commands of this guide (`make moving-test`).
ELSEWHERE = ["moving-from-kubevirt"]

RELEASE = "needs a published release: make release-test executes it"
REGISTRY = "needs a registry, and builds the images: make release-test pushes them"
NO_KVM = "needs a node with hardware virtualization"
CDI = "needs CDI, and later guides need the definitions of DataVolumes"

# Commands that are not executed: guide, command, reason.
NOT_EXECUTED = [
    ("install", "kubectl apply --server-side -f crds.yaml", RELEASE),
    ("install", "kubectl apply --server-side -f importer-crds.yaml", RELEASE),
    ("install", "kubectl wait --for=condition=Established crd/kubevirts.kubevirt.io", RELEASE),
    ("install", "kubectl apply --server-side -f install.yaml", RELEASE),
    (
        "install",
        "helm install ferrovirt oci://registry.example.com/ferrovirt/charts/ferrovirt --version 0.1.0 --namespace kubevirt --set 'imagePullSecrets[0].name=registry'",
        RELEASE,
    ),
    ("install", "make images push REGISTRY=registry.example.com/ferrovirt", REGISTRY),
    ("upgrade", "make images push REGISTRY=registry.example.com/ferrovirt", REGISTRY),
    (
        "changing-a-running-vm",
        "echo 1 > /sys/devices/system/cpu/cpu1/online",
        "Linux does not use a new vCPU under software emulation, as the guide says",
    ),
    ("consoles-and-clients", "kubectl virt usbredir 0951:1666 my-vm", "needs a USB device and usbredirect"),
    ("kvm-hosts", "ls -l /dev/kvm /dev/net/tun /dev/vhost-net", NO_KVM),
    ("kvm-hosts", "lsmod | grep kvm", NO_KVM),
    ("kvm-hosts", "grep -c -w -e vmx -e svm /proc/cpuinfo", NO_KVM),
    ("kvm-hosts", "cat /sys/module/kvm_intel/parameters/nested", NO_KVM),
    ("kvm-hosts", "make images debug-image guests push REGISTRY=registry.example.com/ferrovirt", REGISTRY),
    (
        "kvm-hosts",
        "KUBECONFIG=$HOME/.kube/config REGISTRY=registry.example.com/ferrovirt make e2e",
        "needs a cluster with a registry, and runs all stories",
    ),
    ("disks", "helm upgrade ferrovirt charts/ferrovirt --namespace kubevirt --reuse-values --set importer=off", CDI),
    ("disks", "kubectl get datavolumes,datasources --all-namespaces", CDI),
    ("disks", "kubectl annotate crd datavolumes.cdi.kubevirt.io datasources.cdi.kubevirt.io ferrovirt.io/confirm-deletion=true", CDI),
    ("disks", "kubectl delete crd datavolumes.cdi.kubevirt.io datasources.cdi.kubevirt.io", CDI),
    ("disks", """kubectl patch cdi cdi --type merge --patch '{"metadata": {"finalizers": ["operator.cdi.kubevirt.io"]}}'""", CDI),
    ("disks", "uid=$(kubectl get cdi cdi --output jsonpath='{.metadata.uid}')", CDI),
    ("disks", "kubectl create --filename - <<END", CDI),
    (
        "web-console",
        "ssh -L 8090:127.0.0.1:8090 bastion kubectl virt ui --no-open --port 8090",
        "needs another host with an SSH server",
    ),
]


@dataclasses.dataclass
class Step:
    """What a command needs. All are scripts with the functions of prelude.sh."""

    before: str = ""
    # Instead of the command: `{}` is the command.
    run: str = "{}"
    after: str = ""
    # Regular expression that its output must match.
    shows: str = ""
    # Seconds.
    limit: int = 300


# What a guide needs before its first block. Its namespace exists.
START = {
    "upgrade": "vm my-vm",
    "troubleshooting": "vm my-vm",
    "uninstall": "vm my-vm",
}

# What a guide leaves behind that others could notice.
END = {
    "upgrade": """kubectl -n kubevirt patch kubevirt kubevirt --type merge -p '{"spec":{"workloadUpdateStrategy":null}}'""",
    "kvm-hosts": "helm upgrade ferrovirt charts/ferrovirt --namespace kubevirt --reuse-values $EMULATION; deployed",
    "tracing": "helm upgrade ferrovirt charts/ferrovirt -n kubevirt --reuse-values --set tracing.endpoint=; deployed",
    "migration": "kubectl delete vm mover --wait=false",
}

# Nobody answers the question about the key of a new host.
NEW_HOST = '-t "-o StrictHostKeyChecking=accept-new" -t "-o UserKnownHostsFile=$PWD/known_hosts"'
# Without program to stop it, a viewer only reads the greeting of the VNC server.
VIEWER = """mkdir -p bin
printf '%s\\n' '#!/bin/sh' 'exec python3 -c "import socket, sys; host, port = sys.argv[1].removeprefix(\\"vnc://\\").rsplit(\\":\\", 1); server = socket.create_connection((host, port), 10); print(server.recv(12), flush=True)" "$@"' >bin/remote-viewer
chmod +x bin/remote-viewer"""

STEPS = {
    "install": {
        # The second way of the guide: the first one is undone.
        "kubectl create namespace kubevirt": Step(before="no_installation"),
        "helm template ferrovirt ferrovirt-0.1.0.tgz --namespace kubevirt --no-hooks --set metrics.readers=... > install.yaml": Step(
            before="""cp "$CHART" ferrovirt-0.1.0.tgz""",
            run="helm template ferrovirt ferrovirt-0.1.0.tgz --namespace kubevirt --no-hooks"
            " --set 'metrics.readers[0].namespace=monitoring,metrics.readers[0].name=prometheus-k8s' > install.yaml",
            after="kubectl apply --server-side --dry-run=server --force-conflicts -f install.yaml",
        ),
        "helm upgrade ferrovirt charts/ferrovirt --namespace kubevirt --reuse-values --set kubevirt.configuration.developerConfiguration.useEmulation=true": Step(
            after="deployed"
        ),
        "make install-cli": Step(run='make -C "$ROOT" install-cli PREFIX="$PWD/local"', after="local/bin/kubectl-virt version --client", limit=1200),
        "kubectl virt version": Step(shows="Server"),
    },
    "upgrade": {
        "kubectl virt restart my-vm": Step(before="remember my-vm", after="replaced my-vm"),
        "helm rollback ferrovirt --namespace kubevirt": Step(after="deployed"),
        "helm rollback ferrovirt 1 --namespace kubevirt": Step(after="deployed"),
    },
    "first-vm": {
        "kubectl get vm,vmi": Step(after="within 240 runs first", shows="first"),
        "kubectl virt console first": Step(before="booted first", run="in_guest first secret 'test $(hostname) = first'"),
        "kubectl virt vnc first --screenshot first.png": Step(after="head -c 4 first.png | grep -q PNG"),
        "kubectl virt pause vm first": Step(after="within 60 has vm/first '{.status.printableStatus}' Paused"),
        "kubectl virt unpause vm first": Step(after="within 60 runs first"),
        "kubectl virt stop first": Step(after="kubectl wait vmi/first --for=delete --timeout=120s"),
        "kubectl virt start first": Step(after="booted first"),
        "kubectl virt restart first": Step(before="remember first", after="replaced first; booted first"),
        "kubectl virt soft-reboot first": Step(after="booted first"),
        "kubectl virt reset first": Step(after="booted first"),
        "kubectl delete vm first": Step(after="within 120 eval '! kubectl get vmi first'"),
    },
    "storage": {
        "kubectl virt addvolume box --volume-name=more": Step(before="booted box"),
        "kubectl virt addvolume box --volume-name=fast --bus=virtio --serial=FAST": Step(
            before="""within 120 has vmi/box '{.status.volumeStatus[?(@.name=="more")].phase}' Ready""",
            after="""within 120 has vmi/box '{.status.volumeStatus[?(@.name=="fast")].phase}' Ready""",
        ),
        "kubectl virt removevolume box --volume-name=more": Step(
            after="""within 120 has vmi/box '{.status.volumeStatus[?(@.name=="more")].phase}' ''"""
        ),
        "kubectl get vm box -o jsonpath='{.status.memoryDumpRequest}'": Step(
            before="within 180 has vm/box '{.status.memoryDumpRequest.phase}' Completed", shows="Completed"
        ),
    },
    "disks": {
        "kubectl get datavolumes": Step(before="within 60 kubectl get datavolume web-root", shows="web-root"),
        "kubectl virt console web": Step(before="booted web", run="in_guest web secret 'test $(hostname) = web'"),
    },
    "images": {
        "kubectl virt console lasting": Step(before="booted lasting", run="in_guest lasting secret 'test $(hostname) = lasting'"),
    },
    "changing-a-running-vm": {
        "kubectl virt set cpu grows --sockets 2 --wait": Step(before="booted grows"),
        "echo online_movable > /sys/devices/system/memory/auto_online_blocks": Step(run="in_guest grows secret '{}'"),
    },
    "web-console": {
        "kubectl virt ui": Step(run="stays 5 {}", shows="http://127.0.0.1"),
        "kubectl virt ui --namespace shop --no-open": Step(run="stays 5 {}", shows="http://127.0.0.1"),
        "kubectl virt ui --all-namespaces --port 8090": Step(run="stays 5 {}", shows="http://127.0.0.1:8090"),
    },
    "migration": {
        "kubectl get vmi mover -o jsonpath='{.status.conditions[?(@.type==\"LiveMigratable\")]}'": Step(
            before="booted mover", shows='"status":"True"'
        ),
        "kubectl virt migrate mover --wait": Step(before="node_of mover >node1", after='is_elsewhere mover "$(cat node1)"'),
        # The name of the node is an example.
        "kubectl virt migrate mover --added-node-selector kubernetes.io/hostname=node1": Step(
            run="kubectl virt migrate mover --added-node-selector kubernetes.io/hostname=$(cat node1)"
        ),
        "kubectl virt migrate-cancel mover": Step(after="migrated"),
        "kubectl drain node1 --ignore-daemonsets --delete-emptydir-data": Step(
            before="node_of mover >node1",
            run="kubectl drain $(cat node1) --ignore-daemonsets --delete-emptydir-data",
            after='migrated; is_elsewhere mover "$(cat node1)"',
        ),
        "kubectl virt drain-status node1": Step(run="kubectl virt drain-status $(cat node1)", after="kubectl uncordon $(cat node1)"),
        "kubectl taint node node1 kubevirt.io/drain=draining:NoSchedule": Step(
            before="node_of mover >node1",
            run="kubectl taint node $(cat node1) kubevirt.io/drain=draining:NoSchedule",
            after='within 180 is_elsewhere mover "$(cat node1)"; kubectl taint node $(cat node1) kubevirt.io/drain-; migrated',
        ),
        # That of the pod; migration_network.rs attaches virt-handlers to a network.
        "kubectl get vmi mover -o jsonpath='{.status.migrationState.targetNodeAddress}'": Step(shows=r"^\d+\.\d+"),
        # The VM of the guide has no claim. A stopped VM with one accepts the commands; volume_migration.rs moves the data.
        """kubectl patch vm mover --type merge -p '{"spec": {"updateVolumesStrategy": "Migration"}}'""": Step(
            before="""kubectl virt stop mover --force --grace-period=0; kubectl wait vmi/mover --for=delete --timeout=120s
kubectl patch vm mover --type json -p '[{"op": "replace", "path": "/spec/template/spec/volumes/0", "value": {"name": "root", "persistentVolumeClaim": {"claimName": "old"}}}]'"""
        ),
    },
    "networking": {
        "kubectl get vmi two-networks -o jsonpath='{.status.interfaces[*].ipAddress}'": Step(shows=r"10\.77\.0\.\d"),
        "kubectl virt expose vm web --name web-nodes --port 80 --target-port 8080 --type NodePort": Step(
            after="has service/web-nodes '{.spec.type}' NodePort"
        ),
        "kubectl virt port-forward vm/web 8080 &": Step(before="booted web"),
        "curl http://localhost:8080/": Step(before="within 60 curl -sf http://localhost:8080/", shows="hello"),
    },
    "guests-and-cloud-init": {
        "kubectl virt guestosinfo debian": Step(
            before="kubectl wait vmi/debian --for=condition=AgentConnected --timeout=800s", shows="Debian", limit=900
        ),
        "kubectl virt fslist debian": Step(shows="ext4"),
        "kubectl virt ssh root@vm/debian --identity-file ./admin": Step(run="{} " + NEW_HOST),
        "kubectl virt ssh root@vm/debian --identity-file ./admin --command uptime": Step(run="{} " + NEW_HOST, shows="load average"),
        "kubectl virt scp ./admin.pub root@vm/debian:/tmp/key --identity-file ./admin": Step(run="{} " + NEW_HOST),
    },
    "consoles-and-clients": {
        "kubectl virt console my-vm": Step(before="booted my-vm", run="type_on my-vm 2", shows="login:"),
        "kubectl virt console my-vm --timeout 10": Step(run="{ sleep 2; printf '\\n'; sleep 2; } | timeout 20 {} 2>&1 || true", shows="login:"),
        "kubectl logs --selector vmi.kubevirt.io/id=my-vm --container compute": Step(shows="."),
        "kubectl virt vnc my-vm": Step(before=VIEWER, run="PATH=$PWD/bin:$PATH; {} || true", shows="RFB 003"),
        "kubectl virt vnc my-vm --proxy-only": Step(run="stays 5 {}", shows="port"),
        "kubectl virt vnc my-vm --screenshot my-vm.png": Step(after="head -c 4 my-vm.png | grep -q PNG"),
        "kubectl virt port-forward vm/my-vm 8080:80": Step(run="stays 5 {}"),
        "kubectl virt port-forward vm/my-vm udp/5353:53": Step(run="stays 5 {}"),
    },
    "instance-types": {
        "kubectl get vm sized -o jsonpath='{.status.instancetypeRef}'": Step(before="within 240 runs sized", shows="tiny"),
        "kubectl virt expand --vm sized": Step(shows="128Mi"),
        "kubectl get vmclusterinstancetype": Step(shows="u1.nano"),
        "kubectl get vmcp": Step(shows="alpine"),
    },
    "pools": {
        "kubectl scale vmpool web --replicas 3": Step(after="within 240 has vmpool/web '{.status.readyReplicas}' 3"),
        "kubectl virt expose vmpool web --name web": Step(after="has service/web '{.spec.selector.app}' web"),
        "kubectl delete vm store-0": Step(
            before="for number in 0 1; do within 180 has datavolume/data-$number '{.status.phase}' Succeeded; done",
            after="within 60 kubectl get vm store-0; has datavolume/data-0 '{.status.phase}' Succeeded",
        ),
        "kubectl scale vmpool store --replicas 1": Step(after="kubectl wait vm/store-1 --for=delete --timeout=60s"),
        "kubectl get datavolume data-1": Step(shows="Succeeded"),
        "kubectl get controllerrevisions": Step(shows="web-"),
        "kubectl delete vmpool web": Step(after="within 120 eval '! kubectl get vm web-0'"),
    },
    "snapshots": {
        "kubectl virt stop box --wait": Step(after="has pvc/data '{.status.phase}' Bound"),
        "kubectl virt snapshot box before-upgrade --wait": Step(shows="Snapshot before-upgrade is ready"),
        "kubectl delete vmsnapshot weekly before-upgrade": Step(
            after="within 120 eval '! kubectl get vmsnapshotcontent -o name | grep .'"
        ),
    },
    "hibernate": {
        "kubectl virt hibernate sleeper --wait": Step(
            before="""within 240 has vmi/sleeper '{.status.phase}' Running
within 240 eval '! kubectl get vm sleeper --output jsonpath={.status.hibernation} | grep .'""",
            shows="VM sleeper is hibernated in claim hibernation-of-sleeper-",
        ),
        "kubectl virt start sleeper": Step(after="within 240 has vmi/sleeper '{.status.phase}' Running"),
        "kubectl virt hibernate sleeper --discard --wait": Step(shows="VM sleeper boots at its next start"),
    },
    "kvm-hosts": {
        "kubectl get nodes -o custom-columns='NODE:.metadata.name,KVM:.status.allocatable.devices\\.kubevirt\\.io/kvm'": Step(shows=r"node-2 +\S"),
        "kubectl describe nodes | grep devices.kubevirt.io": Step(shows="devices.kubevirt.io/kvm"),
        "kubectl get pods --all-namespaces --selector kubevirt.io=virt-launcher -o custom-columns='POD:.metadata.name,KVM:.spec.containers[?(@.name==\"compute\")].resources.limits.devices\\.kubevirt\\.io/kvm'": Step(
            # It need not run.
            before="""sed 's/: tiny$/: my-vm/' "$ROOT/examples/vm-tiny.yaml" | kubectl apply --filename -
within 60 eval 'kubectl get pods --selector kubevirt.io=virt-launcher --output name | grep .'""",
            shows=r"virt-launcher-my-vm-\S+ +1"
        ),
        "kubectl get nodes --show-labels": Step(shows="machine-type.node.kubevirt.io/"),
        "kubectl -n kubevirt get kubevirt kubevirt -o jsonpath='{.spec.configuration.developerConfiguration.useEmulation}'": Step(
            shows="false"
        ),
    },
    "monitoring": {
        "helm upgrade ferrovirt charts/ferrovirt --namespace kubevirt --reuse-values --set metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.labels.release=prometheus --set metrics.rules.enabled=true,metrics.rules.labels.release=prometheus": Step(
            before="definition monitoring.coreos.com v1 ServiceMonitor servicemonitors; definition monitoring.coreos.com v1 PrometheusRule prometheusrules",
            after="kubectl -n kubevirt get servicemonitors,prometheusrules",
        ),
        'curl -k -H "Authorization: Bearer $(kubectl -n kubevirt create token reader)" https://localhost:8443/metrics': Step(
            shows="kubevirt_"
        ),
    },
    "security": {
        "kubectl label namespace my-namespace pod-security.kubernetes.io/enforce=restricted": Step(after="vm my-vm"),
    },
    "tracing": {
        "helm upgrade ferrovirt charts/ferrovirt -n kubevirt --reuse-values --set tracing.endpoint=http://collector.monitoring:4317 --set-json tracing.samplingRatio=0.1": Step(
            after="deployed; vm my-vm"
        ),
    },
    "troubleshooting": {
        "kubectl virt stop my-vm --force --grace-period=0": Step(after="kubectl wait vmi/my-vm --for=delete --timeout=60s"),
        "kubectl virt support-bundle my-vm --namespace my-namespace --output bundle.tar.gz": Step(after="tar -tzf bundle.tar.gz"),
    },
    "uninstall": {
        "kubectl virt stop my-vm --wait": Step(after="! kubectl get vmi my-vm"),
        "kubectl delete crd kubevirts.kubevirt.io": Step(after="! kubectl get crds | grep kubevirt.io | grep -v cdi.kubevirt.io"),
        "kubectl delete crd --selector ferrovirt.io/importer": Step(after="! kubectl get crds | grep kubevirt.io"),
        # After the first removal of everything.
        """kubectl -n kubevirt patch kubevirt kubevirt --type merge -p '{"spec":{"uninstallStrategy":"RemoveWorkloads"}}'""": Step(
            before="install_again; vm my-vm"
        ),
        # Definitions without components, and objects that nothing finishes.
        "kubectl delete validatingwebhookconfigurations,mutatingwebhookconfigurations,apiservices --selector app.kubernetes.io/part-of=ferrovirt": Step(
            before="left_behind KubeVirt kubevirt kubevirt '{}'; left_behind VirtualMachineInstance $NAMESPACE my-vm '{domain: {devices: {}}}'"
        ),
        """kubectl -n kubevirt patch kubevirt kubevirt --type merge -p '{"metadata":{"finalizers":null}}'""": Step(
            after="within 60 eval '! kubectl -n kubevirt get kubevirt kubevirt'"
        ),
        """kubectl patch vmi my-vm --type merge -p '{"metadata":{"finalizers":null}}'""": Step(
            after="within 60 eval '! kubectl get vmi my-vm'"
        ),
    },
}
