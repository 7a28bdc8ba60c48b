"""The advice in an error fits how the worker ended."""

from __future__ import annotations

import signal

import pytest

from penstock_server.coordinator.model.failures import deadly
from penstock_server.worker_state.activity import Activity
from penstock_server.worker_state.process_ends import CUT_OFF, advice, ended_how
from penstock_server.workers.hang_detection import stands_still
from tests.coordinator.test_coordinator_tables import PLAN


def hung(*, in_user_code: bool) -> str:
    doing = Activity(1, 1, "1", 0, 100.0, in_user_code)
    return f"{stands_still(doing, unread=0, awake=100, stopped=False, timeout=60)} and was killed"


@pytest.mark.parametrize(
    ("how", "what_to_do"),
    [
        (ended_how(-signal.SIGKILL), "If memory ran out (`dmesg` says so), fewer workers"),
        (ended_how(-signal.SIGSEGV), "A library that the feed calls crashed"),
        (ended_how(-signal.SIGABRT), "A library that the feed calls crashed"),
        (ended_how(-signal.SIGBUS), "A file that the feed maps into memory became shorter"),
        (ended_how(-signal.SIGTERM), "Another program sent it this signal"),
        (ended_how(-60), "Another program sent it this signal"),
        (ended_how(3), "Code that the feed calls ended the process"),
        (hung(in_user_code=True), "If a sample may take that long, give --hang-timeout more seconds"),
        (hung(in_user_code=False), ""),
        (ended_how(None), ""),
        (CUT_OFF, ""),
    ],
)
def test_what_to_do_fits_how_the_worker_ended(how: str, what_to_do: str) -> None:
    message = deadly(PLAN, 0, 1, 3, how, 2, "'b.h5'").message
    assert message.startswith("a split ended its worker process 3 times in epoch 0, the last time it ")
    assert f"{how}. {what_to_do}" in message
    assert "memory ran out" not in message or "SIGKILL" in message
    assert message.endswith('Feed(on_error="skip") leaves such splits out')
    assert advice(how).startswith(f". {what_to_do}" if what_to_do else "")
    assert advice(how) or not what_to_do
