#!/bin/sh
# Upgrades a cluster with running VMs from the former release to this working tree, and back, and uninstalls it. See README.md.
# CLUSTER is the program of this name; `kubectl-virt` lies beside it. Arguments are parts of the test: upgrade, missing, rollback,
# uninstall; without any, all are run. VMS is the number of VMs, at least 6.
set -eu
cd "$(dirname "$0")/../.."
title=upgrade-test
. e2e/lib.sh

# Tag of the images of this working tree.
present=devel

cache=${XDG_CACHE_HOME:-$HOME/.cache}/ferrovirt/former/$former_commit
plugin=$(dirname "$CLUSTER")/kubectl-virt
services='virt-api virt-controller virt-handler virt-launcher'
first=tenant-a
second=tenant-b
count=${VMS:-10}
outdated=kubevirt.io/outdatedLauncherImage

fail_more() {
    kubectl get vmi --all-namespaces --output wide >&2
    kubectl logs --namespace kubevirt --selector 'kubevirt.io in (virt-api,virt-controller,virt-handler)' --tail 10 --prefix >&2
    helm history ferrovirt --namespace kubevirt >&2
}

clean_more() { [ -z "$source" ] || rm -rf "$source"; }

virt() { "$plugin" "$@"; }

# Builds programs and images of the former release, once.
build_former() {
    [ ! -e "$cache/complete" ] || return 0
    step "building release $former; this takes as long as the first make images, once"
    need_former
    source=$cache/source
    rm -rf "$source"
    git clone --quiet --shared --no-checkout . "$source"
    git -C "$source" checkout --quiet --detach "$former_commit"
    (
        cd "$source"
        export CARGO_TARGET_DIR="$cache/target"
        # Otherwise cargo would also choose features of tests and benchmarks.
        "${CARGO:-cargo}" build --release --locked --workspace --exclude ferrovirt-fuzz --exclude ferrovirt-layout --exclude ferrovirt-e2e-tests \
            --exclude ferrovirt-skips --bin virt-api --bin virt-controller --bin virt-handler --bin virt-launcher \
            --bin virt-launcher-monitor --bin images
        # shellcheck disable=SC2086
        "$cache/target/release/images" build $services --tag $former --out "$cache/images"
    )
    rm -rf "$source" "$cache/target"
    source=
    touch "$cache/complete"
}

settled() {
    [ "$(kubectl get kubevirt kubevirt --namespace kubevirt --output \
        jsonpath='{.status.phase} {.status.conditions[?(@.type=="Available")].status} {.status.conditions[?(@.type=="Progressing")].status}')" = 'Deployed True False' ]
}

runs_only() {
    [ "$(kubectl get pods --namespace kubevirt --selector kubevirt.io --output jsonpath='{range .items[*]}{.spec.containers[0].image}{"\n"}{end}' |
        sed 's/.*://' | sort -u)" = "$1" ]
}

# Waits until all components have images with this tag and are available.
wait_deployed() {
    kubectl --namespace kubevirt rollout status --timeout=240s daemonset/virt-handler deployment/virt-controller deployment/virt-api ||
        fail 'the components do not become ready'
    within 60 "only components with tag $1" runs_only "$1"
    within 120 'status of the KubeVirt object' settled
}

upgrade() { helm upgrade ferrovirt charts/ferrovirt --namespace kubevirt --reset-then-reuse-values --hide-notes --timeout 4m "$@"; }

# Applies the example VM: create_vm NAMESPACE NAME
create_vm() { sed "s/: tiny$/: $2/" examples/vm-tiny.yaml | kubectl apply --namespace "$1" --filename -; }

running() { [ "$(kubectl get vm "$2" --namespace "$1" --output jsonpath='{.status.printableStatus}')" = Running ]; }

look() { python3 e2e/upgrade/guests.py "$CLUSTER" "$plugin" "$@" || fail 'a guest does not answer'; }

# Compares all guests with the last look. Those that are named may differ, but must be there.
unchanged() {
    look >"$work/now"
    [ "$(wc -l <"$work/now")" = "$(wc -l <"$work/guests")" ] || fail "VMIs: $(cat "$work/now")"
    for file in guests now; do
        cp "$work/$file" "$work/$file.compared"
        for name in "$@"; do
            grep -v "/$name " "$work/$file.compared" >"$work/rest" || true
            mv "$work/rest" "$work/$file.compared"
        done
    done
    diff "$work/guests.compared" "$work/now.compared" || fail 'guests were touched'
    step "  $(wc -l <"$work/now.compared") guests were not touched: same VMI, pod, QEMU process and boot ID"
    cp "$work/now" "$work/guests"
}

