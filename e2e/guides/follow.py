"""Executes the commands of the guides: `follow.py [GUIDE...]`, without arguments all. See README.md.

Environment: WORK (folder for files), CHART (packaged chart), EMULATION (options for Helm).
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

# The folder is a part of the sources.
sys.dont_write_bytecode = True
import guide as guides
import table

try:
    import yaml
except ImportError:
    # A host without PyYAML only misses a check.
    yaml = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
STARTED = time.time()
# What a command of a guide becomes on the test cluster: the chart and the images of this tree, and emulation.
ADAPTED = [
    (r"oci://registry\.example\.com/ferrovirt/charts/ferrovirt --version \S+", '"$CHART"'),
    (r"--set image\.registry=registry\.example\.com/ferrovirt ", ""),
    (r"^helm install .*", r"\g<0> $EMULATION"),
    (r"\bmy-namespace\b", "$NAMESPACE"),
]


class Failed(Exception):
    """A command failed."""


def say(text):
    """Prints a line at once."""
    print(f"guides-test: [{time.time() - STARTED:.0f} s] {text}", flush=True)


def normal(command):
    """Returns a command without comment, with single spaces."""
    if "\n" not in command:
        command = re.sub(r"\s{2,}# .*| {1,}# (phase|leave|sets|asks|resets|prints|starts|user).*", "", command)
    return re.sub(r"\s+", " ", command).strip()


def read(name):
    """Returns the blocks of a guide that the test applies or executes, and its commands."""
    found = []
    for block in guides.blocks((GUIDES / f"{name}.md").read_text()):
        if block.language == "console":
            found.append((block, guides.commands(block.lines)))
        elif block.language == "yaml" and not block.purpose:
            found.append((block, None))
    return found


def check(names):
    """Returns errors: entries of the tables that name no guide or no command, and guides that no list has."""
    errors = []
    known = {name: {normal(c) for _, cs in read(name) for _, c in cs or []} for name in names}
    entries = [(name, command) for name, command, _ in table.NOT_EXECUTED]
    entries += [(name, command) for name, steps in table.STEPS.items() for command in steps]
    for name, command in entries:
        if command not in known.get(name, ()):
            errors.append(f"docs/guides/{name}.md has no command: {command}")
    for name in names:
        listed = {command for of, command in entries if of == name}
        roots = [normal(c) for _, cs in read(name) for prompt, c in cs or [] if prompt == "#"]
        errors += [f"docs/guides/{name}.md: no row for a command of a shell elsewhere: {c}" for c in roots if c not in listed]
    both = {(name, command) for name, command, _ in table.NOT_EXECUTED} & {
        (name, command) for name, steps in table.STEPS.items() for command in steps
    }
    errors += [f"executed and not executed: {name}: {command}" for name, command in both]
    errors += [f"docs/guides/{name}.md: {error}" for name in names for error in broken(name)]
    errors += [f"no guide {name}" for name in [*table.START, *table.END, *table.FIRST, *table.LAST] if name not in known]
    return errors


def broken(name):
    """Returns the errors of the blocks `yaml` of a guide, also of those that are not applied."""
    errors = []
    found = guides.blocks((GUIDES / f"{name}.md").read_text()) if yaml else []
    for block in [block for block in found if block.language == "yaml"]:
        try:
            list(yaml.safe_load_all("\n".join(block.lines)))
        except yaml.YAMLError as error:
            errors.append(f"the block in line {block.line} is not YAML: {error}")
    return errors


class Guide:
    """A guide while it is followed."""

    def __init__(self, name):
        self.name = name
        self.namespace = f"guide-{name}"
        self.folder = pathlib.Path(os.environ["WORK"]) / name
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in ["charts", "examples"]:
            (self.folder / part).symlink_to(ROOT / part)
        self.environment = {**os.environ, "ROOT": str(ROOT), "NAMESPACE": self.namespace}
        self.background = []

    def run(self, script, what, limit=300, stdin=""):
        """Runs a script and returns its output."""
        if not script:
            return ""
        text = f". {ROOT}/e2e/guides/prelude.sh\n{script}\n"
        process = subprocess.Popen(
            ["bash", "-c", text], cwd=self.folder, env=self.environment, text=True, errors="replace",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        try:
            output, _ = process.communicate(stdin, timeout=limit)
        except BaseException as failure:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            if not isinstance(failure, subprocess.TimeoutExpired):
                # The test is stopped.
                raise
            raise Failed(f"{what}: not in {limit} s:\n{script}\n{output}") from None
        if process.returncode:
            raise Failed(f"{what}: status {process.returncode}:\n{script}\n{output}")
        return output

    def run_beside(self, script):
        """Starts a command that ends with `&`, and stops it at the end of the guide."""
        log = self.folder / "background.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {script.rstrip('& ')}"], cwd=self.folder, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )
        self.background.append(process)
        end = time.time() + 30
        while not log.stat().st_size:
            if process.poll() is not None or time.time() > end:
                raise Failed(f"ended or prints nothing: {script}")
            time.sleep(0.2)
        time.sleep(0.5)
        if process.poll() is not None:
            raise Failed(f"ended: {script}:\n{log.read_text()}")

    def command(self, text):
        """Executes a command of the guide, or says why not."""
        key = normal(text)
        reason = next((why for name, command, why in table.NOT_EXECUTED if (name, command) == (self.name, key)), None)
        if reason:
            say(f"{self.name}: NOT EXECUTED ({reason}): {key}")
            return
        step = table.STEPS.get(self.name, {}).get(key, table.Step())
        adapted = text if "\n" in text else key
        for pattern, replacement in ADAPTED:
            adapted = re.sub(pattern, replacement, adapted)
        adapted = step.run.replace("{}", adapted)
        self.run(step.before, f"before {key}", max(step.limit, 600))
        began = time.time()
        if adapted.endswith("&"):
            self.run_beside(adapted)
            output = ""
        else:
            output = self.run(adapted, key, step.limit)
        took = time.time() - began
        if step.shows and not re.search(step.shows, output):
            raise Failed(f"{key}: shows no {step.shows}:\n{output}")
        self.run(step.after, f"after {key}", 600)
        say(f"{self.name}: {took:.1f} s: {key}")

    def show(self):
        """Prints what is in the namespace after a failure, and removes it."""
        script = """kubectl get pods,vm,vmi,vmim,pvc --output wide || true
