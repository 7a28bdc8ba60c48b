"""The public face: `connect`, and the connection that it returns."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock_proto import PenstockError, Spec
from penstock_proto.messages import MAX_WORLD, FeedInfo

from ._address import is_private
from ._connecting import Connector, Identity
from ._numpy_batches import NumpyBatches
from ._stream_handle import StreamHandle

if TYPE_CHECKING:
    import tensorflow as tf

MAX_GROUP = 128
TRANSPORTS = ("auto", "local", "tcp")
LAST_ROUNDS = ("drop", "pad")


class Connection:
    """An open connection to a feed, with a stream of its own that begins at epoch 0 or at a state. Made by `connect`.

    A context manager: it closes at the end of `with`. Its methods may be called on any thread.

    Attributes:
        info: what the daemon says of the feed: name, spec of a sample, batch size, seed, epochs, ...
        element_spec: the spec of a batch. The batch dimension is None, as the last batch may be smaller, or the batch
            size where the feed was made with `drop_remainder=True`.
        cardinality: batches in an epoch (for a rank: of its own), or None where that is not known, as for a group's
            consumer. `math.inf` where an epoch has no end (the feed has `segment=` and no `samples=`).
    """

    def __init__(self, handle: StreamHandle) -> None:
        self._handle = handle
        self._dataset: tf.data.Dataset | None = None
        self.info: FeedInfo = handle.info
        self.element_spec: Spec = handle.views.spec
        self.cardinality: int | float | None = handle.cardinality

    def batches(self) -> Iterator[Any]:
        """An iterator over the NumPy batches of one epoch, the next of the stream.

        A batch has the feed's structure (tuples and dicts) of arrays of shape (rows, ...); over the same host they lie
        in the shared memory, which is held until they are gone. The epoch begins with the first `next`.

        Raises (while iterating):
            StreamClosed: the connection was closed, or a newer iteration has begun.
            EndOfStream: the feed has no further epoch.
            PenstockError: the stream failed; it stays so, and every later iteration raises the same error.
        """
        return NumpyBatches(self._handle)

    def dataset(self, prefetch: int | None = None, *, cached: int | None = None) -> tf.data.Dataset:
        """A dataset of this connection's stream: iterating it once is one epoch, iterating again the next.

        Its elements have the feed's structure of tensors, aliasing the shared memory on the same host. It keeps the
        connection open while it, or any dataset or iterator made from it, lives, unless `close` is called.

        Args:
            prefetch: batches that TensorFlow takes ahead, at least 0. They count as handed over. None: 2, or, where
                batches are small and come several at a time (`info.turn`), as many as that.
            cached: to see how fast training would be with an infinitely fast loader: copies of so many batches, over
                and over, in epochs that are as long as the feed's (where that is not known, of so many batches).

        Raises (while iterating): tf.errors.UnknownError, or another of tf.errors, whose text is that of the
            PenstockError; the error itself is `error`.
        """
        if prefetch is None:
            prefetch = max(2, self.info.turn)
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: 0 or more batches can be taken ahead")
        if cached is not None and cached < 1:
            raise ValueError(f"cached={cached}: give 1 or more batches")
        from . import _tfdata

        if self._dataset is None:
            self._dataset = _tfdata.dataset(self._handle)
        dataset = self._dataset if cached is None else _tfdata.cached(self._dataset, cached, self.cardinality)
        return dataset.prefetch(prefetch) if prefetch else dataset

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where the training loop stands in the stream, for `load_state_dict` or `connect(state=...)` in a later run.

        It is plain JSON of a few KB and takes no time to speak of, so it can be saved with every step. Save it together
        with the model: the two must belong to the same step.

        Args:
            consumed: batches that the training loop consumed since the stream's very beginning, over all epochs and all
                earlier runs (a state's own count stands in its key `consumed`). It must not go down from call to call.
                An epoch that was left early counts as all that was handed over of it, prefetched batches too. None:
                all that `batches()` yielded.

        Raises:
            ValueError: `consumed` is more than was handed over, or less than the oldest that is remembered; or it is
                None although TensorFlow reads the stream: its prefetch hides what was consumed.
        """
        return self._handle.state(consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin where `state` was taken: the next iteration is the rest of the epoch that was being read.

        If nothing of it is left, the next iteration is the next epoch. The count of consumed batches goes on from the
        state's. The daemon may be another, with any number of workers, as long as it serves the same feed.

        Raises:
            ValueError: the connection has been read already, or `state` is damaged or no state.
            StateMismatch: the state was taken from another feed; the message names what differs.
            StreamClosed: the connection was closed.
            PenstockError: as `connect`.
        """
        self._handle.load(state)

    def stats(self) -> dict[str, Any]:
        """Figures since the connection was opened.

        `feed`; `transport` ("local" or "tcp"); `epoch` (the newest, from 0; -1 before the first); `slabs`, `batches`,
        `rows`, `bytes` handed over (a dataset is handed all batches of a slab at once); `copies` (slabs copied because
        too many were held); `aliased` (slabs held now); `reconnects` (how often a lost connection was replaced);
        `wait_seconds` (how long consumers waited for data that was not there); `first_batch_seconds` (how long
        `connect` took, and then the first iteration to its first hand-over; or None); `seconds` (since that hand-over).
        """
        return self._handle.session.stats(self._handle.unread[0])

    @property
    def error(self) -> PenstockError | None:
        """The error by which the stream failed, or None."""
        return self._handle.error

    def close(self) -> None:
        """Close the connection: iterations end with StreamClosed. Arrays and tensors stay valid."""
        self._dataset = None
        self._handle.session.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<penstock.Connection {self._handle.session.url}>"


def connect(
    url: str,
    *,
    workers: int | None = None,
    memory: int | None = None,
    transport: str = "auto",
    timeout: float = 30.0,
    reconnect: float = 60.0,
    state: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    group: str = "",
    last_round: str = "drop",
) -> Connection:
    """Connect to a feed.

    Args:
        url: `tcp://HOST:PORT/FEED` for a daemon that runs, or `MODULE:ATTR` (`scenes.py:feed`), for which a private
            daemon is started that ends with the connection.
        workers: worker processes of a private daemon. A daemon that runs has its own: then this has no effect.
        memory: bound of a private daemon's shared memory in bytes. With a daemon that runs this has no effect.
        transport: "local" (shared memory), "tcp", or "auto": shared memory where the daemon is on this host.
        timeout: seconds that the daemon has for each answer of the handshake, and a rank that is taken to come free.
        reconnect: seconds for which a lost connection is sought again (a private daemon is started again) before
            readers get ConnectionLost; the stream then goes on unchanged. For so long ranks wait for all others to be
            back. 0: readers get it at once.
        state: begin where it was taken, as `Connection.load_state_dict`. None: at epoch 0.
        rank: which of `world_size` trainers this is, from 0. Together they read one stream, the very one that a single
            trainer would: batch j of an epoch goes to rank j mod `world_size`, each gets equally many, and nothing
            comes before all of them are there.
        world_size: how many trainers there are; given with `rank` or not at all.
        group: with `rank`, tells apart training jobs that read the same feed with the same `world_size` at the same
            time. Alone: all who give the same name share one stream, each batch goes to one of them, whoever asks, and
            an epoch ends for all when all of it was handed over. What a consumer that dies was sent and had not handed
            over goes to another. Such a stream has no state, ends when nobody has read it for a minute, and outlives
            its daemon if that was started with `--state FILE`.
        last_round: with `rank`, what becomes of the last k batches of an epoch where k is less than `world_size`.
            "drop": nobody gets them. "pad": ranks 0 to k - 1 do, and rank r of the others a copy of the batch of rank
            r mod k, so that no batch is left out. All ranks must ask for the same.

    Raises:
        Unreachable: no daemon answered, or (with "local") it is not on this host.
        UnknownFeed: the daemon has no such feed; the message lists those it has.
        ProtocolError: the daemon speaks another version of the protocol.
        RankTaken: another process reads as this rank, or has left the stream that the other ranks still read.
        StartError: the URL has no proper form, or the private daemon did not start.
        StateMismatch: `state` was taken from another feed.
        ValueError: an option or `state` cannot be right.
        PenstockError: what else the daemon reported.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: it can be {', '.join(TRANSPORTS)}")
    if timeout <= 0:
        raise ValueError(f"timeout={timeout}: it is in seconds, more than 0")
    if not 0 <= reconnect < float("inf"):
        raise ValueError(f"reconnect={reconnect}: it is in seconds, 0 or more")
    connector = Connector(url, workers, memory, transport, timeout, _identity(url, rank, world_size, group, last_round))
    return Connection(StreamHandle(connector, reconnect, state))


def _identity(url: str, rank: int | None, world_size: int | None, group: str, last_round: str) -> Identity:
    if last_round not in LAST_ROUNDS:
        raise ValueError(f"last_round={last_round!r:.60}: it can be {', '.join(LAST_ROUNDS)}")
    if last_round != "drop" and rank is None:
        raise ValueError(f"last_round={last_round!r} is for ranks: give rank= and world_size= too")
    if not isinstance(group, str) or len(group) > MAX_GROUP:
        raise ValueError(f"group={group!r:.60}: it is a text of at most {MAX_GROUP} characters")
    if (group or rank is not None or world_size is not None) and is_private(url):
        raise ValueError(
            f"{url!r} is a private daemon's, and each consumer would have its own: start one daemon with `penstock "
            "serve` and give all of them its URL"
        )
    if rank is None and world_size is None:
        return Identity(group)
    if rank is None or world_size is None:
        raise ValueError(
            f"rank={rank}, world_size={world_size}: give both. world_size= is how many trainers read together, rank= "
            "which of them this is, from 0"
        )
    try:
        rank, world_size = int(operator.index(rank)), int(operator.index(world_size))
    except TypeError:
        raise TypeError(f"rank={rank!r}, world_size={world_size!r}: both are whole numbers") from None
    if not 1 <= world_size <= MAX_WORLD:
        raise ValueError(f"world_size={world_size}: from 1 to {MAX_WORLD} trainers can read together")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: with world_size={world_size} the ranks are 0 to {world_size - 1}")
    return Identity(group, rank, world_size, last_round == "pad")
