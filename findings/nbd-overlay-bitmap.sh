#!/bin/sh
# Version: qemu-nbd and qemu-img 7.2.22 (Debian 12, 1:7.2+dfsg-7+deb12u18+b3), nbdinfo 1.14.2.
# Expected: qemu-nbd --bitmap NAME exports the bitmap NAME of the image, as its manual says, and is refused if the image has none. The
# bitmap belongs to the content that is exported.
# Seen: the name is looked up in the whole backing chain. After an external snapshot the export has the content of the overlay and
# the bitmap of the image below it: all that was written since the snapshot is clean. For the same overlay qemu-img info lists no
# bitmap, and qemu-img convert --bitmaps copies none.
# Consequence: an incremental backup that reads what is dirty misses writes, without an error, once the disk got an overlay. A
# backup needs a bitmap in each layer, merged for the export, or a check that the top layer has it.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
cd "$work"
apt-get download -qq qemu-utils=1:7.2+dfsg-7+deb12u18+b3 libnbd-bin=1.14.2-1 libnbd0=1.14.2-1 libaio1 liburing2 libfuse3-3 libnuma1 \
	2>/dev/null || exit 3
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH="$work/root/usr/lib/x86_64-linux-gnu:$work/root/lib/x86_64-linux-gnu" PATH="$work/root/usr/bin:$PATH"

qemu-img create -q -f qcow2 base.qcow2 16M
qemu-img bitmap --add base.qcow2 since
qemu-io -c 'write -P 1 2M 64k' base.qcow2 >/dev/null
qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2
qemu-io -c 'write -P 2 4M 1M' overlay.qcow2 >/dev/null

# The dirty extents of an export, as offset+length.
dirty() { # IMAGE
	nbdinfo --map=qemu:dirty-bitmap:since -- [ qemu-nbd --read-only --format qcow2 --bitmap since "$1" ] |
		awk '$4 == "dirty" { print $1 "+" $2 }' | paste -sd' '
}
bitmaps() { # IMAGE
	qemu-img info --output=json "$1" | grep -c '"name": "since"' || true
}
qemu-img convert -O qcow2 --bitmaps overlay.qcow2 copy.qcow2
below=$(dirty base.qcow2)
above=$(dirty overlay.qcow2)
echo "bitmaps: base $(bitmaps base.qcow2), overlay $(bitmaps overlay.qcow2), copy of the overlay $(bitmaps copy.qcow2)"
echo "dirty in an export of base: $below; of overlay, with 1 MiB written at 4 MiB: $above"
test "$(bitmaps base.qcow2)$(bitmaps overlay.qcow2)$(bitmaps copy.qcow2)" = 100
test "$below" = 2097152+65536
test "$above" = "$below"
# The content of the same export is that of the overlay.
nbdcopy -- [ qemu-nbd --read-only --format qcow2 --bitmap since overlay.qcow2 ] exported.raw
qemu-img compare -q -f raw -F qcow2 exported.raw overlay.qcow2
# Only a name that no image of the chain has is refused.
refused=$(timeout 10 qemu-nbd --read-only --format qcow2 --bitmap other --socket="$work/socket" overlay.qcow2 2>&1 || true)
echo "$refused"
case $refused in *"Bitmap 'other' is not found"*) ;; *) exit 1 ;; esac
