"""A feed as the coordinator knows it: its plan, and the spec and sizes of its first samples."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from msgspec import UNSET, Struct

from penstock_proto import EndOfStream
from penstock_proto.batches.columns import Columns
from penstock_proto.batches.layout import ALIGN, HEADER, SlotLayout, is_fixed, lay_out
from penstock_proto.messages import FeedInfo, FeedPlan, Shapes
from penstock_proto.spec import Spec

from ...feed.options.plan_sizes import block_samples, fixed_slots, pooled_lanes, sample_slots, turn_of
from .known_lists import KnownLists, SplitsInfo
from .memory import least_slots
from .turn import Part


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages of 4096 bytes: a slot takes whole pages."""
    return -(-nbytes // 4096) * 4096


class Skipped(Struct, frozen=True):
    """The rest of a split was left out after `samples` samples. `why`: the reason. `traceback`: where user code raised,
    if it did."""

    split: str
    samples: int
    why: str
    epoch: int = -1
    traceback: str = ""


@dataclass(slots=True)
class SentTotals:
    """Counts what was sent to consumers, including what was sent again after a lost connection."""

    batches: int = 0
    samples: int = 0
    nbytes: int = 0


class ServedFeed:
    """A feed that can be read.

    Args:
        plan: its options.
        spec: of one sample, or of one ready batch where the plan has no batch size.
        sample_nbytes: bytes of one sample (or ready batch), measured or declared.
        static_splits: the list of splits for all epochs; None if each epoch has a list of its own.
        sample_spec: of one sample before the feed's `batch_transform`, if it has one and is read in lanes. `spec` is
            then that of a row after it, and leftover rows and the visits of pools are as before it.
        lists: those lists that are known now.

    Attributes:
        skipped, skipped_count: the latest splits that were left out in any stream, and the number of all that were.
        made: how many batches workers have made.
        sent: counts what all consumers were sent.
        errors: how often user code raised in a run.
        replays: how often a run began at a restart record: a worker died, a lane moved, or a consumer resumed.
    """

    def __init__(
        self,
        plan: FeedPlan,
        spec: Spec,
        sample_nbytes: int,
        static_splits: SplitsInfo | None,
        sample_spec: Spec | None = None,
    ) -> None:
        self.plan = plan
        self.name = plan.name
        self.sample_nbytes = sample_nbytes
        self.static_splits = static_splits
        self.sample_spec = sample_spec
        self.lists = KnownLists()
        self.skipped: deque[Skipped] = deque(maxlen=100)
        self.skipped_count = 0
        self.made = 0
        self.sent = SentTotals()
        self.errors = 0
        self.replays = 0
        self.columns = Columns(spec, plan.batch_size, plan.buckets if sample_spec is None else ())
        self._layout: SlotLayout | None = None
        if plan.batch_size is not None and is_fixed(spec, plan.batch_size):
            self._layout = fixed_slots(plan, spec, plan.batch_size)
            self.turn = turn_of(plan, self._layout)
            self.slot_nbytes = whole_pages(self._layout.nbytes)
        else:
            self.turn = 1
            self.slot_nbytes = whole_pages(
                HEADER + (plan.batch_size or 1) * sample_nbytes + ALIGN * len(self.columns.arrays)
            )
        self.sample_columns, self._sample_layout = self.columns, self._layout
        if sample_spec is not None:
            self.sample_columns, self._sample_layout = Columns(sample_spec, plan.batch_size, plan.buckets), None
            if plan.batch_size is not None and is_fixed(sample_spec, plan.batch_size):
                self._sample_layout = sample_slots(sample_spec, plan.batch_size, self._layout)
                self.slot_nbytes = max(self.slot_nbytes, whole_pages(self._sample_layout.nbytes))
        self.info = FeedInfo(
            name=plan.name,
            spec=spec,
            batch_size=plan.batch_size,
            turn=self.turn,
            drop_remainder=plan.drop_remainder,
            order=plan.order,
            lanes=plan.lanes,
            seed=plan.seed,
            epochs=plan.epochs,
            batches=self._batches(),
            samples=self._samples(),
            shuffle=plan.shuffle,
            interleave=plan.interleave,
            segment=plan.segment,
            pool=pooled_lanes(plan, spec, sample_spec),
            parameters=plan.params or UNSET,
            stripe=self._layout.batches if self._layout is not None and self._layout.batches > self.turn else 1,
        )

    @cached_property
    def blocks_nbytes(self) -> int:
        """Bytes that the shuffle blocks of one stream take in the workers' heaps, for all lanes together."""
        plan = self.plan
        if not plan.shuffle or plan.length is not None:
            return 0
        lanes = min(plan.lanes, self.static_splits.count) if self.static_splits else plan.lanes
        return lanes * block_samples(plan.shuffle, lanes, plan.batch_size) * self.sample_nbytes

    def skip(self, skipped: Skipped) -> None:
        """Note that the rest of a split is left out."""
        self.skipped.append(skipped)
        self.skipped_count += 1

    @property
    def ranges_vary(self) -> bool:
        """Whether it is made in ranges that are as long as a worker makes in a moment, at most a turn."""
        return self.plan.length is not None and self.plan.turn is None and self.turn > 1

    @property
    def least_nbytes(self) -> int:
        """The fewest bytes with which a stream of this feed can run."""
        return least_slots(1, pool=self.info.pool, stripe=self.info.stripe) * self.slot_nbytes + self.blocks_nbytes

    def ends_before(self, epoch: int) -> bool:
        """Whether the feed ends before this epoch."""
        return self.plan.epochs is not None and epoch >= self.plan.epochs

    def end_of_stream(self) -> EndOfStream:
        """Return the error for a consumer that wants an epoch after the last one."""
        return EndOfStream(f"the feed has {self.plan.epochs} epochs", feed=self.name)

    @property
    def varies(self) -> bool:
        """Whether batches vary in size."""
        return self._layout is None

    @property
    def leftovers_vary(self) -> bool:
        """Whether samples vary in size, so that leftover rows must be measured before they can be merged."""
        return self._sample_layout is None

    def nbytes_of(self, part: Part) -> int:
        """Return the bytes that a part of a turn takes in its slot."""
        return self.layout(part.shapes).nbytes_of(part.batches)

    def layout(self, shapes: Shapes) -> SlotLayout:
        """Return the layout of a slot. If samples vary in size, it is that of one batch whose arrays have these
        shapes."""
        return self._layout or lay_out(self.columns.dtypes, shapes)

    def leftovers_layout(self, shapes: Shapes) -> SlotLayout:
        """Return the layout of a merged batch while its rows are written: before the feed's `batch_transform`."""
        return self._sample_layout or lay_out(self.sample_columns.dtypes, shapes)

    def _samples(self) -> int | None:
        return self.plan.length if self.plan.length is not None else self.plan.samples

    def _batches(self) -> int | None:
        samples = self._samples()
        if samples is None or self.plan.batch_size is None:
            return samples
        if self.plan.drop_remainder:
            return samples // self.plan.batch_size
        return -(-samples // self.plan.batch_size)
