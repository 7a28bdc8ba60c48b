"""The receiver thread: it receives, tends the hand-off, and connects again after a loss.

It is the only thread that receives, connects and replaces the transport. It has no lock of its own: the methods of the
hand-off (handoff.py) take theirs. Other threads ask it to act through the mailbox, and may call the methods under "any
thread" below.

The thread ends when the mailbox is closed and the last array over a slot is gone.
"""

from __future__ import annotations

import copy
import logging
import threading
import time

from penstock_proto import ConnectionLost, DaemonStopped, PenstockError, StreamMoved
from penstock_proto.batches.position import Position
from penstock_proto.messages import Failed, FeedInfo, ServerMessage

from .._state import state_dict
from .._state.consumer_state import Received
from . import process_hooks
from .connecting import Connector, Link, LostSession
from .handoff import STEP, HandOff
from .reconnecting import GivenUp, Reconnector

IDLE = 1.0
"""Longest step of the thread in seconds, while no slot is held and nothing waits to be sent."""
AT_ONCE = 256
"""Most messages in one step of the thread, so that a daemon that never stops sending does not keep it from the rest."""
STOOD = 5.0
"""If two steps are this many seconds apart, this process stood still: usually they are at most a second apart."""
_LOOK = 0.1
"""Seconds between two looks whether arrays still lie over the slots of lost connections."""
FAREWELL = 2.0
"""Seconds for which a member of a group that was closed during a loss tries to tell the daemon what it was handed."""
_CLOSE = 1.0
"""Seconds that `close` waits for the thread to end, after waiting up to twice as long for the connection to close."""

logger = logging.getLogger("penstock")


