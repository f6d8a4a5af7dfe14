#!/bin/sh
# Runs the stories in build/stories-selected on the cluster of KUBECONFIG, after the conformance tests. TESTS is the command of cargo,
# SELECTOR the program `stories`, which selected them. Prints the duration of each story and its part of the run's, longest first, and
# at the end the stories that were left out and those that failed. If RENEW is not empty, e2e/story-times.tsv gets the durations.
set -u
cd "$(dirname "$0")/.."
STORY_TIMES=$PWD/build/story-times
export STORY_TIMES
: >"$STORY_TIMES"

$TESTS --test conformance || exit
# Threads of waiting stories cost nothing. The kit limits how many stories run, and selects the next one (e2e/cluster/src/places.rs).
# shellcheck disable=SC2046
RUST_TEST_THREADS=${RUST_TEST_THREADS:-1000} $TESTS --test e2e -- --exact $(cat build/stories-selected)
result=$?
echo 'duration of each story, without the time that it waited for its turn:'
sort -rn "$STORY_TIMES"
test -z "${RENEW:-}" || $TESTS --test e2e -- --list | "$SELECTOR" renew || result=1
if test $result = 0; then
    # Reads the audit log of all stories, so it runs after them.
    if test -s build/stories-left; then export STORIES_LEFT_OUT=1; fi
    $TESTS --test audit -- --nocapture || result=1
fi
cat build/stories-left
grep FAILED "$STORY_TIMES"
exit $result
