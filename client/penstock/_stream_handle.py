"""The handle on a session's stream, shared by everything that reads it. The session closes when the handle is gone."""

from __future__ import annotations

import copy
import math
import time
import weakref
from typing import Any

from penstock_proto import PenstockError, StreamClosed
from penstock_proto.messages import End, FeedInfo
from penstock_proto.position import Position

from . import _state_dict
from ._connecting import Connector
from ._consumer_state import Received, Refused
from ._mailbox import Mailbox
from ._session import STEP, Session


class StreamHandle:
    """What connections, iterators and datasets share: when the last of them is gone the session closes.

    Attributes:
        cut: how slabs are cut into batches.
        info: what the daemon says of the feed.
        cardinality: batches in an epoch (of one rank), `math.inf` where it has no end, or None where that is not known.
        world_size: how many ranks read the stream, of which this is one; else 1.
        session: the open session.
        shares: whether it takes from a group's stream what others do not.
        by_dataset: whether TensorFlow reads it, and so takes more than is consumed.
        unread: how many batches of the last slab were not read yet; each slab has a box of its own.
    """

    session: Session

    def __init__(self, connector: Connector, reconnect: float, loaded: object | None) -> None:
        """Open a session, which begins where the state `loaded` was taken. Raises as `connect`."""
        self._reconnect = reconnect
        self._error: weakref.ref[PenstockError] | None = None
        self.shares = connector.identity.shares
        self.world_size = connector.identity.world_size or 1
        self.by_dataset = False
        self.unread = [0]
        try:
            self._open(connector, loaded)
        except BaseException:
            connector.stop()
            raise

    def _open(self, connector: Connector, loaded: object | None, replaces: bool = False) -> None:
        asked = time.monotonic()
        start: Position | None = None
        consumed = 0
        if loaded is not None:
            if self.shares:
                raise ValueError("a group's stream has no state, so none can be loaded: leave out group= or state=")
            start, consumed = _state_dict.load(loaded)

        def begin(info: FeedInfo) -> Position | None:
            nonlocal start
            start = start and _state_dict.for_feed(start, info, "the state was taken from")
            return None if start is None or _state_dict.is_start(start) else start

        mailbox = Mailbox()
        link = connector.first(mailbox, begin, replaces)
        self.info, self.views = link.info, link.views
        self.cardinality: int | float | None = link.info.batches
        if link.info.endless:
            self.cardinality = math.inf
        elif connector.identity.shares:
            self.cardinality = None
        elif self.cardinality is not None:
            self.cardinality = (self.cardinality + (self.world_size - 1) * connector.identity.pad) // self.world_size
        self.session = Session(connector, link, mailbox, asked, self._reconnect, start, consumed)

    def load(self, loaded: object) -> None:
        """Begin where the state `loaded` was taken, over another session. Raises as `Connection.load_state_dict`."""
        old = self.session
        if old.error is not None:
            raise self._raised(old.error)
        if old.closed:
            raise StreamClosed("the connection was closed, so no state can be loaded into it", feed=self.info.name)
        if old.begun:
            raise ValueError(
                "this connection has been read already: load a state into a new connection, before its first batch"
            )
        connector = old.taken_over()
        try:
            self._open(connector, loaded, replaces=True)
        except BaseException:
            old.kept(connector)
            raise
        old.close()

    def state(self, consumed: int | None) -> dict[str, Any]:
        """The state behind `consumed` batches. Raises as `Connection.state_dict`."""
        if self.shares:
            raise ValueError(
                "a group's stream has no state: which of its consumers gets a batch is up to chance. For a stream that "
                "can be gone on with give each consumer rank= and world_size="
            )
        if consumed is None and self.by_dataset:
            raise ValueError(
                "state_dict() needs `consumed` where a tf.data.Dataset reads the connection, as TensorFlow takes "
                "batches ahead: give the number of batches that the training loop consumed since the stream's very "
                "beginning, with those of earlier runs"
            )
        return _state_dict.dump(*self.session.place(consumed, self.unread[0]))

    def __del__(self) -> None:
        if hasattr(self, "session"):
            self.session.close_soon()

    @property
    def error(self) -> PenstockError | None:
        """The error by which the stream failed, or None: the same object as long as somebody holds it.

        It is held weakly. Once raised it holds the frames that it came through, and these the reader: a cycle, which
        would keep the session and a private daemon until a garbage collection.
        """
        kept = self._error() if self._error is not None else None
        if kept is None and self.session.error is not None:
            kept = copy.copy(self.session.error)
            self._error = weakref.ref(kept)
        return kept

    def begin(self) -> int:
        """Begin the next epoch and return its number.

        Raises:
            EndOfStream: the feed has no further epoch.
            StreamClosed: the connection was closed.
            PenstockError: the stream failed.
        """
        try:
            epoch = self.session.begin(self.unread[0])
            self.unread = [0]
            return epoch
        except Refused as refused:
            error = refused.error
        raise self._raised(error)

    def take(self, epoch: int) -> Received | End:
        """The next slab of `epoch`, or its End; waits for it.

        Raises:
            StreamClosed: the connection was closed, or a newer iteration has begun.
            PenstockError: the stream failed.
        """
        try:
            while (item := self.session.take(epoch, STEP)) is None:
                pass
            return item
        except Refused as refused:
            error = refused.error
        raise self._raised(error)

    def _raised(self, error: PenstockError) -> PenstockError:
        kept = self.error
        if kept is not None and error is self.session.error:
            return kept.with_traceback(None)
        return copy.copy(error)
