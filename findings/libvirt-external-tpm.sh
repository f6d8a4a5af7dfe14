#!/bin/sh
# Version: libvirt 11.3.0 (Debian 13, 11.3.0-3+deb13u3) with QEMU 10.0 and swtpm 0.7.1.
# Expected: a TPM with <backend type='external'> is a socket of an emulator that somebody else runs, perhaps in another container,
# so that libvirt needs nothing of swtpm for it, and none of the programs by which it manages an emulator of its own.
# Seen: without swtpm_ioctl, which only ends a TPM that libvirt has started, the domain capabilities have neither `emulator` nor
# `external`, and a domain with the latter does not start ("does not support TPM backend type external"). QEMU supports both.
# Consequence: an image that runs swtpm beside libvirt, or elsewhere, must contain swtpm, swtpm_setup and swtpm_ioctl, although
# nobody calls them.
set -eu
work=$(mktemp -d)
trap 'umount --recursive "$work/root/sys" "$work/root/proc" 2>/dev/null; rm -rf --one-file-system "$work"' EXIT
packages=libvirt-daemon-driver-qemu=11.3.0-3+deb13u3,libvirt-clients,qemu-system-x86,swtpm-tools
mmdebstrap --quiet --variant=apt --include="$packages" trixie "$work/root" >"$work/log" 2>&1 || { tail -5 "$work/log"; exit 3; }
mount --rbind --make-rslave /proc "$work/root/proc"
mount --bind /sys "$work/root/sys"

# Names the backends that libvirt offers.
backends() {
    chroot "$work/root" virsh --quiet --connect "qemu:///embed?root=/var/$1" domcapabilities |
        sed -n "/<enum name='backendModel'>/,/<\/enum>/s/.*<value>\(.*\)<\/value>.*/\1/p" | paste -sd' '
}

complete=$(backends complete)
rm "$work/root/usr/bin/swtpm_ioctl"
reduced=$(backends reduced)
echo "with swtpm_ioctl: $complete; without: $reduced"
case $complete in *emulator*external* | *external*emulator*) ;; *) exit 1 ;; esac
case $reduced in *emulator* | *external*) exit 1 ;; esac
