"""A stream that this process makes itself (`workers=0`): no daemon, no socket and no thread.

`penstock_server.in_process.engine` makes the batches. This file replaces three parts of a connection: the connector,
the transport and the receiver. Everything runs on the thread that waits for data.

If the user interrupts user code (with Ctrl-C, or by quitting the debugger), the generators cannot continue. The stream
is then treated like one whose connection was lost: it starts again from the consumer's position.
"""

from __future__ import annotations

import logging
import threading
import weakref
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from penstock_proto import PenstockError
from penstock_proto.batches.position import Position
from penstock_proto.messages import FeedInfo, ServerMessage
from penstock_proto.params import shown_call
from penstock_proto.transport import codec

from .._state import state_dict
from .._state.consumer_state import Received
from .._state.mailbox import Mailbox
from .._state.memory import Pool, Root
from .._transport.slab_views import SlabViews
from . import process_hooks, server_package
from .connecting import Identity, Link
from .handoff import HandOff

if TYPE_CHECKING:
    from penstock_server import Feed
    from penstock_server.in_process.engine import InProcess
    from penstock_server.worker.reading.loaded_feed import LoadedFeed

_KEEP = 4
"""Buffers of slots that are kept for reuse."""

logger = logging.getLogger("penstock")

Start = Callable[[FeedInfo], Position | None]


class InProcessConnector:
    """Opens the stream of one feed.

    Attributes:
        url: the feed's name, as the user gave it, for messages.
        identity: that of a consumer with a stream of its own.
        keys: None, because there is no daemon.
    """

    def __init__(self, feed: str | Feed, memory: int | None) -> None:
        """Import the feed.

        Args:
            feed: MODULE:ATTR, or the Feed.
            memory: limit of slots and shuffle blocks in bytes, or None.

        Raises:
            StartError: the server package is not installed, or the feed cannot be imported.
        """
        self.url = shown_call(feed) if isinstance(feed, str) else "the Feed"
        self.identity = Identity()
        self.keys = None
        self._memory = memory
        server_package.refuse_in_worker(repr(self.url) if isinstance(feed, str) else "a Feed")
        server_package.check_installed(f"workers=0, which runs {self.url} in this process, needs the server package")
        imports = server_package.load("in_process.own_import")
        self._feed: LoadedFeed = imports.load(feed) if isinstance(feed, str) else imports.serve(feed)
        if not isinstance(feed, str):
            self.url = f"the feed {self._feed.plan.name}"

    def __str__(self) -> str:
        return self.url

    def connect_first(self, mailbox: Mailbox, start: Start, replaces: bool = False) -> Link:
        """Open the stream at the position that `start` returns for the feed. Raises PenstockError."""
        mailbox.shut()  # no thread waits there
        return self.open(start)

    def open(self, start: Start) -> Link:
        """As `connect_first`."""
        pool = Pool(_KEEP)

        def room(nbytes: int) -> tuple[Root, npt.NDArray[np.uint8]]:
            root = pool.take(nbytes)
            return root, np.asarray(root)

        feed = type(self._feed)(self._feed.declared, self._feed.plan)  # as a new worker loads it
        made: InProcess = server_package.load("in_process.engine").InProcess(feed, room, self._memory)
        try:
            views = SlabViews(made.info)
            made.open(start(made.info))
        except BaseException as error:
            made.close()
            if isinstance(error, PenstockError):
                error.feed = error.feed or made.info.name
            raise
        return Link(b"", InProcessTransport(made, views), made.info, views, 0)

    def stop(self) -> None:
        """Do nothing: there is no daemon."""


