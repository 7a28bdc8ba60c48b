"""Splits: the user's list of them as bytes that workers share, and one split as a source of samples.

One worker makes the list and writes it to a sealed memfd:

    uint64 count, uint64 offsets[count + 1] (from the start), then each item, pickled separately

Only workers of the same daemon unpickle it; they run the same user code.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import filterfalse, islice
from typing import Any

import numpy as np

from penstock_proto import FeedError, GeneratorError, PenstockError, SpecError
from penstock_proto.messages import FeedPlan
from penstock_proto.spec import shown

from ..activity import ActivityPage
from ..feed import Feed, generator_call, is_shared
from ..importing import summary, user_traceback
from ..transforms import checked_transforms
from .batch_rows import BatchRows, NoRows
from .collate import BadSample, Collate, Raised
from .failures import describe, pass_on
from .randomness import GlobalRandomness, GlobalState, generator
from .shares import Share
from .transforming import SampleTransform, TransformedSamples, TransformFailed

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def list_splits(
    feed: Feed, plan: FeedPlan, epoch: int, randomness: GlobalRandomness, page: ActivityPage, run: int
) -> list[Any]:
    """List the splits of an epoch, of a feed that is not indexable. A feed without `splits` has one split, None.

    `page` shows meanwhile that splits are listed for `run`.

    Raises:
        FeedError: there are none.
        GeneratorError: the user's function raised, or, with on_error="retry", returned none.
    """
    if feed.splits is None:
        if is_shared(feed) or generator_call(feed).wants.shard:
            return [(index, plan.lanes) for index in range(plan.lanes)]
        return [None]
    if not callable(feed.splits):
        splits = list(feed.splits)
    else:
        name = _name(feed.splits)
        randomness.seed(plan.seed, epoch)
        page.enter(run, -1, f"{name}(), which lists the splits")
        try:
            answer = feed.splits()
            if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
                raise FeedError(f"{name}, given as splits=, must return a list, got {shown(answer)}")
            splits = list(page.counting(iter(answer)))
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


def write_list(splits: list[Any]) -> tuple[int, int, bytes]:
    """Write the list to a memfd.

    Returns:
        Its fd, which the caller closes, its length in bytes, and the SHA-256 of these.

    Raises:
        FeedError: a split cannot be pickled.
    """
    items = []
    for number, split in enumerate(splits):
        try:
            items.append(pickle.dumps(split, protocol=5))
        except BaseException as error:
            pass_on(error)
            raise FeedError(
                f"cannot pickle split {number} of {len(splits)} ({summary(error)}): make splits plain data, such as "
                "paths or ranges, and open files in the generator",
                split=shown(split),
            ) from error
    head = 8 * (len(items) + 2)
    offsets = np.cumsum([head, *map(len, items)], dtype=np.uint64)
    data = b"".join((np.uint64(len(items)).tobytes(), offsets.tobytes(), *items))
    fd = os.memfd_create("penstock-splits", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, len(data), hashlib.sha256(data).digest()


class SharedSplits:
    """A list that `write_list` wrote, here or in another worker. Unpickles a split when it is read."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `nbytes` of `fd`, which the caller may close afterwards."""
        # Before Linux 6.7 a write-sealed memfd can only be mapped private.
        self._data = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self._count = int.from_bytes(self._data[:8], sys.byteorder)

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


