"""One run of a generator serves all lanes of a process, and each lane gets the samples of its share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from penstock_server.worker.batch.shares import Share
from penstock_server.worker.isolation.randomness import GlobalRandomness, GlobalState
from penstock_server.worker.reading import passes as module
from penstock_server.worker.reading.generators import Started
from penstock_server.worker.reading.passes import Pass, Passes, ShareSamples

KEY = (0, 0)


@pytest.fixture(autouse=True)
def _price_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes share even generators that are cheaper than copying, as those here are."""
    monkeypatch.setattr(module, "MEASURED", 0.0)


class Source:
    """A generator that lanes share.

    Attributes:
        started, closed: how often it was.
        made: how many samples it has made, in all passes.
    """

    def __init__(self, samples: Callable[[], Iterator[Any]]) -> None:
        self.samples = samples
        self.started = self.closed = self.made = 0
        self.passes = Passes()
        self._randomness = GlobalRandomness()

    def start(self, new: Pass) -> tuple[Any, ...]:
        self.started += 1
        generator = _Samples(self)
        started = Started(generator, GlobalState(), self._randomness.variables.new())
        new.run(started, generator, self._randomness)
        return ()

    def open(self, share: Share, first: int = 0, expected: ShareSamples | None = None) -> ShareSamples:
        reader = self.passes.expect(KEY, share, first) if expected is None else expected
        reader.open(self.start)
        reader.seek(first)
        return reader


class _Samples(Iterator[Any]):
    def __init__(self, source: Source) -> None:
        self._source = source
        self._samples = source.samples()

    def __next__(self) -> Any:
        sample = next(self._samples)
        self._source.made += 1
        return sample

    def close(self) -> None:
        self._source.closed += 1


def numbers(count: int) -> Callable[[], Iterator[Any]]:
    """Return a generator function that fills the same array again and again."""

    def generate() -> Iterator[Any]:
        array = np.zeros(3, np.int64)
        for i in range(count):
            array[:] = i
            yield array, i

    return generate


def ids(samples: Iterator[Any]) -> list[int]:
    found = []
    for sample in samples:
        assert (sample[0] == sample[1]).all()
        found.append(sample[1])
    return found


def of_share(share: Share, count: int) -> list[int]:
    return list(share.of(iter(range(count))))


@pytest.mark.parametrize("stretch", [1, 4])
def test_all_lanes_read_one_pass_and_each_gets_its_share(stretch: int) -> None:
    source = Source(numbers(103))
    shares = [Share(index, 5, stretch) for index in (0, 2, 3)]
    readers = [source.open(share) for share in shares]
    assert [ids(reader) for reader in reversed(readers)] == [of_share(share, 103) for share in reversed(shares)]
    assert source.started == 1
    assert source.made == 103


def test_the_generator_ends_with_the_last_lane_that_reads_it() -> None:
    source = Source(numbers(103))
    readers = [source.open(Share(index, 3, 2)) for index in range(3)]
    for reader in readers:
        next(reader)
    for reader in readers:
        assert not source.closed
        reader.close()
    assert source.closed == 1


def test_a_lane_that_is_expected_finds_its_samples_though_others_were_read_before_it_is_opened() -> None:
    source = Source(numbers(60))
    expected = [source.passes.expect(KEY, Share(index, 3, 2)) for index in range(3)]
    first = source.open(Share(0, 3, 2), expected=expected[0])
    assert ids(islice(first, 8)) == of_share(Share(0, 3, 2), 60)[:8]
    assert ids(source.open(Share(2, 3, 2), expected=expected[2])) == of_share(Share(2, 3, 2), 60)
    assert source.started == 1
    first.close()
    expected[2].close()
    assert not source.closed, "there are samples for another lane"
    expected[1].close()
    assert source.closed == 1


