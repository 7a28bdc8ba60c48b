"""A connection to a daemon over TCP: it introduces the client, asks, and receives frames.

Every session begins with one, even if its batches come through shared memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock_proto import VERSION, ConnectionLost, KeyRefused, ProtocolError, Unreachable
from penstock_proto.messages import ClientMessage, Failed, Hello, Ping, Pong, ServerMessage, Welcome
from penstock_proto.security.keys import ClientKeys
from penstock_proto.status.readiness import Patience
from penstock_proto.transport.codec import encode, from_server
from penstock_proto.transport.urls import Address
from penstock_proto.transport.zmtp import Silent
from penstock_proto.transport.zmtp_dealer import Dealer

from .dialing import dealer_to
from .frames import Frames
from .waiting import Waiting

if TYPE_CHECKING:
    from penstock_proto.transport.libzmq import LibzmqDealer

STEP = 0.1
"""Longest wait in seconds for the daemon's answer before other events are checked."""
_LINGER = 0.5
_CONNECT = 3.0
"""Repeat a connection attempt after this many seconds without an answer: the network may be back."""
_AGAIN = 0.1
"""Seconds between two attempts."""


class TcpConnection:
    """A connection to the daemon at `address`, with the client's keys if there are any. `hello` opens it.

    Attributes:
        endpoint: the daemon's `tcp://host:port`.
        keys: the client's keys, or None.
        trusted: the users who may run the daemon if it is on this machine; None: any, as keys say who it is.
    """

    def __init__(self, address: Address, keys: ClientKeys | None = None, trusted: frozenset[int] | None = None) -> None:
        self.endpoint = address.endpoint
        self._address = address
        self.keys = keys
        self.trusted = trusted
        self._dealer: Dealer | LibzmqDealer | None = None
        self._frames: Frames | None = None

    @property
    def dealer(self) -> Dealer | LibzmqDealer:
        """The ZeroMQ connection, for frames as bytes."""
        assert self._dealer is not None  # `hello` was called
        return self._dealer

    def hello(self, patience: Patience, watch: Callable[[], None] | None = None) -> Welcome:
        """Introduce this client and ask for the feed.

        Args:
            patience: how long to wait for the answer.
            watch: called regularly while waiting; it may raise to stop. With `watch` a connection that breaks is an
                error; without it, the client connects and asks again.

        Raises:
            Unreachable: no daemon answered in time, or its feeds were not ready, or a user who is not trusted listens
                there.
            KeyRefused: the daemon requires a key, does not know this one, or uses none.
            ConnectionLost: with `watch`, the connection broke.
            PenstockError: the daemon refused: no such feed, another version. Or it could not start.
        """
        waiting = Waiting(self._address, self.keys, patience)
        try:
            answer = self._greeted(patience, watch, waiting)
        finally:
            waiting.close()
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the daemon at {self.endpoint} answered Hello with {type(answer).__name__}")
        return answer

    def _greeted(self, patience: Patience, watch: Callable[[], None] | None, waiting: Waiting) -> ServerMessage:
        def look() -> None:
            if watch is not None:
                watch()
            waiting.look()

        hello = Hello(VERSION, self._address.feed, f"{socket.gethostname()}:{os.getpid()}")
        answer: ServerMessage | None = None
        asked = False
        while answer is None:
            try:
                self._dealer = self._connected(
                    patience, look, waiting.on_nobody if watch is None else lambda error: None
                )
                self._frames = Frames(self._dealer)
                asked = True
                answer = self._answer(hello, patience, look)
            except Silent:
                raise Unreachable(self._unanswered(patience)) from None
            except OSError as error:
                if not asked:
                    raise Unreachable(self._unheard(patience, error)) from None
                if watch is not None:
                    raise self.broke_again() from None
                if patience.left < _AGAIN:
                    closed = isinstance(error, ConnectionResetError)
                    said = self._closed(patience) if closed else self._unanswered(patience)
                    raise Unreachable(said) from None
                asked = False
                time.sleep(_AGAIN)
            except KeyRefused as error:
                raise KeyRefused(f"{self.endpoint}: {error}") from None
            except ProtocolError as error:
                if asked:
                    raise
                said = f"{self.endpoint} is not a Penstock daemon: {error}"
                raise Unreachable(said) from None
        return answer

    def ask(self, message: ClientMessage, deadline: float, watch: Callable[[], None] | None) -> ServerMessage:
        """Send `message` and return the answer.

        Raises:
            Silent: no answer came before `deadline`.
            OSError: the connection broke.
            PenstockError: the daemon answered with this error.
        """
        return self._answer(message, Patience(deadline - time.monotonic()), watch or (lambda: None))

    def _answer(self, message: ClientMessage, patience: Patience, look: Callable[[], None]) -> ServerMessage:
        self.say(message, patience.until)
        while (data := self.frame()) is None:
            self.dealer.wait(STEP)
            look()
            if not patience.left:
                raise Silent
        answer = from_server(data)
        if isinstance(answer, Failed):
            raise answer.error.error()
        return answer

    def say(self, message: ClientMessage, deadline: float) -> None:
        """Send `message`. Raises `Silent` if there is no room before `deadline`, and OSError as `ask`."""
        while not self.dealer.send(encode(message)):
            self.dealer.wait(STEP)
            if time.monotonic() > deadline:
                raise Silent

    def frame(self) -> memoryview | None:
        """Return the next frame if all of it has arrived, else None."""
        assert self._frames is not None  # `hello` was called
        return self._frames.next()

    @property
    def more(self) -> bool:
        """Whether another frame of the same message follows the last one."""
        return self._frames is not None and self._frames.more

    def broke_again(self) -> ConnectionLost:
        """Return the error for a connection that broke before the session was open."""
        return ConnectionLost(f"the connection to the daemon at {self.endpoint} broke again")

    def close(self) -> None:
        """Close the connection. Messages that are due have up to half a second to be sent."""
        if self._dealer is None:
            return
        if not isinstance(self._dealer, Dealer):
            self._settle(self._dealer)
        self._dealer.close(_LINGER)

    def _settle(self, dealer: LibzmqDealer) -> None:
        """Wait until the daemon has read everything: it answers a Ping after all earlier messages. (libzmq would close
        the connection with unread bytes, which resets it, and the daemon would lose what it has not read.)"""
        deadline = time.monotonic() + _LINGER
        with contextlib.suppress(OSError, ProtocolError):
            if not dealer.send(encode(Ping())):
                return
            while (left := deadline - time.monotonic()) > 0 and (data := dealer.message(left)) is not None:
                if isinstance(from_server(data), Pong | Failed):
                    return

    def forget(self) -> None:
        """In a forked child: leave the connection to the parent."""
        if self._dealer is not None:
            self._dealer.forget()

    def _connected(
        self, patience: Patience, look: Callable[[], None], on_nobody: Callable[[OSError], None]
    ) -> Dealer | LibzmqDealer:
        """Return a connection; try as long as the patience lasts. Call `on_nobody` after each failure."""
        if self._dealer is not None:  # which broke
            self._dealer.close(0)
        while True:
            left = patience.left
            try:
                return dealer_to(self._address, self.keys, self.trusted, min(left, _CONNECT), look)
            except OSError as error:
                if left <= _AGAIN:
                    raise
                on_nobody(error)
            look()
            time.sleep(_AGAIN)

    def _where(self, patience: Patience) -> str:
        return f"{self.endpoint}, tried for {patience.seconds:.4g} s"

    def _unanswered(self, patience: Patience) -> str:
        where, state = self._where(patience), patience.state
        if state is not None and not state.ready:
            advice = f"see its log, and `penstock status {self.endpoint}`"
            if patience.fixed:
                advice = "give it more time (timeout=), or leave timeout= out to wait as long as it makes progress"
            return f"the daemon at {where}, is not ready: {state.phase}: {advice}"
        return (
            f"something at {where}, accepts connections but does not answer: is it a Penstock daemon, and does it "
            f"respond to `penstock status {self.endpoint}`?"
        )

    def _closed(self, patience: Patience) -> str:
        return f"{self._where(patience)}: connections are closed at once: the daemon may have too many; see its log"

    def _unheard(self, patience: Patience, error: OSError) -> str:
        where, state = self._where(patience), patience.state
        if state is not None and not state.ready:
            return f"the daemon at {where}, ended before its feeds were ready ({state.phase}): see its log"
        advice = (
            "is it running (`penstock serve` prints its address when it is ready), does it bind an address that this "
            "machine can reach (127.0.0.1 serves its own host only), and does a firewall allow the port?"
        )
        if isinstance(error, socket.gaierror):
            advice = f"the host name is unknown ({error})"
        if isinstance(error, ConnectionResetError):
            return self._closed(patience)
        return f"no daemon listens at {where}: {advice}"
