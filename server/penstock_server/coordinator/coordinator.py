"""The coordinator: feeds, workers and streams, as a state machine without I/O.

Two rules. All that changes state is a method here or in stream.py, called with values; and nothing here knows a socket,
a clock, a process or an address. Events come in as method calls, and `take()` gives what is to be done. A daemon drives
it, and so does a simulation.

Life of a feed: `plans` (a worker has imported it) -> its splits and first sample are asked for -> `splits_listed` ->
it is ready, or the start is refused. Life of a stream: `open` -> `begin`/`acknowledge`/`leave` ... -> `close` or
`lost` -> gone when its last slot has come back. Runs and tickets tell by their number to which stream they belong.

An event that cannot be is refused with a PenstockError before anything has changed. Any other exception is a bug, after
which it is not known where a stream stands. All state is a stream's own, but for sums over streams. So that stream is
`broken`: it fails, and nothing is sent or made for it any more. Its slots come back as workers and consumers let go of
them, and a worker that fills one is never told of another use of it before that. Other streams go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain

from msgspec import Struct

from penstock_proto import (
    DaemonStopped,
    GeneratorError,
    MemoryBound,
    PenstockError,
    ProtocolError,
    StateMismatch,
    UnknownFeed,
    WorkerDied,
)
from penstock_proto.messages import IDS_PER_STREAM, FeedPlan, FirstSample, Opened
from penstock_proto.position import Position, differences
from penstock_proto.spec import Spec

from . import commands as do
from .consumer import Consumer
from .delivery import Delivery, GroupDelivery, RankDelivery, SingleDelivery
from .epoch import check, check_counts
from .feeds import ServedFeed, Skipped, SplitsInfo, whole_pages
from .first_samples import FirstSampleChecks
from .group_log import SavedGroup, check_had
from .groups import Groups
from .memory import MANY, Share, least_slots, regrown, share, with_consumers
from .order import Part
from .production import pause
from .rendezvous import Ask, Rendezvous
from .stream import MOST_STREAMS, Stream
from .workers import Workers

NOBODY = -1
"""In place of a worker's number: the feed waits for its next try."""


class Failing(Struct, frozen=True):
    """Why a feed cannot be started yet, and how often it was tried."""

    times: int
    error: PenstockError


