"""The handle on an open stream, which all its readers share. The stream closes when the handle is gone."""

from __future__ import annotations

import math
import time
import weakref
from typing import Any

import numpy as np

from penstock_proto import PenstockError, ProtocolError, StreamClosed
from penstock_proto.batches.position import Position
from penstock_proto.messages import End, FeedInfo

from .._state import state_dict
from .._state.build_reads import BuildReads
from .._state.consumer_state import Received, Refused
from .._state.mailbox import Mailbox
from .connecting import Connector
from .handoff import STEP, HandOff
from .in_process import InProcessConnector, InProcessReceiver
from .receiver import Receiver
from .renewed_error import renewed

datasets: weakref.WeakSet[StreamHandle] = weakref.WeakSet()
"""The handles of streams that a dataset of TensorFlow, Keras or PyTorch was made of, so that `fit` may read them."""


class StreamHandle:
    """A handle on an open stream. A connection, its iterators and its datasets share one.

    Attributes:
        views: views slabs as batches.
        info: the daemon's description of the feed.
        cardinality: batches in an epoch (for a rank: of this rank), `math.inf` if it has no end, or None if unknown.
        rank: the rank of this consumer, or None.
        world_size: how many ranks read the stream, including this one; 1 without ranks.
        handoff: hands slabs over.
        receiver: receives them.
        shares: whether it shares a group's stream, and so receives only some of the batches.
        reads_ahead: whether TensorFlow or Keras reads the stream, and so takes batches ahead.
        length_told: whether the log says how long an epoch was that Keras read to its end to find out.
        unread: how many batches of the last slab were not read yet, as a list of one number. Each slab has its own
            list.
    """

    handoff: HandOff
    receiver: Receiver | InProcessReceiver

    def __init__(
        self, connector: Connector | InProcessConnector, reconnect: float | None, loaded: object | None
    ) -> None:
        """Open a stream, which begins where the state `loaded` was taken. Raises as `connect`."""
        self._reconnect = reconnect
        self._error: weakref.ref[PenstockError] | None = None
        self.shares = connector.identity.shares
        self.rank = connector.identity.rank if connector.identity.world_size > 1 else None
        self.world_size = connector.identity.world_size or 1
        self.reads_ahead = False
        self.length_told = False
        self.unread = [0]
        try:
            self._open(connector, loaded)
        except BaseException:
            connector.stop()
            raise

    def _open(self, connector: Connector | InProcessConnector, loaded: object | None, replaces: bool = False) -> None:
        asked = time.monotonic()
        start: Position | None = None
        consumed = 0
        if loaded is not None:
            if self.shares:
                raise ValueError("a group's stream has no state, so none can be loaded: omit group= or state=")
            start, consumed = state_dict.load(loaded)

        def begin(info: FeedInfo) -> Position | None:
            nonlocal start
            start = start and state_dict.for_feed(start, info, "the state was taken from")
            if connector.identity.start == "next_epoch" and info.endless:
                raise ValueError("start='next_epoch' never begins: this feed is endless, so give start='latest'")
            return None if start is None or state_dict.is_start(start) else start

        mailbox = Mailbox()
        link = connector.connect_first(mailbox, begin, replaces)
        self.info, self.views = link.info, link.views
        if connector.identity.start != "beginning" and start is None:
            start = link.start
        self.cardinality: int | float | None = link.info.batches
        if link.info.endless:
            self.cardinality = math.inf
        elif self.shares:
            self.cardinality = None
        elif self.cardinality is not None:
            pad = connector.identity.pad
            self.cardinality = (self.cardinality + (self.world_size - 1) * pad) // self.world_size
        self._start = start
        self.handoff = HandOff(link, mailbox, connector, asked, start, consumed)
        if isinstance(connector, Connector):
            self.receiver = Receiver(self.handoff, link, connector, self._reconnect)
        else:
            self.receiver = InProcessReceiver(self.handoff, connector)

    def load(self, loaded: object) -> None:
        """Begin where the state `loaded` was taken, in another session. Raises as `Connection.load_state_dict`."""
        handoff, receiver = self.handoff, self.receiver
        if handoff.error is not None:
            raise self._to_raise(handoff.error)
        if handoff.closed:
            raise StreamClosed("the connection was closed, so no state can be loaded into it", feed=self.info.name)
        if handoff.begun:
            raise ValueError(
                "this connection has been read already: load a state into a new connection, before its first batch"
            )
        connector = receiver.give_up_connector()
        try:
            self._open(connector, loaded, replaces=True)
        except BaseException:
            receiver.take_back_connector()
            raise
        receiver.close()

    def state(self, consumed: int | None) -> dict[str, Any]:
        """Return the state after `consumed` batches. Raises as `Connection.state_dict`."""
        if self.shares:
            raise ValueError(
                "a group's stream has no state, because chance decides which consumer gets a batch. For a stream that "
                "can be resumed give each consumer rank= and world_size="
            )
        if consumed is None and self.reads_ahead:
            raise ValueError(
                "state_dict() needs `consumed` when a tf.data.Dataset or Keras reads the connection, because they take "
                "batches ahead: give the number of batches that the training loop has consumed since the very "
                "beginning of the stream, including earlier runs"
            )
        return state_dict.dump(*self.handoff.position(consumed, self.unread[0]))

    def close(self) -> None:
        """Close the stream: iterations end with StreamClosed. Arrays and tensors stay valid."""
        self.receiver.close()

    def __del__(self) -> None:
        if hasattr(self, "handoff"):
            self.handoff.mailbox.close()

    @property
    def error(self) -> PenstockError | None:
        """The error that ended the stream, or None: the same object as long as anything else holds it.

        The handle holds it weakly. Once raised, the error holds the frames that it passed through, and these hold the
        handle: a cycle, which would keep the stream and a private daemon until a garbage collection.
        """
        kept = self._error() if self._error is not None else None
        if kept is None and self.handoff.error is not None:
            kept = renewed(self.handoff.error)
            self._error = weakref.ref(kept)
        return kept

    def begin(self, build: BuildReads | None = None) -> int:
        """Begin the next epoch and return its number. `build`: as for `HandOff.begin`.

        Raises:
            EndOfStream: the feed has no further epoch.
            StreamClosed: the connection was closed.
            PenstockError: the stream failed.
        """
        try:
            epoch = self.handoff.begin(self.unread[0], build)
            self.unread = [0]
            return epoch
        except Refused as refused:
            error = refused.error
        raise self._to_raise(error)

    def take(self, epoch: int, build: BuildReads | None = None) -> Received | End:
        """Wait for the next slab of `epoch`, or its End, and return it. `build`: that of `begin`.

        Raises:
            StreamClosed: the connection was closed, or a newer iteration has begun.
            PenstockError: the stream failed.
        """
        try:
            while (item := self.handoff.take(epoch, STEP, build)) is None:
                pass
            if self.views.has_offsets and isinstance(item, Received):
                self._check_offsets(item)
            return item
        except Refused as refused:
            error = refused.error
        raise self._to_raise(error)

    def _check_offsets(self, item: Received) -> None:
        """Fail the stream if the slab's offsets are wrong. Raises Refused."""
        try:
            self.views.check_offsets(item.layout, np.asarray(item.root))
        except ProtocolError as error:
            self.handoff.lose(renewed(error))
            assert self.handoff.error is not None
            raise Refused(self.handoff.error) from None

    @property
    def begins_within(self) -> bool:
        """Whether the next iteration reads the rest of an epoch, because a state was loaded."""
        return self._start is not None and self.behind(self._start.epoch) > 0 and not self.handoff.begun

    def behind(self, epoch: int) -> int:
        """Return how many batches of `epoch` (for a rank: of this rank's) come before the state that was loaded."""
        start = self._start
        if start is None or start.epoch != epoch:
            return 0
        return -(-(start.batches + start.skip) // self.world_size)

    def __reduce__(self) -> str:
        raise TypeError(
            "a Penstock connection cannot be pickled or copied: another process must call penstock.connect itself. A "
            "DataLoader needs num_workers=0, because the feed has workers of its own"
        )

    def _to_raise(self, error: PenstockError) -> PenstockError:
        kept = self.error
        if kept is not None and error is self.handoff.error:
            cause = kept.__cause__  # raised by user code in this process: where a post-mortem debugger should begin
            return kept.with_traceback(None if cause is None else cause.__traceback__)
        return renewed(error)
