#!/bin/sh
# Runs stories on the node in a VM of the cluster of KUBECONFIG, one after the other: those of e2e/vm-node-stories.txt, or those whose
# names are arguments. TESTS is the command of cargo. Prints the duration of each story, longest first.
set -u
cd "$(dirname "$0")/.."
STORY_TIMES=$PWD/build/node-times
# The node is slow: its processor is emulated.
STORY_NODES=test.ferrovirt.io/vm-node=true STORY_PATIENCE=4 STORIES=1 RUST_TEST_THREADS=1
export STORY_TIMES STORY_NODES STORY_PATIENCE STORIES RUST_TEST_THREADS
: >"$STORY_TIMES"
kubectl get nodes -o wide
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
echo 'duration of each story on the node in a VM:'
sort -rn "$STORY_TIMES"
emulation "${former:-false}"
exit $result
