"""Reads feeds in every way in which their streams must be the same: with 0, 1 and 3 workers, with remote workers only,
over both transports, through SIGKILLs, and from states."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import penstock
from tests.conftest import Join, Serve, kill
from tests.reference.one_stream import digests

ENDLESS_BATCHES = 60
"""The number of batches to read from an endless feed."""

_numbers = count()


def two_epochs(connection: penstock.Connection) -> list[Any]:
    """Return the batches of two epochs, or the first batches of an endless feed."""
    if connection.info.endless:
        return list(islice(connection.batches(), ENDLESS_BATCHES))
    return [batch for _ in range(2) for batch in connection.batches()]


def read_every_way(serve: Serve, join: Join, source: str, names: Sequence[str]) -> dict[str, list[Any]]:
    """Check that each stream is the same however it is read. Return the batches of two epochs by feed name."""
    streams, expected = {}, {}
    one = serve(source, *names, workers=1)
    for name in names:
        with penstock.connect(one.urls[name], transport="local") as connection:
            streams[name] = two_epochs(connection)
            expected[name] = digests(streams[name])
    assert one.stop() == 0

    three, states = serve(source, *names, workers=3), {}
    for number, name in enumerate(names):
        transport = ("tcp", "local")[number % 2]
        with penstock.connect(three.urls[name], transport=transport) as connection:
            batches = connection.batches()
            seen = digests(islice(batches, 3))
            kill(three.workers()[: 1 + number % 3])
            seen += digests(islice(batches, 2))
            states[name] = connection.state_dict()
            del batches
        with penstock.connect(three.urls[name], transport="tcp", state=states[name]) as connection:
            seen += digests(islice(two_epochs(connection), len(expected[name]) - 5))
            assert seen == expected[name], f"{name}: 3 workers, {transport}, killed and resumed"
    assert "please report this as a bug" not in three.stderr(), three.stderr()
    assert "a different first sample" not in three.stderr(), three.stderr()
    assert three.stop() == 0

    head = serve(source, *names, workers=0)
    lost, stays = (join(head, *names, folder=one.folder, working=False) for _ in range(2))
    for host in (lost, stays):
        host.wait_working()
    for number, name in enumerate(names):
        with penstock.connect(head.urls[name], transport=("tcp", "local")[number % 2]) as connection:
            batches = connection.batches()
            seen = digests(islice(batches, 3))
            if number == 0:
                lost.process.kill()
            del batches
            with penstock.connect(head.urls[name], state=connection.state_dict()) as resumed:
                seen += digests(islice(two_epochs(resumed), len(expected[name]) - 3))
            assert seen == expected[name], f"{name}: workers of other hosts only, and one host lost"
    assert "please report this as a bug" not in head.stderr(), head.stderr()
    assert head.stop() == 0
    assert stays.wait_ended() == 0, stays.log()

    # It gets a new name, because a module that was imported under the old name would not be imported again.
    module = shutil.copy(one.folder / "feeds.py", one.folder / f"feeds_{next(_numbers)}.py")
    for name in names:
        target = f"{module}:{name}"
        with penstock.connect(target, workers=0) as connection:
            assert digests(two_epochs(connection)) == expected[name], f"{name}: without workers"
        with penstock.connect(target, workers=0, state=states[name]) as connection:
            rest = digests(islice(two_epochs(connection), len(expected[name]) - 5))
            assert rest == expected[name][5:], f"{name}: without workers, resumed"
    return streams
