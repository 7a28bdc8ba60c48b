"""The daemon's HTTP server (`penstock serve --http`): metrics for Prometheus, health checks, and the status as JSON.

It only reads. Its packages are imported only if it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock_proto import StartError

if TYPE_CHECKING:
    from .service import HttpService


def service(host: str, port: int, status: Callable[[], str]) -> HttpService:
    """Return an HTTP server that is not started yet. For the arguments, see `HttpService`.

    Raises:
        StartError: its packages are not installed.
    """
    try:
        from .service import HttpService
    except ImportError as error:
        raise StartError(f"--http needs further packages ({error}): pip install 'penstock[http]'") from None
    return HttpService(host, port, status)