kubectl get events --sort-by .lastTimestamp | tail -40 || true
kubectl logs --selector kubevirt.io=virt-launcher --container compute --tail 30 --prefix || true
kubectl delete namespace "$NAMESPACE" --wait=false"""
        try:
            print(self.run(script, "diagnosis"), flush=True)
        except Failed as failure:
            print(failure, flush=True)

    def follow(self):
        """Applies the manifests and executes the commands of the guide, in its order."""
        self.run(
            f"kubectl create namespace {self.namespace}; kubectl config set-context --current --namespace {self.namespace}", "namespace"
        )
        try:
            self.run(table.START.get(self.name, ""), "preparation", 600)
            for block, commands in read(self.name):
                text = "\n".join(block.lines) + "\n"
                if commands is not None:
                    for _, command in commands:
                        self.command(command)
                elif block.saved_as:
                    (self.folder / block.saved_as).write_text(text)
                else:
                    # A reader's namespace is `default`.
                    text = text.replace("namespace: default\n", f"namespace: {self.namespace}\n")
                    self.run("kubectl apply --filename -", f"the manifest in line {block.line}", stdin=text)
                    say(f"{self.name}: the manifest in line {block.line} is applied")
            self.run(table.END.get(self.name, ""), "end", 600)
        finally:
            for process in self.background:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait()
        # The end of a namespace takes as long as its guests need to shut down, which is checked at the end.
        self.run(f"kubectl delete namespace {self.namespace} --wait=false", "end of the namespace")


def main():
    """Follows the guides."""
    names = sorted(path.stem for path in GUIDES.glob("*.md") if path.stem not in table.ELSEWHERE)
    if errors := check(names):
        sys.exit("\n".join(errors))
    if sys.argv[1:] == ["--check"]:
        return
    ordered = table.FIRST + [name for name in names if name not in table.FIRST + table.LAST] + table.LAST
    failed = []
    # Commands have sessions of their own, so they would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in sys.argv[1:] or ordered:
        guide = Guide(name)
        try:
            if name in table.LAST:
                # Everything of the other guides is gone.
                guide.run("within 300 eval '! kubectl get vmi --all-namespaces --output name | grep .'", "the end of all VMIs", 400)
            guide.follow()
        except Failed as failure:
            say(f"{name}: FAILED: {failure}")
            if name in table.FIRST:
                sys.exit(1)
            failed.append(name)
            guide.show()
    if failed:
        sys.exit(f"guides-test: failed: {' '.join(failed)}")
    say(f"{len(table.NOT_EXECUTED)} commands are listed as not executed")


main()
