#!/bin/sh
# Version: qemu-utils 7.2.22 (Debian 12, 1:7.2+dfsg-7+deb12u18+b3).
# Expected: qemu-img convert -l SNAPSHOT --bitmaps copies the bitmaps as they were in the snapshot, or is refused if it has none.
# Seen: the content is that of the snapshot and the bitmap that of the live disk: a bitmap that was added after the snapshot is
# in the copy, next to content that is older than the bitmap. The exit status is 0.
# Consequence: an incremental backup of a VM restored from such a copy counts from a point in time that its disk has never seen.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
cd "$work"
apt-get download -qq qemu-utils=1:7.2+dfsg-7+deb12u18+b3 libaio1 liburing2 libfuse3-3 libnuma1 2>/dev/null || exit 3
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH="$work/root/usr/lib/x86_64-linux-gnu:$work/root/lib/x86_64-linux-gnu" PATH="$work/root/usr/bin:$PATH"

qemu-img create -q -f qcow2 disk.qcow2 16M
qemu-io -c 'write -P 1 0 1M' disk.qcow2 >/dev/null
qemu-img snapshot -c before disk.qcow2
qemu-img bitmap --add disk.qcow2 later
qemu-io -c 'write -P 2 4M 1M' disk.qcow2 >/dev/null
qemu-img convert -O qcow2 -l before --bitmaps disk.qcow2 copy.qcow2 || exit 1
# Content of the snapshot: the second write is missing.
qemu-io -r -c 'read -P 1 0 1M' -c 'read -P 0 4M 1M' copy.qcow2 | grep -q 'verification failed' && exit 1
qemu-img info copy.qcow2 | grep -q 'name: later' || exit 1
echo 'content of the snapshot, bitmap of the live disk'
