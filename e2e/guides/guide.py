"""Takes a guide apart for a test.

`guide.py GUIDE FOLDER` writes a script `NUMBER-HEADING.sh` with the commands of the blocks `console` below each heading, in the order of
the guide, and a file for each block that the text before it says to save ("Save this as `NAME`:").
"""

import dataclasses
import pathlib
import re
import sys

# A line of a block that begins with one of these programs, and is neither a command nor continues one, has lost its prompt.
PROGRAMS = ("kubectl ", "helm ", "make ", "curl ")


@dataclasses.dataclass
class Block:
    """A block of code."""

    heading: str
    # Last line of text before it.
    before: str
    # First word after the fence, and what follows.
    language: str
    purpose: str
    # Number of its first line.
    line: int
    lines: list

    @property
    def saved_as(self):
        """Returns the name of the file as which the text says to save the block."""
        found = re.search(r" as `([^`]+)`[^`]*:$", self.before)
        return found and found.group(1)


def blocks(text):
    """Yields the blocks of code."""
    heading, before, block = "", "", None
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.lstrip()
        if block is not None:
            if stripped.rstrip() == "```":
                yield block
                block, before = None, ""
            else:
                # Without the indentation of the block.
                block.lines.append(line[indentation:])
        elif stripped.startswith("```"):
            indentation = len(line) - len(stripped)
            language, _, purpose = stripped[3:].partition(" ")
            block = Block(heading, before, language, purpose, number + 1, [])
        elif line.startswith("#"):
            heading = line.lstrip("#").strip()
        elif line.strip():
            before = line
    if block is not None:
        sys.exit(f"a block below {heading!r} does not end")


def commands(lines):
    """Returns the commands of a block, each with its prompt (`$` or `#`), without output."""
    found = []
    is_open = False
    for line in lines:
        if is_open:
            found[-1][1] += "\n" + line
        elif re.match(r"[$#] ", line):
            found.append([line[0], line[2:]])
        elif not found or line.startswith(PROGRAMS):
            sys.exit(f"not a command: {line!r}")
        else:
            continue
        is_open = found[-1][1].endswith("\\") or found[-1][1].count("'") % 2 == 1
    if is_open:
        sys.exit(f"a command does not end: {found[-1][1]!r}")
    # Each on a line, if no quotation contains the end of the line.
    return [(prompt, re.sub(r" *\\\n *", " ", command)) for prompt, command in found]


def main():
    """Writes the files."""
    guide, folder = map(pathlib.Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    scripts = {}
    for block in blocks(guide.read_text()):
        if block.language == "console":
            found = commands(block.lines)
            if any(prompt != "$" for prompt, _ in found):
                sys.exit(f"a command of root below {block.heading!r}")
            scripts.setdefault(block.heading, []).extend(command for _, command in found)
        elif block.saved_as:
            (folder / block.saved_as).write_text("\n".join(block.lines) + "\n")
        else:
            sys.exit(f"nothing says what to do with the block below {block.heading!r}")
    for number, (heading, found) in enumerate(scripts.items(), 1):
        name = re.sub(r"[^a-z]+", "-", heading.lower()).strip("-")
        (folder / f"{number}-{name}.sh").write_text("\n".join(found) + "\n")


if __name__ == "__main__":
    main()
