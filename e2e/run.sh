#!/bin/sh
# Runs the end-to-end tests on the cluster of KUBECONFIG, for `make e2e`: all, or the stories whose names contain an argument. TESTS
# is the command of cargo. Prints the duration of each story, longest first, and the failed ones again at the end.
set -u
cd "$(dirname "$0")/.."
STORY_TIMES=$PWD/build/story-times
export STORY_TIMES
rm -f "$STORY_TIMES"

$TESTS --test conformance || exit
# Threads of waiting stories cost nothing. The kit limits how many stories run (e2e/cluster/src/places.rs).
RUST_TEST_THREADS=${RUST_TEST_THREADS:-32} $TESTS --test e2e -- "$@"
result=$?
echo 'duration of each story, without the time that it waited for its turn:'
sort -rn "$STORY_TIMES"
grep FAILED "$STORY_TIMES"
test $result = 0 || exit $result
# Reads the audit log of all stories, so it runs after them. A selection does not use all rights.
test $# -gt 0 || $TESTS --test audit -- --nocapture
