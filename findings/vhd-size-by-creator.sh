#!/bin/sh
# Version: qemu-img 7.2.22 (Debian 12, 1:7.2+dfsg-7+deb12u18+b3), hcsshim 0.13.0 (Microsoft's Go module), libvhdi 20210425.
# Expected: a VHD has the size that its field "current size" states. The field "creator application" documents which program wrote
# the file, and changes nothing.
# Seen: qemu-img takes the size from the geometry (cylinders, heads, sectors), unless the creator is one of a few that it knows or
# the geometry is the largest. tar2ext4 of hcsshim writes neither creator nor geometry: its VHD of 16 MiB has 0 bytes, and
# convert writes an empty disk with exit status 0. With the geometry that the specification computes, which is rounded down, the
# last 30 KiB are missing; with the creator "win " nothing is. libvhdi reads 16 MiB each time.
# Without -f vpc a fixed VHD, which has no header, is a raw disk whose last sector is the footer.
# Consequence: an imported VHD can be empty or lack its end, with the backup of its partition table, although every program succeeded.
# Read the size from the footer, compare it with that of the result, or pass force_size_calc=current_size.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
cd "$work"
apt-get download -qq qemu-utils=1:7.2+dfsg-7+deb12u18+b3 libvhdi-utils=20210425-1+b2 libvhdi1=20210425-1+b2 libfuse2 libaio1 \
	liburing2 libfuse3-3 libnuma1 2>/dev/null || exit 3
for package in *.deb; do dpkg -x "$package" root; done
export GOFLAGS=-mod=mod
go mod init finding 2>/dev/null
go get github.com/Microsoft/hcsshim/ext4/tar2ext4@v0.13.0 2>/dev/null || exit 3
cat >main.go <<'GO'
package main

import (
	"encoding/binary"
	"os"

	"github.com/Microsoft/hcsshim/ext4/tar2ext4"
)

// write appends the footer of hcsshim to a disk and sets one field of the footer, with its checksum (bytes 64 to 67).
func write(name string, disk []byte, first int, field string) error {
	if err := os.WriteFile(name, disk, 0o644); err != nil {
		return err
	}
	file, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := tar2ext4.ConvertToVhd(file); err != nil || field == "" {
		return err
	}
	footer := make([]byte, 512)
	if _, err := file.ReadAt(footer, int64(len(disk))); err != nil {
		return err
	}
	copy(footer[first:], field)
	copy(footer[64:68], make([]byte, 4))
	sum := uint32(0)
	for _, value := range footer {
		sum += uint32(value)
	}
	binary.BigEndian.PutUint32(footer[64:], ^sum)
	_, err = file.WriteAt(footer, int64(len(disk)))
	return err
}

func main() {
	disk, err := os.ReadFile("disk")
	if err == nil {
		err = write("plain.vhd", disk, 0, "")
	}
	if err == nil {
		err = write("win.vhd", disk, 28, "win ")
	}
	// The geometry that the specification computes for 16 MiB: 481 cylinders, 4 heads, 17 sectors.
	if err == nil {
		err = write("geometry.vhd", disk, 56, "\x01\xe1\x04\x11")
	}
	if err != nil {
		panic(err)
	}
}
GO
go build -o finding . || exit 1
export LD_LIBRARY_PATH="$work/root/usr/lib/x86_64-linux-gnu:$work/root/lib/x86_64-linux-gnu" PATH="$work/root/usr/bin:$PATH"

yes text | head -c 16777216 >disk
./finding

size() { # OPTION...
	qemu-img info --output=json "$@" | sed -n 's/.*"virtual-size": \([0-9]*\),.*/\1/p' | head -1
}
media_size() { # IMAGE
	vhdiinfo "$1" | sed -n 's/.*Media size.*(\([0-9]*\) bytes).*/\1/p'
}
raw=$(size plain.vhd)
forced=$(size --image-opts driver=vpc,file.filename=plain.vhd,force_size_calc=current_size)
echo "without -f vpc $raw bytes, with force_size_calc $forced"
test "$raw $forced" = "16777728 16777216"
for row in plain:0 geometry:16746496 win:16777216; do
	name=${row%:*}
	qemu-img convert -f vpc -O raw "$name.vhd" "$name.raw" || exit 1
	echo "$name: qemu-img $(size -f vpc "$name.vhd"), converted $(stat -c %s "$name.raw"), libvhdi $(media_size "$name.vhd")"
	test "$(size -f vpc "$name.vhd") $(stat -c %s "$name.raw") $(media_size "$name.vhd")" = "${row#*:} ${row#*:} 16777216"
done
cmp disk win.raw
