"""Files in object stores are read as local ones are, whatever the network does. The server is moto's."""

from __future__ import annotations

import functools
import http.server
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import numpy as np
import pytest

import penstock
from penstock_server import Feed, FixedLen
from penstock_server.sources import files as fs
from penstock_server.sources import registry
from penstock_server.sources.remote import file_cache, remote_file, stores, urls
from penstock_server.sources.tfrecord.crc32c import crc32c, masked
from penstock_server.sources.tfrecord.example import example_class
from tests.conftest import Serve
from tests.sources.object_store import BUCKET, ENVIRONMENT, SECRET, Bucket, bucket_of, serving

pytest.importorskip("obstore")
MIB = 1 << 20


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of moto's server."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.raises(OSError, match="nothing"):  # obstore starts threads, which last as long as the process
        fs.size_of(f"http://{host}:{port}/nothing/at-all")
    stores._stores.clear()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No credentials but those of the test, an empty file cache, and no facts of earlier tests."""
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(stores, "FIRST_PAUSE", 0.001)
    forget()
    file_cache.choose(str(tmp_path / "file cache"), 1 << 30)
    yield
    file_cache.choose(None, None)
    forget()


def forget() -> None:
    stores._known.clear()
    stores._reached[:] = [False]
    stores._stores.clear()
    remote_file._whole_only.clear()


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with bucket_of(s3) as made:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": made.endpoint}.items():
            monkeypatch.setenv(name, value)
        yield made


def noise(nbytes: int) -> bytes:
    return np.random.default_rng(7).bytes(nbytes)


def read(url: str) -> bytes:
    with fs.open_binary(url) as opened:
        return opened.read()


def samples(feed: Feed) -> list[bytes]:
    return [pickle.dumps(one) for split in feed.splits() for one in feed.generate(split)]  # type: ignore[operator]


def written(folder: Path) -> dict[str, Any]:
    """Write files of all formats, and return what is given for them besides the files."""
    import pyarrow as pa
    from pyarrow import feather, parquet

    ids = np.arange(8000)
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("ids", data=ids, chunks=(500,), compression="gzip")
    np.save(folder / "a.npy", ids)
    np.savez_compressed(folder / "a.npz", ids=ids)
    (folder / "a.jsonl").write_text("".join(json.dumps({"id": int(i), "pad": "x" * 80}) + "\n" for i in ids))
    (folder / "a.csv").write_text("id,name\n" + "".join(f"{i},n{i}\n" for i in ids[:500]))
    with open(folder / "a.tfrecord", "wb") as records:
        for i in ids[:500]:
            feature = {"id": {"int64_list": {"value": [int(i)]}}}
            data = example_class()(features={"feature": feature}).SerializeToString()
            head = struct.pack("<Q", len(data))
            for part in (head, data):
                records.write(part + struct.pack("<I", masked(crc32c()(part))))
    table = pa.table({"ids": ids})
    parquet.write_table(table, folder / "a.parquet", row_group_size=1000)
    feather.write_feather(table, folder / "a.arrow", "uncompressed", chunksize=1000)
    with pa.ipc.new_stream(str(folder / "stream.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    for number in range(3):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for i in range(50):
                data = str(1000 * number + i).encode()
                info = tarfile.TarInfo(f"{i:03}.cls")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return {
        "a.h5": "ids",
        "a.npy": None,
        "a.npz": "ids",
        "a.jsonl": None,
        "a.csv": None,
        "a.tfrecord": {"id": FixedLen((), "int64")},
        "a.parquet": None,
        "a.arrow": None,
        "stream.arrow": None,
        "*.tar": "cls",
    }


def test_each_format_gives_the_same_splits_and_samples_as_from_local_files(bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "data").mkdir()
    formats = written(tmp_path / "data")
    bucket.put_folder(tmp_path / "data", "data/")
    for name, leaves in formats.items():
        local = Feed.from_files(f"{tmp_path}/data/{name}", leaves, batch_size=10)
        remote = Feed.from_files(f"s3://{BUCKET}/data/{name}", leaves, batch_size=10)
        if hasattr(local, "splits") and local.splits is not None:
            texts = [repr(split).replace(str(tmp_path), f"s3://{BUCKET}") for split in local.splits()]
            assert [repr(split) for split in remote.splits()] == texts, name
            assert samples(remote) == samples(local), name
        else:
            indexed = [feed.generate for feed in (local, remote)]
            assert [pickle.dumps(indexed[0][i]) for i in range(500)] == [
                pickle.dumps(indexed[1][i]) for i in range(500)
            ]
    before = bucket.fetched()
    for name, leaves in formats.items():
        feed = Feed.from_files(f"s3://{BUCKET}/data/{name}", leaves, batch_size=10)
        if feed.splits is not None:
            samples(feed)
    assert bucket.fetched() == before, "a second epoch reads the file cache"


@pytest.fixture(scope="module")
def zarr() -> Any:
    """The module, with its threads, which last as long as the process."""
    zarr = pytest.importorskip("zarr")
    zarr.config.set({"threading.max_workers": 1})
    zarr.create_array(store={}, shape=(1,), dtype="i4")[:] = 1
    return zarr


def test_zarr_stores_are_read_by_chunks(zarr: Any, bucket: Bucket, tmp_path: Path) -> None:
    store = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    store.create_array("ids", data=np.arange(1000), chunks=(100,))
    bucket.put_folder(tmp_path / "a.zarr", "x/a.zarr/")
    local = Feed.from_zarr(str(tmp_path / "a.zarr"), "ids", batch_size=10)
    remote = Feed.from_zarr(f"s3://{BUCKET}/x/a.zarr", "ids", batch_size=10)
    bucket.faults += ["503", "", "reset"]
    assert samples(remote) == samples(local)
    bucket.faults += ["403"] * 20
    with pytest.raises(PermissionError, match=rf"s3://{BUCKET}/x/a.zarr: access was denied \(403 SlowDown\): set AWS_"):
        samples(remote)


def test_a_zarr_store_on_a_web_server_needs_consolidated_metadata(zarr: Any, tmp_path: Path) -> None:
    store = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=2)
    store.create_array("ids", data=np.arange(100), chunks=(50,))
    with serving(functools.partial(WholeFiles, directory=str(tmp_path))) as server:
        url = f"{server}/a.zarr?signature={SECRET}"
        with pytest.raises(
            OSError, match=r"a\.zarr: its server does not list the arrays of the store: write "
        ) as raised:
            samples(Feed.from_zarr(url, "ids", batch_size=10))
        assert SECRET not in str(raised.value)
        zarr.consolidate_metadata(str(tmp_path / "a.zarr"))
        local = Feed.from_zarr(str(tmp_path / "a.zarr"), "ids", batch_size=10)
        assert samples(Feed.from_zarr(url, "ids", batch_size=10)) == samples(local)


def test_a_daemon_serves_the_same_stream_and_shows_no_secret(bucket: Bucket, tmp_path: Path, serve: Serve) -> None:
    for number in range(4):
        lines = "".join(json.dumps({"x": 1000 * number + i}) + "\n" for i in range(1000))
        (tmp_path / f"{number}.jsonl").write_text(lines)
        bucket.put(f"{number}.jsonl", lines.encode())
    web = "http://user:ohsosecret@" + bucket.endpoint.removeprefix("http://")
    source = f"""
        from penstock_server import Feed
        options = dict(batch_size=32, shuffle=100, seed=3)
        local = Feed.from_json_lines("{tmp_path}/*.jsonl", **options)
        remote = Feed.from_json_lines("s3://{BUCKET}/*.jsonl", **options)
        signed = Feed.from_json_lines(
            [f"{web}/{BUCKET}/{{n}}.jsonl?X-Amz-Signature={SECRET}" for n in range(4)], **options)
    """
    cache = tmp_path / "of the workers"
    daemon = serve(source, "local", "remote", "signed", file_cache=cache, file_cache_size="100M", http=0)
    streams = []
    for name in ("local", "remote", "signed"):
        with penstock.connect(daemon.urls[name]) as connection:
            streams.append([batch["x"].tolist() for _ in range(2) for batch in connection.batches()])
    assert streams[0] == streams[1] == streams[2]
    assert [*cache.glob("*.blocks")]
    words = [sys.executable, "-m", "penstock_server", "status", daemon.urls["local"].rpartition("/")[0], "--json"]
    status = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    assert SECRET not in daemon.stderr() + status


@pytest.mark.parametrize("fault", ["reset", "truncated", "503", "500", "429", "drip"])
def test_a_request_that_fails_for_a_while_is_repeated(
    bucket: Bucket, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise(3 * MIB + 5)
    url = bucket.put("a.bin", data)
    if fault == "drip":
        monkeypatch.setattr(stores, "ONE_REQUEST", 0.5)
    bucket.faults += ["", fault, fault]
    assert read(url) == data
    assert not bucket.faults


def test_a_body_goes_on_where_it_ended(bucket: Bucket) -> None:
    data = noise(4 * MIB)
    url = bucket.put("a.bin", data)
    facts = stores.facts_of(url)
    bucket.faults += ["truncated"] * 3
    assert b"".join(stores.read(url, facts, 0, len(data))) == data
    assert bucket.fetched() < 2 * len(data)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("503", "the server is too busy, or fails (503 SlowDown) (3 attempts in 0 s): use fewer workers"),
        ("reset", "it cannot be read (Connection reset by peer) (3 attempts in 0 s): is the network up"),
        ("truncated", "it cannot be read (the answer ended early) (3 attempts in 0 s): is the network up"),
        ("403", "access was denied (403 SlowDown): set AWS_ACCESS_KEY_ID and"),
        ("400", "the request was refused (400 SlowDown): is AWS_REGION the region of the bucket?"),
        ("301", "the request was refused: is AWS_REGION the region of the bucket?"),
    ],
)
def test_a_server_that_goes_on_failing_is_named(
    bucket: Bucket, fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "ATTEMPTS", 3)
    url = bucket.put("a.bin", noise(MIB))
    stores.facts_of(url)
    bucket.faults += [fault] * 20
    with pytest.raises(OSError, match=r"a\.bin") as raised:
        read(url)
    assert str(raised.value).startswith(f"{url}: {message}")


def test_what_cannot_be_read_says_what_to_do(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ATTEMPTS", 2)
    for url, message in {
        f"s3://{BUCKET}/none": "no such file, or no such bucket (404): correct the name, or AWS_ENDPOINT_URL (http://",
        "s3:///a.h5": "the bucket is missing",
        "ftp://host/a.h5": "ftp:// is not served. These are: s3://, gs://",
        "simplecache::s3://bucket/a.h5": "write it without simplecache::",
        "hf://datasets/a/b": "write https://huggingface.co/datasets/USER/NAME/resolve/main/FILE",
        "http://127.0.0.1:9/a.h5": "it cannot be read (Connection refused) (2 attempts in 0 s): is the network up",
    }.items():
        with pytest.raises((OSError, ValueError)) as raised:
            fs.size_of(url)
        assert str(raised.value).startswith(f"{url}: {message}")
    with pytest.raises(FileNotFoundError, match=rf"no file matches s3://{BUCKET}/\*.h5: correct the pattern"):
        fs.expand([f"s3://{BUCKET}/*.h5"])
    with pytest.raises(ValueError, match="a web server has no list of its files: name them one by one"):
        fs.expand(["https://host/*.h5"])
    with pytest.raises(
        OSError, match=r"az://a/b: the store cannot be used \(.*Account must be .*\): set AZURE_STORAGE_"
    ):
        fs.size_of("az://a/b")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    stores._stores.clear()
    with pytest.raises(
        OSError, match="s3://bucket/c: AWS_ENDPOINT_URL must be a URL, such as https://HOST:PORT, got 'loc"
    ):
        fs.size_of("s3://bucket/c")
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(OSError, match="no credentials were found: set AWS_ACCESS_KEY_ID and"):
        fs.size_of(f"s3://{BUCKET}/other")
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    with pytest.raises(ImportError, match="your credentials are those of an AWS profile, which only boto3 reads"):
        fs.size_of(f"s3://{BUCKET}/other")


def test_a_profile_of_aws_is_read_where_boto3_is(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    url = bucket.put("a.bin", b"abc")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert read(url) == b"abc"
    monkeypatch.setenv("AWS_PROFILE", "other")
    stores._stores.clear()
    with pytest.raises(
        OSError, match=r"a\.bin: the AWS profile gives no credentials \(.*other.*\): correct AWS_PROFILE"
    ):
        fs.expand([url])
        fs.size_of(url)


def test_google_cloud_storage_is_read_with_its_credentials(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("a/b.bin", b"abc")
    key = {"gcs_base_url": bucket.endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
    (tmp_path / "account.json").write_text(json.dumps({**key, "private_key_id": ""}))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    monkeypatch.setattr(stores, "ATTEMPTS", 1)
    (url,) = fs.expand([f"gs://{BUCKET}/*/b.*"])
    assert (url, read(url)) == (f"gs://{BUCKET}/a/b.bin", b"abc")


def test_patterns_match_the_names_in_a_bucket(bucket: Bucket) -> None:
    for name in ("p/b.bin", "p/a.bin", "p/q/c.bin", "p/a.txt", "odd/a b+c%20d.bin"):
        bucket.put(name, b"x")
    assert fs.expand([f"s3://{BUCKET}/p/*.bin"]) == [f"s3://{BUCKET}/p/a.bin", f"s3://{BUCKET}/p/b.bin"]
    assert fs.expand([f"s3://{BUCKET}/**/c.*"]) == [f"s3://{BUCKET}/p/q/c.bin"]
    assert len(fs.expand([f"s3://{BUCKET}/p/**"])) == 4
    (odd,) = fs.expand([f"s3://{BUCKET}/odd/*"])
    assert (odd, read(odd)) == (f"s3://{BUCKET}/odd/a b+c%20d.bin", b"x")
    assert read(f"{bucket.endpoint}/{BUCKET}/{quote('odd/a b+c%20d.bin')}?X-Amz-Signature=s") == b"x"


def test_a_file_that_changes_while_it_is_served_is_named(bucket: Bucket) -> None:
    url = bucket.put("a.bin", noise(20 * MIB))
    with fs.open_binary(url) as opened:
        assert len(opened.read(10)) == 10
        before = fs.stamp_of(url)
        bucket.put("a.bin", bytes(20 * MIB))
        with pytest.raises(OSError, match=f"{url} has changed: it had 20971520 bytes and the stamp "):
            opened.read()
    assert fs.stamp_of(url) != before, "so cached splits are not served any more"
    bucket.put("a.bin", bytes(21 * MIB))
    assert fs.expand([url]) == [url]
    assert fs.size_of(url) == 21 * MIB, "an epoch begins with the files as they are"
    bucket.put("a.bin", bytes(20 * MIB))
    fs.expand([url])
    assert read(url) == bytes(20 * MIB), "no block of the earlier file"


def test_one_file_is_fetched_once_by_the_processes_of_a_host(bucket: Bucket, tmp_path: Path) -> None:
    data = noise(6 * MIB)
    url = bucket.put("a.bin", data)
    bucket.faults += ["late"] * 20
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE) for words in [reading(url, tmp_path)] * 3]
    assert [process.communicate(timeout=60)[0] for process in processes] == [b"%d\n" % sum(data)] * 3
    assert bucket.fetched() == len(data)


def test_what_a_killed_process_has_not_fetched_is_fetched_by_the_next(bucket: Bucket, tmp_path: Path) -> None:
    data = noise(3 * MIB)
    url = bucket.put("a.bin", data)
    bucket.faults += ["", "", "drip"]  # the facts, the first block, and the next ones
    process = subprocess.Popen(reading(url, tmp_path), stdout=subprocess.PIPE)
    while len(bucket.sent) < 2:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert subprocess.check_output(reading(url, tmp_path), timeout=60) == b"%d\n" % sum(data)
    assert read(url) == data


def reading(url: str, tmp_path: Path) -> list[str]:
    code = f"""
        from penstock_server.sources import files as fs
        from penstock_server.sources.remote import file_cache
        file_cache.choose({str(tmp_path / "file cache")!r}, 1 << 30)
        with fs.open_binary({url!r}) as opened:
            print(sum(opened.read()))
    """
    return [sys.executable, "-c", textwrap.dedent(code)]


@pytest.mark.parametrize("size", [0, 2 * MIB])
def test_a_cache_too_small_for_a_file_changes_only_the_time(bucket: Bucket, tmp_path: Path, size: int) -> None:
    data = noise(9 * MIB + 77)
    url = bucket.put("a.bin", data)
    file_cache.choose(str(tmp_path / "small"), size)
    assert read(url) == data
    with fs.open_binary(url) as opened:
        for at in (5 * MIB, 0, 9 * MIB, MIB - 3):
            opened.seek(at)
            assert opened.read(100) == data[at : at + 100]
    assert kept(tmp_path / "small") <= size


def kept(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.glob("*.blocks"))


def test_a_process_that_was_forked_is_told_so(bucket: Bucket) -> None:
    url, other = bucket.put("a.bin", b"abc"), bucket.put("b.bin", b"abc")
    assert read(url) == b"abc"
    here, there = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where there are threads
        pid = os.fork()
    if not pid:
        try:
            read(other)
        except OSError as error:
            os.write(there, str(error).encode())
        os._exit(0)
    os.close(there)
    os.waitpid(pid, 0)
    with open(here, "rb") as said:
        assert b"the process from which this one was forked had read a URL" in said.read()


class WholeFiles(http.server.SimpleHTTPRequestHandler):
    """Sends whole files only, as Python's own server does."""

    def log_message(self, *_: Any) -> None:
        pass