class Coordinator:
    """See the file's head.

    Args:
        workers: how many worker processes there are; they are numbered from 0.
        memory: bytes that slots and shuffle blocks may take in all.
        kept: what the state file has of groups, by feed and name; None without such a file.
        slots: how many slots there may be in all.
    """

    def __init__(
        self,
        *,
        workers: int,
        memory: int,
        kept: Mapping[tuple[str, str], SavedGroup] | None = None,
        slots: int = MANY,
    ) -> None:
        self.workers = Workers(workers)
        self.memory = memory
        self.slots = slots
        self.feeds: dict[str, ServedFeed] = {}
        self.streams: dict[int, Stream] = {}
        self._plans: dict[str, FeedPlan] = {}
        self._listings: dict[int, tuple[int, str]] = {}
        """The worker that lists the splits, and the feed, by run, until the feed is ready."""
        self.failing: dict[str, Failing] = {}
        """The feeds that cannot be started yet, where they say "retry"."""
        self.stopping: DaemonStopped | None = None
        self._rendezvous: dict[tuple[str, str, int], Rendezvous] = {}
        self._groups = Groups(kept, self._do)
        self._last_stream = 0
        self._last_consumer = 0
        self._commands: list[do.Command] = []
        self._comparisons = FirstSampleChecks(self._do)

    def take(self) -> list[do.Command]:
        """What is to be done since the last call, in order."""
        commands, self._commands = self._commands, []
        return commands

    @property
    def reserved(self) -> int:
        """Bytes that the streams' shares add up to."""
        return sum(stream.reserved for stream in self.streams.values())

    @property
    def slots_reserved(self) -> int:
        """Slots that the streams' shares add up to."""
        return sum(stream.slots_reserved for stream in self.streams.values())

    def allow_slots(self, slots: int) -> None:
        """There may be so many slots from now on; streams keep those that they have."""
        self.slots = slots

    # --- feeds ---

    def plans(self, plans: Iterable[FeedPlan], worker: int) -> bool:
        """A worker has imported the feeds. The first one to do so is asked for splits and samples.

        Returns:
            Whether they are the same as the first worker's.
        """
        if self._plans:
            same = list(plans) == list(self._plans.values())
            if same:
                self._comparisons.worker_ready(worker)
                self._compare()
            return same
        self._comparisons.worker_ready(worker)
        for run, plan in enumerate(plans):
            self._plans[plan.name] = plan
            self._list(worker, run, plan.name)
        return True

    def _list(self, worker: int, run: int, feed: str) -> None:
        self._listings[run] = worker, feed
        self._do(do.ListSplits(worker, run, feed, 0))

    @property
    def retries(self) -> bool:
        """Whether every feed that is not ready is tried again when its start fails, and there is such a feed."""
        return bool(self._listings) and all(
            self._plans[feed].on_error == "retry" for _, feed in self._listings.values()
        )

    def _start_failed(self, run: int, error: PenstockError) -> None:
        _, feed = self._listings[run]
        if self._plans[feed].on_error != "retry" or not isinstance(error, GeneratorError | WorkerDied):
            self._do(do.FailStart(error))
            return
        error.feed = feed
        times = self.failing[feed].times + 1 if feed in self.failing else 1
        self.failing[feed] = Failing(times, error)
        self._listings[run] = NOBODY, feed
        self._do(do.Retry(pause(times), run))

    def splits_listed(
        self,
        run: int,
        splits: SplitsInfo,
        spec: Spec | None,
        sample_nbytes: int,
        first: FirstSample | None = None,
    ) -> None:
        """A list of splits is there, and for the first of a feed its spec and the bytes of a sample."""
        if run in self._listings:
            worker, feed = self._listings.pop(run)
            self.failing.pop(feed, None)
            self._feed_seen(run, worker, self._plans[feed], splits, spec, sample_nbytes, first)
        elif (stream := self.stream_of(run)) is not None:
            stream.splits_listed(run, splits)
            self._settle(stream)
        else:
            self._do(do.ForgetSplits(splits.number))

    def _feed_seen(
        self,
        run: int,
        worker: int,
        plan: FeedPlan,
        splits: SplitsInfo,
        spec: Spec | None,
        sample_nbytes: int,
        first: FirstSample | None,
    ) -> None:
        spec = plan.spec or spec
        if spec is None:
            error = ProtocolError("the worker did not say what a sample looks like", feed=plan.name)
            self._do(do.FailStart(error))
            return
        static = plan.static_splits or plan.length is not None
        self._comparisons.seen(plan.name, run, splits.number, not static, first, worker)
        feed = ServedFeed(plan, spec, sample_nbytes, splits if static else None)
        self.feeds[plan.name] = feed
        needed = sum(served.least_nbytes for served in self.feeds.values())
        if needed <= self.memory:
            self._do(do.FeedReady(plan.name, splits.count))
            self._compare()
        elif not self._listings:  # else the figure is not complete
            self._do(do.FailStart(self._too_small(needed)))

    def _compare(self) -> None:
        if self.feeds and not self._listings:
            self._comparisons.ask(len(self.workers))

    def _too_small(self, needed: int) -> MemoryBound:
        needs = []
        for feed in self.feeds.values():
            blocks = f" and {size(feed.blocks_nbytes)} of shuffle blocks" if feed.blocks_nbytes else ""
            needs.append(f"feed {feed.name}: {least_slots(1)} slots of {size(feed.slot_nbytes)}{blocks}")
        return MemoryBound(
            f"--memory {self.memory} is too small: {needed} bytes are needed at the least ({'; '.join(needs)}); "
            f"give --memory {needed} or more, or make the batches, `turn` or `shuffle` smaller"
        )

    # --- consumers ---

    def unknown_feed(self, name: str) -> UnknownFeed:
        """The error for a feed that is not served; it names those that are."""
        served = ", ".join(sorted(self.feeds)) or "none is ready yet"
        return UnknownFeed(f"no feed {name!r} is served here; there are: {served}")

    def open(self, feed_name: str, ask: Ask) -> Consumer:
        """A new consumer, with a stream of its own, or as one of the ranks that share one; that begins with the last.

        Raises:
            UnknownFeed: names the feeds that there are.
            StateMismatch: the position is not one of this feed, or not that of the other ranks; says in what they
                differ.
            DaemonStopped: the daemon serves its present consumers to the end of their epochs, and nobody else.
            MemoryBound: other streams hold the memory; says how much is needed.
            StreamClosed: the consumer comes back to a group's stream that is not here.
        """
        before = set(self.streams)
        try:
            return self._open(feed_name, ask)
        except PenstockError:
            raise
        except Exception as error:
            shared = self._shared(feed_name, ask)
            for stream in self._each():
                new = stream.number not in before
                if new or stream is shared:
                    self.broken(stream, error)
                if new:
                    with contextlib.suppress(Exception):
                        stream.end()  # nobody reads it
                        self._settle(stream)
            raise a_bug(error) from error

    def _shared(self, feed: str, ask: Ask) -> Stream | None:
        """The stream that others read and `ask` was to join."""
        if ask.world_size:
            rendezvous = self._rendezvous.get((feed, ask.group, ask.world_size))
            return None if rendezvous is None else rendezvous.stream
        return self._groups.stream_of(feed, ask.group)

    def _open(self, feed_name: str, ask: Ask) -> Consumer:
        feed = self.feeds.get(feed_name)
        if feed is None:
            raise self.unknown_feed(feed_name)
        if self.stopping is not None:
            raise self.stopping
        if not self.workers.numbers:
            raise WorkerDied("no worker process can start any more: the daemon's log says why", feed=feed_name)
        if ask.position is not None:
            self._check(ask.position, feed)
        if ask.world_size:
            consumer = self._join_ranks(feed, ask)
        elif ask.group:
            check_had(ask.had, feed.name)
            consumer = self._join(feed, ask)
        else:
            stream = self._new_stream(feed, ask, SingleDelivery)
            consumer = self._new_consumer(stream, ask)
            stream.start([consumer], [ask.position])
        self._do(do.Tell(consumer.number, Opened(consumer.share.credit, consumer.share.quota, consumer.epoch)))
        self._settle(consumer.stream)
        return consumer

    def _join(self, feed: ServedFeed, ask: Ask) -> Consumer:
        group = self._groups.find(feed, ask)
        if group is None:
            return self._begin_group(feed, ask)
        stream = group.stream
        share = with_consumers(
            stream.share,
            len(stream.consumers) + 1,
            free=self.memory - self.reserved,
            slot=stream.production.slot_nbytes,
            most=self.slots - self.slots_reserved,
        )
        if share is None:
            raise MemoryBound(
                f"there is no memory (or there are no file descriptors) for one more consumer of group {ask.group!r}: "
                "give the daemon more, or close one",
                feed=feed.name,
            )
        consumer = self._new_consumer(stream, ask)
        stream.join(consumer, share)
        group.came(ask)
        return consumer

    def _begin_group(self, feed: ServedFeed, ask: Ask) -> Consumer:
        kept = self._groups.kept(feed, ask.group)
        if kept is not None:
            mend = "give the group another name"
            self._check(kept.position, feed, f"group {ask.group!r} cannot go on from the state file", mend)
        delivery = partial(GroupDelivery, group_log=self._groups.group_log(feed, ask.group))
        stream = self._new_stream(feed, ask, delivery)
        group = self._groups.begin(stream, ask.group)
        consumer = self._new_consumer(stream, ask)
        stream.start([consumer], [kept.position if kept else None])
        group.came(ask)
        return consumer

    def _join_ranks(self, feed: ServedFeed, ask: Ask) -> Consumer:
        if not ask.rank < ask.world_size:
            raise ProtocolError(f"rank {ask.rank} of {ask.world_size}: ranks go from 0", feed=feed.name)
        key = feed.name, ask.group, ask.world_size
        rendezvous = self._rendezvous.get(key)
        if rendezvous is not None and not rendezvous.over:
            rendezvous.check(ask)
            rendezvous.give_way(ask)
        if rendezvous is None or rendezvous.over:
            delivery = partial(RankDelivery, pad=ask.pad) if ask.world_size > 1 else SingleDelivery
            rendezvous = self._rendezvous[key] = Rendezvous(self._new_stream(feed, ask, delivery), ask.world_size)
        rendezvous.compare(ask)
        consumer = self._new_consumer(rendezvous.stream, ask)
        rendezvous.join(consumer, ask)
        return consumer

    def _new_stream(self, feed: ServedFeed, ask: Ask, delivery: Callable[[Stream], Delivery]) -> Stream:
        granted = self._share(feed, ask.credit, ask.quota, max(1, ask.world_size))
        self._last_stream = next(
            number
            for number in chain(range(self._last_stream + 1, MOST_STREAMS), range(1, MOST_STREAMS))
            if number not in self.streams
        )
        stream = Stream(self._last_stream, feed, granted, delivery=delivery, workers=self.workers, out=self._do)
        self.streams[stream.number] = stream
        return stream

    def _new_consumer(self, stream: Stream, ask: Ask) -> Consumer:
        self._last_consumer += 1
        return Consumer(
            self._last_consumer,
            stream,
            credit_bytes=ask.credit_bytes,
            holds_handed=ask.quota > 0,
            rank=ask.rank,
            identity=ask.identity,
        )

    def _check(
        self,
        position: Position,
        feed: ServedFeed,
        what: str = "the stream cannot go on from this state",
        mend: str = "begin anew",
    ) -> None:
        found = list(differences(position.feed, feed.info))
        if found:
            raise StateMismatch(
                f"{what}, which was made with another feed: {'; '.join(found)}. Serve the feed as it was, or {mend}",
                feed=feed.name,
            )
        check_counts(position, feed.info)
        if feed.static_splits is not None:
            check(position, feed.plan, feed.static_splits)

    def _share(self, feed: ServedFeed, credit: int, quota: int, consumers: int) -> Share:
        reading = {stream.feed for stream in self.streams.values()}
        granted = share(
            free=self.memory - self.reserved,
            kept=sum(other.least_nbytes for other in self.feeds.values() if other not in reading | {feed}),
            slot=feed.slot_nbytes,
            blocks=feed.blocks_nbytes,
            workers=len(self.workers),
            credit=credit,
            quota=quota,
            consumers=consumers,
            most=self.slots - self.slots_reserved,
        )
        if granted is None and least_slots(quota, consumers) > self.slots - self.slots_reserved:
            raise MemoryBound(
                f"a stream needs {least_slots(quota, consumers)} slots, but {len(self.streams)} others hold "
                f"{self.slots_reserved} of the {self.slots} for which the daemon may have files open: close one, or "
                "give it a higher limit of open files (ulimit -n)",
                feed=feed.name,
            )
        if granted is None:
            needed = feed.blocks_nbytes + least_slots(quota, consumers) * feed.slot_nbytes
            raise MemoryBound(
                f"a stream needs {size(needed)}, but {len(self.streams)} others hold {size(self.reserved)} of the "
                f"{size(self.memory)} that --memory allows: close one, or give the daemon more",
                feed=feed.name,
            )
        return granted

    def stop(self, reason: DaemonStopped) -> None:
        """Let the epochs that are being read go on to their ends, and begin nothing new; each stream then fails with
        this reason."""
        self.stopping = reason
        for stream in self._each():
            with self._alone(stream):
                stream.stop(reason)
                self._settle(stream)

    @property
    def stopped(self) -> bool:
        """Whether every consumer has all that was promised to it."""
        return all(stream.error is not None or stream.delivered for stream in self.streams.values())

    def begin(self, consumer: Consumer, epoch: int) -> None:
        """The consumer wants this epoch.

        Raises:
            ProtocolError: it reads an epoch, has read this one before, or is gone. Nothing has changed then.
            EndOfStream: the feed has no such epoch. (Who has a stream alone is told by its failure.)
        """
        stream = consumer.stream
        if stream.ends_before(epoch) and self._groups.of(stream) is not None:
            raise stream.end_of_stream()
        stream.begin(consumer, epoch)
        self._settle(stream)

    def acknowledge(self, consumer: Consumer, handed: int, released: tuple[int, ...], ended: int) -> None:
        """The consumer was handed so many slabs, released these, and saw so many epochs end."""
        consumer.stream.acknowledge(consumer, handed, released, ended)
        self._settle(consumer.stream)

    def leave(self, consumer: Consumer, epoch: int, handed: int) -> None:
        """The consumer leaves the epoch early, and hands over only the first `handed` slabs."""
        consumer.stream.leave(consumer, epoch, handed)
        self._settle(consumer.stream)

    def close(self, consumer: Consumer, handed: int) -> None:
        """The consumer wants nothing more, but may still have tensors over slots; `handed` as in `leave`.

        Raises:
            ProtocolError: so many slabs were not sent. Nothing has changed then.
        """
        consumer.check(handed)
        self._leave_rendezvous(consumer)
        stream = consumer.stream
        stream.close(consumer, handed)
        self._parted(consumer)
        group = self._groups.of(stream)
        if group is not None and group.left:
            stream.end()
        self._settle(stream)

    def cut(self, consumer: Consumer, handed: int) -> None:
        """The consumer is cut off, but may still have tensors over slots; `handed` as in `leave`."""
        handed = consumer.believed(handed)
        self._leave_rendezvous(consumer)
        if (group := self._groups.of(consumer.stream)) is not None:
            group.lost(consumer)
        consumer.stream.cut(consumer, handed)
        self._settle(consumer.stream)

    def lost(self, consumer: Consumer, handed: int) -> None:
        """The consumer is gone without a word; `handed` as in `leave`."""
        handed = consumer.believed(handed)
        self._leave_rendezvous(consumer)
        group = self._groups.of(consumer.stream)
        if group is not None:
            group.lost(consumer)
        consumer.stream.lost(consumer, handed)
        self._parted(consumer)
        if group is not None:
            self._part(consumer)
        self._settle(consumer.stream)

    def _parted(self, consumer: Consumer) -> None:
        """What the consumer's consumer was not handed is not its own any more, unless it has come again."""
        group_log, consumers = consumer.stream.group_log, consumer.stream.consumers
        if group_log is not None and not any(one.identity == consumer.identity and not one.gone for one in consumers):
            group_log.parted(consumer.identity)

    def _part(self, consumer: Consumer) -> None:
        """A group's stream has one consumer fewer."""
        stream = consumer.stream
        stream.consumers.remove(consumer)
        free = self.memory - self.reserved
        share = with_consumers(stream.share, len(stream.consumers), free=free, slot=stream.production.slot_nbytes)
        assert share is not None, "it needs less"
        stream.share = share

    def _leave_rendezvous(self, consumer: Consumer) -> None:
        """The consumer waits for other ranks no more, if it does."""
        for rendezvous in self._rendezvous.values():
            if rendezvous.stream is consumer.stream:
                rendezvous.leave(consumer)
        self._rendezvous = {key: rendezvous for key, rendezvous in self._rendezvous.items() if not rendezvous.over}

    def look_at_the_clock(self, now: float) -> None:
        """Time has passed; `now` is in seconds from anywhere."""
        if self._plans and len(self.feeds) == len(self._plans):
            for stream in self._groups.given_up(now):
                with self._alone(stream):
                    stream.give_up_waiting()
                    self._settle(stream)
        for rendezvous in list(self._rendezvous.values()):
            with self._alone(rendezvous.stream):
                rendezvous.look_at_the_clock()
        for group in self._groups:
            with self._alone(group.stream):
                if group.deserted(now):
                    group.stream.end()
                    self._settle(group.stream)
        self._groups.tidy()

    # --- workers ---

    def made(
        self,
        ticket: int,
        run: int,
        part: Part | None,
        *,
        last: bool = False,
        ended: bool = False,
        leftover: int = 0,
        record: bytes = b"",
        border: bool = False,
    ) -> None:
        """Batches are in a slot."""
        if (stream := self.stream_of(ticket)) is not None:
            stream.production.made(
                ticket, run, part, last=last, ended=ended, leftover=leftover, record=record, border=border
            )
            self._settle(stream)

    def rows_written(self, ticket: int, run: int) -> None:
        """Leftover rows are in a slot."""
        if (stream := self.stream_of(ticket)) is not None:
            stream.production.rows_written(ticket, run)
            self._settle(stream)

    def need_room(self, ticket: int, run: int, nbytes: int) -> None:
        """A batch does not fit into its slot: later slots are larger, if the memory allows it."""
        stream = self.stream_of(ticket)
        if stream is None or not stream.production.needs(ticket, run):
            return
        if nbytes > stream.production.slot_nbytes and not self._grow(stream, nbytes):
            needed = (
                least_slots(stream.share.quota, stream.share.consumers) * whole_pages(nbytes)
                + stream.production.nbytes
                + stream.feed.blocks_nbytes
            )
            missing = needed - stream.share.nbytes - (self.memory - self.reserved)
            stream.fail(
                MemoryBound(
                    f"a batch of {size(nbytes)} came, with which the stream needs {size(needed)}, {size(missing)} more "
                    f"than is left to it. Give --memory {2 * (self.memory + missing)} or make the batches smaller",
                    feed=stream.feed.name,
                )
            )
        else:
            stream.production.need_room(ticket)
        self._settle(stream)

    def _grow(self, stream: Stream, nbytes: int) -> bool:
        """Let the stream's slots hold `nbytes`, with some to spare if there is room for it."""
        for slot in (whole_pages(nbytes + nbytes // 8), whole_pages(nbytes)):
            larger = regrown(
                stream.share,
                free=self.memory - self.reserved,
                held=stream.production.nbytes,
                blocks=stream.feed.blocks_nbytes,
                slot=slot,
            )
            if larger is not None:
                stream.resize(larger, slot)
                return True
        return False

    def run_failed(self, run: int, error: PenstockError) -> None:
        """User code failed in a worker."""
        if run in self._listings:
            self._start_failed(run, error)
        elif (stream := self.stream_of(run)) is not None:
            stream.run_failed(run, error)
            self._settle(stream)

    def split_skipped(self, run: int, number: int, skipped: Skipped) -> ServedFeed | None:
        """A worker leaves out the rest of a split, whose number within its lane is `number`.

        Returns:
            The feed, if the stream lives and this was not known yet.
        """
        stream = self.stream_of(run)
        if stream is None or not stream.production.split_skipped(run, number, skipped):
            return None
        return stream.feed

    def retry(self, run: int) -> None:
        """The pause that `Retry` asked for is over."""
        if run in self._listings:
            _, feed = self._listings[run]
            self._list(self.workers.pick(self.failing[feed].times), run, feed)
        elif (stream := self.stream_of(run)) is not None:
            stream.retry(run)
            self._settle(stream)

    def slot_found(self, ticket: int) -> None:
        """The ticket has its slot."""
        if (stream := self.stream_of(ticket)) is not None:
            stream.production.slot_found(ticket)
            self._settle(stream)

    def copied(self, ticket: int) -> None:
        """The copy that `Copy` asked for is in the ticket's slot."""
        if (stream := self.stream_of(ticket)) is not None:
            stream.production.copied(ticket)
            self._settle(stream)

    def no_slot(self, ticket: int, error: PenstockError) -> None:
        """The machine has no memory for the ticket's slot."""
        if (stream := self.stream_of(ticket)) is not None:
            if stream.production.has(ticket):
                stream.fail(error)
            self._settle(stream)

    def worker_died(self, worker: int, how: str, blamed: tuple[int, int, str] | None = None) -> None:
        """A worker process has ended. `blamed`: the run that it worked on, the split within it (-1: it was not in user
        code) and its name; None if it worked on nothing."""
        if (self._listings and not self.retries) or not self._plans:
            error = WorkerDied(f"the worker process {how} before it could serve a feed", worker=worker)
            self._do(do.FailStart(error))
        else:
            for run, (lister, _) in list(self._listings.items()):
                if lister == worker:
                    self._start_failed(run, WorkerDied(f"the worker process that looked at it {how}", worker=worker))
        self._comparisons.worker_away(worker)
        if worker in self.workers.numbers:
            self.workers.died(worker)
        for stream in self._each():
            with self._alone(stream):
                stream.worker_died(worker, how, blamed)
                self._settle(stream)

    def worker_ready(self, worker: int) -> None:
        """A worker process has imported the user's modules."""
        if worker in self.workers.away:
            self.workers.is_ready(worker)
            self._workers_changed()

    def add_worker(self, worker: int) -> None:
        """There is one worker more; it gets work when it is ready."""
        self.workers.add(worker)

    def retire_worker(self, worker: int) -> None:
        """The worker is to leave: it hands over its lanes as they come to borders; `Retire` says when it is done."""
        self.workers.leaves(worker)
        self._workers_changed()

    def hurry(self, worker: int) -> None:
        """The worker is to leave now: its lanes are handed over wherever they are."""
        for stream in self._each():
            with self._alone(stream):
                stream.production.move_all(worker)
                self._settle(stream)
        self._retire()

    def worker_gone(self, worker: int, how: str) -> None:
        """The worker is no more, and no process takes its place."""
        self.workers.gone(worker)
        if self.workers.leaving.issuperset(self.workers.numbers):
            self.workers.all_stay()
        if not self.workers.numbers:
            error = WorkerDied(f"no worker process can start any more: the last one {how}; the daemon's log says more")
            for stream in self._each():
                with self._alone(stream):
                    stream.fail(error)
        self.worker_died(worker, how)

    def _workers_changed(self) -> None:
        for stream in self._each():
            with self._alone(stream):
                stream.production.workers_changed()
                self._settle(stream)
        self._retire()

    # --- failures ---

    def fail(self, stream: Stream, error: PenstockError) -> None:
        """The stream cannot go on."""
        stream.fail(error)
        self._settle(stream)

    def not_kept(self, feed: str, group: str, kept: SavedGroup | None, error: DaemonStopped) -> Stream | None:
        """The state file could not be written, and has `kept` of the group: its stream fails, if it has not ended.

        Returns:
            That stream: its consumers may hear of nothing that was to be written before.
        """
        stream = self._groups.not_kept(feed, group, kept)
        if stream is not None:
            self.fail(stream, error)
        return stream

    def broken(self, stream: Stream, error: Exception) -> None:
        """An event about the stream raised what nobody expected: see the file's head."""
        self._do(do.ReportBug(error))
        with contextlib.suppress(Exception):
            stream.fail(a_bug(error))
        with contextlib.suppress(Exception):
            self._settle(stream)

    def _each(self) -> Iterator[Stream]:
        """The streams that there are now; what is done to one may end it, and others."""
        return iter(list(self.streams.values()))

    @contextlib.contextmanager
    def _alone(self, stream: Stream) -> Iterator[None]:
        """What happens to the stream within happens to it alone, whatever is raised: others hear of an event too."""
        try:
            yield
        except Exception as error:
            self.broken(stream, error)

    def stream_of(self, number: int) -> Stream | None:
        """The stream to which a run or a ticket belongs, if it is still there."""
        return self.streams.get(number // IDS_PER_STREAM)

    def _settle(self, stream: Stream) -> None:
        stream.advance()
        if stream.group_log is not None and (stream.closing or stream.error is not None):
            stream.group_log.end(forget=not isinstance(stream.error, DaemonStopped))
        if stream.done:
            self.streams.pop(stream.number, None)
        if self.workers.leaving:
            self._retire()

    def _retire(self) -> None:
        """End the workers that are to leave and do nothing any more."""
        for worker in sorted(self.workers.leaving):
            if not any(other.uses(worker) for other in self.streams.values()):
                self.workers.gone(worker)
                self._comparisons.worker_away(worker)
                self._do(do.Retire(worker))

    def _do(self, command: do.Command) -> None:
        self._commands.append(command)


def a_bug(error: Exception) -> PenstockError:
    """What a consumer is told of an error that nobody expected."""
    return PenstockError(f"the daemon failed: {error!r}. This is a bug; its log has the traceback, please report it")


def size(nbytes: int) -> str:
    """`nbytes` for people: 12 bytes, 3.4 MiB."""
    amount, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
