"""The public API: `connect` and `dataset`, and the `Connection` that both open."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock_proto import PenstockError, Spec, StartError
from penstock_proto.messages import GROUP, MAX_WORLD, FeedInfo, Start
from penstock_proto.params import shown_call, with_params
from penstock_proto.security.keys import client_keys
from penstock_proto.world import World

from .._stream.connecting import Connector, Identity
from .._stream.in_process import InProcessConnector
from .._stream.stream_handle import StreamHandle
from .._transport.address import is_private
from . import optional
from .feed_objects import compare, find, require_feed
from .numpy_batches import NumpyBatches

if TYPE_CHECKING:
    import tensorflow as tf
    from keras.utils import PyDataset
    from torch.utils.data import IterableDataset

    from penstock_server import Feed

MAX_GROUP = 128
TRANSPORTS = ("auto", "local", "tcp")
LAST_ROUNDS = ("drop", "pad")
STARTS = get_args(Start)


class Connection:
    """An open connection to a feed, with a stream of its own that begins at epoch 0 or at a state. Made by `connect`.

    It is a context manager, which closes the connection at the end of `with`. Any thread may call its methods.

    Attributes:
        info: the daemon's description of the feed: name, spec of a sample, batch size, seed, epochs, ...
        element_spec: the spec of a batch. The batch dimension is the batch size if the feed has `drop_remainder=True`,
            else None, because the last batch may be smaller.
        cardinality: batches in an epoch (for a rank: batches of this rank), or None if unknown, as for a consumer in a
            group. `math.inf` if epochs have no end (the feed has `segment=` and no `samples=`).
        classes: the names of the feed's classes, by label: a tuple for a folder of images, or another source with such
            an attribute `classes`; a dict of tuples by column for a CSV file. None if it has none, or too many to be
            told (more than 16 KiB of text).
    """

    def __init__(self, handle: StreamHandle) -> None:
        self._handle = handle
        self._datasets: dict[int, tf.data.Dataset] = {}
        """By the number of slabs that TensorFlow takes ahead."""
        self.info: FeedInfo = handle.info
        self.element_spec: Spec = handle.views.spec
        self.cardinality: int | float | None = handle.cardinality
        self.classes: tuple[str, ...] | dict[str, tuple[str, ...]] | None = _classes_in(handle.info)

    def batches(self) -> Iterator[Any]:
        """Iterate over the NumPy batches of the stream's next epoch.

        A batch has the feed's structure (tuples and dicts), with arrays of shape (rows, ...). On the daemon's host the
        arrays lie in shared memory, which is freed when they are gone. The epoch begins with the first `next`.

        Raises (while iterating):
            StreamClosed: the connection was closed, or a newer iteration has begun.
            EndOfStream: the feed has no further epoch.
            PenstockError: the stream failed. Every later iteration raises the same error.
        """
        return NumpyBatches(self._handle)

    def dataset(self, prefetch: int | None = None, *, cached: int | None = None) -> tf.data.Dataset:
        """Return a dataset of this connection's stream: each iteration is one epoch, in order.

        Its elements have the feed's structure, with tensors. On the daemon's host these alias shared memory. The
        dataset, and all datasets and iterators made from it, keep the connection open, unless you call `close`.

        Args:
            prefetch: how many batches TensorFlow takes ahead, 0 or more. They count as handed over. None: two slabs. A
                slab has up to `info.most` batches: one, or several if batches are small.
            cached: copy this many batches and repeat them, to find out how fast training would be with an infinitely
                fast loader. Epochs are as long as the feed's, or `cached` batches long if that length is unknown.
                None: read the stream as usual.

        Raises (while iterating): tf.errors.UnknownError, or another of tf.errors, with the text of the PenstockError.
            `Connection.error` is the PenstockError itself.

        Raises:
            ImportError: TensorFlow is not installed.
            RuntimeError: it is called in a function that TensorFlow traces, such as that of `Dataset.interleave`.
        """
        optional.check_tensorflow("connection.dataset()")
        if prefetch is not None and prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: must be 0 or more batches")
        if cached is not None and cached < 1:
            raise ValueError(f"cached={cached}: must be 1 or more batches")
        from . import tfdata

        slabs = 0
        if prefetch is None and self.info.most > 1 and cached is None:
            slabs, prefetch = 2, 0  # a prefetch of batches wakes a thread for each of them
        elif prefetch is None:
            prefetch = max(2, self.info.most)
        if slabs not in self._datasets:
            optional.check_outside_of_functions("connection.dataset()")
            self._datasets[slabs] = tfdata.dataset(self._handle, slabs)
        dataset = self._datasets[slabs]
        if cached is not None:
            dataset = tfdata.cached(dataset, cached, self.cardinality)
        return dataset.prefetch(prefetch) if prefetch else dataset

    def keras(self, map: Callable[[Any], Any] | None = None) -> PyDataset:
        """Return a `keras.utils.PyDataset` of this connection's stream, for `fit`, `evaluate` and `predict` on any
        backend of Keras. Each iteration is one epoch, in order, and `fit(shuffle=)` has no effect.

        The batch that Keras reads to build the model is trained on as well. The dataset has `num_batches` if
        `cardinality` is known and finite. An epoch of unknown length ends where the stream's epoch ends, and an endless
        stream needs `fit(steps_per_epoch=)`. After a state, the first epoch is the rest of the one that was
        interrupted.

        Args:
            map: a function that arranges a batch as Keras takes it: `(x, y)`, `(x, y, sample_weight)`, or `x` alone
                (an array or a dict). None: the feed's samples have that structure. Its argument is a batch of NumPy
                arrays; with the TensorFlow backend it runs in a graph, as in `Dataset.map`, so compute with
                `keras.ops`.

        Raises:
            ImportError: Keras, or the library of its backend, is not installed.
            ValueError: the backend has no tensors for a leaf of the feed (text, ragged), or the feed's samples are
                tuples of more than 3 parts.
        """
        optional.check_keras()
        from .keras_batches import KerasBatches

        return KerasBatches(self._handle, self.dataset, map)

    def torch(self) -> IterableDataset[Any]:
        """Return a PyTorch `IterableDataset` of this connection's stream: each iteration is one epoch, in order.

        Its elements have the feed's structure, with tensors that alias the batches' memory. Iterate over it, or pass it
        to `DataLoader(batches, batch_size=None)`. It has `state_dict` and `load_state_dict`, and a length if
        `cardinality` is known and finite.

        Raises:
            ImportError: PyTorch is not installed.
        """
        optional.check_torch()
        from .torch import SizedTorchBatches, TorchBatches

        return (SizedTorchBatches if isinstance(self.cardinality, int) else TorchBatches)(self._handle)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the training loop's position in the stream, for `load_state_dict` or `connect(state=...)` later.

        The state is plain JSON of a few KB and is cheap to make, so you can save it at every step. Save it together
        with the model: both must belong to the same step.

        Args:
            consumed: how many batches the training loop has consumed since the very beginning of the stream, over all
                epochs and all earlier runs (a state stores its count under the key `consumed`). It must not decrease
                from call to call. If the loop left an epoch early, all batches of it that were handed over count,
                including prefetched ones. None: all that `batches()` yielded.

        Raises:
            ValueError: `consumed` is more than was handed over, or less than the oldest count that is remembered; it is
                None although TensorFlow reads the stream, whose prefetch hides how many batches were consumed; or the
                connection shares a group's stream, which has no state.
        """
        return self._handle.state(consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken: the next iteration reads the rest of the epoch that was interrupted.

        If nothing of that epoch is left, the next iteration reads the next epoch. The count of consumed batches
        continues from the state's. A different daemon may serve the feed, with any number of workers.

        Raises:
            ValueError: the connection has been read already, or `state` is damaged or not a state.
            StateMismatch: the state was taken from a different feed; the message names the differences.
            StreamClosed: the connection was closed.
            PenstockError: as `connect`.
        """
        self._handle.load(state)

    def stats(self) -> dict[str, Any]:
        """Return figures about the connection since it was opened.

        - `feed`: its name; `transport`: "local", "tcp", or "process" with `workers=0`.
        - `epoch`: the number of the newest epoch, from 0; -1 before the first.
        - `slabs`, `batches`, `rows`, `bytes`: how many were handed over. (A dataset receives all batches of a slab at
          once.)
        - `copies`: slabs copied because the consumer held too many, or because a rank was sent small batches of
          several rounds; `aliased`: slabs that it holds now.
        - `reconnects`: how often a lost connection was replaced.
        - `first_batch_seconds`: how long `connect` took, plus the time from the first iteration to its first batch;
          None before that batch. `seconds`: the time since that batch.
        - `wait_seconds`: how long consumers waited for data. `waits`: the same, in three parts: while nothing of the
          batch had come, because it was not made or not sent (`production`); while it was coming (`transfer`); and
          while it was there, until the consumer woke up (`handoff`).
        - `ready`: the share of the batches that were there when the consumer asked; None before the first.

        If your loop iterates over `batches()` or `torch()`, it is the consumer. The consumer of a dataset is a
        TensorFlow thread that takes batches ahead, so these waits are not the training's: to measure the training's
        waits use `penstock.keras.Feeding`.
        """
        return self._handle.handoff.stats(self._handle.unread[0])

    @property
    def error(self) -> PenstockError | None:
        """The error that ended the stream, or None."""
        return self._handle.error

    def close(self) -> None:
        """Close the connection: iterations end with StreamClosed. Arrays and tensors stay valid."""
        self._datasets.clear()
        self._handle.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        rows = "" if self.info.batch_size is None else f" of {self.info.batch_size}"
        return f"<penstock.Connection {self._handle.handoff.url}: batches{rows}, {self.info.spec}>"


def _classes_in(info: FeedInfo) -> tuple[str, ...] | dict[str, tuple[str, ...]] | None:
    if not info.classes:
        return None
    found = dict(info.classes)
    return found.get("", found)


def connect(
    url: str | Feed,
    *,
    params: Mapping[str, Any] | None = None,
    workers: int | Literal["auto"] | None = None,
    memory: int | None = None,
    transport: str = "auto",
    timeout: float | None = None,
    reconnect: float | None = None,
    state: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    group: str = "",
    last_round: str = "drop",
    share: bool = True,
    start: Literal["beginning", "latest", "next_epoch"] = "beginning",
    keys: str | os.PathLike[str] | None = None,
    daemon_user: str | int | None = None,
) -> Connection:
    """Connect to a feed.

    Args:
        url: `tcp://HOST:PORT/FEED` for a running daemon, or `MODULE:ATTR` (`scenes.py:feed`) to start a private daemon
            that ends with the connection. ATTR may also be a function that returns a feed. Instead of `MODULE:ATTR` you
            can pass the `Feed` itself: workers import it if it has a name at the top level of a file, and otherwise it
            is pickled, with the functions that it needs.
        params: with `MODULE:ATTR`, the parameters of that function. They are converted to the types of its annotations,
            and are part of what a state belongs to.
        workers: worker processes of a private daemon, by default one for each CPU that it may use. "auto": as many as
            the trainer needs, measured while it reads. No effect on a running daemon, which has its own. 0: no daemon
            and no worker processes. The feed then runs in this process, on the thread that waits for a batch, and makes
            the same stream. So breakpoints, profilers and tracebacks work as in any code.
        memory: limit of a private daemon's shared memory in bytes. No effect on a running daemon.
        transport: "local" (shared memory), "tcp", or "auto": shared memory if the daemon is on this host. No effect
            with `workers=0`.
        timeout: seconds in which the connection must be open, and a taken rank become free. None: 30 s, which begin
            again as long as the daemon makes progress with the start of its feeds: it imports modules, lists splits, or
            makes first samples. The log says what it waits for. (A private daemon may always take as long as it needs.)
        reconnect: how many seconds to try to reconnect after a connection is lost (and to restart a private daemon)
            before iterations raise ConnectionLost. After a reconnection the stream continues unchanged. A rank also
            waits this long for the other ranks to return. 0: raise ConnectionLost at once. None: 60 s, which begin
            again as long as another daemon makes progress with its start.
        state: continue where this state was taken, as with `Connection.load_state_dict`. None: begin at epoch 0.
        rank: the number of this trainer among `world_size` trainers, from 0. Together they read the stream that a
            single trainer would read: batch j of an epoch goes to rank j mod `world_size`, all ranks get the same
            number of batches, and no rank gets a batch before all have connected.
        world_size: the number of trainers; requires `rank`.
        group: with `rank`: separates training jobs that read the same feed with the same `world_size` at the same time.
            Without `rank`: all consumers that give the same name share one stream. Each batch goes to the consumer that
            asks first, and an epoch ends for all when every batch of it was handed over. If a consumer dies, others get
            the batches that the daemon had sent to it and that it had not handed over. Such a stream has no state, ends
            when nobody has read it for a minute, and outlives its daemon if that was started with `--state FILE`.
        last_round: with `rank`: what happens to the last k batches of an epoch if k is less than `world_size`. "drop":
            no rank gets them. "pad": ranks 0 to k - 1 get them, and every other rank r gets a copy of the batch of rank
            r mod k, so no batch is left out. All ranks must give the same value.
        share: share what is made with other jobs that read the same feed of the daemon. While they are near each other,
            each batch is made only once. Each job still gets exactly its own stream, at its own pace. False: everything
            is made for this job alone. Ranks share as one job; all of them must give the same value. No effect with
            `group` and no `rank`, on a private daemon, and with `reconnect=0`.
        start: where a job without a state begins. "beginning": at epoch 0. "latest": with the next batch that other
            jobs of this feed get, so that it shares with them from there on. Its first epoch is the rest of theirs.
            "next_epoch": with the next epoch that they begin. Its first batch comes when the first of them was sent all
            of the epoch before. Both: at epoch 0 if there are no other jobs. Its states say where it began.
        keys: the folder with this client's keys, for a daemon that was started with `--keys`: traffic over the network
            is then encrypted, and both sides prove who they are. None: the folder that the environment variable
            PENSTOCK_KEYS names, or no keys if it is not set. (`penstock keygen` makes such folders.)
        daemon_user: without keys, the user who runs the daemon on this machine, as a name or uid, if that is neither
            this process's own user nor root. Anybody can listen at the port of a daemon that is gone, so batches of
            other users are refused. None: the user that the environment variable PENSTOCK_DAEMON_USER names, or none.

    Raises:
        Unreachable: no daemon answered, its feeds were not ready in time, a user who is not trusted listens there, or
            (with "local") it is not on this host.
        KeyRefused: the daemon requires a key, does not know this one, is not the one that the keys are for, or uses
            none.
        UnknownFeed: the daemon has no such feed; the message lists those it has.
        ProtocolError: the daemon speaks another version of the protocol.
        RankTaken: another process reads as this rank, or this rank has left the stream that the others still read.
        StartError: the URL has the wrong form, the daemon could not start its feeds, the Feed cannot be pickled,
            the keys cannot be read, or there is no user `daemon_user`.
        StateMismatch: `state` was taken from a different feed.
        ValueError: an option or `state` is invalid.
        PenstockError: any other error that the daemon reported.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: must be one of {', '.join(TRANSPORTS)}")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"timeout={timeout}: must be more than 0 seconds")
    if reconnect is not None and not 0 <= reconnect < float("inf"):
        raise ValueError(f"reconnect={reconnect}: must be a finite number of seconds, 0 or more")
    if not isinstance(url, str):
        require_feed(url)
    private = not isinstance(url, str) or is_private(url)
    if workers == 0 and not private:
        raise ValueError(
            f"workers=0 runs a feed in this process, but {url} is served by a daemon: give MODULE:ATTR or the Feed, or "
            "omit workers="
        )
    if params:
        if not private or not isinstance(url, str):
            what = "a Feed, which has none" if private else f"{url}, whose daemon has its own (penstock serve --param)"
            raise ValueError(f"params= is for MODULE:FUNCTION, where the function returns a feed, not for {what}")
        url = with_params(url, params)
    if keys is not None and private:
        raise StartError(
            "keys= is for the daemon at a URL: a private daemon, or workers=0, can be reached from this host only"
        )
    if daemon_user is not None and private:
        raise StartError("daemon_user= is for the daemon at a URL: a private daemon runs as this process's own user")
    alone = ""
    if private:
        feed = repr(shown_call(url)) if isinstance(url, str) else "a Feed"
        alone = f"{feed} starts a private daemon" if workers != 0 else "workers=0 makes a stream in this process"
    identity = _identity(alone, rank, world_size, group, last_round)
    share = share and not (private or (group and rank is None) or reconnect == 0)
    if start not in STARTS:
        raise ValueError(f"start={start!r:.60}: must be one of {', '.join(STARTS)}")
    if start != "beginning" and (state is not None or not share or rank is not None):
        what = "this job shares with no other"
        if state is not None or rank is not None:
            what = "a state says where the job begins" if state is not None else "ranks begin together, at the start"
        raise ValueError(f"start={start!r} is for a job that joins others which read the same feed, but {what}")
    identity = replace(identity, share=share, start=start)
    if workers == 0:
        return Connection(StreamHandle(InProcessConnector(url, memory), reconnect, state))
    if isinstance(url, str):
        own = None if private else client_keys(keys)
        connector = Connector(url, workers, memory, transport, timeout, identity, keys=own, daemon_user=daemon_user)
        return Connection(StreamHandle(connector, reconnect, state))
    target = find(url)
    world = World.here(target.directory, target.carried)
    connector = Connector(target.name, workers, memory, transport, timeout, identity, world)
    connection = Connection(StreamHandle(connector, reconnect, state))
    try:
        compare(url, connection.info, target.name)
    except StartError:
        connection.close()
        raise
    return connection


def dataset(
    url: str | Feed,
    *,
    prefetch: int | None = None,
    cached: int | None = None,
    params: Mapping[str, Any] | None = None,
    workers: int | Literal["auto"] | None = None,
    memory: int | None = None,
    transport: str = "auto",
    timeout: float | None = None,
    reconnect: float | None = None,
    state: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    group: str = "",
    last_round: str = "drop",
    share: bool = True,
    start: Literal["beginning", "latest", "next_epoch"] = "beginning",
    keys: str | os.PathLike[str] | None = None,
    daemon_user: str | int | None = None,
) -> tf.data.Dataset:
    """Connect to a feed and return a dataset of it: each iteration is one epoch, in order.

    Short for `connect(url, ...).dataset(prefetch, cached=cached)`. See `Connection.dataset` for `prefetch` and
    `cached`, and `connect` for all other arguments and the errors. The connection closes when the dataset, and
    everything made from it, is gone.

    Raises:
        ImportError: TensorFlow is not installed.
        RuntimeError: it is called in a function that TensorFlow traces, such as that of `Dataset.interleave`.
    """
    optional.check_outside_of_functions("penstock.dataset()")
    optional.check_tensorflow("penstock.dataset()")
    connection = connect(
        url,
        params=params,
        workers=workers,
        memory=memory,
        transport=transport,
        timeout=timeout,
        reconnect=reconnect,
        state=state,
        rank=rank,
        world_size=world_size,
        group=group,
        last_round=last_round,
        share=share,
        start=start,
        keys=keys,
        daemon_user=daemon_user,
    )
    return connection.dataset(prefetch, cached=cached)


def _identity(alone: str, rank: int | None, world_size: int | None, group: str, last_round: str) -> Identity:
    if last_round not in LAST_ROUNDS:
        raise ValueError(f"last_round={last_round!r:.60}: must be one of {', '.join(LAST_ROUNDS)}")
    if last_round != "drop" and rank is None:
        raise ValueError(f"last_round={last_round!r} is for ranks: give rank= and world_size= too")
    if not isinstance(group, str) or not re.fullmatch(GROUP, group):
        raise ValueError(
            f"group={group!r:.60}: must be a string of at most {MAX_GROUP} characters, without control characters"
        )
    if (group or rank is not None or world_size is not None) and alone:
        raise ValueError(
            f"{alone}, so each consumer would have its own: start one daemon with `penstock serve` and give its URL to "
            "all of them"
        )
    if rank is None and world_size is None:
        return Identity(group)
    if rank is None or world_size is None:
        raise ValueError(
            f"rank={rank}, world_size={world_size}: give both. world_size= is the number of trainers that read "
            "together, rank= is which of them this is, from 0"
        )
    try:
        rank, world_size = int(operator.index(rank)), int(operator.index(world_size))
    except TypeError:
        raise TypeError(f"rank={rank!r}, world_size={world_size!r}: both must be integers") from None
    if not 1 <= world_size <= MAX_WORLD:
        raise ValueError(f"world_size={world_size}: must be 1 to {MAX_WORLD}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: must be 0 to {world_size - 1} with world_size={world_size}")
    return Identity(group, rank, world_size, last_round == "pad")
