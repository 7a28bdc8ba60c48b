"""The jobs that read a stream: one consumer that gets every batch (solo_job.py), or ranks that get one batch each of
every round (rank_job.py).

A job knows how far it is in the stream's window. shared_delivery.py decides what the window keeps.
"""

from __future__ import annotations

from typing import Protocol

from penstock_proto import PenstockError, StreamMoved
from penstock_proto import messages as m

from ..model.consumer import Consumer
from .front_place import Before
from .outlet import Outlet
from .window import EpochEnd, Window

Place = tuple[int, int]
"""A place in the stream: an epoch, and how many of its batches come before."""


class Job(Protocol):
    """What reads a stream.

    Attributes:
        consumers: its consumers, by rank.
        at: if it is behind: the number of the window's entry that it gets next; else None.
        told_first: if it has joined at the front: what it is told when it begins its epoch.
        round: how many slots are reserved for a round of ranks.
    """

    consumers: list[Consumer]
    at: int | None
    told_first: tuple[Before, ...]
    round: int

    @property
    def gone(self) -> bool:
        """Whether all of its consumers are gone."""

    @property
    def there(self) -> list[Consumer]:
        """Its consumers that are not gone."""

    @property
    def epoch(self) -> int:
        """The first epoch that one of its consumers reads, or will read."""

    def is_at_front(self, epoch: int) -> bool:
        """Whether it reads the epoch, and needs its next batch before it can go on."""

    @property
    def keeps_up(self) -> bool:
        """Whether what it needs of the window is within the slots that are reserved for it."""

    @property
    def holding_up(self) -> list[Consumer]:
        """Its consumers for which the others of the job wait."""

    def place(self, at: Place) -> Place | None:
        """Return the place up to which its consumers were handed everything; None if that is not known. `at`: the place
        of the window's entry with which it goes on, or the front."""

    def catch_up(self) -> PenstockError | None:
        """Send its consumers what they have missed, as far as they have credit. Return why the job cannot go on here,
        or None."""

    def batches_behind(self) -> int:
        """Return how many batches of the window it has not been sent; 0 if it only waits for its next round."""

    def take_back(self) -> None:
        """Note that a consumer leaves an epoch, or is gone."""

    def on_lost(self, consumer: Consumer) -> PenstockError | None:
        """Return why its other consumers cannot go on without this one, which is lost; None if there are none."""


def moved(feed: str) -> StreamMoved:
    """Return the error for a job that connects again, and goes on in another stream."""
    return StreamMoved("the job reads another stream from here on, which goes on where it is", feed=feed)


def end_for(outlet: Outlet, consumer: Consumer, epoch: int, total: EpochEnd) -> None:
    """End the epoch for a consumer."""
    outlet.tell(m.End(epoch, consumer.slabs, total.batches, total.rows), [consumer])
    consumer.ends += 1
    consumer.leave()


def after_left_epochs(window: Window, at: int, epoch: int) -> int:
    """Return the number of the first entry from `at` on that is not of an epoch before this one."""
    while at < window.end and window[at].epoch < epoch:
        at += 1
    return at
