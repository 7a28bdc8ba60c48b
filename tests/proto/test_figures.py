"""A figure of the status is declared once: with what it means, and with its metric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import pytest
from msgspec import Struct

from penstock_proto.declarations import Figure, figure, figures
from penstock_proto.status.status_shape import Status


def all_figures(kind: type[Struct]) -> Iterator[Figure]:
    for one in figures(kind):
        yield one
        if one.kind is not None:
            yield from all_figures(one.kind)


def test_every_figure_of_the_status_says_what_it_means_in_a_line_for_a_table() -> None:
    for one in all_figures(Status):
        assert one.means.endswith("."), one
        assert one.means[0].isupper() or one.means[0] in "`0123456789", one
        assert not {"|", "\n"} & set(one.means), one


def test_a_metric_shows_one_figure() -> None:
    declared = {one: None for one in all_figures(Status) if one.metric}
    assert len({one.metric for one in declared}) == len(declared) > 30


class Inner(Struct):
    lost: Annotated[int, figure("Batches that were lost.", "lost_batches_total")]


class Outer(Struct):
    name: Annotated[str, figure("Its name.")]
    inner: Annotated[Inner | None, figure("What it lost.")]
    several: Annotated[list[Inner], figure("What others lost.")]


class WithoutMeaning(Struct):
    lanes: int


def test_a_declaration_says_what_a_figure_is() -> None:
    assert figures(Inner) == (Figure("lost", "Batches that were lost.", "lost_batches_total", None, many=False),)
    assert figures(Outer) == (
        Figure("name", "Its name.", "", None, many=False),
        Figure("inner", "What it lost.", "", Inner, many=False),
        Figure("several", "What others lost.", "", Inner, many=True),
    )


def test_a_figure_that_does_not_say_what_it_means_is_refused() -> None:
    with pytest.raises(TypeError, match="lanes does not say what it means"):
        figures(WithoutMeaning)
