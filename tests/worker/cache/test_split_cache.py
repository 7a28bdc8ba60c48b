"""The files of cached splits: whole or absent, one writer each, and only what was written is ever served."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_proto.messages import CacheUsed
from penstock_server.worker.batch.shares import Share
from penstock_server.worker.cache import split_cache
from penstock_server.worker.cache.cached_samples import CachedSamples, RecordedSamples, UnreadableSample
from penstock_server.worker.cache.split_cache import SplitCache


@pytest.fixture
def cache(tmp_path: Path) -> SplitCache:
    return SplitCache(str(tmp_path / "feed-1"))


def write(cache: SplitCache, split: Any, samples: Any) -> None:
    writer = cache.writer(cache.key_of(split))
    assert writer is not None
    for _ in RecordedSamples(iter(samples), writer, lambda: True):
        pass


def read(cache: SplitCache, split: Any) -> list[Any] | None:
    found = cache.find(cache.key_of(split))
    return None if found is None else list(CachedSamples(found, "file"))


def files(cache: SplitCache, tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("feed-1/*"))


def said(cache: SplitCache) -> CacheUsed:
    return cache.counters.take("feed") or CacheUsed("feed")


SAMPLES: list[Any] = [
    {"image": np.arange(5000, dtype="u1").reshape(50, 100), "label": 3, "name": "zwölf", "raw": b"\0" * 3000},
    (1, 2.5, None, True, "", b"", [], {}, {"deep": ({"er": np.float32(2)},)}),
    np.arange(4000.0)[::2],
    np.asfortranarray(np.arange(6000).reshape(2, 3000)),
    np.arange(6000).reshape(10, 20, 30).transpose(2, 0, 1),
    np.zeros((0, 5)),
    np.array(["a", "bc", None], object),
    np.array([b"a\0", b"b"]),
    np.array(7),
    bytearray(b"x" * 2000),
    np.zeros(1000, [("a", "i4"), ("b", "f8", 3)]),
    np.arange(3_000_000, dtype="f4"),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        kept = one.flags.writeable, one.dtype, one.shape
        return kept == (other.flags.writeable, other.dtype, other.shape) and bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_samples_come_back_as_they_were(cache: SplitCache) -> None:
    read_only = np.arange(1000)
    read_only.flags.writeable = False
    for split, samples in enumerate(([*SAMPLES, read_only], [], [1], [None])):
        write(cache, split, samples)
        found = read(cache, split)
        assert found is not None
        assert same(samples, found)


def test_large_arrays_lie_in_the_file_at_multiples_of_64_bytes(cache: SplitCache) -> None:
    write(cache, 0, [{"x": np.arange(2000, dtype="u1"), "y": np.arange(999.0)} for _ in range(5)])
    for sample in read(cache, 0) or []:
        for array in sample.values():
            assert array.ctypes.data % 64 == 0
            assert not array.flags.owndata


def test_arrays_may_be_changed_in_place_and_the_file_stays_as_it_is(cache: SplitCache, tmp_path: Path) -> None:
    write(cache, 0, [np.zeros(1000) for _ in range(3)])
    (file,) = files(cache, tmp_path)
    before = file.read_bytes()
    for sample in read(cache, 0) or []:
        sample += 5
    assert file.read_bytes() == before
    assert all((sample == 0).all() for sample in read(cache, 0) or [])


def test_samples_outlive_the_file(cache: SplitCache, tmp_path: Path) -> None:
    write(cache, 0, [np.arange(1000)])
    (sample,) = read(cache, 0) or []
    files(cache, tmp_path)[0].unlink()
    assert (sample == np.arange(1000)).all()


def test_a_file_that_is_not_whole_is_never_served_and_is_written_again(cache: SplitCache, tmp_path: Path) -> None:
    samples = [np.arange(2000), "text"] * 3
    write(cache, 0, samples)
    (file,) = files(cache, tmp_path)
    whole = file.read_bytes()
    damaged = [whole[:length] for length in (0, 1, 63, 127, 128, 1000, len(whole) - 1)]
    damaged += [whole + b"\0", b"\0" * len(whole), os.urandom(len(whole)), whole[:-1] + bytes([whole[-1] ^ 1])]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(72)]
    for data in damaged:
        file.write_bytes(data)
        assert read(cache, 0) is None
    write(cache, 0, samples)
    assert file.read_bytes() == whole


def test_the_file_of_another_split_is_never_served(cache: SplitCache, tmp_path: Path) -> None:
    write(cache, 0, [0])
    (file,) = files(cache, tmp_path)
    write(cache, 1, [1])
    (other,) = set(files(cache, tmp_path)) - {file}
    other.rename(file)
    assert read(cache, 0) is None


def test_a_split_that_is_not_read_to_its_end_leaves_nothing(cache: SplitCache, tmp_path: Path) -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        write(cache, 0, failing())
    assert files(cache, tmp_path) == []
    writer = cache.writer(cache.key_of(0))
    assert writer is not None
    samples = RecordedSamples(iter([1, 2]), writer, lambda: True)
    next(samples)
    assert read(cache, 0) is None
    samples.close()
    assert files(cache, tmp_path) == []


def test_one_writes_a_split_and_others_do_not(cache: SplitCache, tmp_path: Path) -> None:
    key = cache.key_of(0)
    writer = cache.writer(key)
    assert writer is not None
    assert cache.writer(key) is None
    assert SplitCache(str(tmp_path / "feed-1")).writer(key) is None
    other = cache.writer(cache.key_of(1))
    assert other is not None
    other.abandon()
    writer.add("x")
    writer.finish()
    assert read(cache, 0) == ["x"]
    assert said(cache) == CacheUsed("feed", written=1, nbytes=files(cache, tmp_path)[0].stat().st_size)


KILLED = """
import sys, time
from penstock_server.worker.cache.split_cache import SplitCache
cache = SplitCache(sys.argv[1])
writer = cache.writer(cache.key_of(0))
for i in range(10):
    writer.add(bytes(1 << 20))
