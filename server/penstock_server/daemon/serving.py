"""Runs daemons in this process: a single one, or with `--reload` one after another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from penstock_proto import PenstockError

from ..machine import descriptors, orphans
from ..reloading.reloader import Reloader
from ..reloading.trial import Trial
from ..scaling.host_scaling import Engine
from ..targets import saved_sources, world
from ..targets.sources import Sources
from .config import DaemonConfig
from .daemon import Daemon

log = logging.getLogger(__name__)


def serve(
    config: DaemonConfig,
    *,
    on_ready: Callable[[str], None],
    each_second: Callable[[Daemon], None] = lambda daemon: None,
    engine: Engine | None = None,
) -> None:
    """Run a daemon in this process, on uvloop, until it is stopped. Call it on the main thread.

    Args:
        config: its options.
        on_ready: called with the URL of each feed once it can be read.
        each_second: called once a second with the daemon.
        engine: runs hosts that join, or None.

    Raises:
        PenstockError: the daemon could not start, or failed; the message says why. With `reload`, an error that new
            code may fix is logged instead.
    """
    descriptors.raise_limit()
    orphans.adopt()
    new = partial(Daemon, on_ready=on_ready, engine=engine)
    if not config.reload:
        saved_sources.keep(Sources(config.feeds, world.loaded_files()).texts())
        _, error = _run(lambda: new(config, each_second=each_second))
        if error is not None:
            raise error
        return
    # Python takes a .pyc file as fresh if its source has the same second and size, so it could miss a quick second
    # change.
    config = replace(config, environment={"PYTHONDONTWRITEBYTECODE": "1", **config.environment})
    _serve_and_reload(config, each_second, new)


def _serve_and_reload(config: DaemonConfig, each_second: Callable[[Daemon], None], new: Callable[..., Daemon]) -> None:
    reloader = Reloader(config.feeds, partial(Trial, config.feeds, config.memory, config.join_words()))

    def look(daemon: Daemon) -> None:
        each_second(daemon)
        reloader.look(daemon)

    try:
        while True:
            daemon, error = _run(partial(new, config, each_second=look, reloader=reloader))
            if error is not None and not (daemon.endpoint and reloader.watches):  # the code is not the reason
                raise error
            config = replace(config, bind=daemon.endpoint, http=daemon.http)
            if error is not None:
                log.error("%s", error, extra={"event": "reload_failed", "error": error})
                if not reloader.wait():
                    log.info("stopped", extra={"event": "stopped"})
                    return
            elif not daemon.renewing:
                return
            reloader.begin()
    finally:
        reloader.stop()


def _run(new: Callable[[], Daemon]) -> tuple[Daemon, PenstockError | None]:
    """Run a daemon on an event loop of its own; return it, and the error with which it ended."""
    import uvloop

    async def run() -> tuple[Daemon, PenstockError | None]:
        daemon = new()
        try:
            await daemon.run()
        except PenstockError as error:
            return daemon, error
        return daemon, None

    return uvloop.run(run())
