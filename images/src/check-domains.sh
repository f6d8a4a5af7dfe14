# Checks domain XML with virt-xml-validate, and defines it with libvirtd, as the launcher does. Runs in namespaces of its own.
#   ROOT     the unpacked packages of the launcher image; not changed
#   BUSYBOX  a static busybox, the shell of virt-xml-validate
#   UID_GID  user of the launcher
#   LOG      output of libvirtd
#   "$@"     files
set -eu
mount --bind "$ROOT" "$ROOT"
mount -o remount,bind,ro "$ROOT"
for directory in dev etc run tmp var; do mount -t tmpfs -o mode=755 none "$ROOT/$directory"; done
mount -t proc none "$ROOT/proc"
mkdir -p "$ROOT/run/xml" "$ROOT/run/home/config/libvirt" "$ROOT/run/home/run" "$ROOT/run/home/cache"
chmod 1777 "$ROOT/tmp"
cp "$BUSYBOX" "$ROOT/run/busybox"
for node in null:1:3 zero:1:5 random:1:8 urandom:1:9; do
    name=${node%%:*} numbers=${node#*:}
    mknod -m 666 "$ROOT/dev/$name" c "${numbers%:*}" "${numbers#*:}"
done
if [ -e /dev/kvm ]; then mknod -m 666 "$ROOT/dev/kvm" c 10 232; fi
printf 'root:x:0:0::/:/bin/false\nqemu:x:%s::/run/home:/bin/false\n' "$UID_GID" >"$ROOT/etc/passwd"
printf 'root:x:0:\nqemu:x:%s:\n' "${UID_GID#*:}" >"$ROOT/etc/group"
printf '%s = %s\n' stdio_handler '"file"' security_driver '"none"' namespaces '[ ]' cgroup_controllers '[ ]' \
    dynamic_ownership 0 remember_owner 0 >"$ROOT/run/home/config/libvirt/qemu.conf"
chown -R "$UID_GID" "$ROOT/run/home"

inside() {
    env -i PATH=/usr/bin:/usr/sbin HOME=/run/home XDG_RUNTIME_DIR=/run/home/run XDG_CONFIG_HOME=/run/home/config \
        XDG_CACHE_HOME=/run/home/cache chroot --userspec="$UID_GID" "$ROOT" "$@"
}
inside /usr/sbin/libvirtd >"$LOG" 2>&1 &
tries=0
until [ -S "$ROOT/run/home/run/libvirt/libvirt-sock" ]; do
    tries=$((tries + 1))
    if [ $tries -gt 300 ]; then
        echo "libvirtd does not start" >&2
        tail "$LOG" >&2
        exit 1
    fi
    sleep 0.1
done

validate() { inside /run/busybox sh /usr/bin/virt-xml-validate "/run/xml/$1" domain; }
# Definitions with --validate are checked against the schema by libvirtd, too.
define() { inside /usr/bin/virsh -q -c qemu:///session define "/run/xml/$@" && inside /usr/bin/virsh -q -c qemu:///session \
    undefine --nvram "$(sed -n 's/^  <name>\(.*\)<\/name>$/\1/p' "$ROOT/run/xml/$1")"; }
failed=0
fails() {
    echo "$1: $2" >&2
    failed=1
}
refused() {
    if "$@" >/dev/null 2>&1; then fails "$2" "accepted by $1 $3"; fi
}

for file in "$@"; do
    name=${file##*/}
    cp "$file" "$ROOT/run/xml/$name"
    if grep -q "^<domain .*id='" "$file"; then
        # libvirt wrote this for a running domain, with attributes that its schema does not have.
        define "$name" || fails "$file" 'not defined by libvirtd'
        continue
    fi
    validate "$name" >"$ROOT/tmp/out" 2>&1 || { cat "$ROOT/tmp/out" >&2; fails "$file" 'refused by virt-xml-validate'; }
    if [ ! -e /dev/kvm ] && grep -q "^<domain type='kvm'" "$file"; then
        continue
    fi
    define "$name" --validate || fails "$file" 'not defined by libvirtd'
    # Counter-checks: an unknown element, and a machine type that only libvirtd knows not to exist.
    sed 's/\(<\/\{0,1\}\)memory\([ >]\)/\1memori\2/g' "$file" >"$ROOT/run/xml/unknown-element.xml"
    sed "s/ machine='[^']*'/ machine='pc-none'/" "$file" >"$ROOT/run/xml/unknown-machine.xml"
    refused validate unknown-element.xml "in $file"
    refused define unknown-element.xml --validate
    validate unknown-machine.xml >/dev/null 2>&1 || fails "$file" 'its counter-check is not valid'
    refused define unknown-machine.xml --validate
done
exit $failed