print("writing", flush=True)
time.sleep(60)
"""


def test_what_a_killed_writer_left_is_taken_over_or_removed(cache: SplitCache, tmp_path: Path) -> None:
    for takes_over in (True, False):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "feed-1")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert cache.writer(cache.key_of(0)) is None
            cache.tidy()
            (left,) = [file for file in files(cache, tmp_path) if file.suffix == ".writing"]
            process.send_signal(signal.SIGKILL)
        assert left.stat().st_size >= 9 << 20
        if takes_over:
            write(cache, 0, ["mine"])
            assert read(cache, 0) == ["mine"]
        else:
            cache.tidy()
        assert [file.suffix for file in files(cache, tmp_path)] == [".split"]


def test_what_another_host_writes_is_left_alone_for_a_day(cache: SplitCache, tmp_path: Path) -> None:
    write(cache, 0, ["x"])
    left = tmp_path / "feed-1" / "ab.01234567.writing"
    left.write_bytes(b"")
    cache.tidy()
    assert left.exists()
    os.utime(left, (0, time.time() - 100_000))
    cache.tidy()
    assert not left.exists()
    assert said(cache).stored == files(cache, tmp_path)[0].stat().st_size


def test_writers_that_race_leave_a_whole_file(cache: SplitCache, tmp_path: Path) -> None:
    samples = [np.full(3000, i) for i in range(50)]

    def race() -> None:
        mine = SplitCache(str(tmp_path / "feed-1"))
        for split in range(20):
            writer = mine.writer(mine.key_of(split))
            if writer is not None:
                list(RecordedSamples(iter(samples), writer, lambda: True))

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for split in range(20):
        assert same(read(cache, split), samples)
    assert len(files(cache, tmp_path)) == 20


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_each_writer_has_a_file_of_its_own(
    cache: SplitCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    writers = [cache.writer(cache.key_of(0)) for _ in range(2)]
    for number, writer in enumerate(writers):
        assert writer is not None
        writer.add(number)
    for number, writer in enumerate(writers):
        assert writer is not None
        writer.finish()
        assert read(cache, 0) == [number]
    assert len(files(cache, tmp_path)) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "rename", "open", "makedirs", "close"])
def test_a_disk_that_cannot_be_written_costs_only_the_cache(
    cache: SplitCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    real, failed = getattr(os, call), []

    def fail(*arguments: Any, **options: Any) -> Any:
        if failed or (call == "close" and sys._getframe(1).f_code.co_name != "finish"):
            return real(*arguments, **options)
        failed.append(call)
        if call == "close":
            real(*arguments)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    writer = cache.writer(cache.key_of(0))
    if writer is not None:
        samples = RecordedSamples(iter([bytes(1 << 20)] * 3), writer, lambda: True)
        assert [len(sample) for sample in samples] == [1 << 20] * 3
        samples.close()
    assert failed
    assert files(cache, tmp_path) == []
    assert said(cache) == CacheUsed("feed", problem=f"not written: {os.strerror(code)}")
    assert cache.writer(cache.key_of(1)) is None  # paused for a while
    monkeypatch.setattr(split_cache, "PAUSE", 0.0)
    cache.on_write_failed(OSError(code, ""))
    write(cache, 0, ["x"])
    assert read(cache, 0) == ["x"]
    assert said(cache).problem == ""


def test_a_file_that_cannot_be_read_is_absent_and_says_why(
    cache: SplitCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cache, 0, ["x"])
    said(cache)

    def no_memory(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", no_memory)
    assert read(cache, 0) is None
    assert said(cache).problem == "not read: Cannot allocate memory"


def test_a_sample_that_cannot_be_pickled_is_not_cached(cache: SplitCache, tmp_path: Path) -> None:
    write(cache, 0, [1, threading.Lock(), 2])
    assert read(cache, 0) is None
    assert files(cache, tmp_path) == []
    assert "not written: a sample cannot be pickled (TypeError: " in said(cache).problem


class Gone:
    """A class that its module forgets."""


def test_a_sample_whose_class_is_gone_is_an_error_that_says_what_to_do(
    cache: SplitCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cache, 0, [1, Gone()])
    monkeypatch.delattr(sys.modules[__name__], "Gone")
    with pytest.raises(UnreadableSample) as raised:
        read(cache, 0)
    error = raised.value.user_error("0")
    assert "sample 1 of file in the cache cannot be unpickled (AttributeError" in error.message
    assert "give another version, cache=Cache(..., version=)" in error.message


@pytest.mark.parametrize("stretch", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_share_is_read_and_sought_in_as_it_was_dealt(cache: SplitCache, stretch: int, count: int) -> None:
    for samples in (0, 1, 7, 23, 30):
        write(cache, samples, range(samples))
        found = cache.find(cache.key_of(samples))
        assert found is not None
        for index in range(count):
            share = Share(index, count, stretch)
            expected = list(share.of(iter(range(samples))))
            assert list(CachedSamples(found, "file", share)) == expected
            assert share.size_of(samples) == len(expected)
            for place in range(len(expected) + 2):
                reader = CachedSamples(found, "file", share)
                assert reader.seek(place) == min(place, len(expected))
                assert list(reader) == expected[place:]


def test_a_fork_of_user_code_does_not_write_to_the_file(cache: SplitCache, tmp_path: Path) -> None:
    parent, children = os.getpid(), []
    wait, go_on = os.pipe()

    def forks() -> Iterator[bytes]:
        for number in range(5):
            if number == 2:
                children.append(os.fork())
            if os.getpid() != parent:
                os.read(wait, 1)  # until the parent is done
                number = 9
            yield bytes([number]) * (2 << 20)

    writer = cache.writer(cache.key_of(0))
    assert writer is not None
    samples = RecordedSamples(forks(), writer, lambda: True)
    try:
        found = list(samples)
    finally:
        if os.getpid() != parent:
            samples.close()
            os._exit(0)
    os.write(go_on, b"x" * 10)
    os.waitpid(children[0], 0)
    os.close(wait)
    os.close(go_on)
    assert read(cache, 0) == found == [bytes([number]) * (2 << 20) for number in range(5)]
    assert len(files(cache, tmp_path)) == 1


def test_a_split_that_is_finished_while_another_begins_stays_whole(
    cache: SplitCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, lock = cache.writer(cache.key_of(0)), fcntl.flock
    assert first is not None
    first.add("x")

    def finished_before(fd: int, how: int) -> None:
        first.finish()  # the other one has opened the file already
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", finished_before)
    assert cache.writer(cache.key_of(0)) is None
    assert read(cache, 0) == ["x"]
    assert len(files(cache, tmp_path)) == 1
