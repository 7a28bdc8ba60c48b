"""`Connection.classes`: a trainer gets the names of the classes that the labels of a feed stand for."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock_server import Feed
from penstock_server.feed.objects.class_names import classes_of
from tests.conftest import Serve

FEEDS = """
    from penstock_server import Feed

    class Photos(list):
        classes = ["cat", "dog"]

    class Table(list):
        classes = {"breed": ("pug", "tabby"), "color": ("red", "white")}

    photos = Feed(Photos(range(8)), batch_size=4)
    skipped = Feed(Photos(range(8)), batch_size=4, on_error="skip")
    table = Feed(Table(range(8)), batch_size=4)
    plain = Feed(list(range(8)), batch_size=4)
"""


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_a_trainer_gets_the_names(serve: Serve, transport: str) -> None:
    daemon = serve(FEEDS, "photos", "skipped", "table", "plain")
    expected: dict[str, Any] = {
        "photos": ("cat", "dog"),
        "skipped": ("cat", "dog"),
        "table": {"breed": ("pug", "tabby"), "color": ("red", "white")},
        "plain": None,
    }
    for name, classes in expected.items():
        with penstock.connect(daemon.urls[name], transport=transport) as connection:
            assert connection.classes == classes


class Source(list[int]):
    def __init__(self, classes: Any) -> None:
        super().__init__(range(8))
        self.classes = classes


class Failing(Source):
    def __init__(self) -> None:
        super(Source, self).__init__(range(8))

    @property
    def classes(self) -> Any:
        raise OSError("the list of classes is gone")


def test_without_a_daemon_too() -> None:
    with penstock.connect(Feed(Source(["a", "b"]), batch_size=4), workers=0) as connection:
        assert connection.classes == ("a", "b")
        assert len(list(connection.batches())) == 2


@pytest.mark.parametrize(
    "source",
    [
        Source(None),
        Source(["a", 3]),
        Source(3),
        Source({"column": [1, 2]}),
        Source([]),
        Source([f"class {number:09}" for number in range(1200)]),
        Source(["not \udcff UTF-8"]),
        Failing(),
        lambda split: iter(split),
    ],
    ids=["none", "mixed", "number", "numbers", "empty", "long", "bytes", "failing", "generator"],
)
def test_what_is_no_list_of_names_or_too_long_is_left_out(source: Any) -> None:
    assert classes_of(source) == ()


def test_a_thousand_classes_are_told() -> None:
    names = tuple(f"n{number:08}" for number in range(1000))
    with penstock.connect(Feed(Source(names), batch_size=4), workers=0) as connection:
        assert connection.classes == names
