#!/bin/sh
# Runs csi-sanity against the storage driver for each form of volumes. Needs root.
# DRIVER and SANITY are the programs csi-driver and csi-sanity.
set -eu
work=$(mktemp -d)
driver=

clean() {
    [ -z "$driver" ] || kill "$driver" 2>/dev/null || true
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 1' INT TERM

"$DRIVER" --data "$work/data" --endpoint "$work/csi.sock" --node node-1 &
driver=$!
for _ in $(seq 50); do
    [ ! -S "$work/csi.sock" ] || break
    sleep 0.1
done

for form in directory ext4 block; do
    case $form in
    block) access=block files=directory ;;
    *) access=mount files=$form ;;
    esac
    echo "csi-sanity: $form"
    echo "files: $files" >"$work/parameters.yaml"
    "$SANITY" --csi.endpoint="$work/csi.sock" --csi.stagingdir="$work/staging" --csi.mountdir="$work/mount" \
        --csi.testvolumeaccesstype=$access --csi.testvolumeparameters="$work/parameters.yaml" --ginkgo.no-color
done
left=$(find "$work/data/volumes" "$work/data/snapshots" -mindepth 1; losetup --list --noheadings | grep "$work" || true)
[ -z "$left" ] || { echo "csi-sanity: the driver left $left" >&2; exit 1; }
