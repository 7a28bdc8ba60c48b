"""Collects what each room and each file says of itself, for the page on the architecture. conf.py calls it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("proto/penstock_proto", "server/penstock_server", "server/penstock_command", "client/penstock")


def page() -> str:
    """Return the rooms of all packages, each with its files, as Markdown."""
    return "\n".join(line for package in PACKAGES for line in _room(ROOT / package, 0))


def _room(folder: Path, depth: int) -> Iterator[str]:
    name = "/".join(folder.relative_to(ROOT).parts[1:])
    yield f"{'###' if depth == 0 else '####'} {name}\n"
    yield f"{_head(folder / '__init__.py')}\n"
    files = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("__init__")]
    if files:
        yield "| file | what |\n|---|---|"
        yield "".join(f"| `{path.name}` | {_sentence(path)} |\n" for path in files)
    for room in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from _room(room, depth + 1)


def _head(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise ValueError(f"{path} does not say what it is for")
    return text


def _sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring, without its full stop."""
    paragraph = _head(path).split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return paragraph.split(". ")[0].removesuffix(".")
