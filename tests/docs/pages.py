"""Extracts code blocks, files and commands from the pages of the documentation, for the tests that run them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def blocks(text: str, kind: str) -> list[str]:
    """Return the contents of all code blocks of this kind, such as "python" or "text"."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        page: the name of the page.
        line: the number of its first line in the page, from 0.
        kind: "python", "sh" or another word after the fence.
        text: its contents.
        reason: why it is not run, from the mark before it; None if it is.
    """

    page: str
    line: int
    kind: str
    text: str
    reason: str | None


def blocks_of(page: Path) -> list[Block]:
    """Return all code blocks of a page, but not MyST's directives."""
    text = page.read_text()
    found = re.finditer(r"^(?:<!-- not run: ([^\n]*) -->\n)?```([a-z]+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(page.stem, text.count("\n", 0, one.start(3)), one[2], one[3], one[1]) for one in found]


def write_files(text: str, folder: Path) -> None:
    """Write the Python blocks that begin with a file name, such as `# feed.py`. Blocks of one name form one file."""
    found: dict[str, str] = {}
    for block in blocks(text, "python"):
        named = re.match(r"# (\w+\.py)\n", block)
        if named:
            found[named[1]] = found.get(named[1], "") + block
    for name, block in found.items():
        (folder / name).write_text(block)


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a page, in the order in which its reader runs them."""
    for kind, block in re.findall(r"^```(sh|console)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if kind == "sh" or line.startswith("$ "):
                yield line.removeprefix("$ ").partition("  #")[0].strip()


def section(text: str, heading: str) -> str:
    """Return the part of a page below a heading, up to the next heading of the same level."""
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, f"no heading {heading!r}"
    return rest.partition("\n## ")[0]