class SplitOpener:
    """Starts the user's generator with the arguments that it takes.

    In a feed with segments a split is the segment's number, which is its index too.

    Where every lane runs the whole generator, a split is (index, count) of the lane's share.

    Args:
        feed: the user's object.
        plan: its options.
        randomness: the random numbers of this process.
        page: shows which split user code reads, for `run`.
        run: the daemon's number of the run.
        stretch: length of the stretches of samples that a share is made of.
        drops: whether a sample is left out, as if it had not been yielded; None: none is.
    """

    def __init__(
        self,
        feed: Feed,
        plan: FeedPlan,
        randomness: GlobalRandomness,
        page: ActivityPage,
        run: int = -1,
        *,
        stretch: int = 1,
        drops: Callable[[Any], bool] | None = None,
    ) -> None:
        self._drops = drops
        self._call = generator_call(feed)
        self._transform = SampleTransform(checked_transforms(feed.transform), plan.seed, randomness)
        self._stretch = stretch if is_shared(feed) else None
        self._yields_batches = feed.rebatch is not None
        self._plan = plan
        self._seed = plan.seed
        self._randomness = randomness
        self._page = page
        self._run = run

    def open(self, split: Any, index: int, epoch: int, number: int = -1) -> OpenSplit:
        """Start to read `split`, which has this index in the list and this number within its lane.

        Raises:
            GeneratorError: the user's code raised, or did not return an iterator.
        """
        wants, share = self._call.wants, None
        if self._stretch is not None:
            part, count = split
            share = Share(part, count, self._stretch)
            index = 0  # the generator is the same in all lanes
        arguments = {"split": split, "shard": split, "epoch": epoch}
        if wants.rng:
            arguments["rng"] = generator(self._seed, epoch, index)
        state = GlobalState(self._seed, epoch, index) if self._call.seeds_global_state else None
        name, place = self._call.name, self._place(split)
        calling = self._call.constructor or name
        self._randomness.use(state)
        self._page.enter(self._run, number, place or name)
        try:
            start = self._call.prepare(arguments)
            calling = name
            samples = start()
        except BaseException as error:
            raise _failed(calling, place, error) from error
        finally:
            self._page.leave()
        if not hasattr(samples, "__next__"):
            raise GeneratorError(f"{name} must return an iterator, got {shown(samples)}: {_hint(samples)}", split=place)
        return OpenSplit(
            BatchRows(samples) if self._yields_batches else samples,
            name,
            place,
            state,
            self._randomness,
            self._page,
            self._run,
            number,
            self._most(index),
            share=share,
            transform=self._transform,
            key=(epoch, index),
            drops=self._drops,
        )

    def _most(self, index: int) -> int | None:
        """Return the samples after which the split is ended, if it is a segment."""
        segment, samples = self._plan.segment, self._plan.samples
        if segment is None or samples is None:
            return segment
        return min(segment, samples - index * segment)

    def show(self, split: Any) -> str:
        """Return a short text for `split`, or for the generator if it takes no split."""
        return self._place(split) or self._call.name

    def _place(self, split: Any) -> str | None:
        if self._stretch is not None:
            return f"share {split[0]} of {split[1]}"
        if self._call.wants.shard:
            return f"shard {split[0]} of {split[1]}"
        if self._plan.segment is not None:
            return f"segment {split}"
        return shown(split) if self._call.wants.split else None


