# Functions of the commands in table.py. Every command of a guide runs in a bash that has read this file.
# shellcheck shell=bash
set -euo pipefail

# Waits until a command succeeds: within SECONDS COMMAND...
within() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || { echo "not in time: $*" >&2; return 1; }
        sleep 1
    done
}

# Succeeds if a command runs for a time, and stops it then: stays SECONDS COMMAND...
stays() {
    local code=0
    timeout "$@" || code=$?
    [ $code = 124 ] || { echo "ended with $code: ${*:2}" >&2; return 1; }
}

field() { kubectl get "$1" --output jsonpath="$2"; }

has() { [ "$(field "$1" "$2")" = "$3" ]; }

runs() { has "vm/$1" '{.status.printableStatus}' Running; }

# Types on the serial console of a guest, Enter first: type_on VM SECONDS LINE...
type_on() {
    local vm=$1 pause=$2
    shift 2
    { sleep 2; printf '\n'; for line in "$@"; do sleep "$pause"; printf '%s\n' "$line"; done; sleep "$pause"; } |
        timeout 30 kubectl virt console "$vm" 2>&1 || true
}

shows_prompt() { type_on "$1" 2 | grep -q -e 'login:' -e '# '; }

# Waits until the guest of a VM has booted.
booted() {
    within 240 runs "$1"
    within 240 shows_prompt "$1"
}

# Logs in and runs a command in a guest: in_guest VM PASSWORD COMMAND
in_guest() {
    local shown
    shown=$(type_on "$1" 2 root "$2" "$3 && echo suc''ceeded" exit)
    echo "$shown"
    grep -q succeeded <<<"$shown"
}

# Creates a VM like examples/vm-tiny.yaml.
vm() {
    kubectl get vm "$1" >/dev/null 2>&1 || sed "s/: tiny$/: $1/" "$ROOT/examples/vm-tiny.yaml" | kubectl apply --filename -
    within 240 runs "$1"
}

# Creates a definition that accepts everything, of a tool that the test cluster does not have: definition GROUP VERSION KIND PLURAL
definition() {
    kubectl apply --filename - <<END
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: $4.$1}
spec:
  group: $1
  names: {kind: $3, plural: $4}
  scope: Namespaced
  versions:
  - name: $2
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
END
    kubectl wait --for=condition=Established --timeout=60s "crd/$4.$1"
}

node_of() { field "vmi/$1" '{.status.nodeName}'; }

is_elsewhere() { local node; node=$(node_of "$1") && [ "$node" != "$2" ]; }

# Waits until no migration runs.
migrated() {
    for name in $(kubectl get vmim --output name); do
        within 180 finished "$name"
    done
}

finished() { case $(field "$1" '{.status.phase}') in Succeeded | Failed) ;; *) return 1 ;; esac; }

deployed() {
    kubectl --namespace kubevirt rollout status --timeout=240s daemonset/virt-handler deployment/virt-controller deployment/virt-api
    kubectl --namespace kubevirt wait kubevirt/kubevirt --for=condition=Progressing=false --timeout=120s
}

# Removes the installation, if there is one.
no_installation() {
    ! helm status ferrovirt --namespace kubevirt >/dev/null 2>&1 || helm uninstall ferrovirt --namespace kubevirt --timeout 4m
    kubectl delete namespace kubevirt --ignore-not-found --timeout=120s
}

install_again() {
    # shellcheck disable=SC2086
    helm install ferrovirt "$CHART" --namespace kubevirt $EMULATION --timeout 4m
    deployed
}

# Stores which VMI a VM has.
remember() { field "vmi/$1" '{.metadata.uid}' >"$1.uid"; }

is_another() {
    local uid
    uid=$(field "vmi/$1" '{.metadata.uid}') && [ "$uid" != "$(cat "$1.uid")" ]
}

# Waits until a VM runs with another VMI than the one remembered.
replaced() {
    within 180 is_another "$1"
    within 240 runs "$1"
}

# Creates an object in Terminating that nothing finishes: left_behind KIND NAMESPACE NAME SPEC
left_behind() {
    kubectl create --namespace "$2" --filename - <<END
apiVersion: kubevirt.io/v1
kind: $1
metadata: {name: $3, finalizers: [example.com/left]}
spec: $4
END
    kubectl delete --namespace "$2" "$1" "$3" --wait=false
}
