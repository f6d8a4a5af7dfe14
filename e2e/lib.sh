# Common head of the tests that bring up clusters of their own: release, upgrade, moving and guides. A test sets `title` and sources
# this file, then calls `need_no_cluster`, and sets `created=yes` before it brings a cluster up. CLUSTER is the program of this name.
# It can define `fail_more`, which prints more after a failure, and `clean_more`.
# shellcheck shell=sh
unset KUBECONFIG
work=$PWD/build/$title
started=$(date +%s)
created=no

# Release 0.1.0. Clones have its commit, but not always the tag v0.1.0.
former=0.1.0
former_commit=646da232f676ab9f2cd701f5c239c116df64f47d

step() { echo "$title: [$(($(date +%s) - started)) s] $*"; }

fail_more() { :; }

clean_more() { :; }

fail() {
    echo "$title: $*" >&2
    kubectl get pods --all-namespaces --output wide >&2 || true
    kubectl get events --all-namespaces --field-selector type=Warning >&2 || true
    fail_more || true
    exit 1
}

clean() {
    clean_more
    [ "$created" = no ] || "$CLUSTER" down
}

# Ends the test in a clone without the commit of the former release.
need_former() {
    git cat-file -e "$former_commit^{commit}" 2>/dev/null || {
        echo "$title: this clone has no commit $former_commit: git fetch --unshallow" >&2
        exit 1
    }
}

# Waits until a command succeeds: within SECONDS DESCRIPTION COMMAND...
within() {
    until=$(($(date +%s) + $1))
    awaited=$2
    shift 2
    while ! "$@"; do
        [ "$(date +%s)" -lt "$until" ] || fail "not in time: $awaited"
        sleep 1
    done
}

# Ends the test if a cluster is up. Otherwise empties the folder of the test, and removes its cluster when it ends.
need_no_cluster() {
    ! "$CLUSTER" status >/dev/null 2>&1 || { echo "$title: needs a fresh cluster, and one is up: run make down" >&2; exit 1; }
    rm -rf "$work"
    mkdir -p "$work"
    trap clean EXIT
    trap 'exit 1' INT TERM
}
