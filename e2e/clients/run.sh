#!/bin/sh
# Runs third-party clients against the cluster of KUBECONFIG, or only those that are named: run.sh vnc kr8s. See README.md.
# PROMTOOL is the path of promtool, which the part `promtool` needs.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$here/../../build/clients"
work=$(cd "$here/../../build/clients" && pwd)
python=$work/venv/bin/python
all='kubernetes kr8s openshift-python-wrapper kubevirt-api promtool vnc'
parts=${*:-$all}
for part in $parts; do
    case " $all " in *" $part "*) ;; *) echo "clients: no part is named $part; the parts are $all" >&2; exit 2 ;; esac
done

say() { echo "clients: $*"; }

# Fails before anything is installed if a part cannot run.
for part in $parts; do
    case $part in
    vnc) command -v "${CHROMIUM:-/usr/bin/chromium}" >/dev/null || { say 'vnc needs Chromium (apt-get install chromium, or CHROMIUM=path)' >&2; exit 2; } ;;
    promtool) command -v "${PROMTOOL:-}" >/dev/null || { say 'promtool needs PROMTOOL, the path that cluster build-promtool prints' >&2; exit 2; } ;;
    esac
done

jobs=
clean() {
    [ -z "$jobs" ] || kill $jobs 2>/dev/null || true
    jobs=
    kubectl delete namespace --selector ferrovirt.io/e2e-clients --ignore-not-found
    kubectl delete clusterrolebinding e2e-clients-metrics --ignore-not-found
    kubectl delete migrationpolicy e2e-clients-typed --ignore-not-found
    kubectl delete virtualmachineclusterpreference e2e-clients-openshift-python-wrapper --ignore-not-found
}

failed() {
    echo "clients: FAILED: $part" >&2
    kubectl get vm,vmi,vmim,pods --namespace "$namespace" --output wide >&2 || true
    kubectl get events --namespace "$namespace" --sort-by=.lastTimestamp >&2 || true
    exit 1
}

# Waits until a program has written its port into a file, and prints it.
port_in() {
    for _ in $(seq 60); do
        found=$(sed -n "s/$2/\\1/p" "$1")
        [ -z "$found" ] || { echo "$found"; return; }
        sleep 1
    done
    echo "no port in $1" >&2
    return 1
}

kubevirt_api() {
    sed "s|ferrovirt\.io/guests|$registry/guests|" "$here/types.yaml" | kubectl apply --namespace "$namespace" --filename - || return
    kubectl wait --namespace "$namespace" vm/typed --for=jsonpath='{.status.printableStatus}'=Running --timeout=120s || return
    kubectl wait --namespace "$namespace" vmi/typed --for=condition=LiveMigratable --timeout=60s || return
    kubectl create --namespace "$namespace" --filename - <<'MIGRATION' || return
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstanceMigration
metadata: {name: typed}
spec: {vmiName: typed}
MIGRATION
    # On one node it waits for a place.
    phase=Scheduling
    [ "$(kubectl get nodes --selector kubevirt.io/schedulable=true --output name | wc -l)" -lt 2 ] || phase=Succeeded
    kubectl wait --namespace "$namespace" vmim/typed --for=jsonpath='{.status.phase}'=$phase --timeout=240s || return
    (cd "$work" && node types.mjs "$namespace" "$here/types-differences.txt")
}

vnc() {
    kubectl apply --namespace "$namespace" --filename "$manifest" || return
    kubectl wait --namespace "$namespace" vm/tiny --for=jsonpath='{.status.printableStatus}'=Running --timeout=120s || return
    # Then the guest's first virtual terminal shows a prompt. The log has whole lines only, so none of the serial console.
    pod=$(kubectl get pods --namespace "$namespace" --output name)
    up=
    for _ in $(seq 120); do
        ! kubectl logs --namespace "$namespace" "$pod" | grep -q ': up in ' || { up=yes; break; }
        sleep 1
    done
    [ -n "$up" ] || { echo 'the guest does not boot' >&2; return 1; }
    kubectl virt vnc tiny --namespace "$namespace" --proxy-only >"$work/vnc.json" &
    jobs=$!
    port=$(port_in "$work/vnc.json" '.*"port":\([0-9]*\).*') || return
    "$python" "$here/vnc.py" "$port" "$work/asyncvnc.png" || return
    kubectl proxy --port=0 --www="$work" --www-prefix=/static/ >"$work/proxy.txt" &
    jobs="$jobs $!"
    port=$(port_in "$work/proxy.txt" '.*127\.0\.0\.1:\([0-9]*\).*') || return
    (cd "$work" && node novnc.mjs "$port" "$namespace" tiny "$work/novnc.png") || return
    say 'pictures: build/clients/asyncvnc.png and build/clients/novnc.png'
}

# The library writes its log to standard error.
openshift() {
    log=$work/openshift-python-wrapper.log
    "$python" "$here/openshift_wrapper.py" "$namespace" "$manifest" 2>"$log" || { tail -n 30 "$log" >&2; return 1; }
}

run_part() {
    case $1 in
    kubernetes) "$python" "$here/kubernetes_client.py" "$namespace" "$manifest" ;;
    kr8s) "$python" "$here/kr8s_client.py" "$namespace" "$manifest" ;;
    openshift-python-wrapper) openshift ;;
    kubevirt-api) kubevirt_api ;;
    promtool) "$python" "$here/metrics.py" "$namespace" "$manifest" ;;
    vnc) vnc ;;
    esac
}

say 'installing the clients into build/clients'
[ -x "$python" ] || python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$here/requirements.txt" --constraint "$here/constraints.txt"
cp "$here/package.json" "$here/novnc.html" "$here/novnc.mjs" "$here/types.mjs" "$work"
(cd "$work" && npm install --no-audit --no-fund --no-package-lock --ignore-scripts --loglevel=error)
ln -sfn node_modules/@novnc/novnc "$work/novnc"
# Libraries keep the API's discovery between runs, by the address of the cluster.
rm -rf "$work/tmp"
mkdir "$work/tmp"
export TMPDIR="$work/tmp" PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore
# REGISTRY is that of `make push`, on a cluster of your own.
registry=${REGISTRY:-ferrovirt.io}
manifest=$work/vm.yaml
sed "s|ferrovirt\.io/guests|$registry/guests|" "$here/../../examples/vm-tiny.yaml" >"$manifest"

trap clean EXIT
trap 'exit 1' INT TERM
for part in $parts; do
    namespace=e2e-clients-$part
    kubectl create namespace "$namespace"
    kubectl label namespace "$namespace" ferrovirt.io/e2e-clients=
    run_part "$part" || failed
    [ -z "$jobs" ] || kill $jobs 2>/dev/null || true
    jobs=
    kubectl delete namespace "$namespace" --timeout=120s
done
say "passed: $parts"
