#!/bin/sh
# Moves a cluster from KubeVirt to Ferrovirt and back, by the commands of docs/guides/moving-from-kubevirt.md. See README.md.
# CLUSTER is the program of this name.
set -eu
cd "$(dirname "$0")/../.."
title=moving-test
. e2e/lib.sh
here=$PWD/e2e/moving
guide=docs/guides/moving-from-kubevirt.md
namespace=tenant
system=kubevirt
operator=

fail_more() { tail -20 "$work/operator.log" >&2; }

clean_more() { [ -z "$operator" ] || kill "$operator" 2>/dev/null || true; }

# Succeeds if a command fails with TEXT in its output.
is_refused() {
    text=$1
    shift
    ! said=$("$@" 2>&1) || return 1
    case $said in *"$text"*) ;; *) return 1 ;; esac
}

refused() { is_refused "$@" || fail "not refused with \"$1\": $* says: $said"; }

# Runs the commands below a heading of the guide, with the chart of this working tree, and under emulation.
follow() {
    script=$(find "$work/guide" -name "[0-9]*-$1.sh")
    [ -n "$script" ] || fail "the guide has no commands below a heading like $1"
    sed -e "s|oci://registry.example.com/ferrovirt/charts/ferrovirt|$chart|" -e "s|^helm upgrade --install .*|& $emulation|" "$script" >"$work/now.sh"
    mv "$script" "$script.done"
    step "guide: $1"
    (cd "$work/guide" && sh -eux "$work/now.sh") || fail "the commands of the guide fail: $1"
}

# Does what virt-operator does, while one of its pods exists. It holds the KubeVirt object by a finalizer, creates what is missing for
# it, and deletes the definitions when it is deleted.
run_operator() {
    while sleep 1; do
        if [ -z "$(kubectl get pods --namespace $system --selector kubevirt.io=virt-operator --output name)" ]; then
            : >"$work/idle"
            continue
        fi
        rm -f "$work/idle"
        state=$(kubectl get kubevirt kubevirt --namespace $system --output jsonpath='{.metadata.finalizers} {.metadata.deletionTimestamp}') || continue
        case $state in
        *Z) kubectl delete --wait=false --filename "$work/definitions" || true ;;
        *foregroundDeleteKubeVirt*)
            kubectl apply --server-side --force-conflicts --field-manager virt-operator --filename "$work/definitions" --filename "$work/managed" >/dev/null || continue
            kubectl patch kubevirt kubevirt --namespace $system --subresource status --type merge \
                --patch '{"status": {"phase": "Deployed", "conditions": [{"type": "Available", "status": "True", "reason": "AllComponentsReady", "message": "All components are ready."}]}}' || true
            ;;
        *) kubectl patch kubevirt kubevirt --namespace $system --type merge --patch '{"metadata": {"finalizers": ["foregroundDeleteKubeVirt"]}}' || true ;;
        esac
    done
}

# Waits until the guest of a VM shows its prompt.
wait_booted() {
    kubectl wait "vm/$1" --for=jsonpath='{.status.printableStatus}'=Running --timeout=180s || fail "VM $1 does not run"
    for _ in $(seq 40); do
        # Enter repeats a prompt from before.
        shown=$({ sleep 2; printf '\n'; sleep 3; } | timeout 10 kubectl virt console "$1" 2>&1 || true)
        case $shown in *login:*) return ;; esac
    done
    fail "the guest of $1 shows no prompt, but: $shown"
}

# Succeeds if nothing of virt-operator is left but definitions, objects of their kinds, the namespace and leases. Garbage collection
# removes what belongs to a deleted object.
is_removed() {
    kinds=$(kubectl api-resources --verbs list,delete --output name | grep -v -e '^events' -e 'kubevirt\.io$' -e '^customresourcedefinitions\.' | paste -sd,)
    left=$(kubectl get "$kinds" --all-namespaces --selector app.kubernetes.io/managed-by=virt-operator --output name) || return 1
    left="$left $(kubectl get "$kinds" --all-namespaces --selector kubevirt.io --output name | grep -v -e '^namespace/' -e '^lease')"
    left="$left $(kubectl get kubevirts --all-namespaces --output name)"
    echo "left: $left" >"$work/left"
    [ -z "$(echo $left)" ]
}

