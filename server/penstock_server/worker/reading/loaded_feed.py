"""A feed as a worker knows it: the user's declaration, its plan, and its spec once that is known.

This file knows nothing of runs, slots or messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock_proto import FeedError, ProtocolError
from penstock_proto.batches import layout
from penstock_proto.batches.columns import Columns
from penstock_proto.messages import FeedPlan, FirstSample
from penstock_proto.spec import Spec, leaf_list, numpy_dtype, unflatten

from ...feed.combined.mixed import Mixed, part_plan
from ...feed.feed import Feed
from ...feed.objects.endless_items import EndlessItems, VaryingItems
from ...feed.options.plan_sizes import fixed_slots, pooled_lanes, sample_slots
from ...feed.options.transforms import Transform, checked_transforms
from ...feed.options.values import Pad
from ...sources.reader import Reader
from ..batch.collate import Collate, CollateAlone, Rows
from ..batch.ready_batches import ReadyBatches
from ..batch.sample_spec import nbytes_of
from ..batch.variable_rows import VariableRows
from ..cache.split_cache import SplitCache
from ..items.items import Items, items_of
from ..items.keras_items import KerasItems
from .first_split import FirstSplit
from .passes import Passes

if TYPE_CHECKING:
    from ..verification.transform_checks import TransformChecks


class LoadedFeed:
    """A feed that this process has imported.

    Args:
        declared: the user's object.
        plan: its options, as the daemon has them. A component of a mix has the mix's ordering options.
        component: its name in a mix, or None.
        also: transforms of the mix that it belongs to.

    Attributes:
        parts: the components of a mix, by name; empty for any other feed.
        spec: declared, or inferred from the first sample; None until it is known.
        sample_spec: that of a sample before `batch_transform`, if there is one and it is known.
        layout: the layout of a slot; None until the spec is known, and if batches vary in size.
        first: a report on the first sample, if this process has read it, or None.
        cache: the cache of its splits, or None.
        first_split: the split whose first sample this process has made, if it is kept open.
        passes: its generator, running for several lanes.
        transform_checks: decides which batches its `batch_transform` transforms twice; None: none of them.
    """

    def __init__(
        self, declared: Feed, plan: FeedPlan, *, component: str | None = None, also: tuple[Transform, ...] = ()
    ) -> None:
        self.declared = declared
        self.plan = plan
        self.component = component
        self.also = also
        self.spec: Spec | None = None
        self.sample_spec: Spec | None = None
        self.layout: layout.SlotLayout | None = None
        self.first: FirstSample | None = None
        self.cache: SplitCache | None = None
        if plan.cache is not None:
            reader = declared.generate
            self.cache = SplitCache(plan.cache, reader.stamp if isinstance(reader, Reader) else None)
        self.first_split = FirstSplit()
        self.passes = Passes()
        self.transform_checks: TransformChecks | None = None
        self._items: Items | None = None
        self._collate: Collate | None = None
        self._sample_collate: Collate | None = None
        self._sample_layout: layout.SlotLayout | None = None
        self.parts: dict[str, LoadedFeed] = {}
        if isinstance(declared.generate, Mixed):
            self.parts = {
                label: LoadedFeed(
                    part, part_plan(part, label, plan), component=label, also=checked_transforms(declared.transform)
                )
                for label, part in declared.generate.parts.items()
            }
        if isinstance(declared.generate, EndlessItems):
            varies = isinstance(declared.generate, VaryingItems)
            declared.generate.reader = KerasItems(declared.generate.source, declared.seed, varies=varies)
        if plan.spec is not None:
            self.learn(plan.spec)

    def learn(self, spec: Spec, sample_spec: Spec | None = None) -> None:
        """Set the spec, which was declared, or inferred here or in another worker, and that before `batch_transform`
        if it is known."""
        if spec != self.spec:
            self.spec = spec
            self._collate = None
            self.layout = None
            if self.plan.batch_size is not None and layout.is_fixed(spec, self.plan.batch_size):
                self.layout = fixed_slots(self.plan, spec, self.plan.batch_size)
            self._sample_layout = None
        if sample_spec is not None and sample_spec != self.sample_spec:
            self.sample_spec = sample_spec
            self._sample_collate = self._sample_layout = None

    def set_first(self, first: FirstSample | None) -> None:
        """Keep the report on the first sample, or forget it."""
        self.first = first

    @property
    def mixed(self) -> Mixed:
        """The user's declaration of a mix."""
        assert isinstance(self.declared.generate, Mixed)
        return self.declared.generate

    @property
    def items(self) -> Items:
        """The items of an indexable feed; all its streams in this process share them."""
        if self._items is None:
            self._items = items_of(self.declared)
        return self._items

    @property
    def needs_a_look(self) -> bool:
        """Whether a first sample is needed to know the spec, or that before `batch_transform`, or the size of a
        batch."""
        if self.spec is None or (self.plan.spec is not None and not self._is_sized(self.plan.spec)):
            return True
        return self.has_lane_batches and self.sample_spec is None

    @property
    def has_lane_batches(self) -> bool:
        """Whether it has a `batch_transform`, and is read in lanes."""
        return self.declared.batch_transform is not None and self.plan.length is None

    @property
    def declared_nbytes(self) -> int:
        """Bytes of a sample (or ready batch) if the declared spec fixes them, else 0."""
        declared = self.plan.spec
        return nbytes_of(declared, None) if declared is not None and self._is_sized(declared) else 0

    @staticmethod
    def _is_sized(spec: Spec) -> bool:
        return all(leaf.sized for leaf in leaf_list(spec))

    @property
    def collate(self) -> Collate:
        """Checks and stacks the feed's samples.

        Raises:
            FeedError: the spec is not known.
        """
        if self._collate is None:
            if self.spec is None:
                raise FeedError("the daemon started to read the feed before it knew the feed's spec")
            if self.layout is not None:
                self._collate = Rows(self.spec)
            else:
                self._collate = self._alone(self.spec)
        return self._collate

    @property
    def sample_layout(self) -> layout.SlotLayout | None:
        """The layout of a slot with rows before `batch_transform`: of the visits of pools, and of merged batches while
        their rows are written. None if samples vary in size. Without `batch_transform`, the same as `layout`."""
        rows = self.plan.batch_size
        if not self.has_lane_batches or rows is None:
            return self.layout
        if self._sample_layout is None and self.sample_spec is not None and layout.is_fixed(self.sample_spec, rows):
            self._sample_layout = sample_slots(self.sample_spec, rows, self.layout)
        return self._sample_layout

    @property
    def visits_layout(self) -> layout.SlotLayout | None:
        """The layout of a slot that a lane fills: that of samples if its rows are mixed in a pool before they are
        transformed."""
        return self.sample_layout if self.has_lane_batches and self.has_pools else self.layout

    @property
    def has_pools(self) -> bool:
        """Whether the feed's lanes mix their rows in pools. The spec must be known."""
        assert self.spec is not None
        return self.plan.length is None and pooled_lanes(self.plan, self.spec, self.sample_spec) > 1

    @property
    def sample_collate(self) -> Collate:
        """Checks and stacks the samples of lanes: as `collate`, but before `batch_transform`, if there is one.

        Raises:
            FeedError: the spec is not known.
        """
        if not self.has_lane_batches:
            return self.collate
        if self._sample_collate is None:
            if self.sample_spec is None:
                raise FeedError("the daemon started to read the feed before it knew what a sample looks like")
            self._sample_collate = self.rows_of(self.sample_spec)
        return self._sample_collate

    @property
    def collate_alone(self) -> CollateAlone:
        """`collate` of a feed whose batches vary in size."""
        collate = self.collate
        assert isinstance(collate, ReadyBatches | VariableRows)
        return collate

    @property
    def collate_variable(self) -> VariableRows:
        """`sample_collate` of a feed whose samples vary in size.

        Raises:
            ProtocolError: they do not vary, so nobody may ask for their sizes.
        """
        collate = self.sample_collate
        if not isinstance(collate, VariableRows):
            raise ProtocolError(
                f"the daemon asked for sizes of samples, but those of feed {self.plan.name} do not vary"
            )
        return collate

    def _alone(self, spec: Spec) -> ReadyBatches | VariableRows:
        plan = self.plan
        if plan.batch_size is None:
            return ReadyBatches(spec, copy=plan.shuffle > 0, one_length=plan.spec is None)
        if self.declared.batch_transform is not None:  # its batches are padded already
            zeros = unflatten(spec, [numpy_dtype(leaf.dtype).type(0) for leaf in leaf_list(spec)])
            return VariableRows(spec, Columns(spec, plan.batch_size), pad_value=zeros)
        return self._variable_rows(spec, plan.batch_size)

    def rows_of(self, spec: Spec) -> Rows | VariableRows:
        """Return what checks and copies samples of this spec to batches with `batch_size` rows."""
        if all(leaf.sized for leaf in leaf_list(spec)):
            return Rows(spec)
        return self._variable_rows(spec, self.plan.batch_size or 1)

    def _variable_rows(self, spec: Spec, batch_rows: int) -> VariableRows:
        columns = Columns(spec, batch_rows, self.plan.buckets)
        return VariableRows(spec, columns, pad_value=self._pad.value, cut=self._pad.too_long == "cut")

    @property
    def _pad(self) -> Pad:
        """How samples are padded; the defaults if they are not."""
        return self.declared.batching if isinstance(self.declared.batching, Pad) else Pad()

    @property
    def drops(self) -> Callable[[Any], bool] | None:
        """A function that returns whether to leave a sample out, or None to keep all."""
        if self._pad.too_long != "drop":
            return None
        collate = self.sample_collate
        return collate.is_too_long if isinstance(collate, VariableRows) else None