count_is() {
    labelled=$(kubectl get vmi --all-namespaces --selector $outdated --output name | wc -l)
    counted=$(kubectl get kubevirt kubevirt --namespace kubevirt --output jsonpath='{.status.outdatedVirtualMachineInstanceWorkloads}')
    [ "$labelled ${counted:-0}" = "$1 $1" ]
}

# Waits until this number of VMIs is labelled and counted as outdated.
expect_outdated() {
    within 60 "$1 outdated VMIs" count_is "$1"
    step "  $1 VMIs are outdated"
}

is_paused() { [ "$(kubectl get vmi "$2" --namespace "$1" --output jsonpath='{.status.conditions[?(@.type=="Paused")].status}')" = "$3" ]; }

# Prints the boot ID of a guest at the last look.
boot_id() { sed -n "s|^$1 .*boot=||p" "$work/guests"; }

has_other_boot() {
    python3 e2e/upgrade/guests.py "$CLUSTER" "$plugin" "$1" >"$work/one" || return 1
    ! grep -q "boot=$2$" "$work/one"
}

# Uses a VM as its user does, which changes only the boot ID: drive NAMESPACE NAME
drive() {
    virt pause vm "$2" --namespace "$1" || fail "pause of $2"
    within 30 "$2 is paused" is_paused "$1" "$2" True
    virt unpause vm "$2" --namespace "$1" || fail "unpause of $2"
    within 30 "$2 is unpaused" is_paused "$1" "$2" ''
    virt vnc "$2" --namespace "$1" --screenshot "$work/$2.png" >/dev/null || fail "screenshot of $2"
    [ "$(head -c 4 "$work/$2.png" | tail -c 3)" = PNG ] || fail "the screenshot of $2 is no picture"
    before=$(boot_id "$1/$2")
    virt soft-reboot "$2" --namespace "$1" || fail "soft reboot of $2"
    within 120 "$2 reboots" has_other_boot "$1/$2" "$before"
    step "  $1/$2 was paused, unpaused, shown and rebooted"
}

# True if a VM has another VMI than at the last look, and it runs.
restarted() {
    uid=$(kubectl get vmi "$2" --namespace "$1" --output jsonpath='{.metadata.uid}' 2>/dev/null) || return 1
    ! grep -q "^$1/$2 vmi=$uid " "$work/guests" && running "$1" "$2"
}

launcher_tag() { kubectl get vmi "$2" --namespace "$1" --output jsonpath='{.status.launcherContainerImageVersion}' | sed 's/.*://'; }

# Restarts a VM, whose launcher must then have a tag: restart NAMESPACE NAME TAG
restart() {
    virt stop "$2" --namespace "$1" || fail "stop of $2"
    kubectl wait --namespace "$1" "vmi/$2" --for=delete --timeout=120s || fail "$2 does not stop"
    virt start "$2" --namespace "$1" || fail "start of $2"
    within 180 "$2 starts" restarted "$1" "$2"
    [ "$(launcher_tag "$1" "$2")" = "$3" ] || fail "$2 has launcher $(launcher_tag "$1" "$2"), not $3"
    step "  $1/$2 was stopped, and started with launcher $3"
}

set_methods() {
    kubectl patch kubevirt kubevirt --namespace kubevirt --type merge --patch "{\"spec\": {\"workloadUpdateStrategy\": {\"workloadUpdateMethods\": $1, \"batchEvictionSize\": 4, \"batchEvictionInterval\": \"5s\"}}}" ||
        fail "methods $1 are refused"
}

# Fails unless a command fails with a text: refused TEXT COMMAND...
refused() {
    expected=$1
    shift
    if "$@" >"$work/refusal" 2>&1; then
        cat "$work/refusal" >&2
        fail "not refused: $*"
    fi
    grep -q "$expected" "$work/refusal" || {
        cat "$work/refusal" >&2
        fail "refused without \"$expected\": $*"
    }
    step "  refused: $*: $(tr '\n' ' ' <"$work/refusal" | head -c 700)"
}

# True if no VMI of a namespace has two running pods.
leaves_one_pod() {
    [ -z "$(kubectl get pods --namespace "$1" --selector kubevirt.io=virt-launcher --field-selector status.phase=Running --output \
        jsonpath='{range .items[*]}{.metadata.labels.kubevirt\.io/created-by}{"\n"}{end}' | sort | uniq --repeated)" ]
}

