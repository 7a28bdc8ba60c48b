"""The activity page shows what a worker is doing, at any moment and after its death."""

from __future__ import annotations

import faulthandler
import mmap
import os
import re
import struct
import time

import numpy as np
import pytest

from penstock_server.worker_state import activity
from penstock_server.worker_state.activity import MAX_TEXT, NBYTES, ActivityPage, call, read, spent, where


def test_a_page_says_how_long_the_present_call_has_lasted_whatever_ticks() -> None:
    memory = bytearray(NBYTES)
    page = ActivityPage(memory, ticks=True)
    assert call(memory) == (-1, 0.0)
    page.works_on(3)
    assert call(memory) == (3, 0.0)
    page.enter(3, 5, "'a.h5'")
    time.sleep(0.02)
    page.tick()
    run, seconds = call(memory)
    assert run == 3
    assert 0.02 <= seconds < 60
    page.leave()
    assert call(memory) == (3, 0.0)
    page.works_on(-1)
    assert call(memory) == (-1, 0.0)


def test_a_page_says_what_was_entered_until_it_is_left() -> None:
    memory = bytearray(NBYTES)
    page = ActivityPage(memory)
    assert read(memory) is None
    page.importing("importing feeds:feed")
    activity = read(memory)
    assert activity is not None
    assert (activity.run, activity.number, activity.split, activity.in_user_code) == (
        -1,
        -1,
        "importing feeds:feed",
        False,
    )
    page.enter(3, 5, "'a.h5'", 100)
    activity = read(memory)
    assert activity is not None
    assert (activity.run, activity.number, activity.split, activity.samples) == (3, 5, "'a.h5'", 100)
    assert activity.in_user_code
    assert 0 <= activity.since_seconds < 60
    page.leave()
    activity = read(memory)
    assert activity is not None
    assert (activity.run, activity.number, activity.split, activity.in_user_code) == (3, 5, "'a.h5'", False)


def test_a_page_tells_who_waits_from_who_works_and_what_ended_from_what_goes_on() -> None:
    memory = bytearray(NBYTES)
    page = ActivityPage(memory)
    page.ready()

    def waits() -> bool:
        activity = read(memory)
        return activity is not None and activity.waits

    seen: list[bool] = []
    page.enter(3, 5, "a")
    assert not waits()
    page.leave()
    time.sleep(0.05)
    began = time.monotonic()
    page.idle(lambda: seen.append(waits()))
    assert seen == [True]
    assert not waits()
    activity = read(memory)
    assert activity is not None
    assert activity.since_seconds <= time.monotonic() - began, "it has just begun to work again"


def test_a_page_keeps_what_closed_the_connection() -> None:
    memory = bytearray(NBYTES)
    page = ActivityPage(memory)
    page.importing("importing feeds:feed")
    page.cut_off()
    activity = read(memory)
    assert activity is not None
    assert (activity.cut_off, activity.in_user_code) == (True, False)
    page.enter(3, 5, "a")
    page.cut_off()
    activity = read(memory)
    assert activity is not None
    assert (activity.run, activity.number, activity.cut_off, activity.in_user_code) == (3, 5, True, True)


def test_a_page_that_was_detached_is_written_no_longer() -> None:
    memory = bytearray(NBYTES)
    page = ActivityPage(memory)
    page.enter(3, 5, "a")
    before = bytes(memory)
    page.detach()
    page.leave()
    page.enter(4, 6, "b")
    page.tick()
    assert bytes(memory) == before


def test_samples_are_counted_when_asked_for() -> None:
    memory = bytearray(NBYTES)
    page = ActivityPage(memory, ticks=True)
    page.enter(1, 2, "a", 10)
    samples = page.counting(iter("abc"))
    assert next(samples) == "a"
    assert next(samples) == "b"
    assert next(page.beating(iter("c"))) == "c"
    activity = read(memory)
    assert activity is not None
    assert (activity.samples, activity.in_user_code) == (12, True)
    plain = iter("abc")
    assert ActivityPage().counting(plain) is plain
    assert ActivityPage().beating(plain) is plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [("ä" * 200, "ä" * 128), ("x" + "ä" * 200, "x" + "ä" * 127), ("", ""), ("file\udcff", "file\\udcff")],
)
def test_any_text_can_show_a_split(text: str, shown: str) -> None:
    memory = bytearray(NBYTES)
    ActivityPage(memory).enter(1, 1, text)
    activity = read(memory)
    assert activity is not None
    assert activity.split == shown
    assert len(activity.split.encode()) <= MAX_TEXT


