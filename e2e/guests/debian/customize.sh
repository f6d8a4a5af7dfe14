# Runs at the end of the installation with the root directory as $1.
chroot "$1" systemctl enable systemd-networkd systemd-resolved ssh qemu-guest-agent serial-getty@ttyS0 >/dev/null 2>&1
ln -sf /run/systemd/resolve/stub-resolv.conf "$1/etc/resolv.conf"
# Root can log in on the console without user data (password ferrovirt). Salt and date of the last change are fixed for
# reproducible images.
echo 'root:$6$ferrovirt$zJ6fGXAA2WQ5Rj6mUiABVIKUoKgDOCXvmTAetLF/OHiRvve89aY732mVgHz5p/SM.RxGgpZJPUHspWbFhNx3N.' | chroot "$1" chpasswd --encrypted
sed -i -E 's/^([^:]*:[^:]*:)[0-9]+:/\120089:/' "$1/etc/shadow"
rm -f "$1"/etc/passwd- "$1"/etc/group- "$1"/etc/shadow- "$1"/etc/gshadow-
# Identities are generated at the first boot.
rm -f "$1"/etc/ssh/ssh_host_* "$1/var/lib/dbus/machine-id"
: > "$1/etc/machine-id"
# The boot loader uses the links to the current kernel.
chroot "$1" update-initramfs -u -k all >/dev/null
test -e "$1/vmlinuz" && test -e "$1/initrd.img"
rm -rf "$1"/usr/share/doc/* "$1"/usr/share/man/* "$1"/usr/share/locale/* "$1"/usr/share/info/*
rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/var/log/*.log "$1"/var/log/apt
# Access times would differ between two builds.
find "$1" -xdev \( -path "$1/proc" -o -path "$1/sys" -o -path "$1/dev" \) -prune -o -exec touch -h -a -d @1735689600 {} +