no_vms() { [ "$(kubectl get vm,vmi,vmirs,vmim,pods --namespace "$1" --output name 2>/dev/null | wc -l)" = 0 ]; }

# Prints objects that are being deleted, of all kinds.
terminating() {
    kubectl get "$(kubectl api-resources --verbs=list --output name | grep -v '^events' | paste -sd ,)" --all-namespaces --output json 2>/dev/null | python3 -c '
import json, sys
for one in json.load(sys.stdin)["items"]:
    meta = one["metadata"]
    if "deletionTimestamp" in meta:
        print(one["kind"], meta.get("namespace", "-"), meta["name"], meta.get("finalizers"), one.get("spec", {}).get("finalizers"))'
}

nothing_terminates() {
    terminating >"$work/terminating" && [ ! -s "$work/terminating" ]
}

expect_nothing_terminates() {
    within 90 'the end of deleted objects' nothing_terminates
    step '  no object of any kind is in Terminating'
}

# Prints everything that could be of an installation.
print_left() {
    echo "  namespaces: $(kubectl get namespaces --output jsonpath='{.items[*].metadata.name}')"
    for kind in apiservices validatingwebhookconfigurations mutatingwebhookconfigurations validatingadmissionpolicies \
        validatingadmissionpolicybindings clusterroles clusterrolebindings priorityclasses certificatesigningrequests crds; do
        echo "  $kind: $(kubectl get $kind --output name | sed 's|.*/||' | grep virt | tr '\n' ' ')"
    done
    echo "  objects in kubevirt: $(kubectl get "$(kubectl api-resources --namespaced --verbs=list --output name | grep -v '^events' | paste -sd ,)" \
        --namespace kubevirt --output name 2>/dev/null | tr '\n' ' ')"
    for kind in vm vmi vmirs vmim kubevirt; do
        echo "  $kind: $(kubectl get $kind --all-namespaces --output name | tr '\n' ' ')"
    done
    echo "  labels of nodes: $(kubectl get nodes --output jsonpath='{.items[*].metadata.labels}' | tr ',' '\n' | grep kubevirt | tr '\n' ' ')"
}

only_definition() { [ "$(kubectl get crds --output name | grep kubevirt.io)" = "customresourcedefinition.apiextensions.k8s.io/$1" ]; }

install() {
    helm install ferrovirt "$1" --namespace kubevirt --create-namespace --hide-notes --timeout 4m --set "image.tag=$2" \
        --set kubevirt.configuration.developerConfiguration.useEmulation=true \
        --set kubevirt.configuration.network.defaultNetworkInterface=masquerade
    wait_deployed "$2"
}

# Creates VMs, and has the first look at their guests when they run.
create_vms() {
    kubectl create namespace $first
    kubectl create namespace $second
    vms=
    for number in $(seq 0 $((count - 1))); do
        namespace=$first
        [ "$number" -lt 5 ] || namespace=$second
        create_vm $namespace "vm-$number"
        vms="$vms $namespace/vm-$number"
    done
    for vm in $vms; do
        within 300 "$vm runs" running "${vm%/*}" "${vm#*/}"
    done
    look >"$work/guests"
    cat "$work/guests"
}

# The upgrade, and old launchers under the new virt-handler.
part_upgrade() {
    step 'helm upgrade'
    upgrade --set image.tag=$present
    wait_deployed $present
    unchanged
    expect_outdated $count
    step 'the new virt-handler drives old launchers'
    drive $first vm-0
    drive $second vm-5
    unchanged vm-0 vm-5
    refused 'does not support live-migration: restart the VM' virt migrate vm-1 --namespace $first
    restart $first vm-3 $present
    restart $first vm-4 $present
    unchanged vm-3 vm-4
    before=$(boot_id $first/vm-4)
    virt migrate vm-4 --namespace $first --wait || fail 'vm-4 does not migrate'
    within 60 'the pod that vm-4 has left ends' leaves_one_pod $first
    unchanged vm-4
    [ "$(boot_id $first/vm-4)" = "$before" ] || fail 'the guest that migrated was restarted'
    expect_outdated $((count - 2))

    step 'method LiveMigrate leaves launchers that cannot migrate'
    set_methods '["LiveMigrate"]'
    # The controller looks again every 30 seconds.
    sleep 65
    [ "$(kubectl get vmim --all-namespaces --output name | wc -l)" = 1 ] || fail "migrations: $(kubectl get vmim --all-namespaces)"
    expect_outdated $((count - 2))
    unchanged
}

