"""A feed as a worker knows it: what the user declared, its plan, and its spec once that is known.

This file knows no runs, slots or messages.
"""

from __future__ import annotations

from penstock_proto import FeedError, layout
from penstock_proto.messages import FeedPlan, FirstSample
from penstock_proto.spec import Spec, leaf_list

from ..feed import Feed, fixed_slots
from .collate import Collate, ReadyBatches, Rows, nbytes_of


class LoadedFeed:
    """A feed that this process has imported.

    Args:
        declared: the user's object.
        plan: its options, as the daemon has them.

    Attributes:
        spec: declared, or inferred from the first sample; None until it is known.
        layout: of a slot; None until the spec is known, and where batches vary in size.
        first: the first sample as this process has seen it, or None.
        warm: whether this process has read item 0 of an indexable feed.
    """

    def __init__(self, declared: Feed, plan: FeedPlan) -> None:
        self.declared = declared
        self.plan = plan
        self.spec: Spec | None = None
        self.layout: layout.SlotLayout | None = None
        self.first: FirstSample | None = None
        self.warm = False
        self._collate: Collate | None = None
        if plan.spec is not None:
            self.learn(plan.spec)

    def learn(self, spec: Spec) -> None:
        """Take over the spec, declared or inferred, here or in another worker."""
        if spec == self.spec:
            return
        self.spec = spec
        self._collate = None
        self.layout = None
        if self.plan.batch_size is not None:
            self.layout = fixed_slots(self.plan, spec, self.plan.batch_size)

    def set_first(self, first: FirstSample | None) -> None:
        """Keep the first sample as it was seen, or forget the last one."""
        self.first = first

    def set_warm(self) -> None:
        """Item 0 is being read."""
        self.warm = True

    @property
    def needs_a_look(self) -> bool:
        """Whether only a first sample can tell the spec, or how large a batch is."""
        return self.spec is None or (self.plan.spec is not None and not self._is_static(self.plan.spec))

    @property
    def declared_nbytes(self) -> int:
        """Bytes of a sample (or ready batch) where the spec declares them, else 0."""
        declared = self.plan.spec
        return nbytes_of(declared, None) if declared is not None and self._is_static(declared) else 0

    @staticmethod
    def _is_static(spec: Spec) -> bool:
        return all(leaf.static for leaf in leaf_list(spec))

    @property
    def collate(self) -> Collate:
        """Checks and stacks the feed's samples.

        Raises:
            FeedError: the spec is not known.
        """
        if self._collate is None:
            if self.spec is None:
                raise FeedError("the daemon started to read the feed before it knew the feed's spec")
            if self.plan.batch_size is not None:
                self._collate = Rows(self.spec)
            else:
                self._collate = ReadyBatches(self.spec, copy=self.plan.shuffle > 0, one_length=self.plan.spec is None)
        return self._collate
