"""A host sends exactly those bytes of a slot to the head that its workers have written."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_proto import DictSpec, Leaf, MemoryBound
from penstock_proto import messages as m
from penstock_proto.batches import layout
from penstock_proto.batches.columns import Columns
from penstock_proto.spec import Spec, leaf_list
from penstock_server.join.building import Building, Regions
from penstock_server.shared_memory.arena import Memfd
from penstock_server.worker.batch.variable_rows import VariableRows
from tests.hosts.test_joined_host import PLAN

FIXED: Spec = DictSpec(("a", "b"), (Leaf("float32", (3, 2)), Leaf("int8", ())))
VARYING: Spec = DictSpec(
    ("ids", "label", "lists", "names", "padded", "text", "words"),
    (
        Leaf("int32", (None,), ragged=True),
        Leaf("int16", (3,)),
        Leaf("int8", (None, None), ragged=True),
        Leaf("string", (None, None), ragged=True),
        Leaf("float64", (None, 2)),
        Leaf("string", ()),
        Leaf("string", (2,)),
    ),
)


def sample(rng: np.random.Generator) -> dict[str, Any]:
    """Return a sample with the spec VARYING."""
    return {
        "ids": rng.integers(0, 100, rng.integers(0, 5)).astype(np.int32),
        "label": rng.integers(0, 100, 3).astype(np.int16),
        "lists": [np.arange(rng.integers(0, 3), dtype=np.int8) for _ in range(rng.integers(0, 4))],
        "names": [["n" * int(k) for k in rng.integers(0, 4, i)] for i in range(rng.integers(0, 3))],
        "padded": rng.random((int(rng.integers(0, 4)), 2)),
        "text": "x" * int(rng.integers(0, 6)),
        "words": ["ab" * int(rng.integers(0, 3)), "c"],
    }


def slot(nbytes: int, fill: int) -> npt.NDArray[np.uint8]:
    """Return memory full of `fill`, a byte that is not written to it."""
    return np.full(nbytes, fill, np.uint8)


def sent(pieces: list[tuple[npt.NDArray[np.uint8], list[tuple[int, int]]]], nbytes: int) -> npt.NDArray[np.uint8]:
    """Return the head's slot after these regions of these slots were sent."""
    target = slot(nbytes, 0xEE)
    for memory, regions in pieces:
        for start, stop in regions:
            target[start:stop] = memory[start:stop]
    return target


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2**32))
def test_rows_of_varying_size_that_several_lanes_have_left_over(counts: list[int], seed: int) -> None:
    rng, rows = np.random.default_rng(seed), sum(counts)
    columns = Columns(VARYING, rows)
    variable, regions = VariableRows(VARYING, columns), Regions(m.FeedPlan(**fields(rows)), VARYING)
    stores = []
    for count in counts:
        store = variable.store(count)
        variable.fill(store, 0, count, iter([sample(rng) for _ in range(count)]))
        stores.append(store)
    sizes = [variable.sizes(store, 0, count) for store, count in zip(stores, counts, strict=True)]
    shapes = columns.shapes(rows, columns.joined(sizes))
    places = layout.lay_out(columns.dtypes, shapes)
    whole, pieces = slot(places.nbytes, 0xEE), []
    for number, (store, count) in enumerate(zip(stores, counts, strict=True)):
        before, row = columns.joined(sizes[:number]), sum(counts[:number])
        message = m.WriteRows(1, 2, 0, places.nbytes, 0, count, row, rows, 0, shapes, before, sizes[number])
        own = slot(places.nbytes, 0x11)
        for memory in (own, whole):
            arrays = [leaf[0, ...] for leaf in places.leaves(memory)]
            variable.write_rows(store, 0, count, arrays, row, before)
            places.headers(memory)[0, :4] = rows, 0, -1, 0
        pieces.append((own, regions.of_rows(message)))
    there = sent(pieces, places.nbytes)
    np.testing.assert_array_equal(there[layout.HEADER :], whole[layout.HEADER :])
    np.testing.assert_array_equal(places.headers(there)[0, :4], [rows, 0, -1, 0])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_rows_of_one_size_that_several_lanes_have_left_over(counts: list[int]) -> None:
    batch = sum(counts) + 1  # the last batch is smaller
    regions = Regions(m.FeedPlan(**fields(batch, turn=3)), FIXED)
    places = layout.fixed_layout(FIXED, batch, 3)
    whole, pieces, row = slot(places.nbytes, 0xEE), [], 0
    for number, count in enumerate(counts):
        own = slot(places.nbytes, 0x11)
        for memory in (own, whole):
            for leaf in places.leaves(memory):
                leaf[0, row : row + count] = number + 1
        message = m.WriteRows(1, 2, 0, places.nbytes, 0, count, row, batch - 1, 0)
        pieces.append((own, regions.of_rows(message)))
        row += count
    there = sent(pieces, places.nbytes)
    for leaf, wanted in zip(places.leaves(there), places.leaves(whole), strict=True):
        np.testing.assert_array_equal(leaf[0, : batch - 1], wanted[0, : batch - 1])
    np.testing.assert_array_equal(there[layout.HEADER :], whole[layout.HEADER :])


