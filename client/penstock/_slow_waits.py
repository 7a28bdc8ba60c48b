"""Says in words, and in the log, what a waiting consumer may be waiting for."""

from __future__ import annotations

import logging
import time

from ._connecting import Identity

logger = logging.getLogger("penstock")

_MOST_RANKS = 20


def who_is_missing(ranks: tuple[int, ...], world_size: int) -> str:
    """Return `rank 1 of 4 is`, or `ranks 1, 3 of 4 are`."""
    named = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
    noun, verb = ("rank", "is") if len(ranks) == 1 else ("ranks", "are")
    return f"{noun} {named} of {world_size} {verb}"


def warn_of_wait(url: str, seconds: float, identity: Identity, missing: tuple[int, ...], *, reconnected: bool) -> None:
    """Log that no data came for so many seconds, and why that may be: ranks are missing, or the generator is slow.

    Args:
        url: the URL of the feed.
        seconds: since the last data came.
        identity: how the consumer shares the stream, if it does.
        missing: the ranks that the stream waits for.
        reconnected: whether the stream began before, over another connection.
    """
    why = _why_no_data(url, identity, missing, reconnected)
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    logger.warning("%s: no data for %.0f s, since %s; %s", url, seconds, since, why)


def _why_no_data(url: str, identity: Identity, missing: tuple[int, ...], reconnected: bool) -> str:
    if missing:
        goes = "continues" if reconnected else "begins"
        return f"{who_is_missing(missing, identity.world_size)} not connected, and the stream {goes} when all are"
    others = ", or another rank, which all ranks wait for" if identity.world_size > 1 else ""
    if identity.shares:
        others = ", or does another consumer of the group still hold the last batches of the epoch"
    return f"is the generator slow{others}? `penstock status {url}` shows the workers"
