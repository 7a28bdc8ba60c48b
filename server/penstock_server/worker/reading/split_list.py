"""The list of splits of an epoch, as bytes that workers share.

One worker makes the list and writes it to a sealed memfd:

    uint64 count, uint64 offsets[count + 1] (from the start), then each item, pickled separately, and the versions of
    the files that they name (file_versions.py)

Only workers of the same daemon unpickle it; they run the same user code.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from penstock_proto import FeedError, GeneratorError
from penstock_proto.messages import FeedPlan
from penstock_proto.value_text import shown

from ...feed.combined.feed_kinds import is_shared, wants_of
from ...feed.feed import Feed
from ...feed.objects.endless_items import VaryingItems
from ...feed.objects.indexables import is_indexable
from ...sources.names_on_disk import may_name_ours, with_names
from ...targets.importing import summary, user_traceback
from ...targets.pickled import dumps
from ...worker_state.activity import ActivityPage
from ..failures import describe, pass_on
from ..isolation.randomness import GlobalRandomness
from ..verification.file_versions import FileVersions
from .item_splits import list_item_splits

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def list_splits(
    feed: Feed, plan: FeedPlan, epoch: int, randomness: GlobalRandomness, page: ActivityPage, run: int
) -> list[Any]:
    """List the splits of an epoch of a feed that is read in lanes. A feed without `splits` has one split, None.

    Meanwhile `page` shows that splits are listed for `run`.

    Raises:
        FeedError: there are none.
        GeneratorError: the user's function raised, or, with on_error="retry", returned none.
    """
    if is_indexable(feed.generate):
        return list_item_splits(feed, plan)
    if isinstance(feed.generate, VaryingItems):
        page.enter(run, -1, "the hooks and the length of the Keras dataset")
        try:
            return list(feed.generate.indices(epoch))
        finally:
            page.leave()
    if feed.splits is None:
        if is_shared(feed) or wants_of(feed).shard:
            return [(index, plan.lanes) for index in range(plan.lanes)]
        return [None]
    if not callable(feed.splits):
        splits = list(feed.splits)
    else:
        name = _name(feed.splits)
        state, variables = randomness.of(feed.splits)
        randomness.use(state)
        randomness.seed(plan.seed, epoch)
        page.enter(run, -1, f"{name}(), which lists the splits")
        try:
            answer = variables.run(feed.splits)
            if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
                raise FeedError(f"{name}, given as splits=, must return a list, got {shown(answer)}")
            splits = variables.run(list, page.counting(iter(answer)))
        except FeedError:
            raise
        except BaseException as error:
            raise GeneratorError(
                f"{name}, which lists the splits, {describe(error)}", remote_traceback=user_traceback(error)
            ) from error
        finally:
            page.leave()
    if not splits:
        source = f"{_name(feed.splits)} returned none" if callable(feed.splits) else "splits= is empty"
        why = f"no splits to read: {source}. Does a path or a pattern match nothing?"
        if callable(feed.splits) and plan.on_error == "retry":
            raise GeneratorError(why)  # a pattern matches nothing while a disk is not mounted
        raise FeedError(why)
    return splits


def write_list(splits: list[Any], versions: FileVersions | None = None) -> tuple[int, int, bytes]:
    """Write the list to a memfd.

    Returns:
        Its fd, which the caller closes, its length in bytes, and its digest: the SHA-256 of these bytes without the
        versions, where classes of Penstock have their names on disk.

    Raises:
        FeedError: a split cannot be pickled.
    """
    items = []
    for number, split in enumerate(splits):
        try:
            items.append(dumps(split))
        except BaseException as error:
            pass_on(error)
            raise FeedError(
                f"cannot pickle split {number} of {len(splits)} ({summary(error)}): make splits plain data, such as "
                "paths or ranges, and open files in the generator",
                split=shown(split),
            ) from error
    data = _joined(items)
    named = with_names(splits, items) if may_name_ours(data) else items
    digest = hashlib.sha256(data if named is items else _joined(named)).digest()
    if versions is not None:
        data += versions.dumps()
    fd = os.memfd_create("penstock-splits", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, len(data), digest


def _joined(items: list[bytes]) -> bytes:
    head = 8 * (len(items) + 2)
    offsets = np.cumsum([head, *map(len, items)], dtype=np.uint64)
    return b"".join((np.uint64(len(items)).tobytes(), offsets.tobytes(), *items))


class SharedSplits:
    """A list that `write_list` wrote, here or in another worker. Unpickles a split when it is read.

    Attributes:
        versions: of the files that the splits name.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `nbytes` of `fd`, which the caller may close afterwards."""
        # Before Linux 6.7 a write-sealed memfd can only be mapped private.
        self._data = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self._count = int.from_bytes(self._data[:8], sys.byteorder)
        end = int.from_bytes(self._data[8 * (self._count + 1) : 8 * (self._count + 2)], sys.byteorder)
        self.versions = FileVersions.loads(self._data[end:])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        """Return the split with this index.

        Raises:
            FeedError: it cannot be unpickled.
        """
        at = 8 * (index + 1)
        start, stop = np.frombuffer(self._data[at : at + 16], np.uint64).tolist()
        try:
            return pickle.loads(self._data[start:stop])
        except BaseException as error:
            pass_on(error)
            raise FeedError(
                f"cannot unpickle split {index} ({summary(error)}): make splits plain data, such as paths or ranges",
                remote_traceback=user_traceback(error),
            ) from error


class ListPart:
    """The splits of a shared list from one index to another, as a list of its own."""

    def __init__(self, whole: SharedSplits, start: int, count: int) -> None:
        self._whole = whole
        self._start = start
        self._count = count
        self.versions = whole.versions

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        """Return the split with this index; see `SharedSplits`."""
        return self._whole[self._start + index]


SplitSequence: TypeAlias = range | SharedSplits | ListPart
"""The splits of an epoch; numbers if they are segments."""


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
