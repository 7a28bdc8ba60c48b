"""How much of the allowed memory a stream may hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_server.coordinator.model.memory import Share, least_slots, regrown, share, with_consumers

quick = settings(derandomize=True, deadline=None, max_examples=500)

sizes = st.fixed_dictionaries(
    {
        "slot": st.integers(1, 10_000),
        "blocks": st.integers(0, 50_000),
        "workers": st.integers(1, 64),
        "credit": st.integers(1, 64),
        "quota": st.integers(0, 64),
        "kept": st.integers(0, 100_000),
    }
)


@quick
@given(sizes, st.integers(0, 1_000_000))
def test_a_share_fits_and_has_what_a_stream_needs_to_live(sizes: dict[str, int], free: int) -> None:
    granted = share(free=free, **sizes)
    least = sizes["blocks"] + least_slots(sizes["quota"]) * sizes["slot"]
    if granted is None:
        assert free < least
        return
    slots = granted.production + granted.credit + granted.quota
    assert granted.nbytes == sizes["blocks"] + slots * sizes["slot"] <= free
    assert granted.production >= 1
    assert 1 <= granted.credit <= sizes["credit"]
    assert min(1, sizes["quota"]) <= granted.quota <= sizes["quota"]


@quick
@given(sizes, st.integers(0, 200), st.integers(1, 5))
def test_a_share_has_no_more_slots_than_there_may_be(sizes: dict[str, int], most: int, consumers: int) -> None:
    granted = share(free=1 << 40, most=most, consumers=consumers, **sizes)
    least = least_slots(sizes["quota"], consumers)
    if granted is None:
        assert most < least
    else:
        assert least <= granted.slots <= max(least, most // 2) <= most
        assert granted.credit >= 1
        more = with_consumers(granted, consumers + 1, free=1 << 40, slot=sizes["slot"], most=0)
        assert more is None
        assert with_consumers(granted, max(1, consumers - 1), free=0, slot=sizes["slot"], most=-5) is not None


@quick
@given(sizes, st.integers(0, 1_000_000))
def test_more_than_the_least_leaves_half_and_what_is_kept_for_others(sizes: dict[str, int], free: int) -> None:
    granted = share(free=free, **sizes)
    least = sizes["blocks"] + least_slots(sizes["quota"]) * sizes["slot"]
    if granted is not None and granted.nbytes > least:
        assert granted.nbytes <= free // 2
        assert granted.nbytes <= free - sizes["kept"]


@quick
@given(sizes)
def test_with_plenty_of_memory_a_stream_gets_what_it_wants(sizes: dict[str, int]) -> None:
    granted = share(free=1 << 40, **sizes)
    assert granted is not None
    assert (granted.credit, granted.quota) == (sizes["credit"], sizes["quota"])
    if not sizes["blocks"]:
        assert granted.production == 2 * sizes["workers"] + 1


@pytest.mark.parametrize(
    ("blocks", "slot", "workers", "production"),
    [(1, 4096, 2, 48), (1, 1 << 20, 2, 16), (1, 4 << 20, 2, 5), (1, 4096, 40, 81), (0, 4096, 2, 5)],
)
def test_a_stream_with_shuffle_blocks_has_small_slots_ahead_while_workers_fill_them(
    blocks: int, slot: int, workers: int, production: int
) -> None:
    granted = share(free=1 << 40, blocks=blocks, slot=slot, workers=workers, credit=4, quota=8)
    assert granted is not None
    assert granted.production == production


@pytest.mark.parametrize(
    ("quota", "least"), [(4, Share(production=1, credit=1, quota=1, nbytes=37)), (0, Share(1, 1, 0, 27))]
)
def test_the_least_is_one_slot_in_each_place(quota: int, least: Share) -> None:
    asks = {"slot": 10, "blocks": 7, "workers": 4, "credit": 4, "quota": quota}
    assert share(free=least.nbytes, **asks) == least
    assert share(free=least.nbytes - 1, **asks) is None


def test_slots_that_grow_are_as_many_as_before_while_there_is_room() -> None:
    old = Share(3, 2, 1, 607)
    assert regrown(old, free=3000, held=400, blocks=7, slot=200) == Share(3, 2, 1, 7 + 400 + 6 * 200)


def test_slots_that_grow_become_fewer_where_room_is_short_but_never_fewer_than_the_least() -> None:
    old = Share(5, 4, 8, 170)
    assert regrown(old, free=1830, held=0, blocks=0, slot=200) == Share(2, 1, 2, 1000)
    assert regrown(old, free=430, held=0, blocks=0, slot=200) == Share(1, 1, 1, 600)
    assert regrown(old, free=429, held=0, blocks=0, slot=200) is None
    assert regrown(old, free=430, held=1, blocks=0, slot=200) is None
    assert regrown(Share(5, 4, 0, 90), free=310, held=0, blocks=0, slot=200) == Share(1, 1, 0, 400)
