#!/bin/sh
# Runs stories on the node in a VM of the cluster of KUBECONFIG, one after the other: those of e2e/vm-node-stories.txt, or those whose
# names are arguments. TESTS is the command of cargo. Prints first what the node is, and at the end a table with the seconds that each
# story took, longest first.
set -u
cd "$(dirname "$0")/.."
STORY_TIMES=$PWD/build/node-times
# The node is slow: its processor is emulated.
STORY_NODES=test.ferrovirt.io/vm-node=true STORY_PATIENCE=4 STORIES=1 RUST_TEST_THREADS=1
export STORY_TIMES STORY_NODES STORY_PATIENCE STORIES RUST_TEST_THREADS
: >"$STORY_TIMES"
kubectl get nodes -o wide
kubectl get nodes -o custom-columns='NODE:.metadata.name,ADDRESSES:.status.addresses[*].address,PODS:.spec.podCIDRs[*]'
# The log shows for itself on which kernel, version of cgroups and CPU manager the stories ran.
# shellcheck disable=SC2016
cluster exec node-vm -- sh -c '. /etc/os-release; echo "$PRETTY_NAME, $(uname -sr)"; systemctl --version | head -n 1
    /opt/cluster/bin/containerd --version; runc --version | head -n 1
    stat -f /sys/fs/cgroup; stat -f -c %T /sys/fs/cgroup
    for f in cgroup.controllers kubepods.slice/cgroup.controllers; do echo "$f: $(cat /sys/fs/cgroup/$f)"; done
    cat /var/lib/kubelet/cpu_manager_state; echo; grep -i huge /proc/meminfo; ip -brief address'
# The emulated processor has the virtualization of AMD.
emulation() {
    kubectl -n kubevirt patch kubevirt kubevirt --type merge \
        -p "{\"spec\":{\"configuration\":{\"developerConfiguration\":{\"useEmulation\":$1}}}}"
}
former=$(kubectl -n kubevirt get kubevirt kubevirt \
    -o 'jsonpath={.spec.configuration.developerConfiguration.useEmulation}') && emulation false || exit

# shellcheck disable=SC2046
test $# -gt 0 || set -- $(sed '/^#/d' e2e/vm-node-stories.txt)
$TESTS --test e2e -- --include-ignored --nocapture --exact "$@"
result=$?
emulation "${former:-false}"
# The reasons of failures are whole.
grep FAILED "$STORY_TIMES"
echo 'seconds of each story on the node in a VM:'
sort -rn "$STORY_TIMES" | awk '
    { printf "%8s  %s%s\n", $1, $5, / FAILED: / ? "  FAILED" : ""; sum += $1 }
    END { printf "%8.1f  all %d\n", sum, NR }'
exit $result