class Receiver:
    """The receiver thread of one stream. It owns the connector, and with it a private daemon."""

    def __init__(self, handoff: HandOff, link: Link, connector: Connector, reconnect: float | None) -> None:
        """Start the thread.

        Args:
            handoff: takes what is received over `link`.
            link: the first connection.
            connector: opens other connections. This object owns it from now on, with the private daemon.
            reconnect: how many seconds to try to reconnect after a loss; None: the default.
        """
        self._handoff = handoff
        self._mailbox = handoff.mailbox
        self._session = link.session
        self._info = link.info
        self._connector = connector
        self._farewell = FAREWELL if connector.identity.shares else 0.0
        self._more = False
        """Whether the last step left something to receive."""
        self._reconnector = Reconnector(self._mailbox, reconnect, self._farewell)
        self._ending = False
        self._stepped = time.monotonic()
        self._apart = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-receiver", daemon=True)
        process_hooks.register(self)
        self._thread.start()

    # --- any thread ---

    def close(self) -> None:
        """Close the stream: iterations end with StreamClosed. The connection stays while arrays lie over its slots."""
        self._handoff.close()
        self._mailbox.close()
        if threading.current_thread() is not self._thread:
            self._closed.wait(2 * _CLOSE)
            if not self._handoff.holds_slots:
                self._thread.join(_CLOSE)

    at_exit = close

    def forget(self) -> None:
        """In a forked child, which has no such thread: leave everything to the parent."""
        self._handoff.forget()
        self._mailbox.shut()
        self._ending = True
        self._closed.set()

    def give_up_connector(self) -> Connector:
        """Return the connector, for a stream that replaces this one.

        From now on this object neither ends the private daemon nor connects again after a loss: a new connection would
        displace the other stream. If it is connecting now, wait until that attempt has ended.
        """
        self._reconnector.permit.take(self._mailbox.wake)
        self._given_up, self._connector = self._connector, self._connector.without_daemon()
        return self._given_up

    def take_back_connector(self) -> None:
        """Undo `give_up_connector`: the other stream could not be opened. After a loss this one connects again."""
        self._connector = self._given_up
        self._reconnector.permit.give_back()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not (self._ending and not self._handoff.holds_slots):
                try:
                    self._step()
                    if self._handoff.passed_by is not None and not self._ending and not self._pass_by():
                        break
                except (ConnectionLost, DaemonStopped) as error:
                    if not self._reconnect(error):
                        break
            self._stop_daemon()
            self._outlive_arrays()
        except Exception as error:  # a bug here must not look like a slow daemon
            logger.exception("the receiver thread of %s failed", self._handoff.url)
            self._lose(PenstockError(f"the client failed: {error!r}; please report this as a bug"))
        finally:
            process_hooks.unregister(self)
            self._handoff.shut()
            self._mailbox.shut()
            self._stop_daemon()

    def _step(self) -> None:
        handoff = self._handoff
        transport = handoff.transport
        assert transport is not None
        now = time.monotonic()
        self._apart, self._stepped = now - self._stepped, now
        idle = STEP if handoff.holds_slots or handoff.unsent else IDLE
        transport.wait(0.0 if self._more else idle, handoff.unsent)
        try:
            for _ in range(AT_ONCE):
                message = transport.receive()
                self._more = message is not None
                if message is None:
                    break
                if isinstance(message, Received):
                    handoff.queue(message)
                    if self._reconnector.cause is not None:
                        self._on_recovered()
                else:
                    self._apply(message)
                del message
        except (ConnectionLost, DaemonStopped):
            raise
        except PenstockError as error:  # it broke the protocol, or sent more than this process can hold
            self._lose(error)
            self._mailbox.close()  # but the connection stays open while arrays lie over its slots
        self._give_up_on_ranks()
        last = self._mailbox.closing and not self._ending
        self._ending = self._ending or last
        handoff.tend(last)
        if last:
            self._stop_daemon()

    def _apply(self, message: ServerMessage) -> None:
        if not isinstance(message, Failed):
            self._handoff.apply(message)
            return
        error = message.error.error()
        try:
            if isinstance(error, ConnectionLost | DaemonStopped) and self._may_reconnect():
                raise error
            self._handoff.fail(error)
        finally:
            del error  # it holds this frame, which would hold it, and the stream

    def _on_recovered(self) -> None:
        self._reconnector.on_recovered()
        if self._reconnector.connections > 1:
            logger.warning("%s: connected again after %.1f s", self._handoff.url, self._reconnector.lasted)

    def _give_up_on_ranks(self) -> None:
        """End the stream if ranks are still missing when the time for a reconnection is over."""
        handoff = self._handoff
        if handoff.missing and (cause := self._reconnector.overdue) is not None:
            self._lose(
                ConnectionLost(
                    f"{cause.message}. After {self._reconnector.seconds:g} s {handoff.missing} still missing. "
                    "Stop all ranks and start the job again"
                )
            )
            self._mailbox.close()

    def _lose(self, error: PenstockError) -> None:
        error = copy.copy(error)  # a raised error holds the frames that it passed through, and so the stream
        error.feed = error.feed or self._info.name
        self._handoff.lose(error)

    def _stop_daemon(self) -> None:
        self._connector.stop()
        self._closed.set()

    def _outlive_arrays(self) -> None:
        """Keep lost connections open while arrays lie over their slots: the daemon may still live."""
        handoff, wakeup = self._handoff, self._mailbox.wakeup
        assert wakeup is not None
        if handoff.holds_slots:
            handoff.disconnect()
        while handoff.holds_slots:
            wakeup.wait(_LOOK)
            handoff.close_lost_transports()

    # --- another connection ---

    def _pass_by(self) -> bool:
        """Connect again, because the session has failed in an epoch that was left before that point, or because a
        signal interrupted the reader. Return False if the stream has ended instead."""
        failure = self._handoff.passed_by
        assert failure is not None
        if not self._may_reconnect():
            self._lose(failure)
            return True  # as after any failure, the connection stays open while arrays lie over its slots
        self._reconnector.on_recovered()  # the connection was not lost
        if not isinstance(failure, ConnectionLost):
            failure = ConnectionLost(f"an epoch that was left failed further on ({failure.message})")
        return self._reconnect(failure)

    def _may_reconnect(self) -> bool:
        daemon = self._connector.daemon
        if self._ending or not (self._handoff.readable or (self._farewell and self._handoff.error is None)):
            return False
        return self._reconnector.seconds > 0 and not (daemon is not None and daemon.stopping)

    def _reconnect(self, cause: PenstockError) -> bool:
        """Connect again after a loss. Return False if the stream has ended instead."""
        handoff, reconnector = self._handoff, self._reconnector
        transport = handoff.transport
        if transport is not None and transport.silent() and self._apart > STOOD:
            cause = ConnectionLost(f"this process stood still for {self._apart:.0f} s, so the daemon ended its session")
        if not self._may_reconnect():
            self._lose(cause)
            return False
        handoff.disconnect()
        try:
            reconnector.wait_for_permit()
            self._say_lost(cause)
            link, position = self._connect()
        except GivenUp:
            self._ending = True
            return False
        except PenstockError as error:
            self._lose(error)
            return False
        self._session = link.session
        self._stepped = time.monotonic()
        handoff.connect(link, position, str(self._connector), lost=not isinstance(cause, StreamMoved))
        if reconnector.connections == 1:  # after several connections `_recovered` logs it, when data comes
            logger.log(_level(cause), "%s: connected again after %.1f s", handoff.url, reconnector.lasted)
        return True

    def _say_lost(self, cause: PenstockError) -> None:
        handoff, reconnector = self._handoff, self._reconnector
        if reconnector.on_lost(cause):
            logger.log(
                _level(cause),
                "%s: %s. Trying to reconnect for up to %g s; the stream then continues where it was",
                handoff.url,
                cause.message,
                reconnector.seconds,
            )
        elif reconnector.connections == 1:
            logger.warning(
                "%s: the new connection broke before data came: %s. Still trying", handoff.url, cause.message
            )

    def _connect(self) -> tuple[Link, Position]:
        """Return another link, and the position at which its stream begins. Raises as `Reconnector.connect`."""
        handoff = self._handoff
        positions: list[Position] = []

        def start(info: FeedInfo) -> Position | None:
            state_dict.for_feed(Position(self._info, 0), info, "the lost stream began with")
            positions.append(handoff.restart_position())
            return None if state_dict.is_start(positions[-1]) else positions[-1]

        def lost() -> LostSession:
            return LostSession(self._session, *handoff.handed)

        link = self._reconnector.connect(lambda: self._connector, start, lost, handoff.close_lost_transports)
        return link, positions[-1]


def _level(cause: PenstockError) -> int:
    """Return the level at which a loss is logged. If the job only moved to another stream, nothing was lost."""
    return logging.DEBUG if isinstance(cause, StreamMoved) else logging.WARNING
