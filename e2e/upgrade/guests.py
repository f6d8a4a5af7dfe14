"""Prints the identity of guests, one line each: anything that a restart of any part of a VMI changes.

usage: guests.py CLUSTER PLUGIN [NAMESPACE/NAME...]

CLUSTER is the program `cluster`, PLUGIN `kubectl-virt`. Without names: all VMIs of the cluster. A line is

    NAMESPACE/NAME vmi=UID node=NODE pod=UID restarts=N qemu=TIME boot=ID

with the UIDs of the VMI and of its running launcher pod, the restarts of its container, the start of the QEMU process in
clock ticks since the boot of the host, and the boot ID in the memory of the guest's kernel, which a shell on the serial console
prints. Fails if a guest does not answer.
"""

import json
import os
import re
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

# Consoles at a time.
CONSOLES = 4
# Seconds until a guest must have answered. It may still boot.
LIMIT = 300
USER, PASSWORD = b"root", b"ferrovirt"
# Start time and arguments of each QEMU of a VMI. The 22nd field of stat is the 20th after the name, which ends with a parenthesis.
PROCESSES = """
for process in /proc/[0-9]*; do
    arguments=$(tr '\\0' ' ' <"$process/cmdline") || continue
    case $arguments in
    /usr/bin/qemu-system-*guest=*) echo "$(sed 's/.*) //' "$process/stat" | cut -d ' ' -f 20) $arguments" ;;
    esac
done 2>/dev/null
true
"""


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode(errors="replace")


def objects(kind, *options):
    return json.loads(run("kubectl", "get", kind, "--all-namespaces", "--output", "json", *options))["items"]


class Console:
    """The serial console of a guest."""

    count = 0

    def __init__(self, plugin, guest):
        namespace, name = guest.split("/")
        command = [plugin, "console", name, "--namespace", namespace]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, bufsize=0)
        self.seen = b""

    def send(self, text):
        self.process.stdin.write(text)

    def wait(self, pattern, seconds):
        """Returns the match of a pattern, or None after this time. Later output is kept."""
        until = time.monotonic() + seconds
        while True:
            match = re.search(pattern, self.seen)
            if match:
                self.seen = self.seen[match.end() :]
                return match
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                raise BrokenPipeError
            self.seen += read

    def log_in(self):
        self.send(USER + b"\n")
        if self.wait(rb"assword: ", 20):
            # login discards input until it has turned the echo off, after the prompt.
            time.sleep(1)
            self.send(PASSWORD + b"\n")
            self.wait(rb"# ", 30)

    def boot_id(self):
        """Returns the boot ID, or None if neither a prompt nor a shell answers."""
        # Enter repeats a prompt from before.
        self.send(b"\n")
        prompt = self.wait(rb"login: |# ", 5)
        if not prompt:
            return None
        if prompt[0] != b"# ":
            self.log_in()
        # Unique, as output of an earlier console may follow. The echo of the line does not match the pattern.
        Console.count += 1
        mark = b"%d-%d" % (os.getpid(), Console.count)
        self.send(b"echo '<%s:'$(cat /proc/sys/kernel/random/boot_id)'>'\n" % mark)
        match = self.wait(rb"<%s:([0-9a-f-]{36})>" % mark, 20)
        return match and match[1].decode()

    def close(self):
        self.process.kill()
        self.process.wait()


def boot_id(plugin, guest):
    until = time.monotonic() + LIMIT
    seen = b""
    while time.monotonic() < until:
        console = Console(plugin, guest)
        try:
            while time.monotonic() < until:
                found = console.boot_id()
                if found:
                    return found
        except BrokenPipeError:
            time.sleep(2)
        finally:
            seen = console.seen or seen
            console.close()
    sys.exit(f"guest {guest} does not answer, but prints {seen[-400:]!r}")


def main():
    cluster, plugin, *wanted = sys.argv[1:]
    vmis = {f"{vmi['metadata']['namespace']}/{vmi['metadata']['name']}": vmi for vmi in objects("virtualmachineinstances.kubevirt.io")}
    guests = sorted(wanted or vmis)
    pods = {}
    for pod in objects("pods", "--selector", "kubevirt.io=virt-launcher"):
        if pod["status"]["phase"] == "Running":
            pods.setdefault(pod["metadata"]["labels"]["kubevirt.io/created-by"], []).append(pod)
    started = {}
    for node in objects("nodes"):
        for line in run(cluster, "exec", node["metadata"]["name"], "--", "sh", "-c", PROCESSES).splitlines():
            start, arguments = line.split(" ", 1)
            namespace, name = re.search(r"guest=([^_,]+)_([^,]+)", arguments).groups()
            started.setdefault(f"{namespace}/{name}", []).append(start)
    with ThreadPoolExecutor(CONSOLES) as executor:
        boots = dict(zip(guests, executor.map(lambda guest: boot_id(plugin, guest), guests)))
    for guest in guests:
        vmi = vmis[guest]
        uid = vmi["metadata"]["uid"]
        of_vmi = pods.get(uid, [])
        print(
            guest,
            f"vmi={uid}",
            f"node={vmi['status'].get('nodeName')}",
            "pod=" + ",".join(sorted(pod["metadata"]["uid"] for pod in of_vmi)),
            "restarts=" + ",".join(str(sum(one["restartCount"] for one in pod["status"]["containerStatuses"])) for pod in of_vmi),
            "qemu=" + ",".join(started.get(guest, [])),
            f"boot={boots[guest]}",
        )


main()
