"""The public face: `connect`, and the connection that it returns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock_proto import PenstockError, Spec, Unreachable
from penstock_proto.messages import FeedInfo

from . import address, tcp
from .batches import Batches, Reader
from .cut import Cut
from .local import LocalTransport
from .notes import Notes
from .private import PrivateDaemon
from .session import Session, Transport

if TYPE_CHECKING:
    import tensorflow as tf

TRANSPORTS = ("auto", "local", "tcp")


class Connection:
    """An open connection to a feed, with a stream of its own that begins at epoch 0. Made by `connect`.

    A context manager: it closes at the end of `with`. Its methods may be called on any thread.

    Attributes:
        info: what the daemon says of the feed: name, spec of a sample, batch size, seed, epochs, ...
        element_spec: the spec of a batch. The batch dimension is None, as the last batch may be smaller, or the batch
            size where the feed was made with `drop_remainder=True`.
        cardinality: batches in an epoch, or None where that is not known.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._dataset: tf.data.Dataset | None = None
        self.info: FeedInfo = reader.info
        self.element_spec: Spec = reader.cut.spec
        self.cardinality: int | None = reader.info.batches

    def batches(self) -> Iterator[Any]:
        """An iterator over the NumPy batches of one epoch, the next of the stream.

        A batch has the feed's structure (tuples and dicts) of arrays of shape (rows, ...); over the same host they lie
        in the shared memory, which is held until they are gone. The epoch begins with the first `next`.

        Raises (while iterating):
            StreamClosed: the connection was closed, or a newer iteration has begun.
            EndOfStream: the feed has no further epoch.
            PenstockError: the stream failed; it stays so, and every later iteration raises the same error.
        """
        return Batches(self._reader)

    def dataset(self, prefetch: int = 2) -> tf.data.Dataset:
        """A dataset of this connection's stream: iterating it once is one epoch, iterating again the next.

        Its elements have the feed's structure of tensors, aliasing the shared memory on the same host. It keeps the
        connection open while it, or any dataset or iterator made from it, lives, unless `close` is called.

        Args:
            prefetch: batches that TensorFlow takes ahead, at least 0. They count as handed over.

        Raises (while iterating): tf.errors.UnknownError, or another of tf.errors, whose text is that of the
            PenstockError; the error itself is `error`.
        """
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: 0 or more batches can be taken ahead")
        from . import tfdata

        if self._dataset is None:
            self._dataset = tfdata.dataset(self._reader)
        return self._dataset.prefetch(prefetch) if prefetch else self._dataset

    def stats(self) -> dict[str, Any]:
        """Figures since the connection was opened.

        `feed`; `transport` ("local" or "tcp"); `epoch` (the newest, from 0; -1 before the first); `slabs`, `batches`,
        `rows`, `bytes` handed over; `copies` (slabs copied because too many were held); `aliased` (slabs held now);
        `wait_seconds` (how long consumers waited for data that was not there); `first_batch_seconds` (how long
        `connect` took, and then the first iteration to its first hand-over; or None); `seconds` (since that
        hand-over).
        """
        return self._reader.session.stats()

    @property
    def error(self) -> PenstockError | None:
        """The error by which the stream failed, or None."""
        return self._reader.error

    def close(self) -> None:
        """Close the connection: iterations end with StreamClosed. Arrays and tensors stay valid."""
        self._dataset = None
        self._reader.session.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<penstock.Connection {self._reader.session.url}>"


def connect(
    url: str,
    *,
    workers: int | None = None,
    memory: int | None = None,
    transport: str = "auto",
    timeout: float = 30.0,
) -> Connection:
    """Connect to a feed.

    Args:
        url: `tcp://HOST:PORT/FEED` for a daemon that runs, or `MODULE:ATTR` (`scenes.py:feed`), for which a private
            daemon is started that ends with the connection.
        workers: worker processes of a private daemon. A daemon that runs has its own: then this has no effect.
        memory: bound of a private daemon's shared memory in bytes. With a daemon that runs this has no effect.
        transport: "local" (shared memory), "tcp", or "auto": shared memory where the daemon is on this host.
        timeout: seconds that the daemon has for each answer of the handshake.

    Raises:
        Unreachable: no daemon answered, or (with "local") it is not on this host.
        UnknownFeed: the daemon has no such feed; the message lists those it has.
        ProtocolError: the daemon speaks another version of the protocol.
        StartError: the URL has no proper form, or the private daemon did not start.
        PenstockError: what else the daemon reported.
    """
    asked = time.monotonic()
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: it can be {', '.join(TRANSPORTS)}")
    if timeout <= 0:
        raise ValueError(f"timeout={timeout}: it is in seconds, more than 0")
    daemon = PrivateDaemon(url, workers, memory) if address.is_private(url) else None
    try:
        return _connected(address.parse(daemon.url if daemon else url), daemon, transport, timeout, asked)
    except BaseException:
        if daemon is not None:
            daemon.stop()
        raise


def _connected(
    place: address.Address, daemon: PrivateDaemon | None, transport: str, timeout: float, asked: float
) -> Connection:
    notes = Notes()
    dealer, welcome = tcp.connected(place, notes, timeout)
    chosen: Transport = dealer
    try:
        cut = Cut(welcome.feed)
        local = None
        if transport != "tcp":
            try:
                local = LocalTransport(welcome, cut, notes, timeout)
            except OSError as error:
                if transport == "local":
                    raise Unreachable(
                        f"{place} has no shared memory with this process ({error}): the daemon is on another host or "
                        'in another container; transport="tcp" reaches it',
                        feed=place.feed,
                    ) from None
        if local is None:
            dealer.open(welcome, cut, timeout)
        else:
            chosen = local
            dealer.close()
    except BaseException:
        dealer.close()
        raise
    session = Session(str(place), welcome.feed, chosen, notes, daemon, asked)
    return Connection(Reader(session, welcome.feed, cut))
