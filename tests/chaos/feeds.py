"""The user's module, for `penstock serve feeds.py:feed0`. CHAOS_FEEDS names the JSON file that declares its feeds.

A failing sample fails the first `times` times that any process reaches it (0: always). A file has the count, so that it
outlives workers and daemons.
"""

import json
import os
import random
import signal
import time

import leaving
import numpy as np
from held import Held
from sample import ROWS, checksum, endless_size, payload, rows_of, width_of

from penstock_server import DictSpec, Feed, Leaf, OnError, Shuffle, TupleSpec


def _reached(folder, name):
    """Count one more time that `name` was reached, and return the count."""
    fd = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, b".")
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


class Source:
    """The samples of a feed, and their failures."""

    def __init__(self, case, folder):
        self.case = case
        self.folder = folder
        self.failures = {}
        for number, failure in enumerate(case["failures"]):
            self.failures[failure["split"], failure["number"]] = number, failure

    def meet(self, epoch, split, number):
        """Fail if this sample has to."""
        if self.case["pause"]:
            time.sleep(self.case["pause"])
        found, failure = self.failures.get((split, number), (None, None))
        if failure is None or failure["epoch"] not in (-1, epoch):
            return
        times = _reached(self.folder, f"failure-{self.case['tag']}-{found}-{epoch}")
        if failure["times"] and times > failure["times"]:
            return
        if failure["what"] == "raise":
            raise OSError(f"the disk is away (split {split}, sample {number}, time {times})")
        if failure["what"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    def draw(self, rng):
        how = self.case["draws"]
        if how == "rng":
            return rng.normal(size=2)
        if how == "numpy":
            return np.random.normal(size=2)
        if how == "random":
            return np.array([random.gauss(0, 1), random.random()])
        return np.zeros(2)

    def row(self, epoch, split, number, width, rng):
        body, draw = payload(self.case["tag"], epoch, split, number, width), self.draw(rng)
        return body, draw, np.array([self.case["tag"], epoch, split, number, checksum(body, draw)], np.int64)

    def one(self, epoch, split, number, rng):
        """Return one sample, or one ready batch."""
        self.meet(epoch, split, number)
        width = self.case["width"]
        if self.case["batch_size"] is not None and not self.case["rebatches"]:
            return self.shaped(*self.row(epoch, split, number, width, rng))
        if not self.case["rebatches"]:
            width = width_of(width, split, number)
        rows = [self.row(epoch, split, ROWS * number + r, width, rng) for r in range(rows_of(split, number))]
        return self.shaped(*map(np.stack, zip(*rows, strict=True)))

    def shaped(self, body, draw, identity):
        if self.case["structure"] == "tuple":
            return body, draw, identity
        if self.case["structure"] == "dict":
            return {"payload": body, "draw": draw, "id": identity}
        return {"x": (body, {"draw": draw.astype(np.float64)}), "id": identity, "odd": identity[..., 3] % 2 == 1}

    def parts(self, sample):
        if self.case["structure"] == "tuple":
            return sample
        if self.case["structure"] == "dict":
            return sample["payload"], sample["draw"], sample["id"]
        return sample["x"][0], sample["x"][1]["draw"], sample["id"]

    def finished(self, sample):
        """Return a sample of an undivided generator with its right checksum: it is transformed once."""
        body, draw, identity = self.parts(sample)
        right = checksum(body, draw)
        assert identity[4] == right + 1, f"{identity[4]} instead of {right + 1}"
        return self.shaped(body, draw, np.array([*identity[:4], right]))

    def transformed(self, batch, rng):
        """Return the batch with its rows reversed, and perhaps with other numbers."""
        body, draw, identity = self.parts(batch)
        body, draw, identity = body[::-1], draw[::-1].copy(), identity[::-1].copy()
        if self.case["transforms"] == "draw":
            draw += rng.random(draw.shape)
            identity[:, 4] = [checksum(*row) for row in zip(body, draw, strict=True)]
        return self.shaped(body, draw, identity)

    def many(self, epoch, split, size, rng):
        with Held(self.case["holds"], split) as held:
            process = leaving.start(self.case["leaves"])  # noqa: F841
            for number in range(size):
                held.check()
                yield self.one(epoch, split, number, rng)
                held.check()
            self.meet(epoch, split, size)  # a split may fail at its end, too

    def unfinished(self, samples):
        """Yield samples with a wrong checksum, all in the same arrays."""
        kept = None
        for sample in samples:
            made = self.parts(sample)
            kept = kept or [np.empty_like(part) for part in made]
            for part, new in zip(kept, made, strict=True):
                part[...] = new
            kept[2][4] += 1
            yield self.shaped(*kept)


class Indexed:
    """An indexable object."""

    def __init__(self, source, size):
        self.source, self.size = source, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.source.one(-1, 0, index, None)


def _with_signature(source, first, sizes_of):
    """Return a generator function with the parameters of its case: `first`, and perhaps `epoch` and `rng`."""
    takes_epoch, takes_rng = source.case["takes_epoch"], source.case["draws"] == "rng"

    def body(what, epoch, rng):
        split, size = sizes_of(what)
        return source.many(epoch, split, size, rng)

    if source.case["kind"] == "whole":
        inner = body

        def body(what, epoch, rng):
            return source.unfinished(inner(what, epoch, rng))

    parameters = ", ".join([*([first] if first else []), *(["epoch"] * takes_epoch), *(["rng"] * takes_rng)])
    text = (
        f"lambda {parameters}: body({first or None}, {'epoch' if takes_epoch else -1}, {'rng' if takes_rng else None})"
    )
    made = eval(text, {"body": body})
    made.__name__ = "samples"
    return made


def spec(structure):
    """Return the spec of ready batches, whose rows and width vary."""
    body, draw, identity = Leaf("uint8", (None, None)), Leaf("float64", (None, 2)), Leaf("int64", (None, 5))
    if structure == "tuple":
        return TupleSpec((body, draw, identity))
    if structure == "dict":
        return DictSpec(("draw", "id", "payload"), (draw, identity, body))
    inner = TupleSpec((body, DictSpec(("draw",), (draw,))))
    return DictSpec(("id", "odd", "x"), (identity, Leaf("bool", (None,)), inner))


def declared(case, folder):
    source = Source(case, folder)
    sizes = case["sizes"]
    options = {
        key: case[key]
        for key in "batch_size seed lanes order drop_remainder epochs turn".split()
        if case[key] is not None
    }
    options["batch_size"] = case["batch_size"]
    options["shuffle"] = Shuffle(case["shuffle"], interleave=case["interleave"])
    options["on_error"] = OnError(case["on_error"], crashes=case["attempts"])
    if case["rebatches"]:
        options["rebatch"], options["batch_size"] = case["batch_size"], None
    elif case["batch_size"] is None:  # only a spec can say which dimensions vary
        options["spec"] = spec(case["structure"])
    if case["transforms"]:
        options["batch_transform" if case["batch_size"] else "transform"] = source.transformed
    if case["cache"]:
        options["cache"] = os.path.join(folder, f"cache-{case['tag']}")
    if case["tells_samples"]:
        options["samples"] = case["tells_samples"]
    kind = case["kind"]
    if kind == "index":
        return Feed(Indexed(source, sizes[0][0]), **options)
    if kind == "items":
        assert not case["failures"]
        return Feed([source.one(-1, 0, number, None) for number in range(sizes[0][0])], **options)
    if kind == "file":
        files = os.path.join(folder, f"data-{case['tag']}-*.{case['format']}")
        names = ("payload", "draw", "id")
        leaves = names if case["structure"] == "tuple" else {name: name for name in names}
        return Feed.from_files(files, leaves, **options)
    if kind in ("plain", "whole"):
        if kind == "whole":
            options["transform"] = source.finished
        return Feed(_with_signature(source, "", lambda _: (0, sizes[0][0])), **options)
    if kind == "shard":
        return Feed(_with_signature(source, "shard", lambda shard: (shard[0], sizes[0][shard[0]])), **options)
    if kind in ("segment", "endless"):
        whole = case["segment"]
        size = (lambda number: (number, 10**6)) if kind == "segment" else lambda n: (n, endless_size(whole, n))
        return Feed(_with_signature(source, "number", size), segment=whole, **options)
    generate = _with_signature(source, "split", lambda split: split)
    lists = [[(1000 * v + split, size) for split, size in enumerate(variant)] for v, variant in enumerate(sizes)]
    if case["weights"]:
        size, count = options.pop("batch_size"), len(case["weights"])
        cache = {"cache": options.pop("cache")} if case["cache"] else {}
        parts = {
            str(part): Feed(generate, splits=lists[0][part::count], batch_size=size, **cache) for part in range(count)
        }
        weights = dict(zip(parts, case["weights"], strict=True))
        return Feed.mix(parts, weights=weights, stop="all", **options)
    if kind == "list":
        return Feed(generate, splits=lists[0], **options)

    def splits():
        source.meet(-1, -1, 0)
        return lists[random.randrange(len(lists))]

    return Feed(generate, splits=splits, **options)


with open(os.environ["CHAOS_FEEDS"]) as _file:
    _cases = json.load(_file)
for _number, _case in enumerate(_cases):
    globals()[f"feed{_number}"] = declared(_case, os.path.dirname(os.environ["CHAOS_FEEDS"]))
