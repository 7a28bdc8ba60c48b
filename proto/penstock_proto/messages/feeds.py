"""The descriptions of a feed that consumers and the daemon need."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from ..spec import Spec, check_size
from .base import Count, Line, Name, Seed

Environment: TypeAlias = dict[
    Annotated[str, Meta(min_length=1, max_length=256)], Annotated[str, Meta(max_length=16384)] | None
]
"""Environment variables to set or, with None, to remove."""
MAX_BUCKETS = 256
MAX_POOLED = 32
"""Most lanes that mix their rows with each other."""
MAX_PARAMS = 4096
Params = Annotated[str, Meta(min_length=1, max_length=MAX_PARAMS)]
SLABS = 2
"""In how many slabs a stripe is sent, if all of it is ready. The first can be used while the other is under way."""
Directory = Annotated[str, Meta(max_length=4096)]
MAX_CLASSES = 16384
"""Most characters that the names of a feed's classes may have."""
Classes: TypeAlias = Annotated[
    tuple[tuple[Line, Annotated[tuple[Line, ...], Meta(max_length=MAX_CLASSES)]], ...], Meta(max_length=64)
]
"""The names of the classes of each column that has labels, by label. The column is "" if the source has one list."""
Batching = Annotated[str, Meta(pattern="^(stack|pad|ragged)$")]


class FeedInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a feed for its consumers.

    `spec` describes one sample, or one batch if `batch_size` is None. `turn` is the most batches that come from one
    lane in a row. `batches` and `samples` are those of an epoch, or None if unknown. `shuffle`, `interleave` and
    `segment` are as in FeedPlan. `pool`: how many lanes mix their rows with each other; 1 if none do. `stripe`: how
    many batches of several lanes, in stream order, share a slot; 1 if a slot holds a turn. It does not affect the
    stream. `parameters`: those of the feed's factory whose defaults differ; left out if there are none. `classes`: the
    names of the source's classes; left out if it has none.
    """

    name: Name
    spec: Spec
    batch_size: Annotated[int, Meta(ge=1, le=2**31)] | None
    turn: Annotated[int, Meta(ge=1, le=2**16)]
    drop_remainder: bool
    order: Annotated[str, Meta(pattern="^(exact|fast)$")]
    lanes: Annotated[int, Meta(ge=1, le=2**16)]
    seed: Seed
    epochs: Count | None
    batches: Count | None
    samples: Count | None
    shuffle: Count = 0
    interleave: Annotated[int, Meta(ge=1, le=2**16)] = 1
    segment: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    pool: Annotated[int, Meta(ge=1, le=MAX_POOLED)] = 1
    stripe: Annotated[int, Meta(ge=1, le=2**16)] = 1
    parameters: Params | UnsetType = UNSET
    classes: Classes | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_size(self.spec)

    @property
    def room(self) -> int:
        """How many batches a slot has room for, if the feed is fixed."""
        return max(self.turn, self.stripe)

    @property
    def most(self) -> int:
        """The most batches in a slab."""
        return max(self.turn, -(-self.stripe // SLABS))

    @property
    def endless(self) -> bool:
        """Whether an epoch has no end."""
        return self.segment is not None and self.samples is None

    @property
    def params(self) -> str:
        """The parameters of the feed's factory whose defaults differ, such as "size=128"; empty if there are none."""
        return "" if isinstance(self.parameters, UnsetType) else self.parameters


class FeedPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a feed for the daemon: its options, with all defaults that need no data.

    `spec` is the declared one or None. `turn` is None if its default depends on the spec. `length` is the number of
    samples of an indexable feed, otherwise None. `static_splits`: `splits` is not a function, so all epochs have the
    same list. `lanes` is 1 if the generator cannot be divided. `on_error`: what happens to a split in which user code
    raises, or that has ended its worker `attempts` times. `warnings` are for the log. `segment`: the most samples of
    one run of a generator that runs again and again, for segment 0, 1, ...; segments are its splits. Without `samples`
    there is no last segment. `batching`: how samples of different shapes become a batch. `buckets`: the lengths to
    which "pad" fills them up; none: to the longest of the batch. `block`: how many neighbours of an indexable feed stay
    together when it shuffles. `cache`: the directory of its cached splits. `mixes`: it draws from several feeds, each
    with its own splits. `part_caches`: the names of these feeds that have a cache, with its directory. `params`: the
    parameters of the feed's factory whose defaults differ, as text. `weights`: a digest of the weights with which the
    items of an indexable feed are drawn; "" if each comes once. Then `length` is the number of draws. `items`: what
    `length` would be, if items may be left out. Then parts of the order are the feed's splits, and `length` is None;
    `permuted` says whether that order is a permutation. `classes`: the names of the source's classes. `contents`: a
    digest of what each worker reads when it imports an indexable feed (a table, or the names in a folder); "" if it
    reads nothing. `undivided`: each worker runs the whole generator, and transforms the samples of its lanes.
    """

    name: Name
    spec: Spec | None
    batch_size: Annotated[int, Meta(ge=1, le=2**31)] | None
    turn: Annotated[int, Meta(ge=1, le=2**16)] | None
    lanes: Annotated[int, Meta(ge=1, le=2**16)]
    order: Annotated[str, Meta(pattern="^(exact|fast)$")]
    shuffle: Count
    interleave: Annotated[int, Meta(ge=1, le=2**16)]
    seed: Seed
    epochs: Count | None
    samples: Count | None
    length: Count | None
    drop_remainder: bool
    static_splits: bool
    on_error: Annotated[str, Meta(pattern="^(raise|skip|retry)$")] = "raise"
    attempts: Annotated[int, Meta(ge=1, le=1000)] = 3
    warnings: Annotated[tuple[Line, ...], Meta(max_length=16)] = ()
    segment: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    batching: Batching = "stack"
    buckets: Annotated[tuple[Count, ...], Meta(max_length=MAX_BUCKETS)] = ()
    block: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    cache: Directory | None = None
    mixes: bool = False
    part_caches: Annotated[tuple[tuple[Name, Directory], ...], Meta(max_length=256)] = ()
    params: Annotated[str, Meta(max_length=MAX_PARAMS)] = ""
    weights: Annotated[str, Meta(pattern="^[0-9a-f]{0,32}$")] = ""
    items: Count | None = None
    permuted: bool = False
    classes: Classes = ()
    contents: Annotated[str, Meta(pattern="^[0-9a-f]{0,32}$")] = ""
    undivided: bool = False

    def __post_init__(self) -> None:
        check_size(self.spec)

    @property
    def endless(self) -> bool:
        """Whether an epoch has no end."""
        return self.segment is not None and self.samples is None

    @property
    def piece(self) -> str:
        """The word for one of its splits: "split" or "segment"."""
        return "split" if self.segment is None else "segment"

    def with_classes(self, info: FeedInfo) -> FeedInfo:
        """Return the description of this feed for its consumers with the names of its classes."""
        return replace(info, classes=self.classes) if self.classes else info
