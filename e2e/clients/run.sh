#!/bin/sh
# Boots a VM on the cluster of KUBECONFIG and connects third-party clients to its display. See README.md.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$here/../../build/clients
namespace=e2e-clients
mkdir -p "$work"

echo "installing the clients into build/clients"
[ -x "$work/venv/bin/python" ] || python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$here/requirements.txt"
cp "$here/package.json" "$here/novnc.html" "$here/novnc.mjs" "$work"
(cd "$work" && npm install --no-audit --no-fund --no-package-lock --ignore-scripts --loglevel=error)
ln -sfn node_modules/@novnc/novnc "$work/novnc"

jobs=
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

clean() {
    [ -z "$jobs" ] || kill $jobs 2>/dev/null || true
    kubectl delete namespace $namespace --ignore-not-found
}
trap clean EXIT
trap 'exit 1' INT TERM

kubectl create namespace $namespace
kubectl apply --namespace $namespace --filename "$here/../../examples/vm-tiny.yaml"
kubectl wait --namespace $namespace vm/tiny --for=jsonpath='{.status.printableStatus}'=Running --timeout=120s
# The guest's first virtual terminal shows a prompt once its serial console does.
pod=$(kubectl get pods --namespace $namespace --output name)
for _ in $(seq 60); do
    ! kubectl logs --namespace $namespace "$pod" | grep -q 'login:' || break
    sleep 1
done

kubectl virt vnc tiny --namespace $namespace --proxy-only >"$work/vnc.json" &
jobs=$!
port=$(port_in "$work/vnc.json" '.*"port":\([0-9]*\).*')
"$work/venv/bin/python" "$here/vnc.py" "$port" "$work/asyncvnc.png"

kubectl proxy --port=0 --www="$work" --www-prefix=/static/ >"$work/proxy.txt" &
jobs="$jobs $!"
port=$(port_in "$work/proxy.txt" '.*127\.0\.0\.1:\([0-9]*\).*')
(cd "$work" && node novnc.mjs "$port" $namespace tiny "$work/novnc.png")
echo "pictures: build/clients/asyncvnc.png and build/clients/novnc.png"
