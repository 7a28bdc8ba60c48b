"""Runs daemons in this process: a single one, or with `--reload` one after another."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock_proto import PenstockError

from ..machine import descriptors, orphans
from ..reloading.reloader import Reloader
from ..reloading.trial import Trial
from ..targets import saved_sources
from .access import Access
from .daemon import Daemon

log = logging.getLogger(__name__)


def serve(
    feeds: list[str],
    *,
    until_stdin_closes: bool = False,
    reload: bool = False,
    each_second: Callable[[Daemon], None] = lambda daemon: None,
    **options: Any,
) -> None:
    """Run a daemon in this process, on uvloop, until it is stopped. Call it on the main thread.

    Args:
        feeds: MODULE:ATTR of each feed.
        until_stdin_closes: also stop at the end of standard input.
        reload: when the feeds' code changes, read the next epoch from the new code.
        each_second: called once a second with the daemon.
        options: as for `Daemon`, but with `keys` and `insecure`, as for `Access`, instead of `access`.

    Raises:
        PenstockError: the daemon could not start, or failed; the message says why. With `reload`, an error that new
            code may fix is logged instead.
    """
    import uvloop

    descriptors.raise_limit()
    orphans.adopt()
    if not reload:
        _, error = uvloop.run(_run(feeds, until_stdin_closes, each_second=each_second, **options))
        if error is not None:
            raise error
        return
    # Python takes a .pyc file as fresh if its source has the same second and size, so it could miss a quick second
    # change.
    options["environment"] = {"PYTHONDONTWRITEBYTECODE": "1", **(options["environment"] or {})}
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        _serve_and_reload(feeds, until_stdin_closes, Path(folder) / "sources", each_second, options)


def _serve_and_reload(
    feeds: list[str],
    until_stdin_closes: bool,
    sources: Path,
    each_second: Callable[[Daemon], None],
    options: dict[str, Any],
) -> None:
    import uvloop

    trial = partial(Trial, feeds, options["memory"], options["environment"])
    reloader = Reloader(feeds, trial, sources)
    options["environment"] = {**options["environment"], saved_sources.VARIABLE: str(sources)}

    def look(daemon: Daemon) -> None:
        each_second(daemon)
        reloader.look(daemon)

    try:
        while True:
            daemon, error = uvloop.run(_run(feeds, until_stdin_closes, each_second=look, reloader=reloader, **options))
            if error is not None and not (daemon.endpoint and reloader.watches):  # the code is not the reason
                raise error
            options["bind"], options["http"] = daemon.endpoint, daemon.http
            if error is not None:
                log.error("%s", error, extra={"event": "reload_failed", "error": error})
                reloader.wait()
            elif not daemon.renewing:
                return
            reloader.begin()
    finally:
        reloader.stop()


async def _run(
    feeds: list[str], until_stdin_closes: bool, *, keys: str | None = None, insecure: bool = False, **options: Any
) -> tuple[Daemon, PenstockError | None]:
    """Run a daemon; return it, and the error with which it ended."""
    daemon = Daemon(feeds, access=Access(options["bind"], keys, insecure), **options)
    try:
        await daemon.run(until_stdin_closes)
    except PenstockError as error:
        return daemon, error
    return daemon, None
