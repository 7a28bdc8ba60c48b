"""The delivery policy of jobs that read the same stream: each gets all of it, at its own pace.

A job is a single consumer, or ranks that read in step (jobs.py). The *front* is the next batch in the order. A job at
the front is sent it as soon as it is made. If it has no credit, others do not wait for it: the front goes on, and the
job is *behind*. The window keeps what it has missed, as long as there is memory for that. Then the job is told that its
stream *moves*: it connects again with its position, as after a loss, and reads another stream, which shares again when
it meets one. Ranks are always served from the window, which keeps their next round until it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock_proto import PenstockError, StreamMoved
from penstock_proto import messages as m
from penstock_proto.batches.position import Position, pack
from penstock_proto.messages import MAX_START, LaneEnded, PoolBegun

from ..model.consumer import Consumer
from ..model.known_lists import SplitsInfo
from ..model.stripe import Stripe
from ..model.turn import Part, Turn
from ..order.epoch import Epoch
from .delivery import SingleDelivery
from .front_place import FrontPlace
from .jobs import Job, Place, moved
from .outlet import Outlet, elsewhere
from .rank_job import RankJob
from .solo_job import Joined, SoloJob
from .window import Entry, EpochEnd, LeftEarly, Window


class SharedDelivery(SingleDelivery):
    """Sends everything to each of the stream's jobs.

    Args:
        outlet: where batches go.
        room: returns the most bytes and the most slots that the window may hold now.
        on_moved: called with the epoch and its list of splits when a job moves within the epoch.
        joinable: whether other jobs may join.

    Attributes:
        joinable: as given. (If one of several ranks does not share, it is set to False before the stream begins.)
        jobs: the jobs that are not gone.
        window: what jobs that are behind still need.
        keeps: whether the window also keeps what none of them needs, for those of another stream, which is behind.
    """

    def __init__(
        self,
        outlet: Outlet,
        room: Callable[[], tuple[int, int]],
        on_moved: Callable[[int, SplitsInfo], None],
        *,
        joinable: bool = True,
    ) -> None:
        super().__init__(outlet)
        self.joinable = joinable
        self.window = Window(outlet.slots)
        self.keeps = False
        self.jobs: list[Job] = []
        self._room = room
        self._on_moved = on_moved
        self._front_place = FrontPlace(outlet.feed.info, None)
        self._latest: list[Entry] = []
        """What the jobs at the front were told since the latest batch."""
        self._lists: dict[int, SplitsInfo] = {}
        """The lists of splits of the epochs that are closed, but are still in the window."""

    # --- jobs ---

    @property
    def readers(self) -> list[Consumer]:
        """The consumers of all jobs that are not gone."""
        return _there(self.jobs)

    @property
    def rounds(self) -> int:
        """How many slots are reserved for rounds of ranks."""
        return sum(job.round for job in self.jobs)

    def job_of(self, consumer: Consumer) -> Job | None:
        """Return the job of a consumer; None if it is gone."""
        return next((job for job in self.jobs if consumer in job.consumers), None)

    @property
    def front(self) -> Place | None:
        """The place of the next batch that nobody has been sent; None if no epoch is open, or it is not known yet."""
        epoch = self._outlet.first_epoch
        return None if epoch is None or epoch.order is None else (epoch.number, epoch.batches)

    @property
    def next_epoch(self) -> int | None:
        """The next epoch that begins with its first batch; None if that is not known yet."""
        epoch = self._outlet.first_epoch
        if epoch is None or epoch.order is None:
            return None
        return epoch.number + (epoch.batches + epoch.skip > 0)

    @property
    def front_position(self) -> Position | None:
        """The position of the front; None if there is no batch of the epoch to come, or the position is not known yet,
        or it is too long."""
        epoch = self._outlet.first_epoch
        if epoch is None or epoch.order is None or epoch.skip or epoch.order.finished or epoch.splits is None:
            return None
        if not epoch.batches:
            return Position(self._outlet.feed.info, epoch.number)
        position = self._front_place.position(epoch.splits.digest)
        return position if len(pack(position)) <= MAX_START else None

    def list_of(self, epoch: int) -> SplitsInfo | None:
        """Return the list of splits of an epoch that consumers read; None if it is not known."""
        first = self._outlet.first_epoch
        return first.splits if first is not None and first.number == epoch else self._lists.get(epoch)

    def covers(self, place: Place, digest: bytes = b"", least: int = 1) -> bool:
        """Whether a job can join that has read everything before this place, of an epoch whose splits have this digest
        (if it knows that), and gets at least `least` more batches of the epoch, or its end."""
        outlet = self._outlet
        if not self._is_common(place):
            return False
        if not outlet.live or (outlet.first_epoch is not None and outlet.first_epoch.skip):
            return False
        if digest and ((splits := self.list_of(place[0])) is None or splits.digest != digest):
            return False
        return self._find(place, least) is not None if self.window else place == self.front

    def reaches(self, place: Place) -> bool:
        """Whether a consumer that joins before this place comes beyond it, and does not have to move before."""
        front = self.front
        return self._is_common(place) and (
            (front is not None and place[0] == front[0] and place[1] >= front[1])
            or (bool(self.window) and self._find(place) is not None)
        )

    def begin(self, consumers: Sequence[Consumer], position: Position | None, *, pad: bool = False) -> None:
        """Begin the stream with one job, whose consumers begin at this position or further on (None: at epoch 0)."""
        self._front_place = FrontPlace(self._outlet.feed.info, position)
        self.jobs.append(self._new_job(consumers, position, pad))

    def join_front(self, consumer: Consumer) -> None:
        """Let a consumer begin with the front's next batch, or with a later epoch."""
        job = SoloJob(self._outlet, self.window, consumer)
        job.told_first = self._front_place.told_first
        self.jobs.append(job)

    def join(self, consumers: Sequence[Consumer], position: Position | None, *, pad: bool = False) -> None:
        """Let a job go on at this position, which `covers` has accepted. (None: epoch 0). Some of its consumers may be
        further on."""
        job = self._new_job(consumers, position, pad)
        self.jobs.append(job)
        place = (position.epoch, position.batches) if position else (0, 0)
        if not self.window and self._latest:  # those at the front have heard that a lane ends or a pool begins here
            for entry in self._latest:
                self.window.append(entry)
        at = self.window.find(*place) if self.window else None
        known = 0
        if at is not None and at < self.window.end:
            job.at = at
            entry = self.window[at]
            if isinstance(entry.item, Part) and entry.epoch == place[0]:
                known = max(0, place[1] - entry.at)
        skip = position.skip if position else 0
        if (known or skip) and isinstance(job, SoloJob):
            job.joined = Joined(place[0], known, skip)

    def place_of(self, job: Job) -> Place | None:
        """Return the place up to which the job was handed everything; None if that is not in the epoch that it reads,
        or not known."""
        place = self.front if job.at is None else (self.window[job.at].epoch, self.window[job.at].at)
        return None if place is None else job.place(place)

    def behind(self, consumer: Consumer) -> int:
        """Return how many batches of the window the job of a consumer has not been sent."""
        job = self.job_of(consumer)
        return 0 if job is None else job.batches_behind()

    def move(self, job: Job) -> None:
        """Let the job go: it connects again, and goes on in another stream."""
        self._let_go(job, moved(self._outlet.feed.name))

    def overtakes(self, consumer: Consumer) -> bool:
        """Decide what happens when a consumer begins an epoch after the front's, which it has left early. Return
        whether the front goes on to that epoch. Then jobs that are behind move if they want more of theirs. If another
        job is at the front, the one that begins moves instead."""
        job = self.job_of(consumer)
        if job is None or self.front is None:
            return False
        if consumer.start is not None and consumer.start.epoch == consumer.epoch:
            return False
        epoch, _ = self.front
        others = [other for other in self.jobs if other is not job and other.epoch < job.epoch]
        if not others or job.epoch <= epoch:
            return False
        if any(other.at is None or other.epoch > epoch or other.is_at_front(epoch) for other in others):
            self.move(job)
            return False
        return True

    def tell_begun(self, consumer: Consumer) -> None:
        """See Delivery: the stream may have delivered all of the epoch, or the consumer begins within it."""
        if (splits := self._lists.get(consumer.epoch)) is not None:
            self._outlet.tell(m.Begun(consumer.epoch, splits.digest), [consumer])
        job = self.job_of(consumer)
        if job is not None and self._has_left_out(consumer.epoch, job):
            self.move(job)
        if job is None or not job.told_first:
            return
        told_first, job.told_first = job.told_first, ()
        for message in told_first:
            if message.epoch == consumer.epoch:
                self._outlet.tell(message, [consumer])

    # --- the order ---

    def wanted(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return any(job.is_at_front(epoch.number) for job in self.jobs)

    def deliver(self, epoch: Epoch, turn: Turn | Stripe, part: Part) -> bool:
        """See Delivery. It has to wait only as long as no job at the front has credit."""
        outlet = self._outlet
        front = [job for job in self.jobs if job.is_at_front(epoch.number)]
        if isinstance(turn, Stripe) and not self._may_send(turn, part, _there(front)):
            return False
        ranks = [job for job in front if isinstance(job, RankJob)]
        nbytes = outlet.feed.nbytes_of(part)
        takers = [job for job in front if isinstance(job, SoloJob) and job.consumers[0].has_credit_for(nbytes)]
        if not takers and not ranks:
            return False
        entry = Entry(epoch.number, epoch.batches, part, turn, self.keeps or len(self.jobs) > 1)
        shared = self._keep(entry, takers) or len(takers) > 1
        for job in takers:
            job.give(entry, shared=shared)
        self._latest.clear()
        outlet.count(epoch, part)
        if self.joinable:
            self._front_place.on_delivered(elsewhere(epoch.number, turn, part))
        self._serve(ranks)
        self._trim()
        return outlet.live

    def on_passed_over(self, epoch: Epoch, turn: Turn | Stripe, part: Part) -> None:
        """See Delivery."""
        if self.joinable:
            self._front_place.on_message(elsewhere(epoch.number, turn, part))

    def on_lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        self._tell(epoch, ended)

    def on_pool_begun(self, epoch: Epoch, pool: PoolBegun) -> None:
        """See Delivery."""
        self._tell(epoch, pool)

    def end(self, epoch: Epoch) -> None:
        """See Delivery."""
        front = self._solo_at_front(epoch)
        total = EpochEnd(epoch.batches, epoch.rows)
        self._keep(Entry(epoch.number, epoch.batches, total), front)
        for job in front:
            job.end(epoch.number, total)
        self._latest.clear()
        self._serve([job for job in self.jobs if isinstance(job, RankJob)])

    def catch_up(self) -> None:
        """See Delivery."""
        self._serve([job for job in self.jobs if job.at is not None])
        self._remove_gone()
        self._trim()

    def on_consumer_lost(self, consumer: Consumer) -> None:
        """See Delivery: the other ranks of its job cannot go on alone."""
        job = self.job_of(consumer)
        if job is not None and (error := job.on_lost(consumer)) is not None:
            self._let_go(job, error, but=consumer)

    def on_failed(self, epoch: Epoch | None) -> None:
        """See Delivery: those that have not come to the failure begin elsewhere."""
        for job in list(self.jobs):
            if epoch is None or not job.is_at_front(epoch.number):
                self.move(job)

    def take_back(self, consumer: Consumer, handed: int) -> None:
        """See Delivery. The consumer leaves an epoch, or is gone."""
        if (job := self.job_of(consumer)) is not None:
            job.take_back()

    def forget(self, epoch: Epoch) -> None:
        """See Delivery. Jobs that are behind may still read it from the window."""
        self._latest.clear()
        if not self.window:
            return
        if epoch.splits is not None:
            self._lists[epoch.number] = epoch.splits
            self._outlet.hold_list(epoch.number, epoch.splits)
        if self.window.after != (epoch.number + 1, 0):
            self.window.append(Entry(epoch.number, epoch.batches, LeftEarly()))

    def holding_up(self, consumer: Consumer) -> list[Consumer]:
        """See Delivery."""
        job = self.job_of(consumer)
        return [] if job is None else job.holding_up

    def keep_for_others(self, keeps: bool) -> None:
        """Keep from now on what is delivered, for jobs of other streams that are behind, or no longer."""
        self.keeps = keeps
        self._remove_gone()
        self._trim()

    def stop(self) -> None:
        """See Delivery."""
        self.jobs.clear()
        self.window.clear()
        self._release_lists()
        self.keeps = False

    def abandon(self) -> None:
        """See Delivery."""
        self.jobs.clear()
        self.window.forget()
        self._release_lists()

    def give_up_window(self) -> bool:
        """Drop the window, because others need its memory, and return whether anything was dropped. Jobs that are
        behind move, unless what they need is within their reserved slots."""
        before = self.window.slots
        for job in [job for job in self.jobs if not job.keeps_up]:
            self.move(job)
        self._drop_unneeded()
        self._release_lists()
        return self.window.slots < before

    # --- helpers ---

    def _new_job(self, consumers: Sequence[Consumer], position: Position | None, pad: bool) -> Job:
        outlet = self._outlet
        if len(consumers) == 1:
            return SoloJob(outlet, self.window, consumers[0])
        in_lanes = outlet.feed.plan.length is None
        return RankJob(outlet, self.window, consumers, pad=pad, position=position, in_lanes=in_lanes)

    def _find(self, place: Place, least: int = 1) -> int | None:
        """Return the number of the window's entry with which a job goes on from this place, as `Window.find`; None if
        the front has left out its epoch, too."""
        at = self.window.find(*place, least)
        return None if at == self.window.end and self._is_beyond(place[0]) else at

    def _has_left_out(self, epoch: int, job: Job) -> bool:
        """Whether the stream has nothing of this epoch for the job: it went on to a later epoch while the job was
        behind."""
        begin = self.window.end if job.at is None else job.at
        later = (self.window[number].epoch for number in range(begin, self.window.end))
        return self._is_beyond(epoch) and epoch not in later

    def _is_beyond(self, epoch: int) -> bool:
        first = self._outlet.first_epoch
        return first is not None and first.number > epoch

    def _is_common(self, place: Place) -> bool:
        """Whether all streams of the feed have the same batches before this place. With `on_error="skip"` that is so
        only where an epoch begins: one stream may have left out a split that another has."""
        return self._outlet.feed.plan.on_error != "skip" or not place[1]

    def _solo_at_front(self, epoch: Epoch) -> list[SoloJob]:
        """Return the consumers that read the epoch, and have been sent everything that the stream has delivered."""
        return [job for job in self.jobs if isinstance(job, SoloJob) and job.is_at_front(epoch.number)]

    def _tell(self, epoch: Epoch, message: LaneEnded | PoolBegun) -> None:
        if self.joinable:
            self._front_place.on_message(message)
        if epoch.skip:  # batches that are passed over follow, which nobody else can get here
            self._outlet.tell(message, self._outlet.listeners(epoch))
            return
        front = self._solo_at_front(epoch)
        entry = Entry(epoch.number, epoch.batches, message)
        self._keep(entry, front)
        self._latest.append(entry)
        self._outlet.tell(message, [job.consumers[0] for job in front])

    def _keep(self, entry: Entry, given: list[SoloJob]) -> bool:
        """Let the jobs that are not given the entry fall behind. Keep it if somebody needs it, and return whether that
        is so."""
        for job in self.jobs if len(self.jobs) > len(given) else ():
            if job.at is None and job.epoch == entry.epoch and job not in given:
                job.at = self.window.end + (0 if self.window else len(self._latest))
        if not self.keeps and all(job.at is None for job in self.jobs):
            self.window.clear()
            self._release_lists()
            return False
        if not self.window:
            for earlier in self._latest:
                self.window.append(earlier)
        self.window.append(entry)
        return True

    def _serve(self, jobs: Sequence[Job]) -> None:
        """Send these jobs what they have missed. Let those go that cannot go on here."""
        for job in jobs:
            if job in self.jobs and (error := job.catch_up()) is not None:
                self._let_go(job, error)

    def _let_go(self, job: Job, error: PenstockError, but: Consumer | None = None) -> None:
        """Let a job go with an error. (`but` is gone already.)"""
        if isinstance(error, StreamMoved) and (splits := self.list_of(job.epoch)) is not None:
            self._on_moved(job.epoch, splits)
        there = [consumer for consumer in job.there if consumer is not but]
        self._outlet.tell(m.Failed(m.ErrorReport.of(error)), there)
        for consumer in there:
            consumer.moved = True
            consumer.on_gone()
        self.jobs.remove(job)

    def _remove_gone(self) -> None:
        there = [job for job in self.jobs if not job.gone]
        if len(there) < len(self.jobs):
            self.jobs = there

    def _trim(self) -> None:
        """Drop what nobody needs, and what there is no room for."""
        window = self.window
        if not window:
            return
        if not self.keeps:
            self._drop_unneeded()
            if window.slots <= self.rounds:
                self._release_lists()
                return  # these slots are reserved
        nbytes, slots = self._room()
        while window and (window.nbytes > nbytes or window.slots > slots):
            oldest = [job for job in self.jobs if job.at == window.first]
            if any(job.keeps_up for job in oldest):
                break  # their slots are reserved
            for job in oldest:
                self.move(job)
            window.drop_first()
        self._release_lists()

    def _drop_unneeded(self) -> None:
        needed = min((job.at for job in self.jobs if job.at is not None), default=self.window.end)
        while self.window.first < needed:
            self.window.drop_first()

    def _release_lists(self) -> None:
        """Release the lists of the epochs that are no longer in the window."""
        if not self._lists:
            return
        first = self.window[self.window.first].epoch if self.window else None
        for epoch in [epoch for epoch in self._lists if first is None or epoch < first]:
            self._outlet.release_list(self._lists.pop(epoch))


def _there(jobs: Sequence[Job]) -> list[Consumer]:
    return [consumer for job in jobs for consumer in job.there]
