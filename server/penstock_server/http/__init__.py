"""The daemon's HTTP server (`penstock serve --http`): a live page, metrics for Prometheus, health checks, and the
status as JSON.

It only reads. Its packages are imported only if `--http` is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock_proto import StartError, distribution

if TYPE_CHECKING:
    from .service import HttpService
    from .watched import Watched


def server(host: str, port: int, watched: Watched) -> HttpService:
    """Return an HTTP server that is not started yet. For the arguments, see `HttpService`.

    Raises:
        StartError: its packages are not installed.
    """
    try:
        from .service import HttpService
    except ImportError as error:
        raise StartError(f"--http needs further packages ({error}): {distribution.pip_install('http')}") from None
    return HttpService(host, port, watched)