def test_a_web_server_without_ranges_sends_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = noise(5 * MIB)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.bin").write_bytes(data)
    requests: list[str] = []
    monkeypatch.setattr(WholeFiles, "log_message", lambda self, *_: requests.append(self.requestline))
    with serving(functools.partial(WholeFiles, directory=str(tmp_path / "web"))) as server:
        url = f"{server}/a.bin"
        with fs.open_binary(url) as opened, fs.open_binary(url) as other:
            opened.seek(3 * MIB)
            assert opened.read(50) == data[3 * MIB : 3 * MIB + 50]
            assert other.read() == data
        assert len([one for one in requests if one.startswith("GET")]) <= 3, "two were attempts to get a part"
        forget()
        file_cache.choose(str(tmp_path / "small"), MIB)
        with pytest.raises(OSError, match=r"a.bin: its server sends whole files only, so it needs 5,242,880 bytes in "):
            read(url)


class Unstamped(http.server.BaseHTTPRequestHandler):
    """Says neither an ETag nor a time."""

    data = b""
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.data)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def test_a_file_without_a_stamp_is_fetched_again_in_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unstamped, "asked", [], raising=False)
    with serving(Unstamped) as server:
        for data in (b"old", b"new"):
            monkeypatch.setattr(Unstamped, "data", data)
            monkeypatch.setattr(remote_file, "_RUN", data.hex())
            assert read(f"{server}/a.bin") == data
            asked = len(Unstamped.asked)
            assert read(f"{server}/a.bin") == data
            assert len(Unstamped.asked) == asked, "the cache has it"
            forget()


