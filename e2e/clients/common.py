"""What the clients in Python share: the VM of the examples, output lines and waiting."""

import sys
import time
from typing import Any, Callable

import yaml

# What the guest prints when it is up. The log of a pod shows whole lines only, so a prompt does not appear in it.
BOOTED = ": up in "
# Seconds within which a VM starts or stops. Guests may run under software emulation.
LIMIT = 120


def arguments(usage: str) -> tuple[str, str]:
    """Returns NAMESPACE and MANIFEST of the command line."""
    if len(sys.argv) != 3:
        raise SystemExit(usage)
    return sys.argv[1], sys.argv[2]


def vm_of(manifest: str, name: str, run_strategy: str) -> dict[str, Any]:
    """Returns the VM of a manifest with another name and run strategy, and with an interface that permits migration."""
    with open(manifest, encoding="utf-8") as file:
        vm = yaml.safe_load(file)
    vm["metadata"]["name"] = name
    vm["spec"]["runStrategy"] = run_strategy
    template = vm["spec"]["template"]
    template["metadata"]["labels"] = {"app": name}
    template["spec"]["domain"]["devices"]["interfaces"] = [{"name": "default", "masquerade": {}}]
    template["spec"]["networks"] = [{"name": "default", "pod": {}}]
    return vm


def step(client: str, text: str) -> None:
    """Prints that a step of a client succeeded."""
    print(f"{client}: {text}", flush=True)


def ensure(holds: Any, message: str) -> None:
    """Ends the program with a message unless something holds."""
    if not holds:
        raise SystemExit(f"FAILED: {message}")


def eventually(what: str, holds: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Waits until something is true, and returns it."""
    deadline = time.monotonic() + limit
    while True:
        if value := holds():
            return value
        ensure(time.monotonic() < deadline, f"not within {limit} s: {what}")
        time.sleep(0.5)