# Upgrades to images that do not exist.
part_missing() {
    step 'upgrade to images that do not exist: the hook fails, nothing changes'
    refused 'pre-upgrade hooks failed' upgrade --set image.tag=missing --timeout 40s
    kubectl get pods --namespace kubevirt
    wait_deployed $present
    unchanged
    # This also replaces the job of the failed hook.
    upgrade --set image.tag=$present
    wait_deployed $present

    step 'the same without hooks'
    upgrade --set image.tag=missing --set hooks.enabled=false
    sleep 45
    kubectl get pods --namespace kubevirt --output wide
    kubectl get kubevirt kubevirt --namespace kubevirt --output jsonpath='{range .status.conditions[*]}  {.type}: {.status} {.reason} {.message}{"\n"}{end}'
    # virt-handler of one node at most is replaced at a time. The consoles of the other nodes work.
    node=$(kubectl get pods --namespace kubevirt --selector kubevirt.io=virt-handler --output \
        jsonpath='{range .items[?(@.status.containerStatuses[0].ready==true)]}{.spec.nodeName}{"\n"}{end}' | head -n 1)
    [ -n "$node" ] || fail 'no virt-handler is left'
    vm=$(kubectl get vmi --all-namespaces --selector "kubevirt.io/nodeName=$node" --output jsonpath='{.items[0].metadata.namespace}/{.items[0].metadata.name}')
    drive "${vm%/*}" "${vm#*/}"
    helm rollback ferrovirt --namespace kubevirt --timeout 4m
    wait_deployed $present
    unchanged "${vm#*/}"
    expect_outdated $((count - 2))

    step 'helm upgrade --rollback-on-failure rolls back by itself'
    refused 'rolled back\|rollback' upgrade --set image.tag=missing --set hooks.enabled=false --rollback-on-failure --timeout 90s
    wait_deployed $present
    unchanged
}

# The way back to the former release, and a second upgrade.
part_rollback() {
    step "helm rollback to release $former; two VMs have launchers of the newer one"
    helm rollback ferrovirt 1 --namespace kubevirt --timeout 4m
    wait_deployed $former
    unchanged
    expect_outdated 2
    drive $first vm-1
    drive $first vm-3
    drive $first vm-4
    drive $second vm-5
    unchanged vm-1 vm-3 vm-4 vm-5
    restart $first vm-4 $former
    unchanged vm-4
    kubectl delete vmim --all --namespace $first --timeout=60s || fail 'the migration cannot be deleted'

    step 'a second upgrade'
    upgrade --set image.tag=$present
    wait_deployed $present
    unchanged
    expect_outdated $((count - 1))

    step 'method Evict restarts VMs with launchers that cannot migrate'
    set_methods '["LiveMigrate", "Evict"]'
    within 300 'no outdated VMI' count_is 0
    for vm in $vms; do
        within 180 "$vm runs" running "${vm%/*}" "${vm#*/}"
        [ "$(launcher_tag "${vm%/*}" "${vm#*/}")" = $present ] || fail "$vm has launcher $(launcher_tag "${vm%/*}" "${vm#*/}")"
    done
    unchanged $(for vm in $vms; do [ "$vm" = $first/vm-3 ] || echo "${vm#*/}"; done)
    kubectl get events --all-namespaces --field-selector reason=SuccessfulEvict --output \
        jsonpath='{range .items[*]}  {.involvedObject.name}: {.message}{"\n"}{end}'
}

# True if there is this number of common instance types and preferences.
has_bundle() {
    [ "$(kubectl get virtualmachineclusterinstancetypes,virtualmachineclusterpreferences \
        --selector instancetype.kubevirt.io/common-instancetypes-version --output name | wc -l)" -eq "$1" ]
}