def test_a_lane_that_ends_before_others_begin_leaves_their_samples() -> None:
    source = Source(numbers(40))
    expected = [source.passes.expect(KEY, Share(index, 4, 2)) for index in range(4)]
    for reader in expected:
        assert ids(source.open(reader.share, expected=reader)) == of_share(reader.share, 40)
        reader.close()
    assert source.started == source.closed == 1


def test_a_lane_that_comes_late_runs_the_generator_itself_and_others_that_are_late_join_it() -> None:
    source = Source(numbers(90))
    early = source.open(Share(0, 3, 1))
    ids(islice(early, 20))
    late = [source.passes.expect(KEY, Share(index, 3, 1)) for index in (1, 2)]
    for reader in late:
        source.open(reader.share, expected=reader)
    assert [ids(reader) for reader in late] == [of_share(Share(index, 3, 1), 90) for index in (1, 2)]
    assert source.started == 2


def test_passes_that_come_near_each_other_become_one() -> None:
    source = Source(numbers(900))
    early = [source.open(Share(index, 4, 1)) for index in (0, 1)]
    ids(islice(early[0], 50))
    late = [source.open(Share(index, 4, 1)) for index in (2, 3)]
    assert ids(islice(late[0], 40)) == of_share(Share(2, 4, 1), 900)[:40]
    assert source.passes.running == 2
    assert ids(islice(late[0], 15)) == of_share(Share(2, 4, 1), 900)[40:55]
    assert source.passes.running == 1
    assert (source.started, source.closed) == (2, 1)
    for reader, taken in zip((*early, *late), (50, 0, 55, 0), strict=True):
        assert ids(reader) == of_share(reader.share, 900)[taken:]
    assert source.started == 2


def test_a_lane_that_goes_on_later_in_its_share_joins_a_pass_and_is_given_nothing_before() -> None:
    source = Source(numbers(200))
    early = source.open(Share(0, 4, 2))
    ids(islice(early, 10))
    later = source.open(Share(3, 4, 2), first=30)
    skipped = list(islice(later, 30))
    assert all(
        sample is None or sample[1] == i for sample, i in zip(skipped, of_share(Share(3, 4, 2), 200), strict=False)
    )
    assert ids(later) == of_share(Share(3, 4, 2), 200)[30:]
    assert ids(early) == of_share(Share(0, 4, 2), 200)[10:]
    assert source.started == 1


def test_the_pass_keeps_what_is_needed_and_no_more() -> None:
    source = Source(numbers(400))
    readers = [source.open(Share(index, 4, 1)) for index in range(3)]  # nobody reads the last share
    kept = readers[0].reads
    assert kept is not None
    ids(islice(readers[0], 50))
    assert kept.kept == readers[1].nbytes + readers[2].nbytes > 0
    assert readers[1].nbytes == readers[2].nbytes == pytest.approx(49 * kept.kept / 98)
    ids(islice(readers[1], 50))
    ids(islice(readers[2], 49))
    assert kept.kept == readers[2].nbytes == 0
    ids(islice(readers[0], 30))
    readers[1].seek(80)
    assert len(list(islice(readers[1], 30))) == 30
    assert kept.kept == readers[2].nbytes
    readers[2].close()
    assert kept.kept == 0


def test_at_the_limit_the_lane_that_is_furthest_behind_gets_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 8000)
    source = Source(numbers(3000))
    readers = [source.passes.expect(KEY, Share(index, 3, 1), run=index) for index in range(3)]
    for reader in readers:
        source.open(reader.share, expected=reader)
    ids(islice(readers[1], 9))
    ids(islice(readers[0], 2))
    assert source.passes.urgent is None
    ids(islice(readers[0], 17))
    assert source.passes.urgent == 2
    found = [ids(islice(reader, 400)) for reader in readers]
    assert max(one.kept for one in source.passes._running) <= 8000
    assert source.started > 1
    for reader, before, more in zip(readers, (19, 9, 0), found, strict=True):
        assert more + ids(reader) == of_share(reader.share, 3000)[before:]