def test_a_page_adds_up_idle_time_and_time_in_user_code() -> None:
    memory = bytearray(NBYTES)
    page = ActivityPage(memory)
    page.enter(1, 1, "looked at before it is ready")
    page.leave()
    assert spent(memory) is None
    page.ready()
    page.idle(lambda: time.sleep(0.02))
    first = spent(memory)
    assert first is not None
    assert first.idle_seconds >= 0.02 > first.user_seconds == 0
    page.enter(1, 1, "a")
    time.sleep(0.02)
    during = spent(memory)  # also while user code runs, for however long
    assert during is not None
    assert during.user_seconds >= 0.02
    page.leave(copying=5_000_000)
    after = spent(memory)
    assert after is not None
    assert 0.015 <= after.user_seconds <= after.seconds - after.idle_seconds
    page.enter(1, 1, "a")
    page.leave(copying=5_000_000)  # an estimate, and more than it took
    assert spent(memory) is not None
    assert after.user_seconds == spent(memory).user_seconds  # type: ignore[union-attr]
    seen: list[float] = []
    page.idle(lambda: (time.sleep(0.01), seen.append(spent(memory).idle_seconds)))  # type: ignore[union-attr]
    assert seen[0] >= after.idle_seconds + 0.01


def test_a_shorter_text_leaves_nothing_of_a_longer_one() -> None:
    memory = bytearray(NBYTES)
    page = ActivityPage(memory)
    for text in ("longer", "short", "short", "longer still"):
        page.enter(1, 1, text)
        activity = read(memory)
        assert activity is not None
        assert activity.split == text


def test_a_page_whose_writer_died_while_it_wrote_says_nothing() -> None:
    memory = bytearray(NBYTES)
    ActivityPage(memory).enter(1, 1, "a")
    memory[:8] = struct.pack("=q", 3)
    assert read(memory) is None


def test_any_bytes_can_be_read() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        memory = bytearray(rng.bytes(NBYTES))
        memory[0] &= 0xFE
        activity = read(memory)
        assert activity is not None
        assert activity.since_seconds >= 0


def test_a_page_is_shared_by_its_fd() -> None:
    fd = os.memfd_create("penstock-activity")
    os.ftruncate(fd, NBYTES)
    reader = mmap.mmap(fd, NBYTES, prot=mmap.PROT_READ)
    page = ActivityPage.inherited(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    page.enter(7, 0, "split")
    activity = read(reader)
    assert activity is not None
    assert activity.run == 7
    reader.close()


DUMP = b"""Stack (most recent call first):
  File "/usr/lib/elsewhere.py", line 3 in first
Stack (most recent call first):
  File "%(numpy)s", line 4242 in svd
  File "/home/me/my scenes.py", line 12 in augment
  File "/home/me/my scenes.py", line 40 in <genexpr>
  File "%(ours)s", line 50 in fill
  File "<frozen runpy>", line 88 in _run_code
"""
PATHS = {b"numpy": np.__file__.encode(), b"ours": where.__code__.co_filename.encode()}


def test_where_a_worker_stands_is_the_innermost_frame_of_the_users() -> None:
    assert where(DUMP % PATHS) == "/home/me/my scenes.py:12 in augment"
    ours_only = re.sub(rb"  File \"/home.*\n", b"", DUMP % PATHS)
    assert where(ours_only) == f"{np.__file__}:4242 in svd"
    assert where(b"") == where(b"Stack (most recent call first):\n") == where(b"\xff") == ""


def test_where_reads_what_faulthandler_writes() -> None:
    fd = os.memfd_create("penstock-dump")
    try:
        faulthandler.dump_traceback(fd, all_threads=False)
        dump = os.pread(fd, 1 << 16, 0)
    finally:
        os.close(fd)
    line = test_where_reads_what_faulthandler_writes.__code__.co_firstlineno + 3
    assert where(dump) == f"{__file__}:{line} in test_where_reads_what_faulthandler_writes"


def test_what_user_code_did_is_looked_at_before_the_page_shows_another_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the calls are: what the look finds is blamed on the split that the page shows."""
    monkeypatch.setattr(activity, "LOOK_NS", 10**10)  # all calls are short
    page = bytearray(NBYTES)
    shown: list[str] = []
    writer = ActivityPage(page)
    writer.on_leave = lambda: shown.append(read(page).split)  # type: ignore[union-attr]
    for split in ("a", "a", "a", "b", "b", "c"):
        writer.enter(1, 0, split)
        writer.leave()
    assert shown == ["a", "a", "b"], "after the first call, and before the page shows b and c"
