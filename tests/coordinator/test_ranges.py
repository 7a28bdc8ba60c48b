"""A set of numbers, kept as ranges, behaves like a set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock_server.coordinator.model.ranges import Ranges

pieces = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=20)


@given(pieces)
def test_it_holds_what_was_added_and_nothing_else(added: list[tuple[int, int]]) -> None:
    ranges, numbers = Ranges(), set[int]()
    for start, count in added:
        ranges.add(start, start + count)
        numbers.update(range(start, start + count))
        assert [number in ranges for number in range(-1, 80)] == [number in numbers for number in range(-1, 80)]


def test_it_is_small_however_much_is_in_it() -> None:
    ranges = Ranges()
    for start in range(0, 2**53, 2**40):
        ranges.add(start, start + 2**40)
    assert len(ranges._starts) == 1