class InProcessTransport:
    """Carries messages between the consumer and the stream that is made here. See `Transport`."""

    name = "process"
    sends_anywhere = True
    quota = None

    def __init__(self, made: InProcess, views: SlabViews) -> None:
        self._made = made
        self._views = views

    def work(self, seconds: float) -> list[ServerMessage | Received | PenstockError]:
        """Make batches for about `seconds`, or until there is something to receive. Raises as `InProcess.work`."""
        return [self._as_received(said) if isinstance(said, tuple) else said for said in self._made.work(seconds)]

    def send(self, data: bytes) -> bool:
        """Pass a message to the stream, which acts on it the next time it works."""
        self._made.hear(codec.from_client(data))
        return True

    def close(self) -> None:
        """End the generators."""
        self._made.close()

    def _as_received(self, said: tuple[Any, Root]) -> Received:
        slab, root = said
        return Received(slab, self._views.layout(slab), root)

    def wait(self, timeout: float, for_room: bool) -> None:
        """Do nothing: `work` does not wait."""

    def receive(self) -> None:
        """Return None: `work` returns all messages."""

    def silent(self) -> bool:
        """Return False: nothing can be lost on the way."""
        return False

    def mark(self, handed: int) -> None:
        """Do nothing: nobody else needs to know."""

    def tell(self, handed: int) -> None:
        """Do nothing: this process makes the slabs, within its credit."""

    def limit(self, quota: int) -> None:
        """Do nothing: slots are private memory."""

    def take_released(self) -> Iterator[int]:
        """Yield nothing: slots are private memory."""
        return iter(())

    def forget(self) -> None:
        """Do nothing: there is no connection."""


class InProcessReceiver:
    """Makes batches on the consumer's thread when it waits for them."""

    def __init__(self, handoff: HandOff, connector: InProcessConnector) -> None:
        self._handoff = handoff
        self._connector = connector
        self._working = threading.Lock()
        self._worker: int | None = None
        self._shut = False
        work = weakref.WeakMethod(self._work)  # no cycle: this object keeps the hand-off alive
        handoff.work = lambda seconds: cast(Callable[[float], None], work())(seconds)
        process_hooks.register(self)

    def close(self) -> None:
        """Close the stream: iterations end with StreamClosed. If another thread is in user code, that thread ends the
        generators when the code returns."""
        self._handoff.close()
        self._handoff.mailbox.close()
        self._end()

    at_exit = close

    def forget(self) -> None:
        """In a forked child: leave the stream to the parent."""
        self._working = threading.Lock()
        self._shut = True
        self._handoff.forget()

    def give_up_connector(self) -> InProcessConnector:
        """Return the connector, for a stream that replaces this one."""
        return self._connector

    def take_back_connector(self) -> None:
        """Undo `give_up_connector`."""

    def _work(self, seconds: float) -> None:
        """Work for about `seconds`, or until something has come, as soon as no other thread works. Called without the
        hand-off's lock."""
        if self._worker == threading.get_ident():
            raise RuntimeError("the feed's own code reads its stream, which cannot work: it would wait for itself")
        try:
            with self._working:  # and not `acquire`: a signal just after that would leave the lock taken
                self._work_alone(seconds)
        finally:
            if self._handoff.mailbox.closing:
                self._end()

    def _work_alone(self, seconds: float) -> None:
        try:
            self._worker = threading.get_ident()
            if not self._shut and not self._handoff.has_news:
                self._make(seconds)
        finally:
            self._worker = None

    def _make(self, seconds: float) -> None:
        handoff = self._handoff
        try:
            if handoff.passed_by is not None:
                handoff.disconnect()
            if handoff.transport is None:
                self._begin_again()
            transport = handoff.transport
            assert isinstance(transport, InProcessTransport)
            for message in transport.work(seconds):
                if isinstance(message, Received):
                    handoff.queue(message)
                elif isinstance(message, PenstockError):
                    handoff.fail(message)
                else:
                    handoff.apply(message)
        except PenstockError as error:
            handoff.lose(error)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, BdbQuit):
                logger.exception("the stream of %s failed", handoff.url)
                handoff.lose(PenstockError(f"Penstock failed: {error!r}; please report this as a bug"))
                return
            handoff.disconnect()  # which closes the transport
            raise

    def _begin_again(self) -> None:
        positions: list[Position] = []

        def start(info: FeedInfo) -> Position | None:
            positions.append(self._handoff.restart_position())
            return None if state_dict.is_start(positions[0]) else positions[0]

        link = self._connector.open(start)
        self._handoff.connect(link, positions[0], self._connector.url)

    def _end(self) -> None:
        """End the generators, unless a thread is working: that thread then ends them itself."""
        if not self._working.acquire(blocking=False):
            return
        try:
            if not self._shut:
                self._shut = True
                process_hooks.unregister(self)
                self._handoff.shut()
        finally:
            self._working.release()
