"""Opens a connection: starts a private daemon if necessary, shakes hands, and opens the stream at a position.

The same code serves the first connection, another one at a loaded position, and each attempt after a loss.
"""

from __future__ import annotations

import copy
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

from penstock_proto import ConnectionLost, MemoryBound, PenstockError, ProtocolError, RankTaken, Unreachable
from penstock_proto.batches.position import Position, pack, unpack
from penstock_proto.messages import FeedInfo, Had, Open, Start, Welcome
from penstock_proto.params import shown_call
from penstock_proto.security.keys import ClientKeys
from penstock_proto.security.trusted_users import users
from penstock_proto.status.readiness import NO_PROGRESS, Patience
from penstock_proto.transport.urls import Address
from penstock_proto.world import World

from .._state.deadline import Deadline
from .._state.mailbox import Mailbox
from .._transport import address as _address
from .._transport.local_transport import LocalTransport
from .._transport.slab_views import SlabViews
from .._transport.tcp_connection import TcpConnection
from .._transport.tcp_transport import TcpTransport
from .._transport.transport import Transport
from .private_daemon import PrivateDaemon

_PIECE = 64 * 1024
_PAUSE = 0.2
"""Seconds between two attempts to open the first connection."""
_SAY_AFTER = 2.0
"""Seconds after which the log explains why the first connection is not open yet."""
_ROOM = 2.0
"""Seconds that a stream without memory waits for the memory of streams that were just closed."""

logger = logging.getLogger("penstock")


class LostSession(NamedTuple):
    """The client's last session, as the client describes it to the daemon: its token, how many of its slabs were handed
    over, and, in a group, the latest of these slabs. All are empty for a first session."""

    session: bytes = b""
    handed: int = 0
    latest: tuple[Had, ...] = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a consumer to the daemon, in all of its sessions.

    With `world_size` the consumer is one of several ranks. With a `group` alone it shares a stream with the other
    consumers of the group. Otherwise it has its own stream. `pad`: as a rank, it wants the last round of an epoch
    filled up. `share`: it may read its stream together with other jobs, each at its own pace. `start`: where it begins
    if it has no state: at the "beginning", or with the next batch ("latest") or epoch ("next_epoch") of such jobs.
    """

    group: str = ""
    rank: int = 0
    world_size: int = 0
    pad: bool = False
    share: bool = False
    start: Start = "beginning"
    consumer: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def shares(self) -> bool:
        """Whether it shares a group's stream, and so receives only some of the batches."""
        return bool(self.group) and not self.world_size

    def opening(self, again: bool, lost: LostSession) -> Callable[..., Open]:
        """Return a function that completes an Open with the arguments of a transport."""
        return partial(
            Open,
            consumer=self.consumer,
            again=again,
            group=self.group,
            rank=self.rank,
            world_size=self.world_size,
            last=lost.session,
            handed=lost.handed,
            pad=self.pad,
            had=lost.latest,
            shares=self.share,
            start=self.start,
        )


@dataclass(frozen=True, slots=True)
class Link:
    """An open connection: the token of its session, the transport of the stream, the feed's description, how its slabs
    are viewed, the first epoch that can begin, and where the stream begins if the daemon has chosen that."""

    session: bytes
    transport: Transport
    info: FeedInfo
    views: SlabViews
    epoch: int
    start: Position | None = None


class Named(Protocol):
    """The part of a connector that messages and counters use."""

    @property
    def url(self) -> str:
        """The feed as the user named it."""

    @property
    def identity(self) -> Identity:
        """Identifies the consumer."""

    @property
    def keys(self) -> ClientKeys | None:
        """The client's keys, or None."""


