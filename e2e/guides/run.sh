#!/bin/sh
# Executes the commands of all guides on a fresh cluster. See README.md. CLUSTER is the program of this name; `kubectl-virt` lies
# beside it. Arguments are names of guides that are executed after the installation; without any, all are.
set -eu
cd "$(dirname "$0")/../.."
title=guides-test
. e2e/lib.sh

fail_more() {
    kubectl get vm,vmi,vmim --all-namespaces --output wide >&2
    kubectl logs --namespace kubevirt --selector 'kubevirt.io in (virt-api,virt-controller,virt-handler)' --tail 20 --prefix >&2
    kubectl logs --selector kubevirt.io=virt-launcher --container compute --tail 30 --prefix >&2
}

python3 e2e/guides/follow.py --check
need_no_cluster
step 'the cluster of make up, with two nodes'
created=yes
"$CLUSTER" demo --nodes 2
eval "$("$CLUSTER" env)"
PATH=$(cd "$(dirname "$CLUSTER")" && pwd):$PATH
cp "$KUBECONFIG" "$work/kubeconfig"
KUBECONFIG=$work/kubeconfig
export KUBECONFIG PATH
# The guides install anew.
kubectl delete namespace ferrovirt-demo --timeout=120s
CHART=$(helm package charts/ferrovirt --app-version devel --destination "$work" | sed 's/.*: //')
EMULATION='--set kubevirt.configuration.developerConfiguration.useEmulation=true'
WORK=$work/guides
export CHART EMULATION WORK
[ $# = 0 ] || [ "$1" = install ] || set -- install "$@"
python3 e2e/guides/follow.py "$@" || fail 'a guide does not work as it is written'
step 'done'
