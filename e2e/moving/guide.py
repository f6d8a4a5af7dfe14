"""Takes a guide apart for a test: `guide.py GUIDE FOLDER`.

Writes a script `NUMBER-HEADING.sh` with the commands of the blocks `console` below each heading, in the order of the guide, and a file
for each block that the text before it says to save ("Save this as `NAME`:").
"""

import pathlib
import re
import sys


def blocks(text):
    """Yields each block of code: heading above it, line before it, language, lines."""
    heading, before, fence = "", "", None
    for line in text.splitlines():
        stripped = line.lstrip()
        if fence is not None:
            if stripped.rstrip() == "```":
                yield heading, before, language, fence
                fence, before = None, ""
            else:
                # Without the indentation of the block.
                fence.append(line[indentation:])
        elif stripped.startswith("```"):
            indentation = len(line) - len(stripped)
            language, fence = stripped[3:].split(" ")[0], []
        elif line.startswith("#"):
            heading = line.lstrip("#").strip()
        elif line.strip():
            before = line
    if fence is not None:
        sys.exit(f"a block below {heading!r} does not end")


def commands(lines):
    """Returns the commands of a block without prompts, each on a line."""
    joined = re.sub(r" *\\\n *", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        if not line.startswith("$ "):
            sys.exit(f"not a command: {line!r}")
        found.append(line[2:])
    return found


def main():
    """Writes the files."""
    guide, folder = map(pathlib.Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    scripts = {}
    for heading, before, language, lines in blocks(guide.read_text()):
        if language == "console":
            scripts.setdefault(heading, []).extend(commands(lines))
        elif saved := re.search(r" as `([^`]+)`[^`]*:$", before):
            (folder / saved.group(1)).write_text("\n".join(lines) + "\n")
        else:
            sys.exit(f"nothing says what to do with the block below {heading!r}")
    for number, (heading, found) in enumerate(scripts.items(), 1):
        name = re.sub(r"[^a-z]+", "-", heading.lower()).strip("-")
        (folder / f"{number}-{name}.sh").write_text("\n".join(found) + "\n")


main()
