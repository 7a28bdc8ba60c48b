"""Says in words, and in the log, what a waiting consumer may be waiting for."""

from __future__ import annotations

import logging
import time

from penstock_proto import ProtocolError
from penstock_proto.messages import MissingRanks

from .connecting import Identity

logger = logging.getLogger("penstock")

_MOST_RANKS = 20


class Missing:
    """The ranks that the stream waits for. True if there are any; as text `rank 1 of 4 is`, or `ranks 1, 3 of 4 are`.

    Args:
        identity: how the consumer shares the stream, if it does.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._ranks: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def __str__(self) -> str:
        ranks = self._ranks
        named = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
        noun, verb = ("rank", "is") if len(ranks) == 1 else ("ranks", "are")
        return f"{noun} {named} of {self._identity.world_size} {verb}"

    def clear(self) -> None:
        """Forget the missing ranks, because the connection was lost."""
        self._ranks = ()

    def on_missing_ranks(self, message: MissingRanks) -> None:
        """Note which ranks are missing, as the daemon says.

        Raises:
            ProtocolError: there are no such ranks.
        """
        if any(rank >= self._identity.world_size for rank in message.ranks):
            raise ProtocolError(f"the daemon sent {message}, but there are {self._identity.world_size} ranks")
        self._ranks = message.ranks

    def warn_of_wait(self, url: str, seconds: float, *, reconnected: bool) -> None:
        """Log how long no data has come, and the likely reason: ranks are missing, or the generator is slow.

        Args:
            url: the URL of the feed.
            seconds: since the last data came.
            reconnected: whether the stream began before, over another connection.
        """
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        why = self._why_no_data(url, reconnected)
        logger.warning("%s: no data for %.0f s, since %s; %s", url, seconds, since, why)

    def _why_no_data(self, url: str, reconnected: bool) -> str:
        if self:
            goes = "continues" if reconnected else "begins"
            read = "does not read" if len(self._ranks) == 1 else "do not read"
            return f"{self} not connected or {read} yet, and the stream {goes} when all read"
        others = ", or another rank, which all ranks wait for" if self._identity.world_size > 1 else ""
        if self._identity.shares:
            others = ", or does another consumer of the group still hold the last batches of the epoch"
        return f"is the generator slow{others}? `penstock status {url}` shows the workers"
