"""The messages of one stream that wait to be sent to the daemon, in order.

The lock of the hand-off guards it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from penstock_proto.messages import Close, Message
from penstock_proto.transport.codec import encode

from .._state.consumer_state import ConsumerState
from .._transport.transport import Transport


class Outbox:
    """The queue of messages to the daemon.

    Args:
        state: the state of the stream, which knows what to acknowledge.
    """

    def __init__(self, state: ConsumerState) -> None:
        self._state = state
        self._messages: collections.deque[bytes] = collections.deque()
        self._said_close = False

    def __bool__(self) -> bool:
        return bool(self._messages)

    def add(self, messages: Iterable[Message]) -> None:
        """Add messages."""
        self._messages.extend(map(encode, messages))

    def add_close(self) -> None:
        """Add Close, with the number of slabs that were handed over, because nobody reads on."""
        self._said_close = True
        state = self._state
        self._messages.append(encode(Close(state.given if state.closed else state.handed)))

    def clear(self) -> None:
        """Drop the messages: the connection is lost, and the next one begins from the state."""
        self._messages.clear()

    def send(self, transport: Transport) -> None:
        """Send the messages, and then the acknowledgement that is due, as far as the transport has room."""
        while True:
            if not self._messages:
                if self._state.closed is not None and not self._said_close:
                    return  # Close comes first: it tells how many slabs were handed over before the rest became void
                ack = self._state.ack()
                if ack is None:
                    return
                self._messages.append(encode(ack))
            if not transport.send(self._messages[0]):
                return
            self._messages.popleft()
