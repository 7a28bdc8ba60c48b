"""Shows progress to a person at a terminal while a command works: one line, or a bar, both on standard error.

Nothing is drawn if standard error is not a terminal.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_CLEAR = "\r\x1b[K"


class Tell(Protocol):
    """Shows the current task, and the part of all work that is done (0 to 1, or None if unknown)."""

    def __call__(self, doing: str, part: float | None) -> None: ...


class Line:
    """A line below the log that says what the command waits for.

    Args:
        private: whether the terminal belongs to a trainer that started this daemon. If so, nothing is shown.

    Attributes:
        drawn: whether the line is shown at all. No longer once the terminal has gone.
    """

    def __init__(self, *, private: bool = False) -> None:
        self.drawn = sys.stderr.isatty() and not private
        self._text = ""

    def show(self, text: str) -> None:
        """Show `text` instead of the previous text; "" removes the line."""
        if self.drawn and text != self._text:
            self._text = text
            try:
                width = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
                self._write(_CLEAR + (text if len(text) <= width else f"{text[: width - 3]}..."))
            except OSError:  # the terminal has gone
                self.drawn = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the line while something else is printed."""
        text = self._text
        self.show("")
        yield
        self.show(text)

    def log_to(self, handler: logging.Handler) -> None:
        """Keep the log lines of this handler above the line."""
        emit = handler.emit

        def above(record: logging.LogRecord) -> None:
            with self.aside():
                emit(record)

        handler.emit = above  # type: ignore[method-assign]

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


@contextmanager
def bar(*, shown: bool = True) -> Iterator[Tell]:
    """Show a bar while a command works, and remove it at the end. `shown`: False if the user may type meanwhile."""
    if not shown or not sys.stderr.isatty():
        yield lambda doing, part: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    # Only twice a second, because the command may be measuring meanwhile.
    drawn = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2)
    with drawn:
        task = drawn.add_task("", total=None)
        done, before = 0.0, ""

        def tell(doing: str, part: float | None) -> None:
            nonlocal done, before
            done = done if part is None else max(done, part)  # a bar never goes back
            changed, before = bool(doing) and doing != before, doing or before
            drawn.update(task, description=before, total=None if part is None else 1.0, completed=done, refresh=changed)

        yield tell