def test_an_encoded_slash_is_part_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unstamped, "asked", [], raising=False)
    monkeypatch.setattr(Unstamped, "data", b"x")
    with serving(Unstamped) as server:
        for path in ("/d/a%2Fb%20c.bin", "/a%2fb.bin?id=5", "/d/a%20b.bin"):
            read(f"{server}{path}")
            assert {*Unstamped.asked} == {path}
            Unstamped.asked.clear()


class Truncating(WholeFiles):
    """Sends half of a file first."""

    halves = 2

    def copyfile(self, source: Any, outputfile: Any) -> None:
        data = source.read()
        half = Truncating.halves > 0
        Truncating.halves -= 1
        outputfile.write(data[: len(data) // 2] if half else data)


def test_a_web_server_without_ranges_that_breaks_off_is_asked_again(tmp_path: Path) -> None:
    data = noise(3 * MIB + 9)
    (tmp_path / "a.bin").write_bytes(data)
    with serving(functools.partial(Truncating, directory=str(tmp_path))) as server:
        assert read(f"{server}/a.bin") == data
    assert Truncating.halves < 0


def test_secrets_of_a_url_are_kept_and_never_shown() -> None:
    url = f"https://user:{SECRET}@host/x/a.tar?X-Amz-Signature={SECRET}"
    (name,) = pickle.loads(pickle.dumps(fs.checked([url])))
    assert (name, urls.whole(name)) == ("https://host/x/a.tar", url)
    urls._SECRET.clear()
    pickle.loads(pickle.dumps(fs.checked([url])))
    assert urls.whole("https://host/x/a.tar") == url, "where a feed arrives"
    assert SECRET not in repr(Feed.from_webdataset(url, "cls", batch_size=1).__dict__)
    first, second = fs.checked([f"https://host/get.tar?id={number}&X-Amz-Signature={SECRET}" for number in (1, 2)])
    assert first != second
    assert first == fs.checked(["https://host/get.tar?id=1&X-Amz-Signature=new"])[0]
    assert registry.format_of(first) is registry.by_name("tar (WebDataset)")
    assert urls.whole(second).startswith("https://host/get.tar?id=2&")
    text = f"Error performing GET {url} in 5 ms (s3://key:{SECRET}@host/b)"
    assert urls.without_secrets(text) == "Error performing GET https://host/x/a.tar in 5 ms (s3://host/b)"