def test_each_lane_that_comes_to_an_error_gets_it_after_its_own_samples() -> None:
    def generate() -> Iterator[Any]:
        yield from numbers(50)()
        raise OSError("no more")

    source = Source(generate)
    readers = [source.open(Share(index, 4, 3)) for index in range(4)]
    for reader in readers:
        found = []
        with pytest.raises(OSError, match="no more"):
            found.extend(sample[1] for sample in iter(reader.__next__, None))
        assert found == of_share(reader.share, 50)
        reader.close()
    assert source.closed == source.started


def test_samples_that_cannot_be_copied_are_read_by_each_lane_itself() -> None:
    def generate() -> Iterator[Any]:
        return ((np.full(1, i), i, {i}) for i in range(40))

    source = Source(generate)
    readers = [source.open(Share(index, 4, 2)) for index in range(4)]
    assert [ids(reader) for reader in readers] == [of_share(reader.share, 40) for reader in readers]
    assert source.started == 4
    assert not source.passes.shared


@pytest.mark.parametrize("price", [0.4, 4.0])
def test_samples_are_copied_only_if_that_takes_less_time_than_the_generator(
    monkeypatch: pytest.MonkeyPatch, price: float
) -> None:
    now = 0.0

    def generate() -> Iterator[Any]:
        nonlocal now
        for i in range(1000):
            now += 1e-3
            yield np.full(1, i), i

    class Copy(module.SampleCopy):
        def __init__(self, sample: Any) -> None:
            nonlocal now
            super().__init__(sample)
            now += price * 1e-3 * 4

    monkeypatch.setattr(module, "MEASURED", 1.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(module, "SampleCopy", Copy)
    source = Source(generate)
    readers = [source.open(Share(index, 4, 1)) for index in range(4)]
    assert [ids(reader) for reader in readers] == [of_share(reader.share, 1000) for reader in readers]
    assert source.passes.shared == (price < 1)
    assert source.started == (1 if price < 1 else 4)


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_reading_gives_the_same_shares(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    choose = random.Random(seed)
    monkeypatch.setattr(module, "MOST_KEPT", choose.choice([0, 500, 3000, 1 << 20]))
    count, lanes, stretch = choose.randrange(300), choose.randrange(1, 9), choose.randrange(1, 6)
    source = Source(numbers(count))
    open_: dict[ShareSamples, int] = {}
    expected: list[ShareSamples] = []
    for _ in range(200):
        match choose.randrange(6):
            case 0 if len(open_) < 12:
                share = Share(choose.randrange(lanes), lanes, stretch)
                first = choose.choice([0, choose.randrange(share.size_of(count) + 1)])
                expected.append(source.passes.expect(KEY, share, first))
            case 1 if expected:
                reader = expected.pop(choose.randrange(len(expected)))
                if choose.random() < 0.2:
                    reader.close()
                    continue
                source.open(reader.share, reader.first, reader)
                open_[reader] = 0
            case 2 if open_ and choose.random() < 0.3:
                reader = choose.choice([*open_])
                del open_[reader]
                reader.close()
            case _ if open_:
                reader = choose.choice([*open_])
                wanted = of_share(reader.share, count)[open_[reader] :]
                more = choose.randrange(30)
                found = 0
                for sample in islice(reader, more):  # the generator fills the same array again and again
                    if sample is None:
                        assert open_[reader] + found < reader.first
                    else:
                        assert sample[1] == wanted[found]
                        assert (sample[0] == sample[1]).all()
                    found += 1
                assert found == min(more, len(wanted))
                open_[reader] += found
        for one in source.passes._running:
            assert one.kept == sum(reader.nbytes for reader in one._readers) <= module.MOST_KEPT
    for reader in [*open_, *expected]:
        reader.close()
    assert source.closed == source.started
    assert not source.passes._running
    assert not source.passes._members