class OpenSplit:
    """A split that is being read.

    Attributes:
        taken: samples read so far.
        place: a short text for the split, or None if the generator takes none.

    It ends after `most` samples, if that is given. With a `share`, only that part of the generator's samples is read.
    `key` is the epoch and the split's index, for the random numbers of `transform`.
    """

    def __init__(
        self,
        samples: Iterator[Any],
        name: str,
        place: str | None,
        state: GlobalState | None,
        randomness: GlobalRandomness,
        page: ActivityPage,
        run: int,
        number: int,
        most: int | None = None,
        *,
        share: Share | None = None,
        transform: SampleTransform | None = None,
        key: tuple[int, int] = (0, 0),
        drops: Callable[[Any], bool] | None = None,
    ) -> None:
        self.taken = 0
        self.place = place
        self._generator = samples
        self._place_of: Callable[[int], int] = _same
        self._transformed: TransformedSamples | None = None
        if transform:
            samples = page.beating(samples)
        if most is not None:
            samples = islice(samples, most)
        if share is not None:
            samples, self._place_of = share.of(samples), share.place_of
        self._source = self._samples = page.counting(samples)
        if transform:
            self._transformed = TransformedSamples(samples, transform, *key, self._place_of, state, randomness)
            self._samples = page.counting(self._transformed)
        self._drops = drops is not None
        if drops is not None:  # what is left out is known behind the transform, so replayed samples pass through it too
            self._source = self._samples = filterfalse(drops, self._samples)
        self._name = name
        self._state = state
        self._randomness = randomness
        self._page = page
        self._run = run
        self._number = number
        self._text = place or name
        self._piece = "split" if most is None else "segment"
        self._is_share = share is not None

    @property
    def generator(self) -> Iterator[Any]:
        """What the user's function returned."""
        return self._generator

    def read(self, collate: Collate, store: Any, row: int, stop: int) -> int:
        """Fill the rows of `store` from `row` to `stop`; returns the first that was not filled if the split ended.

        Raises:
            GeneratorError: user code raised; `taken` counts the rows that were filled before.
            SpecError: a sample does not fit the spec.
        """
        self._enter()
        try:
            end = collate.timed_fill(store, row, stop, self._samples)
        except BadSample as error:
            made = "" if self._transformed is None else "what transform= made of "
            which = self._which(self.taken + error.row - row)
            raise SpecError(f"{error.message} ({made}{which})", split=self.place) from None
        except Raised as raised:
            self.taken += raised.row - row
            raise self._error_of(raised.error) from raised.error
        finally:
            self._page.leave(collate.copying)
        self.taken += end - row
        return end

    def first(self) -> list[Any]:
        """Return the next sample as a list of one, or an empty list if the split has ended.

        Raises:
            GeneratorError: user code raised.
        """
        self._enter()
        try:
            return list(islice(self._samples, 1))
        except BaseException as error:
            raise self._error_of(error) from error
        finally:
            self._page.leave()

    def skip(self, until: int, seconds: float) -> bool:
        """Drop samples until `until` were read in all, for about `seconds`; returns whether they were.

        Raises:
            GeneratorError: user code raised.
            FeedError: the split has fewer samples than when it was read first.
        """
        deadline = time.monotonic() + seconds
        self._enter()
        try:
            for _ in islice(self._source, until - self.taken):
                self.taken += 1
                if time.monotonic() >= deadline:
                    return self.taken == until
        except BaseException as error:
            raise self._error_of(error) from error
        finally:
            self._page.leave()
            if self._transformed is not None and not self._drops:  # else it has counted itself
                self._transformed.number = self.taken
        if self.taken < until:
            raise FeedError(
                f"{self._name} yielded {until} samples of a {self._piece}, and only {self.taken} when it was run "
                f"again: a stream can continue elsewhere only if a {self._piece} always yields the same samples",
                split=self.place,
            )
        return True

    def close(self) -> None:
        """End the generator; an error in its clean-up is only logged."""
        close = getattr(self._generator, "close", None)
        if close is None:
            return
        self._enter()
        try:
            close()
        except BaseException:
            traceback.print_exc()
        finally:
            self._page.leave()

    def _error_of(self, error: BaseException) -> PenstockError:
        if isinstance(error, NoRows):
            what = self._name if self._is_share else f"its {self._piece}"
            return SpecError(f"{error.message} (batch {error.number} of {what}, from 0)", split=self.place)
        if isinstance(error, TransformFailed) and self._transformed is not None:
            return error.user_error(self.place, self._which(self._transformed.number - 1))
        return _failed(self._name, self.place, error)

    def _which(self, number: int) -> str:
        """Return the words for sample `number` of those that this reads."""
        where = self._name if self._is_share else f"its {self._piece}"
        return f"sample {self._place_of(number)} of {where}, from 0"

    def _enter(self) -> None:
        self._randomness.use(self._state)
        self._page.enter(self._run, self._number, self._text, self.taken)


def _failed(name: str, place: str | None, error: BaseException) -> GeneratorError:
    return GeneratorError(f"{name} {describe(error)}", split=place, remote_traceback=user_traceback(error))


def _same(number: int) -> int:
    return number


def _hint(returned: Any) -> str:
    if returned is None:
        return "did you forget to `yield` its samples?"
    return "`yield` the samples one by one, or return iter(...) of it"


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
