"""How a session gets to its daemon: a private one is started, hands are shaken, and the stream is opened at a position.

The same for the first connection, for another at a loaded position, and for each attempt after a loss.
"""

from __future__ import annotations

import copy
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from penstock_proto import ConnectionLost, MemoryBound, PenstockError, ProtocolError, RankTaken, Unreachable
from penstock_proto.messages import FeedInfo, Had, Open
from penstock_proto.position import Position, pack

from . import _address
from ._local_transport import LocalTransport
from ._mailbox import Mailbox
from ._private_daemon import PrivateDaemon
from ._slab_views import SlabViews
from ._tcp_transport import TcpTransport

_PIECE = 64 * 1024
_PAUSE = 0.2
"""Seconds between two attempts to get a first connection."""
_SAY_AFTER = 2.0
"""Seconds of these after which the log says why."""
_ROOM = 2.0
"""Seconds for which a stream that finds no memory waits for that of others which have just been closed."""

logger = logging.getLogger("penstock")


LostSession: TypeAlias = tuple[bytes, int, tuple[Had, ...]]
"""The session that was lost, how many of its slabs were handed over, and in a group, which were last."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who reads: one consumer, the same in all of its sessions.

    With a `group` alone it shares a stream with whoever else is of the group; with a `world_size` it is a rank of
    several; else the stream is its own. `pad`: as a rank, it has the last round of an epoch filled up.
    """

    group: str = ""
    rank: int = 0
    world_size: int = 0
    pad: bool = False
    consumer: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def shares(self) -> bool:
        """Whether it takes from a group's stream what others do not."""
        return bool(self.group) and not self.world_size

    def opening(self, again: bool, last: LostSession) -> Callable[..., Open]:
        """Makes an Open of what a transport asks for."""
        return partial(
            Open,
            consumer=self.consumer,
            again=again,
            group=self.group,
            rank=self.rank,
            world_size=self.world_size,
            last=last[0],
            handed=last[1],
            pad=self.pad,
            had=last[2],
        )


@dataclass(frozen=True, slots=True)
class Link:
    """An open way to a daemon: the session, the transport over which the stream comes, what comes over it, and the
    first epoch that can begin."""

    session: bytes
    transport: LocalTransport | TcpTransport
    info: FeedInfo
    views: SlabViews
    epoch: int


class Connector:
    """Where a feed is, and how to get there.

    Attributes:
        url: as the user gave it.
        daemon: the private daemon, if it is one and runs.
        timeout: seconds that the daemon has for each answer of the handshake.
        who: who reads.
    """

    def __init__(
        self, url: str, workers: int | None, memory: int | None, transport: str, timeout: float, identity: Identity
    ) -> None:
        """Raises StartError where the URL has no proper form."""
        self.url = url
        self.identity = identity
        self.daemon: PrivateDaemon | None = None
        self.timeout = timeout
        self._workers = workers
        self._memory = memory
        self._transport = transport
        self._private = _address.is_private(url)
        self._address = None if self._private else _address.parse(url)

    def __str__(self) -> str:
        """The URL of the feed, of a private daemon also, once it runs."""
        return str(self._address or self.url)

    def __call__(
        self,
        mailbox: Mailbox,
        start: Callable[[FeedInfo], Position | None],
        timeout: float,
        watch: Callable[[], None] | None = None,
        last: LostSession = (b"", 0, ()),
        first_answer: float | None = None,
    ) -> Link:
        """An open way.

        Args:
            mailbox: the session's.
            start: the position from which the stream of this feed is to begin, or None for its very beginning. It may
                raise.
            timeout: seconds that the daemon has for each answer.
            watch: for attempts after a loss: called now and then while waiting; it may raise to break off.
            last: for attempts after a loss: what was lost.
            first_answer: for these: seconds that the daemon has for the first answer, if it has fewer.

        Raises:
            PenstockError: as `connect`.
        """
        place = self._place(watch)
        watch = watch and self._watching(watch)
        opening = self.identity.opening(watch is not None, last)
        dealer = TcpTransport(place, mailbox)
        try:
            welcome = dealer.hello(min(first_answer or timeout, timeout), watch)
            if welcome.feed.name != place.feed:
                raise ProtocolError(f"{place} was asked for, and the daemon answered with feed {welcome.feed.name!r}")
            views = SlabViews(welcome.feed)
            pieces = _pieces(start(welcome.feed))
            if self._transport != "tcp":
                try:
                    local = LocalTransport(welcome, views, mailbox, timeout, opening, pieces, watch)
                except OSError as error:
                    if self._transport == "local":
                        raise Unreachable(
                            f"{place} has no shared memory with this process ({error}): the daemon is on another host "
                            'or in another container; transport="tcp" reaches it',
                            feed=place.feed,
                        ) from None
                else:
                    dealer.close()
                    return Link(welcome.session, local, welcome.feed, views, local.epoch)
            epoch = dealer.open(welcome, views, timeout, opening, pieces, watch)
            return Link(welcome.session, dealer, welcome.feed, views, epoch)
        except BaseException as error:
            if isinstance(error, PenstockError):
                error.feed = error.feed or place.feed
            dealer.close()
            raise

    def first(self, mailbox: Mailbox, start: Callable[[FeedInfo], Position | None], replaces: bool = False) -> Link:
        """As a call, for a first connection. It is tried again within `timeout` seconds where it breaks before it is
        open, as nothing has come over it, and where its rank is taken, as the daemon may not know yet that a job has
        ended. Where there is no memory it is tried again for 2 s, or for `timeout` seconds if it `replaces` another:
        what a stream that was just closed held comes back soon."""
        began, said, left = time.monotonic(), False, self.timeout
        refused: PenstockError | None = None
        try:
            while True:
                try:
                    return self(mailbox, start, left)
                except Unreachable:  # in the little time that was left
                    if refused is None:
                        raise
                    raise refused from None
                except (ConnectionLost, RankTaken, MemoryBound) as error:
                    waited = time.monotonic() - began
                    left = self.timeout - waited - _PAUSE
                    if left <= 0 or (self._private and isinstance(error, ConnectionLost)):
                        raise
                    if isinstance(error, MemoryBound) and not replaces and waited > _ROOM:
                        raise
                    refused = error
                    if waited > _SAY_AFTER and not said:
                        said = True
                        logger.warning("%s: %s. Trying again for up to %g s", self, error.message, self.timeout)
                time.sleep(_PAUSE)
        finally:
            del refused  # it holds this frame

    def without_daemon(self) -> Connector:
        """Another that knows the same address, and has no private daemon to end."""
        other = copy.copy(self)
        other.daemon = None
        other._private = False
        return other

    def stop(self) -> None:
        """End the private daemon, if there is one."""
        daemon, self.daemon = self.daemon, None
        if daemon is not None:
            daemon.stop()

    def _place(self, watch: Callable[[], None] | None) -> _address.Address:
        if self._private and (self.daemon is None or not self.daemon.alive()):
            self.stop()
            self.daemon = PrivateDaemon(self.url, self._workers, self._memory, watch)
            self._address = _address.parse(self.daemon.url)
        assert self._address is not None
        return self._address

    def _watching(self, watch: Callable[[], None]) -> Callable[[], None]:
        def look() -> None:
            watch()
            if self.daemon is not None and not self.daemon.alive():
                raise ConnectionLost("the private daemon ended")

        return look


def _pieces(position: Position | None) -> list[bytes]:
    if position is None:
        return []
    data = pack(position)
    return [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
