"""Shows in a notebook what a wait is for: a bar below the cell, which changes in place and is gone at the end.

It needs nothing but IPython, which a notebook's kernel has imported. Elsewhere nothing is shown.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import secrets
import sys
import threading
import time
from typing import Any

STEP = 0.5
"""Seconds between two changes."""


class NotebookBar:
    """A bar that says what a wait is for. Other threads than the main one show nothing, as their cell has ended."""

    def __init__(self) -> None:
        self._display = _display() if threading.current_thread() is threading.main_thread() else None
        self._id = ""
        self._at = 0.0

    @property
    def works(self) -> bool:
        """Whether this is a notebook."""
        return self._display is not None

    def show(self, text: str) -> None:
        """Show the bar with this text. Call it often."""
        now = time.monotonic()
        if now >= self._at:
            self._at = now + STEP
            escaped = html.escape(text)
            self._draw({"text/html": f"<progress></progress> {escaped}", "text/plain": text})

    def close(self) -> None:
        """Remove the bar."""
        if self._id:
            self._draw({"text/html": "", "text/plain": ""})
            self._id = ""

    def _draw(self, data: dict[str, str]) -> None:
        if self._display is None:
            return
        update = bool(self._id)
        self._id = self._id or f"penstock-{secrets.token_hex(8)}"
        with contextlib.suppress(Exception):  # a wait must not fail because its kernel cannot draw
            self._display(data, raw=True, display_id=self._id, update=update)


def _display() -> Any:
    """Return IPython's function `display` if this is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:  # IPython in a terminal
        return None
    return importlib.import_module("IPython.display").display