# The end of the installation.
part_uninstall() {
    step 'uninstalling is refused while VMs run'
    still='there are still Virtual Machine Instances present'
    refused "$still" kubectl delete kubevirt kubevirt --namespace kubevirt
    refused "$still" kubectl delete kubevirt kubevirt --namespace kubevirt --cascade=orphan
    refused 'uninstall Ferrovirt first' kubectl delete namespace kubevirt
    refused 'deletes every VirtualMachine of the cluster' kubectl delete crd virtualmachines.kubevirt.io
    refused "VMI $first/vm-0" helm uninstall ferrovirt --namespace kubevirt --timeout 4m
    # The command that the refusal names.
    keep=$(sed -n 's/.*`\(helm -n kubevirt rollback [^`]*\)`.*/\1/p' "$work/refusal" | head -n 1)
    [ -n "$keep" ] || fail 'the refusal names no way back'
    $keep --timeout 4m
    helm status ferrovirt --namespace kubevirt | grep -q 'STATUS: deployed' || fail "not deployed after $keep"
    wait_deployed $present
    unchanged

    step 'a namespace with VMs is deleted'
    kubectl delete namespace $second --timeout=180s || fail "namespace $second stays: $(kubectl get namespace $second --output yaml)"
    expect_nothing_terminates
    grep "^$first/" "$work/guests" >"$work/rest"
    mv "$work/rest" "$work/guests"
    unchanged

    step 'uninstallStrategy RemoveWorkloads; the common instance types go with the release, also edited ones'
    within 120 'the common instance types and preferences exist' has_bundle 119
    kubectl patch virtualmachineclusterinstancetype u1.small --type merge --patch '{"spec": {"cpu": {"guest": 3}}}'
    kubectl patch kubevirt kubevirt --namespace kubevirt --type merge --patch '{"spec": {"uninstallStrategy": "RemoveWorkloads"}}'
    # Fails if anything but definitions is left.
    "$CLUSTER" uninstall || fail 'the installation is not removed'
    has_bundle 0 || fail 'common instance types or preferences are left'
    within 60 "no objects of VMs in $first" no_vms $first
    expect_nothing_terminates
    print_left

    step 'a new installation; a stopped VM stays when it is removed'
    install charts/ferrovirt $present
    within 120 'the common instance types and preferences are back' has_bundle 119
    create_vm $first again
    within 180 'the VM of the new installation runs' running $first again
    virt stop again --namespace $first
    kubectl wait --namespace $first vmi/again --for=delete --timeout=120s
    kubectl delete kubevirt kubevirt --namespace kubevirt --cascade=orphan --timeout=60s || fail 'the KubeVirt object is not deleted'
    expect_nothing_terminates
    refused 'uninstall Ferrovirt first' kubectl delete namespace kubevirt
    "$CLUSTER" uninstall || fail 'the installation without KubeVirt object is not removed'
    kubectl delete namespace kubevirt --timeout=120s || fail 'the install namespace stays'
    expect_nothing_terminates
    install charts/ferrovirt $present
    virt start again --namespace $first
    within 180 'the VM of the former installation runs' running $first again

    step 'nothing is left'
    kubectl delete namespace $first --timeout=180s || fail "namespace $first stays: $(kubectl get namespace $first --output yaml)"
    helm upgrade ferrovirt charts/ferrovirt --namespace kubevirt --reuse-values --set crds.keep=false --timeout 4m
    kubectl create --filename - <<'END'
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineClusterInstancetype
metadata: {name: kept}
spec: {cpu: {guest: 1}, memory: {guest: 128Mi}}
END
    "$CLUSTER" uninstall || fail 'the installation is not removed'
    within 60 'only the definition that has an object' only_definition virtualmachineclusterinstancetypes.instancetype.kubevirt.io
    kubectl delete virtualmachineclusterinstancetype kept
    kubectl delete crd --selector kubevirt.io --timeout=120s
    kubectl delete namespace kubevirt --timeout=120s || fail 'the install namespace stays'
    expect_nothing_terminates
    [ -z "$(kubectl get crds,clusterroles,clusterrolebindings,apiservices,validatingwebhookconfigurations,mutatingwebhookconfigurations,validatingadmissionpolicies,priorityclasses \
        --output name | grep virt | grep -v ferrovirt:kubelet-api)" ] || fail "left: $(kubectl get crds,clusterroles --output name | grep virt)"
}

source=
need_no_cluster
[ $# -gt 0 ] || set -- upgrade missing rollback uninstall
is_part() { case " $parts " in *" $1 "*) ;; *) return 1 ;; esac; }
parts=$*
if [ "$parts" != uninstall ]; then
    build_former
    git archive $former_commit charts/ferrovirt | tar -x -C "$work"
fi

step 'cluster with two nodes'
created=yes
"$CLUSTER" up --nodes 2
eval "$("$CLUSTER" env)"
"$CLUSTER" load-image build/images/guest-tiny.tar
for service in $services; do
    "$CLUSTER" load-image "build/images/$service.tar"
    [ "$parts" = uninstall ] || "$CLUSTER" load-image "$cache/images/$service.tar"
done

if [ "$parts" = uninstall ]; then
    step "this working tree with $count VMs"
    install charts/ferrovirt $present
    create_vms
else
    step "release $former with $count VMs"
    install "$work/charts/ferrovirt" $former
    create_vms
    part_upgrade
fi
! is_part missing || part_missing
! is_part rollback || part_rollback
! is_part uninstall || part_uninstall
step 'done'