has_no_label() { ! kubectl get nodes --output jsonpath='{.items[*].metadata.labels}' | grep -q of-kubevirt; }

is_gone() { ! kubectl get vm my-vm 2>/dev/null; }

# Deletes the KubeVirt object as its user. virt-operator, which would admit it, does not answer.
uninstall_kubevirt() {
    kubectl delete validatingwebhookconfigurations virt-operator-validator --ignore-not-found
    kubectl delete kubevirt kubevirt --namespace $system --wait=false
}

need_no_cluster
python3 "$here/kubevirt.py" "$work"
python3 e2e/guides/guide.py $guide "$work/guide"
cp "$work/operator.yaml" "$work/guide/kubevirt-operator.yaml"

step 'cluster with KubeVirt'
created=yes
"$CLUSTER" up
eval "$("$CLUSTER" env)"
PATH=$(dirname "$CLUSTER"):$PATH
cp "$KUBECONFIG" "$work/kubeconfig"
KUBECONFIG=$work/kubeconfig
export KUBECONFIG PATH
kubectl config set-context --current --namespace $namespace
for image in virt-api virt-controller virt-handler virt-launcher guest-tiny; do
    "$CLUSTER" load-image build/images/$image.tar
done
chart=$(helm package charts/ferrovirt --app-version devel --destination "$work" | sed 's/.*: //')
emulation='--set kubevirt.configuration.developerConfiguration.useEmulation=true'
kubectl create namespace $namespace
kubectl apply --server-side --field-manager virt-operator --filename "$work/operator.yaml" --filename "$work/definitions"
kubectl wait --for=condition=Established --timeout=60s crd --all >/dev/null
# Without virt-api, webhooks would refuse VMs.
kubectl create --dry-run=client --filename examples/vm-tiny.yaml --output json | python3 "$here/vms.py" create $namespace
kubectl create rolebinding jane --clusterrole kubevirt.io:view --user jane
kubectl label nodes --all kubevirt.io/schedulable=true cpu-model.node.kubevirt.io/of-kubevirt=true
kubectl annotate nodes --all kubevirt.io/heartbeat=2026-01-01T00:00:00Z
kubectl create --filename "$work/cr.yaml"
run_operator >"$work/operator.log" 2>&1 &
operator=$!
kubectl wait kubevirt kubevirt --namespace $system --for=condition=Available --timeout=60s
kubectl rollout status --namespace $system --timeout=60s daemonset/virt-handler deployment/virt-operator deployment/virt-api
python3 "$here/vms.py" record "$work/before.json"

step 'Helm does not install over KubeVirt, and virt-operator puts back what is deleted'
refused conflict helm install ferrovirt "$chart" --namespace $system
refused 'not found' helm status ferrovirt --namespace $system
kubectl delete clusterrole kubevirt.io:view
within 60 'virt-operator restores a role' kubectl get clusterrole kubevirt.io:view

follow before-the-move
follow stop-the-vms
follow save-the-objects-and-protect-the-vms
for vm in my-vm other sized with-display pool-0 held; do grep -q "^    name: $vm$" "$work/guide/vms.yaml" || fail "VM $vm was not saved"; done
within 60 'the policy is in effect' is_refused 'would delete VMs' kubectl delete --dry-run=server --filename "$work/definitions"
for thing in crd/virtualmachines.kubevirt.io crd/kubevirts.kubevirt.io crd/virtualmachinepools.pool.kubevirt.io vm/my-vm; do
    refused 'would delete VMs' kubectl delete "$thing"
done
refused 'would delete VMs' kubectl delete crd --selector kubevirt.io
refused 'would delete VMs' kubectl delete vm --all
follow stop-virt-operator
within 60 'virt-operator has stopped' test -e "$work/idle"
follow remove-kubevirt-without-its-definitions
within 60 'nothing of virt-operator is left' is_removed
python3 "$here/vms.py" compare "$work/before.json"

