"""The messages for wrong URLs."""

from __future__ import annotations

import pytest

import penstock
from penstock._transport.address import is_private, parse
from penstock_proto.transport.urls import Address


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h:1/f", "has the scheme 'http'"),
        ("tcp://h/f", "names no port"),
        ("tcp://[::1]/f", "names no port"),
        ("tcp://:1/f", "names no host"),
        ("tcp://::1:5555/f", "names no host"),
        ("tcp://h:x/f", "has the port 'x'"),
        ("tcp://h:70000/f", "has the port '70000'"),
        ("tcp://h:1/a/b", "such as tcp://127.0.0.1:5555/train, got 'tcp://h:1/a/b'"),
        ("tcp://h:1/f?token=abc", "'tcp://h:1/f?...': such a URL takes no query"),
        ("tcp://h:1?token=abc", "'tcp://h:1?...': such a URL takes no query"),
        ("tcp://user:secret@h:1/f", "'tcp://...@h:1/f': such a URL takes no user name and no password"),
        ("http://user:secret@h:1/f", "'http://...@h:1/f' has the scheme 'http'"),
        ("user:secret@h:1", "looks like an address without tcp://"),
        ("tcp://h:1", "names no feed: write tcp://h:1/FEED"),
        ("tcp://h:1/", "`penstock status tcp://h:1` lists the feeds"),
        ("scenes.py", "which feed in it? Write scenes.py:ATTR"),
        ("scenes", "neither a URL nor MODULE:ATTR"),
        (":feed", "neither a URL nor MODULE:ATTR"),
    ],
)
def test_each_wrong_url_has_its_own_sentence(url: str, says: str) -> None:
    with pytest.raises(penstock.StartError) as caught:
        penstock.connect(url)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("tcp://loader:5555/train", Address("loader", 5555, "train")),
        ("tcp://10.0.0.1:1/a-b.c", Address("10.0.0.1", 1, "a-b.c")),
        ("tcp://[fe80::1%eth0]:80/x", Address("[fe80::1%eth0]", 80, "x")),
    ],
)
def test_a_url_reads_back_as_it_was_written(url: str, address: Address) -> None:
    assert parse(url) == address
    assert str(address) == url


def test_module_and_attribute_name_a_private_feed() -> None:
    assert is_private("scenes.py:feed")
    assert is_private("package.scenes:feed")
    assert not is_private("tcp://loader:5555/train")
