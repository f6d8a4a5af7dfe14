#!/bin/sh
# Version: nbdkit 1.32.5-1 (Debian 12).
# Expected: the gzip filter serves what gunzip writes; a gzip file may consist of several members (RFC 1952, 2.2), as an xz file
# may of several streams.
# Seen: the export of the gzip filter has the size of the first member. Nothing is reported; the rest of the disk is missing.
# The xz filter serves all streams.
# Consequence: a disk image compressed in pieces (cat, parallel or appending compressors) is imported cut off. Compare the size of the
# export with an independent figure, or decompress by another tool.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
cd "$work"
apt-get download -qq nbdkit=1.32.5-1 libnbd0=1.14.2-1 libnbd-bin=1.14.2-1 2>/dev/null || exit 3
for package in *.deb; do dpkg -x "$package" root; done
lib=$work/root/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH="$lib" PATH="$work/root/usr/sbin:$work/root/usr/bin:$PATH"

yes text | head -c 1048576 >a
gzip -c a >ab.gz && gzip -c a >>ab.gz
xz -c a >ab.xz && xz -c a >>ab.xz
test "$(gzip -dc ab.gz | wc -c)" = 2097152

size() { # FILTER FILE
	# shellcheck disable=SC2016 # nbdkit sets uri
	nbdkit -U - "$lib/nbdkit/plugins/nbdkit-file-plugin.so" --filter="$lib/nbdkit/filters/nbdkit-$1-filter.so" "$2" \
		--run 'nbdinfo --size "$uri"'
}
gzip_size=$(size gzip ab.gz)
xz_size=$(size xz ab.xz)
echo "gzip: $gzip_size, xz: $xz_size, both of 2097152"
test "$gzip_size" = 1048576
test "$xz_size" = 2097152