def test_batches_of_a_turn() -> None:
    regions = Regions(m.FeedPlan(**fields(4, turn=5)), FIXED)
    places = layout.fixed_layout(FIXED, 4, 5)
    own = slot(places.nbytes, 0x11)
    for leaf in (*places.leaves(own), places.headers(own)):
        leaf[2:4] = 7
    there = sent([(own, regions.of_batches(2, 2, ()))], places.nbytes)
    for leaf in (*places.leaves(there), places.headers(there)):
        assert (leaf[2:4] == 7).all()
        assert (leaf[[0, 1, 4]] != 7).all()
        assert (leaf[[0, 1, 4]] != 0x11).all()


def test_batches_of_a_stripe() -> None:
    regions = Regions(m.FeedPlan(**fields(4, turn=9)), FIXED)
    places = layout.fixed_layout(FIXED, 4, 9)
    own = slot(places.nbytes, 0x11)
    for leaf in (*places.leaves(own), places.headers(own)):
        leaf[[1, 4, 7]] = 7
    there = sent([(own, regions.of_batches(1, 3, (), step=3))], places.nbytes)
    for leaf in (*places.leaves(there), places.headers(there)):
        assert (leaf[[1, 4, 7]] == 7).all()
        assert (leaf[[0, 2, 3, 5, 6, 8]] != 7).all()
        assert (leaf[[0, 2, 3, 5, 6, 8]] != 0x11).all()


def fields(batch_size: int, turn: int | None = None) -> dict[str, Any]:
    """Return the fields of a plan."""
    own = {name: getattr(PLAN, name) for name in PLAN.__struct_fields__}
    return {**own, "batch_size": batch_size, "turn": turn}


def test_the_spec_of_the_tests_has_a_leaf_of_each_kind() -> None:
    assert len({column.kind for column in Columns(VARYING, 4).columns}) == 4
    assert len(leaf_list(FIXED)) == 2


def test_memory_is_bounded_and_given_in_order() -> None:
    gone: list[Memfd] = []

    async def use() -> None:
        building = Building(3 * 4096, gone.append)
        with pytest.raises(MemoryBound, match="give `penstock join` a larger --memory"):
            await building.acquire(4 * 4096)
        one, two = await building.acquire(4096), await building.acquire(4096)
        large = asyncio.create_task(building.acquire(2 * 4096))
        await asyncio.sleep(0)
        small = asyncio.create_task(building.acquire(4096))
        await asyncio.sleep(0.02)
        assert not large.done()
        assert not small.done()  # there is room for it, but it asked later
        building.release(one)
        big = await large
        assert building.used == 3 * 4096
        assert not small.done()
        building.release(two)
        again = await small
        assert again is two
        for memfd in (big, again):
            building.release(memfd)
        assert building.used == 0
        used = await building.acquire(8192)
        assert used is big
        building.close([used])
        assert sorted(memfd.number for memfd in gone) == [1, 2, 3]

    asyncio.run(use())
