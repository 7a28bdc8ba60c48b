"""The file cache never holds more than its bound, and never gives a block that was not written as a whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock_server.sources.remote import file_cache
from penstock_server.sources.remote.file_cache import BLOCK, Entry, FileCache


def kept(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.glob("*.blocks"))


def filled(cache: FileCache, name: str, blocks: int) -> Entry:
    entry = cache.entry(name, "stamp", blocks * BLOCK)
    assert all(entry.put(block, os.urandom(BLOCK)) for block in range(blocks))
    return entry


def test_the_files_that_were_not_read_for_longest_are_removed(tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path), 10 * BLOCK + (1 << 18))
    for number, name in enumerate("abc"):
        filled(cache, name, 3).close()
        for file in tmp_path.glob("*.blocks"):
            os.utime(file, (number, number)) if file.stat().st_mtime > 1000 else None
    cache.entry("a", "stamp", 3 * BLOCK).close()
    filled(cache, "d", 3).close()
    assert kept(tmp_path) <= cache.size
    there = {name: cache.entry(name, "stamp", 3 * BLOCK) for name in "abcd"}
    assert {name: entry.has(0) for name, entry in there.items()} == {"a": True, "b": False, "c": True, "d": True}
    for entry in there.values():
        entry.close()


def test_a_file_that_is_open_is_not_removed(tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path), 4 * BLOCK + (1 << 18))
    entry = filled(cache, "a", 4)
    other = FileCache(str(tmp_path), cache.size).entry("b", "stamp", BLOCK)  # as another process has it
    assert not other.put(0, bytes(BLOCK))
    assert entry.missing(0, 4) == (4, 4)
    entry.close()
    other.cache._paused_until = 0
    assert other.put(0, bytes(BLOCK))
    assert kept(tmp_path) <= cache.size
    other.close()


def test_what_is_there_counts_after_a_restart(tmp_path: Path) -> None:
    filled(FileCache(str(tmp_path), 100 * BLOCK), "a", 6).close()
    (tmp_path / "usage").unlink()
    assert 6 * BLOCK <= FileCache(str(tmp_path), 100 * BLOCK)._used() <= 7 * BLOCK
    FileCache(str(tmp_path), 4 * BLOCK)
    assert kept(tmp_path) <= 4 * BLOCK


def test_blocks_of_an_earlier_kernel_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(FileCache(str(tmp_path), 100 * BLOCK), "a", 2).close()
    monkeypatch.setattr(file_cache, "_boot", lambda: "another")
    cache = FileCache(str(tmp_path), 100 * BLOCK)
    entry = cache.entry("a", "stamp", 2 * BLOCK)
    assert entry.missing(0, 2) == (0, 2)
    assert len([*tmp_path.glob("*.blocks")]) == 1, "the earlier ones are removed"
    entry.close()


def test_a_full_disk_keeps_nothing_and_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = FileCache(str(tmp_path), 100 * BLOCK).entry("a", "stamp", 2 * BLOCK)

    def full(fd: int, data: bytes, at: int) -> int:
        if len(data) > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, at)

    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    assert not entry.put(0, bytes(BLOCK))
    assert not entry.has(0)
    entry.close()


def test_two_readers_do_not_fetch_the_same_block(tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path), 100 * BLOCK)
    first, second = (cache.entry("a", "stamp", 4 * BLOCK) for _ in range(2))
    assert first.lock(0, 2)
    assert not second.lock(1, 3)
    assert second.lock(2, 4)
    first.again().close()
    assert not second.lock(0, 1), "closing another descriptor of the file gives no lock back"
    first.unlock(0, 2)
    assert second.lock(0, 1)
    first.close()
    second.close()


def test_the_default_folder_is_not_one_that_others_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_cache.choose(None, None)
    monkeypatch.delenv("PENSTOCK_FILE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(file_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    assert file_cache.the_cache().directory == f"{tmp_path}/home/penstock/files"
    for planted in (tmp_path / "home" / "penstock", tmp_path / f"penstock-{os.getuid()}"):
        planted.mkdir(exist_ok=True)
        planted.chmod(0o777)
    file_cache.choose(None, None)
    with pytest.raises(OSError, match=r"which cannot be written [(]another user can write to it[)]"):
        file_cache.the_cache()
    file_cache.choose(None, None)


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("0", 0), ("200G", 200 << 30), ("1.5 MiB", 3 << 19), ("12kb", 12 << 10)]
)
def test_the_variable_of_its_size_takes_what_the_option_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, size: int
) -> None:
    file_cache.choose(str(tmp_path), None)
    monkeypatch.setenv("PENSTOCK_FILE_CACHE_SIZE", text)
    assert file_cache.the_cache().size == size
    file_cache.choose(None, None)


@pytest.mark.parametrize("text", ["much", "4X", "1e999G", "nanM", "-1", "-2G"])
def test_a_variable_that_is_no_size_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file_cache.choose(str(tmp_path), None)
    monkeypatch.setenv("PENSTOCK_FILE_CACHE_SIZE", text)
    with pytest.raises(OSError, match=f"variable PENSTOCK_FILE_CACHE_SIZE must be a size such as .*, got '{text}'"):
        file_cache.the_cache()
    file_cache.choose(None, None)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file_cache.choose(str(tmp_path / "file" / "cache"), None)
    with pytest.raises(OSError, match=r"which cannot be written .* choose a folder on a local disk with --file-cache"):
        file_cache.the_cache()
    file_cache.choose(None, None)
