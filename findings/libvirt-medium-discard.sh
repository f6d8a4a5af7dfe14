#!/bin/sh
# Version: libvirt 11.3.0 (Debian 13, 11.3.0-3+deb13u3) with QEMU 10.0.
# Expected: `discard` belongs to the medium of a CD-ROM drive like the file and its format, so that an exchange of the medium may
# bring another value, or an update that leaves the drive as it is states what the definition would have.
# Seen: an update of a running drive that was defined without it is refused if it has discard='unmap' ("cannot modify field 'discard'
# of the disk"), also if it only ejects. The opposite is accepted: an update without the attribute leaves the drive's value in force.
# Consequence: whoever renders a drive anew, from a volume for which discards are decided in another way, can neither insert nor eject
# until the guest starts again. An update of a medium must leave the attribute out.
set -eu
work=$(mktemp -d)
trap 'umount --recursive "$work/root/sys" "$work/root/proc" 2>/dev/null; rm -rf --one-file-system "$work"' EXIT
packages=libvirt-daemon-driver-qemu=11.3.0-3+deb13u3,libvirt-clients,qemu-system-x86
mmdebstrap --quiet --variant=apt --include="$packages" trixie "$work/root" >"$work/log" 2>&1 || { tail -5 "$work/log"; exit 3; }
mount --rbind --make-rslave /proc "$work/root/proc"
mount --bind /sys "$work/root/sys"

# Prints a drive whose element <driver> has the given attributes, with or without a medium.
drive() {
    echo "<disk type='file' device='cdrom'><driver name='qemu' type='raw'$1/>$2<target dev='sda' bus='sata'/><readonly/></disk>"
}
medium="<source file='/medium'/>"
truncate -s 1M "$work/root/medium"

# Starts a domain with a drive with a medium, and ejects it by an update. Prints what libvirt says, and the drive's attribute.
eject() {
    drive "$2" '' >"$work/root/update.xml"
    mkdir -p "$work/root/var/$1/etc"
    cat >"$work/root/var/$1/etc/qemu.conf" <<CONF
security_driver = "none"
stdio_handler = "file"
user = "root"
group = "root"
namespaces = []
cgroup_controllers = []
CONF
    cat >"$work/root/domain.xml" <<XML
<domain type='qemu'><name>$1</name><memory unit='MiB'>32</memory><os><type machine='q35'>hvm</type></os>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>$(drive "$3" "$medium")</devices></domain>
XML
    chroot "$work/root" virsh --quiet --connect "qemu:///embed?root=/var/$1" \
        "create /domain.xml; update-device $1 /update.xml --live; dumpxml $1; destroy $1" 2>&1 |
        sed -n "s/^error: //p; s/.*\(discard='[a-z]*'\).*/drive with \1/p; /<source file/p" | paste -sd' '
}

unmap=" discard='unmap'"
added=$(eject added "$unmap" '')
left_out=$(eject left-out '' "$unmap")
echo "added: $added"
echo "left out: $left_out"
case $added in *"cannot modify field 'discard' of the disk"*) ;; *) exit 1 ;; esac
case $left_out in *error* | *'cannot modify'* | *'<source file'*) exit 1 ;; *"drive with discard='unmap'"*) ;; *) exit 1 ;; esac
