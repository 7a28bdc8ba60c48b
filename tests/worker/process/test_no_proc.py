"""Without /proc, or with parts of it hidden, streams are the same. What is missing is said."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock_server.machine import cpus, memory_limits
from penstock_server.net import local
from penstock_server.worker.process import process_guard

FEED = """
    import os
    import numpy as np
    from penstock_server import Feed

    def samples(split):
        if os.fork() == 0:  # user code that forks, as multiprocessing does
            os._exit(0)
        os.wait()
        for i in range(20):
            yield np.int64(100 * split + i)

    feed = Feed(samples, splits=range(4), batch_size=4)
"""
READ = """
    import sys
    import penstock

    if __name__ == "__main__":
        for workers in (0, 2):
            with penstock.connect("feeds.py:feed", workers=workers) as connection:
                print([batch.tolist() for batch in connection.batches()])
        from penstock_server.machine import cpus
        from penstock_server.profiling import watching
        from penstock_server.checking.observing import imports

        assert imports.open_paths() == {}
        assert imports.resident() > 1 << 20
        try:
            watching.profile("tcp://127.0.0.1:1", 1, tell=print, may_go_on=bool)
        except penstock.PenstockError as error:
            print(error)
"""
HIDDEN = ("unshare", "--mount", "--propagation", "private", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"')


def can_hide() -> bool:
    try:
        return subprocess.run([*HIDDEN, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_hide(), reason="/proc cannot be hidden here")
def test_the_stream_is_the_same_without_proc_and_the_log_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "feeds.py").write_text(textwrap.dedent(FEED))
    (tmp_path / "read.py").write_text(textwrap.dedent(READ))
    words = [*HIDDEN, sys.executable, "read.py"]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stderr
    one, other, refused = run.stdout.splitlines()
    assert one == other
    assert "penstock: /proc is hidden: each worker imports all libraries itself" in run.stderr
    assert refused == "profiling needs /proc, which is hidden here: mount it (a proc file system)"
    assert "Traceback" not in run.stderr


def test_memory_is_that_which_is_free_if_the_kernel_does_not_say_what_it_could_reclaim(tmp_path: Path) -> None:
    free = memory_limits._machine(tmp_path / "none")
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_cpus_without_statistics_count_as_idle(tmp_path: Path) -> None:
    before, after = (cpus.read(at, tmp_path, tmp_path / "none", tmp_path / "none") for at in (10.0, 12.0))
    assert cpus.idle(before, after) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("own", "admitted"), [(0, {0}), (1000, {0, 1000}), (65534, {0})])
def test_without_a_map_of_user_ids_nobody_is_not_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: int, admitted: set[int]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: own)
    assert local._users(tmp_path) == admitted


def test_our_memfds_are_found_by_their_seals_if_nobody_lists_open_files() -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    ours, theirs = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("penstock", "other"))
    try:
        fcntl.fcntl(ours, fcntl.F_ADD_SEALS, seals)
        for listing in ("/proc/self/fd", "/nowhere"):
            found = process_guard.our_memfds(listing)
            assert ours in found
            assert theirs not in found
    finally:
        os.close(ours)
        os.close(theirs)
