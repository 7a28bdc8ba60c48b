"""Files are paths, patterns and URLs; URLs are opened by obstore, in the worker."""

from __future__ import annotations

import functools
import http.server
import io
import os
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock
from penstock_proto import distribution
from penstock_server import Feed, VarLen
from penstock_server.sources import files as fs
from penstock_server.sources.tfrecord import example
from tests.conftest import Daemon, Serve

IDS = np.arange(500)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files of a folder, and ranges of them."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        self.send_response(206 if wanted else 200)
        if wanted:
            start, stop = int(wanted[1]), min(len(data), int(wanted[2] or len(data)) + 1)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            data = data[start:stop]
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a server of these files."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("ids", data=IDS, chunks=(50,), compression="gzip")
    np.save(tmp_path / "a.npy", IDS)
    np.savez_compressed(tmp_path / "a.npz", ids=IDS)
    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_files_are_read_from_a_web_server(server: str, serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    daemon = serve(
        f"""
        from penstock_server import Feed
        options = {{"batch_size": 50, "lanes": 1}}
        h5 = Feed.from_hdf5("{server}/a.h5", "ids", **options)
        npy = Feed.from_numpy("{server}/a.npy", **options)
        npz = Feed.from_numpy("{server}/a.npz", "ids", **options)
        """,
        *["h5", "npy", "npz"],
        workers=2,
        file_cache=tmp_path / "cache",
    )
    for name, url in daemon.urls.items():
        with penstock.connect(url) as connection:
            assert np.concatenate(list(connection.batches())).tolist() == IDS.tolist(), name


def test_a_cached_file_is_fetched_once(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    fetched: list[str] = []

    def note(self: Handler, *_: Any) -> None:
        if self.headers["Range"] != "bytes=0-0":  # which asks for the size and the time of the last change
            fetched.append(self.path)

    monkeypatch.setattr(Handler, "log_message", note)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in IDS[:60]:
            data = str(number).encode()
            info = tarfile.TarInfo(f"{number:04}.cls")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    words = ["--leaf", "cls", "--batch-size", "20", "--cache", "cache", "--bind", "tcp://127.0.0.1:0"]
    words += ["--file-cache-size", "0", "--file-cache", str(tmp_path / "files")]
    command = [sys.executable, "-m", "penstock_server", "serve", f"{server}/a.tar", *words]
    for run in range(2):
        daemon = Daemon(command, tmp_path, tmp_path / "log", {**os.environ})
        try:
            daemon.wait_ready(1)
            with penstock.connect(daemon.url) as connection:
                for _ in range(2):
                    assert np.concatenate(list(connection.batches())).tolist() == IDS[:60].tolist()
        finally:
            daemon.stop()
        assert bool(fetched) == (run == 0)
        fetched.clear()


def test_file_urls_need_no_package(server: str, tmp_path: Path) -> None:
    feed = Feed.from_numpy(f"file://{tmp_path}/*.npy", batch_size=1)
    assert [int(i) for split in feed.splits() for i in feed.generate(split)] == IDS.tolist()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("{server}/nothing.h5", "FileNotFoundError: {server}/nothing.h5: no such file (404): correct the name"),
        ("http://127.0.0.1:9/a.h5", "OSError: http://127.0.0.1:9/a.h5: it cannot be read (Connection refused)"),
    ],
)
def test_a_url_that_cannot_be_reached_is_named(server: str, url: str, message: str) -> None:
    pytest.importorskip("obstore")
    command = [sys.executable, "-m", "penstock_server", "serve", url.format(server=server), "--leaf", "x"]
    command += ["--batch-size", "1", "--workers", "1", "--bind", "tcp://127.0.0.1:0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert message.format(server=server) in found.stderr


@pytest.mark.parametrize(
    ("package", "extra", "code", "message"),
    [
        ("obstore", "urls", "files.size_of('s3://a/b')", "s3://a/b is a URL, which needs obstore"),
        (
            "google.protobuf",
            "tfrecord",
            "list(Feed.from_tfrecord('a', {'x': VarLen('int64')}, batch_size=1).generate(None))",
            "TFRecord files need protobuf",
        ),
        (
            "pyarrow",
            "parquet",
            "Feed.from_parquet(__file__, 'x', batch_size=1).splits()",
            "Parquet files need pyarrow",
        ),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str, extra: str, code: str, message: str
) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    example.example_class.cache_clear()
    with pytest.raises(ImportError) as raised:
        eval(code, {"files": fs, "Feed": Feed, "VarLen": VarLen, "__file__": __file__})
    assert str(raised.value) == f"{message}: {distribution.pip_install(extra)}"


def test_patterns_match_files_sorted_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.h5", "b/1.h5", "a/3.h5", "odd[1].h5"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    assert fs.expand(["b/*.h5", "a/3.h5"]) == ["b/1.h5", "b/2.h5", "a/3.h5"], "the list keeps its order"
    assert fs.expand(["**/[12].h5"]) == ["b/1.h5", "b/2.h5"]
    assert fs.expand(["odd[1].h5"]) == ["odd[1].h5"], "a file of exactly this name"
    with pytest.raises(FileNotFoundError, match=rf"no file matches c/\*.h5 in {tmp_path}"):
        fs.expand(["c/*.h5"])