step 'Helm names what is left'
kubectl create priorityclass kubevirt-cluster-critical --value 1000000000
refused 'PriorityClass "kubevirt-cluster-critical"' helm upgrade --install ferrovirt "$chart" --namespace $system --force-conflicts
kubectl delete priorityclass kubevirt-cluster-critical
follow install-ferrovirt
python3 "$here/vms.py" compare "$work/before.json"
[ "$(kubectl auth can-i list virtualmachines.kubevirt.io --as jane)" = yes ] || fail 'a RoleBinding of a user is not in effect'
kubectl explain vm.spec.template.spec.domain.devices.disks >/dev/null || fail 'the definitions are not those of Ferrovirt'
[ -z "$(kubectl get kubevirt kubevirt --namespace $system --output jsonpath='{.spec.uninstallStrategy}')" ] || fail "KubeVirt's strategy of removal is in effect"
within 60 'no node has labels of KubeVirt' has_no_label

follow start-the-vms
wait_booted my-vm
for vm in other sized pool-0; do
    kubectl virt start $vm
    wait_booted $vm
done
memory=$(kubectl get vmi sized --output jsonpath='{.spec.domain.memory.guest}')
[ "$memory" = 160Mi ] || fail "the VM of an instance type has $memory, not the 160Mi of its copy"
[ "$(kubectl get vmi my-vm --output jsonpath='{.spec.domain.firmware.uuid}')" = 00000001-0000-4000-8000-000000000000 ] || fail 'the firmware has another UUID'

step 'a PodDisruptionBudget that an old release made for a VMI is removed'
kubectl create --filename - <<END
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: kubevirt-disruption-budget-abcde
  ownerReferences:
  - {apiVersion: kubevirt.io/v1, kind: VirtualMachineInstance, name: my-vm, uid: $(kubectl get vmi my-vm --output jsonpath='{.metadata.uid}'), controller: true}
spec: {minAvailable: 1, selector: {matchLabels: {kubevirt.io/created-by: my-vm}}}
END
kubectl create poddisruptionbudget of-a-user --min-available 1 --selector app=other
kubectl rollout restart --namespace $system deployment/virt-controller
kubectl wait --for=delete poddisruptionbudget/kubevirt-disruption-budget-abcde --timeout=120s || fail 'the budget of a VMI was not removed'
kubectl delete poddisruptionbudget of-a-user || fail 'the budget of a user was removed'
kubectl rollout status --namespace $system --timeout=120s deployment/virt-controller

step 'a VM with an unsupported field stays stopped'
refused 'spec.template.spec.domain.devices.gpus[0].virtualGPUOptions.display is not supported yet' kubectl virt start with-display
kubectl label vm with-display checked=yes
kubectl delete vm held --wait=false
follow if-something-was-deleted
within 60 'the deleted VM is gone' is_refused NotFound kubectl get vm held

for vm in other sized pool-0; do kubectl virt stop $vm; done
follow uninstall-ferrovirt
python3 "$here/vms.py" compare "$work/before.json" held
follow install-kubevirt
kubectl rollout status --namespace $system --timeout=60s daemonset/virt-handler deployment/virt-operator deployment/virt-api
python3 "$here/vms.py" compare "$work/before.json" held
[ "$(kubectl get kubevirt kubevirt --namespace $system --output jsonpath='{.spec.uninstallStrategy}')" = RemoveWorkloads ] || fail 'the KubeVirt object has lost a setting'
! find "$work/guide" -name '[0-9]*.sh' | grep . || fail 'these commands of the guide were not executed'

step 'the policy of the guide withstands the uninstallation of KubeVirt, and nothing else would'
kubectl apply --filename "$work/guide/policy.yaml"
within 60 'the policy is in effect' is_refused 'would delete VMs' kubectl delete --dry-run=server --filename "$work/definitions"
rm "$work/managed/webhooks.yaml"
: >"$work/operator.log"
within 60 'the KubeVirt object can be deleted' uninstall_kubevirt
within 60 'virt-operator is refused' grep -q 'would delete VMs' "$work/operator.log"
python3 "$here/vms.py" compare "$work/before.json" held
kubectl delete --filename "$work/guide/policy.yaml"
within 60 'the VM without protection is gone' is_gone
step 'done'