class Connector:
    """Opens connections to one feed.

    Attributes:
        url: the URL as the user gave it, with the parameters of a factory.
        daemon: the private daemon that it has started, or None.
        timeout: seconds in which a connection must be open, once the daemon makes no progress.
        identity: identifies the consumer.
        keys: this client's keys, for a daemon that requires them, or None.
        trusted: the users of this machine who may run the daemon; None: any, as keys say who it is.
    """

    def __init__(
        self,
        url: str,
        workers: int | Literal["auto"] | None,
        memory: int | None,
        transport: str,
        timeout: float | None,
        identity: Identity,
        world: World | None = None,
        keys: ClientKeys | None = None,
        daemon_user: str | int | None = None,
    ) -> None:
        """`timeout`: None: `NO_PROGRESS` seconds, and as long as the daemon makes progress. `world`: what user modules
        see in the workers of a private daemon; None: what they see here. Raises StartError if the URL has the wrong
        form, or if there is no user `daemon_user`."""
        self.url = url
        self.identity = identity
        self.daemon: PrivateDaemon | None = None
        self.timeout = NO_PROGRESS if timeout is None else timeout
        self._patient = timeout is None
        self._progressed = 0.0
        """When the daemon last made progress with its start (monotonic)."""
        self._workers = workers
        self._memory = memory
        self._transport = transport
        self.keys = keys
        self.trusted = users(daemon_user) if keys is None else None
        self._private = _address.is_private(url)
        self._world = world or World.here() if self._private else None
        self._address = None if self._private else _address.parse(url)

    def __str__(self) -> str:
        """Return the URL of the feed. Before a private daemon runs, this is the URL that the user gave."""
        return str(self._address or shown_call(self.url))

    def connect(
        self,
        mailbox: Mailbox,
        start: Callable[[FeedInfo], Position | None],
        timeout: float,
        watch: Callable[[], None] | None = None,
        lost: LostSession | None = None,
        first_answer: float | None = None,
        on_progress: Callable[[], None] | None = None,
    ) -> Link:
        """Open a connection.

        Args:
            mailbox: the mailbox of the stream.
            start: returns the position at which the stream of the given feed begins, or None for its very beginning. It
                may raise.
            timeout: seconds in which the connection must be open, after the start of a private daemon.
            watch: for attempts after a loss: called regularly while waiting; it may raise to stop the attempt.
            lost: for attempts after a loss: the lost session.
            first_answer: for attempts after a loss: seconds that the daemon has for its first answer, if fewer than
                `timeout`.
            on_progress: called when the daemon makes progress with its start, which prolongs the wait for its answer.
                None: nothing does.

        Raises:
            PenstockError: as `connect`.
        """
        address = self._start(watch)
        watch = watch and self._watching(watch)
        patience = Patience(timeout if first_answer is None else min(timeout, first_answer), on_progress)
        until = Deadline.after(timeout)
        opening = self.identity.opening(watch is not None, lost or LostSession())
        shares = bool(self.identity.group or self.identity.world_size)
        connection = TcpConnection(address, self.keys, self.trusted)
        try:
            welcome = connection.hello(patience, watch)
            if patience.state is not None and not patience.fixed:
                until = Deadline.after(timeout)
            if welcome.feed.name != address.feed:
                raise ProtocolError(f"the daemon at {address} answered with another feed, {welcome.feed.name!r}")
            views = SlabViews(welcome.feed)
            pieces = _pieces(start(welcome.feed))
            if self._transport != "tcp":
                try:
                    local = LocalTransport(
                        welcome,
                        views,
                        mailbox,
                        until,
                        opening,
                        pieces,
                        watch,
                        trusted=self.trusted,
                        shares=shares,
                    )
                except OSError as error:
                    if self._transport == "local":
                        raise Unreachable(
                            f"{address} shares no memory with this process ({error}): the daemon is on another host "
                            'or in another container; use transport="tcp"',
                            feed=address.feed,
                        ) from None
                else:
                    connection.close()
                    return _linked(welcome, local, views)
            tcp = TcpTransport(connection, welcome, views, mailbox, until, opening, pieces, watch, shares=shares)
            return _linked(welcome, tcp, views)
        except BaseException as error:
            if isinstance(error, PenstockError):
                error.feed = error.feed or address.feed
            connection.close()
            raise

    def connect_first(
        self, mailbox: Mailbox, start: Callable[[FeedInfo], Position | None], replaces: bool = False
    ) -> Link:
        """Open the first connection of a stream, with several attempts if necessary.

        Without a given timeout it waits as long as the daemon makes progress with its start. If a connection breaks
        before the stream is open, it tries for `timeout` seconds: nothing has arrived yet that could be lost. If the
        rank is taken, it tries equally long: the daemon may not know yet that an earlier job has ended. If memory is
        missing, it tries for 2 s, or for `timeout` seconds if the stream `replaces` another: streams that were just
        closed free their memory soon.
        """
        began, said, left = time.monotonic(), False, self.timeout
        refused: PenstockError | None = None
        try:
            while True:
                try:
                    return self.connect(mailbox, start, left, on_progress=self._on_progress if self._patient else None)
                except Unreachable:  # within the short time that was left
                    if refused is None:
                        raise
                    raise refused from None
                except (ConnectionLost, RankTaken, MemoryBound) as error:
                    waited = time.monotonic() - max(began, self._progressed)
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

    def _on_progress(self) -> None:
        self._progressed = time.monotonic()

    def without_daemon(self) -> Connector:
        """Return a connector to the same address that does not own the private daemon."""
        other = copy.copy(self)
        other.daemon = None
        other._private = False
        return other

    def stop(self) -> None:
        """Stop the private daemon, if there is one."""
        daemon, self.daemon = self.daemon, None
        if daemon is not None:
            daemon.stop()

    def _start(self, watch: Callable[[], None] | None) -> Address:
        """Start a private daemon if the URL needs one and none runs. Return the address of the feed."""
        if self._world is not None and self._private and (self.daemon is None or not self.daemon.alive()):
            self.stop()
            self.daemon = PrivateDaemon(self.url, self._workers, self._memory, self._world, watch)
            self._address = _address.parse(self.daemon.url)
        assert self._address is not None
        return self._address

    def _watching(self, watch: Callable[[], None]) -> Callable[[], None]:
        def look() -> None:
            watch()
            if self.daemon is not None and not self.daemon.alive():
                raise ConnectionLost("the private daemon ended")

        return look


def _linked(welcome: Welcome, transport: LocalTransport | TcpTransport, views: SlabViews) -> Link:
    """Return the link over an open transport.

    Raises:
        ProtocolError: the daemon has chosen a position that is not one of this feed.
    """
    opened, start = transport.opened, None
    if opened.position:
        start = unpack(opened.position)
        if start.feed != welcome.feed:
            raise ProtocolError("the daemon lets the stream begin at a position of another feed")
    return Link(welcome.session, transport, welcome.feed, views, opened.epoch, start)


def _pieces(position: Position | None) -> list[bytes]:
    if position is None:
        return []
    data = pack(position)
    return [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
