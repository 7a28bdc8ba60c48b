"""Says in words what a waiting consumer may be waiting for."""

from __future__ import annotations

from ._connecting import Identity

_MOST_RANKS = 20


def who_is_missing(ranks: tuple[int, ...], world_size: int) -> str:
    """Return `rank 1 of 4 is`, or `ranks 1, 3 of 4 are`."""
    named = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
    noun, verb = ("rank", "is") if len(ranks) == 1 else ("ranks", "are")
    return f"{noun} {named} of {world_size} {verb}"


def why_no_data(url: str, identity: Identity, missing: tuple[int, ...], *, reconnected: bool) -> str:
    """Return why no data may come: ranks are missing, or a question about the generator.

    Args:
        url: the URL of the feed.
        identity: how the consumer shares the stream, if it does.
        missing: the ranks that the stream waits for.
        reconnected: whether the stream began before, over another connection.
    """
    if missing:
        goes = "continues" if reconnected else "begins"
        return f"{who_is_missing(missing, identity.world_size)} not connected, and the stream {goes} when all are"
    others = ", or another rank, which all ranks wait for" if identity.world_size > 1 else ""
    if identity.shares:
        others = ", or does another consumer of the group still hold the last batches of the epoch"
    return f"is the generator slow{others}? `penstock status {url}` shows the workers"
