"""`penstock check` compares a feed with a plain loop over its generator, and names what the feed loses or repeats."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock_server import Feed
from penstock_server.checking.judging.carried import lost, repeating
from penstock_server.checking.judging.judging import _equal_segments
from penstock_server.checking.observing.messages import Carried
from penstock_server.checking.observing.plain_loop import carried
from penstock_server.checking.observing.raw_samples import digests_of_raw, digests_of_rows
from penstock_server.checking.observing.recording import Recording
from penstock_server.checking.observing.repeats import bits, lost_by_epochs, lost_by_segments, tiny_pass
from penstock_server.feed.options.plan_sizes import segment_count
from penstock_server.worker.isolation.randomness import GlobalRandomness
from penstock_server.worker.reading.loaded_feed import LoadedFeed


def found_in(feed: Feed) -> Carried | None:
    """Return what a feed loses, compared with a plain loop."""
    plan = feed.plan("feed")
    splits = range(segment_count(plan)) if plan.segment is not None else feed.splits or [None]
    randomness = GlobalRandomness()
    try:
        return carried(LoadedFeed(feed, plan), splits, randomness, 60.0)
    finally:
        randomness.use(None)


def kind_in(feed: Feed) -> str:
    found = found_in(feed)
    return "" if found is None else found.kind


@dataclass
class Row:
    number: int
    name: str


def forever(form: Any, count: int = 30) -> Any:
    def generate() -> Iterator[Any]:
        while True:
            for i in range(count):
                yield form(i)

    return generate


SHAPES: dict[str, Any] = {
    "a list of arrays": lambda i: ([np.full(2, i), np.ones(3)], i),
    "an object": lambda i: Row(i, f"row {i}"),
    "a dict with other keys than text": lambda i: {"boxes": [[1.0] * 4] * (i % 3), 3: [i, "a"]},
    "lists of different lengths": lambda i: ([np.ones(2)] * (i % 3), i),
    "text": lambda i: f"{i}.png",
    "nothing beside a number": lambda i: (None, i),
}


@pytest.mark.parametrize("form", SHAPES.values(), ids=SHAPES)
def test_a_loop_is_compared_whatever_the_generator_yields_to_its_transform(form: Any) -> None:
    endless = Feed(forever(form), batch_size=4, transform=lambda sample: 1)
    assert found_in(endless) == Carried("endless", 30, 4066, 30, alike=True)


def packed(i: int) -> Any:
    return [np.full((4, 2), i), np.ones((4, 3))], np.arange(4) + 4 * i


def test_the_rows_of_a_batch_are_compared_if_it_is_a_list_of_arrays() -> None:
    found = found_in(Feed(forever(packed, 7), batch_size=None, transform=lambda batch: (tuple(batch[0]), batch[1])))
    assert found == Carried("endless", 28, 4068, 7, unit="rows", alike=True)


def test_a_split_that_yields_one_batch_for_ever_is_named() -> None:
    def one(split: int) -> Iterator[Any]:
        while True:
            yield packed(split)

    assert kind_in(Feed(one, splits=[0, 1], batch_size=None, transform=tuple)) == "endless"


def test_it_is_said_if_samples_cannot_be_compared_or_the_loop_fails() -> None:
    locks = found_in(Feed(forever(lambda i: (i, threading.Lock())), batch_size=4, transform=lambda sample: sample[0]))
    assert locks is not None
    assert locks.why.startswith("samples contain lock objects, which cannot be pickled")
    failed = found_in(Feed(forever(lambda i: 1 // i), batch_size=4))
    assert failed is not None
    assert "raised ZeroDivisionError" in failed.why


def test_equal_samples_have_equal_digests_and_others_do_not() -> None:
    text = "".join(["a", "b"])
    assert digests_of_raw([Row(1, text), Row(1, text)]) == digests_of_raw([Row(1, "ab"), Row(1, "".join("ab"))])
    assert digests_of_raw({"a": 1}) != digests_of_raw({"b": 1})
    assert digests_of_raw((1, [2, "x"])) != digests_of_raw((1, [2, "y"]))
    assert len(set(digests_of_rows({"x": np.arange(3), "names": ["a", "b", "c"]}))) == 3
    assert len(list(digests_of_rows((np.arange(3), np.arange(4))))) == 1  # nodes and edges have no common rows


@pytest.mark.parametrize("beside", [[], None, 0.5, {}, np.zeros((0, 4))], ids=range(5))
def test_what_has_no_rows_does_not_hinder_the_comparison_of_rows(beside: Any) -> None:
    rows = list(digests_of_rows(([np.arange(6).reshape(3, 2), np.arange(3)], beside)))
    assert rows == list(digests_of_rows((np.arange(6).reshape(3, 2), np.arange(3))))
    assert len(set(rows)) == 3

    def shuffled_at_each_pass() -> Iterator[Any]:
        ids, at = np.arange(24), 0
        while True:
            if at % 24 == 0:
                np.random.shuffle(ids)
            part = ids[at % 24 : at % 24 + 2].copy()
            at += 2
            yield [np.stack([part, part]).T, part], beside

    found = found_in(Feed(shuffled_at_each_pass, segment=5, batch_size=None, transform=lambda batch: tuple(batch[0])))
    assert found is not None
    assert (found.kind, found.one_pass) == ("segments", 12)


def shuffles(*, first: bool, noise: bool = True) -> Any:
    def generate() -> Iterator[Any]:
        ids = np.arange(40)
        if first:
            np.random.shuffle(ids)
        while True:
            for start in range(0, 40, 8):
                part = ids[start : start + 8].copy()
                yield part[:, None] + noise * np.random.rand(8, 1) / 1000, part
            np.random.shuffle(ids)

    return generate


@pytest.mark.parametrize("noise", [True, False])
def test_a_generator_that_shuffles_only_after_a_pass_begins_each_segment_alike(noise: bool) -> None:
    after, before = shuffles(first=False, noise=noise), shuffles(first=True, noise=noise)
    feed = Feed(after, segment=10, samples=40, batch_size=None)
    found = found_in(feed)
    assert found is not None
    assert (found.kind, found.compared, found.one_pass) == ("begins", 40, 5)
    finding = lost(found, feed.plan("feed"))
    assert finding.what.endswith("A plain loop has that order once, the feed in one of 2 passes")
    assert kind_in(Feed(before, segment=10, samples=40, batch_size=None)) == ""
    whole = Feed(after, segment=5, samples=40, batch_size=None)
    found = found_in(whole)
    assert found is not None
    if noise:
        assert lost(found, whole.plan("feed")).what.endswith("once, the feed in each pass")
    else:
        assert found.kind == "repeats"
    assert kind_in(Feed(after, segment=7, samples=42, batch_size=None)) in ("uneven", "segments")


class OwnSeed:
    def __init__(self, count: int, batch: int) -> None:
        self.count, self.batch, self.random = count, batch, np.random.RandomState(1)

    def batches(self) -> Iterator[Any]:
        while True:
            order = self.random.permutation(self.count)
            for i in range(0, self.count, self.batch):
                yield order[i : i + self.batch], self.random.rand(self.batch)

    def noise(self) -> Iterator[Any]:
        for rows, _ in self.batches():
            yield rows, np.random.rand(self.batch)


def own_seed() -> Iterator[Any]:
    return OwnSeed(200, 4).batches()


def own(method: str, count: int, segment: int, **options: Any) -> Feed:
    return Feed(OwnSeed, method=method, args=(count, 4), segment=segment, batch_size=None, **options)


@pytest.mark.parametrize(
    ("feed", "compared"),
    [
        (own("batches", 200, 50, samples=50), 200),
        (own("batches", 20, 5, samples=5), 20),
        (own("noise", 200, 50, samples=50), 200),  # only the order is the same
        (Feed(own_seed, segment=50, samples=50, batch_size=None), 200),
        (own("batches", 20_000, 5_000, samples=5_000), 4_096),
    ],
)
def test_epochs_of_one_segment_that_are_all_the_same_are_named(feed: Feed, compared: int) -> None:
    found = found_in(feed)
    assert found is not None
    assert (found.kind, found.compared) == ("restarts", compared)
    assert found.different > compared / 2


def test_epochs_that_are_all_the_same_in_a_plain_loop_are_right() -> None:
    assert kind_in(Feed(forever(packed, 13), segment=13, samples=13, batch_size=None)) == ""
    part = found_in(Feed(forever(lambda i: i), segment=10, samples=10, batch_size=5))
    assert part == Carried("restarts", 10, 10, 30)


def number(i: int) -> bytes:
    return i.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("second", "other_epoch", "shuffled", "lost"),
    [
        (range(20, 0, -1), range(1, 21), False, (20, 20)),
        (range(20, 0, -1), range(1, 21), True, None),  # the feed makes another order
        (range(20, 0, -1), range(20, 0, -1), False, None),
        (range(1, 21), range(1, 21), False, None),
        (range(1, 8), range(1, 21), False, None),  # too few
    ],
)
def test_epochs_lose_what_differs_in_a_second_pass(second: Any, other_epoch: Any, shuffled: bool, lost: Any) -> None:
    first, again, other = ([*map(number, numbers)] for numbers in (range(1, 21), second, other_epoch))
    assert lost_by_epochs((first, again), (first, other), shuffled=shuffled) == lost


@pytest.mark.parametrize(
    ("form", "count", "segment", "samples", "one_pass"),
    [
        (lambda i: (np.full(4, i), np.arange(4) + 4 * i), 5, 5, 10, 5),
        (lambda i: (np.full(4, i), np.arange(4) + 4 * i), 5, 5, 15, 5),
        (lambda i: np.arange(4) + 4 * i, 13, 1, 13, 13),
        (lambda i: np.arange(4) + 4 * i, 13, 7, None, 13),
    ],
)
def test_segments_that_repeat_are_named_also_if_they_have_few_batches(
    form: Any, count: int, segment: int, samples: int | None, one_pass: int
) -> None:
    found = found_in(Feed(forever(form, count), segment=segment, samples=samples, batch_size=None))
    assert found is not None
    assert (found.kind, found.one_pass) == ("repeats", one_pass)


def drawn(*pool: Any) -> Any:
    def generate() -> Iterator[Any]:
        while True:
            yield random.choice(pool)

    return generate


def drawn_file() -> Iterator[Any]:
    while True:
        first = 100 * random.randrange(3)
        yield from (np.arange(i, i + 4) for i in range(first, first + 80, 4))


def shuffled_anew() -> Iterator[Any]:
    while True:
        yield from np.split(np.random.permutation(200), 50)


BATCHES = [np.arange(4) + 4 * i for i in range(5)]


@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize(
    ("generate", "segment"),
    [
        (forever(lambda i: (np.zeros((4, 3)), np.zeros(4))), 5),
        (forever(lambda i: np.full(4, i % 2)), 6),
        (drawn(np.zeros(4), np.ones(4)), 1),
        (drawn(np.zeros(4), np.ones(4)), 2),
        (drawn(np.zeros(4), np.ones(4)), 5),
        (drawn_file, 20),
        (drawn(*BATCHES), 1),
        (drawn(*BATCHES), 5),
        (shuffled_anew, 50),
    ],
    ids=[
        "zeros",
        "two labels in turn",
        "a label",
        "two of two labels",
        "five of two labels",
        "a file",
        "a batch",
        "five batches",
        "shuffled",
    ],
)
def test_few_values_and_random_draws_are_no_segments_that_repeat(generate: Any, segment: int, segments: int) -> None:
    assert kind_in(Feed(generate, segment=segment, samples=segment * segments, batch_size=None)) == ""


def test_rows_of_batches_that_are_drawn_at_random_come_again_together() -> None:
    plain = [*map(number, [*range(20), 0, 1, 2, 3])]
    reads = [*enumerate(map(number, [*range(4), *range(4), *range(4), *range(8, 16)]))]
    assert lost_by_segments(plain, reads, rows=4) is None
    assert lost_by_segments(plain, reads) == Carried("segments", 20, 8)


def test_segments_of_a_constant_do_not_repeat_but_those_of_which_one_sample_was_read_may() -> None:
    def recorded(*digests: bytes) -> Recording:
        return Recording(["sample"], digests={place: bytearray(data) for place, data in enumerate(digests)})

    repeats = [number(1) + number(2)] * 16
    assert _equal_segments(recorded(*repeats)) == 15
    assert _equal_segments(recorded(*repeats, number(1))) == 16
    assert _equal_segments(recorded(*repeats, number(2))) == 0
    assert _equal_segments(recorded(*[number(1) * 2] * 16)) == 0


def test_evidence_is_what_two_random_draws_would_not_agree_in() -> None:
    assert bits("aaaa") == 0
    assert bits("abab") == 1
    assert bits("abcdefgh") == 3
    assert bits("") == 0


def test_a_tiny_pass_is_repeated_in_the_same_order() -> None:
    assert tiny_pass([*map(number, [1, 2, 3] * 16)]) == 3
    assert tiny_pass([number(1)] * 100) == 0
    assert tiny_pass([*map(number, [1, 2, 3] * 15)]) == 0
    assert tiny_pass([*map(number, [1, 2, 3] * 16 + [2])]) == 0


def test_the_advice_to_make_an_epoch_one_pass_says_what_lets_several_workers_work() -> None:
    plan = Feed(forever(int), segment=20, batch_size=None).plan("feed")
    alike = lost(Carried("uneven", 52, 0, 13, unit="rows", alike=True), plan).fix
    assert alike.startswith("give segment=13 and samples=13: each epoch is then a whole pass, which one worker makes")
    assert "makes all passes alike, so only splits= let several workers share the work" in alike
    others = lost(Carried("uneven", 52, 0, 13, unit="rows"), plan).fix
    assert "With samples=130 (10 passes in an epoch), several workers make whole passes at a time" in others
    assert "samples= of several passes" in lost(Carried("segments", 60, 20), plan).fix


def test_the_advice_for_segments_that_repeat_is_also_for_data_in_order() -> None:
    fix = repeating("0 to 9", Carried("repeats", 52, 0, 13)).fix
    assert "draw from `rng`" in fix
    assert "give the data as splits= (files, or ranges of rows), or give segment=13 and samples=13: each epoch" in fix
    assert "or give segment= and samples= of one pass" in repeating("0 to 9", None).fix


def test_a_feed_with_epochs_of_one_pass_is_not_told_to_make_them_one_pass() -> None:
    plan = Feed(own_seed, segment=50, samples=50, batch_size=None).plan("feed")
    whole = lost(Carried("restarts", 200, 199, 50, unit="rows"), plan)
    assert whole.what.startswith("each epoch has the same samples in the same order, and in a plain loop over the")
    assert "take `epoch` and add it to the seed" in whole.fix
    assert "one pass" not in whole.fix
    assert "give segment=80 and samples=80" in lost(Carried("restarts", 200, 199, 80), plan).fix
