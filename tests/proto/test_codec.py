"""The codec alone: a message comes out as it went in, and anything malformed is refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_proto import ProtocolError, UnknownFeed, errors
from penstock_proto import messages as m
from penstock_proto.batches import arrays
from penstock_proto.batches.position import unpack
from penstock_proto.spec import DTYPES, DictSpec, Leaf, TupleSpec
from penstock_proto.transport import codec

counts = st.integers(0, 2**62)
epochs = st.integers(0, 2**53)
names = st.text(min_size=1, max_size=40)
shapes = st.lists(st.lists(st.integers(0, 2**40), max_size=4).map(tuple), max_size=4).map(tuple)
leaf_specs = st.builds(
    Leaf, st.sampled_from(sorted(DTYPES)), st.lists(st.none() | st.integers(0, 2**30), max_size=4).map(tuple)
)
specs = st.recursive(
    leaf_specs,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: TupleSpec(tuple(items)))
        | st.dictionaries(names, inner, max_size=3).map(
            lambda d: DictSpec(tuple(sorted(d)), tuple(d[key] for key in sorted(d)))
        )
    ),
    max_leaves=8,
)
infos = st.builds(
    m.FeedInfo,
    name=names,
    spec=specs,
    batch_size=st.none() | st.integers(1, 1000),
    turn=st.integers(1, 256),
    drop_remainder=st.booleans(),
    order=st.sampled_from(["exact", "fast"]),
    lanes=st.integers(1, 4096),
    seed=counts,
    epochs=st.none() | counts,
    batches=st.none() | counts,
    samples=st.none() | counts,
)
tokens = st.binary(min_size=16, max_size=16)
reports = st.builds(
    m.ErrorReport,
    st.sampled_from(sorted(errors.BY_NAME)),
    st.text(max_size=200),
    st.none() | names,
    st.none() | st.integers(0, 100),
    st.none() | names,
    st.none() | st.text(max_size=200),
)
from_clients = st.one_of(
    st.builds(m.Hello, st.integers(0, 9), names, names),
    st.builds(m.Open, tokens, st.binary(max_size=16), st.integers(1, 4096), counts, st.integers(0, 4096)),
    st.builds(m.Begin, epochs),
    st.builds(m.Ack, counts, st.lists(counts, max_size=20).map(tuple), counts),
    st.builds(m.Leave, epochs),
    st.sampled_from([m.Ping(), m.Close(), m.StatusRequest(1), m.StopRequest(), m.StacksRequest()]),
    st.builds(m.ProfileHosts, st.floats(0, 3600), st.floats(1, 1000)),
)
from_servers = st.one_of(
    st.builds(m.Welcome, tokens, infos, names),
    st.builds(m.Slab, counts, counts, st.integers(-1, 99), counts, st.integers(1, 256), counts, counts, shapes=shapes),
    st.builds(m.End, counts, counts, counts, counts),
    st.builds(m.MissingRanks, st.lists(st.integers(0, 99), max_size=9).map(tuple)),
    st.builds(m.Failed, reports),
    st.builds(m.Chunk, counts, counts),
    st.builds(m.WorkerStacks, st.integers(0, 4095), st.integers(1, 1 << 22)),
    st.just(m.StacksSent()),
    st.builds(m.HostSampled, names, st.booleans(), names),
    st.builds(
        m.WorkerSampled,
        st.integers(0, 2**31 - 1),
        names,
        st.builds(
            m.Samples,
            st.integers(0, 99),
            counts,
            st.just((m.SampledFrame("a.py", 3, "f", "user"),)),
            st.just(((0, 0), ())),
            st.lists(st.builds(m.SampledRun, st.integers(0, 1), counts, st.booleans()), max_size=9).map(tuple),
            st.booleans(),
        ),
    ),
)
from_hosts = st.one_of(
    st.builds(m.GivenUp, st.integers(0, 99), names),
    st.builds(m.MemoryMeasured, st.just((m.ProcessMemory(3, 5),))),
    st.builds(m.ActivityShown, st.floats(0, 1e9), st.just((m.WorkerActivity(3, 0, 500, 500, 7, "a.h5"),))),
    st.builds(m.SamplingEnded, counts),
)
from_workers = st.one_of(
    st.builds(m.Made, counts, counts, counts, counts, counts, st.booleans(), record=st.binary(max_size=100)),
    st.builds(m.RunFailed, counts, reports),
    st.builds(m.NeedRoom, counts, counts, counts),
)


@given(from_clients)
def test_a_client_message_comes_back_as_it_was(message: m.ClientMessage) -> None:
    assert codec.from_client(codec.encode(message)) == message


@given(from_servers)
def test_a_server_message_comes_back_as_it_was(message: m.ServerMessage) -> None:
    assert codec.from_server(codec.encode(message)) == message


@given(from_workers)
def test_a_worker_message_comes_back_as_it_was(message: m.FromWorker) -> None:
    assert codec.from_worker(codec.encode(message)) == message


@given(from_hosts)
def test_a_message_of_a_host_comes_back_as_it_was(message: m.FromHost) -> None:
    assert codec.from_host(codec.encode(message)) == message


DECODERS = [codec.from_client, codec.from_server, codec.from_worker, codec.to_worker, codec.from_host, codec.from_head]


@given(st.binary(max_size=300), st.sampled_from(DECODERS))
def test_arbitrary_bytes_raise_nothing_but_a_protocol_error(data: bytes, decode: codec.Decoder[m.Message]) -> None:
    with contextlib.suppress(ProtocolError):
        decode(data)


@given(from_servers, st.data())
def test_a_damaged_message_raises_nothing_but_a_protocol_error(message: m.ServerMessage, data: st.DataObject) -> None:
    damaged = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        codec.from_server(bytes(damaged))


@pytest.mark.parametrize(
    "raw",
    [
        {"type": "begin", "epoch": -1},
        {"type": "begin", "epoch": 1.5},
        {"type": "begin", "epoch": 2**63},
        {"type": "begin", "epoch": 2**53 + 1},
        {"type": "begin", "epoch": 1, "more": 1},
        {"type": "begin"},
        {"type": "nonsense"},
        {"type": "welcome"},
        {"type": "ack", "handed": 1, "released": list(range(5000))},
        {"type": "hello", "version": 1, "feed": "x" * 5000},
        {"type": "open", "session": b"short", "proof": b"", "credit": 1, "credit_bytes": 1, "quota": 1},
        {"type": "open", "session": b"x" * 16, "proof": b"", "credit": 0, "credit_bytes": 1, "quota": 1},
        ["begin", 1],
        "begin",
        None,
    ],
)
def test_what_breaks_a_bound_is_refused(raw: object) -> None:
    with pytest.raises(ProtocolError, match="malformed message"):
        codec.from_client(msgpack.packb(raw) if not _too_large(raw) else msgspec.msgpack.encode(raw))


def _too_large(raw: object) -> bool:
    return isinstance(raw, dict) and any(isinstance(v, int) and v >= 2**63 for v in raw.values())


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        codec.from_server(b"\x81\xa4spec" * 20_000)


def test_a_message_over_the_bound_is_neither_sent_nor_read() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        codec.encode(m.Status("x" * 200_000))
    with pytest.raises(ProtocolError, match="at most"):
        codec.from_client(b"x" * 1_100_000)


def test_an_error_crosses_the_wire_as_its_class_with_its_place() -> None:
    error = UnknownFeed("no feed 'x'", feed="x", worker=3, split="7", remote_traceback="Traceback...")
    report = m.ErrorReport.of(error)
    raised = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=m.ErrorReport).error()
    assert type(raised) is UnknownFeed
    assert (raised.feed, raised.worker, raised.split, raised.remote_traceback) == ("x", 3, "7", "Traceback...")
    assert str(raised) == "no feed 'x'\n  in feed x, worker 3, split 7\n\nTraceback..."


def test_an_error_of_a_kind_we_do_not_know_is_still_a_penstock_error() -> None:
    raised = m.ErrorReport("FromTheFuture", "something").error()
    assert type(raised) is errors.PenstockError
    assert "FromTheFuture: something" in str(raised)


def test_texts_of_a_report_fit_a_message_and_a_long_one_keeps_both_ends_and_says_what_is_left_out() -> None:
    long = f"the beginning{'x' * 10**6}the end"
    sent = m.ErrorReport.of(errors.GeneratorError(long, split=long, remote_traceback=long))
    report = codec.from_server(codec.encode(m.Failed(sent)))
    assert isinstance(report, m.Failed)
    error = report.error
    for text in (error.message, error.split, error.remote_traceback):
        assert text is not None
        assert text.startswith("the beginning")
        assert text.endswith("the end")
        kept = len(text) - len(re.findall(r" \[\.\.\. [\d,]+ characters left out \.\.\.\] ", text)[0])
        assert f"[... {len(long) - kept:,} characters left out ...]" in text


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(plain)
def test_records_of_plain_values_come_back_as_they_were(value: object) -> None:
    assert arrays.unpack(arrays.pack(value)) == value


@given(
    st.sampled_from(["bool", "int8", "int64", "uint16", "float16", "float32", "float64"]),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_small_arrays_come_back_as_they_were(dtype: str, shape: list[int]) -> None:
    array = np.arange(int(np.prod(shape)), dtype="int64").reshape(shape).astype(dtype)
    back = arrays.unpack(arrays.pack({"a": array, "b": [array]}))
    assert back["a"].dtype == array.dtype
    assert back["a"].shape == array.shape
    np.testing.assert_array_equal(back["b"][0], array)


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4")]),
        np.zeros(2, "V8"),
        np.array(["text"]),
        np.zeros(1, "M8[s]"),
        np.zeros(3, ">i4"),
        np.zeros(2, complex),
        {1, 2},
        1j,
        object(),
        np.zeros(100_000),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip(),
)
def test_what_may_not_be_in_a_record_is_refused_on_the_way_out(value: object) -> None:
    with pytest.raises(ProtocolError):
        arrays.pack({"a": value})


def hostile(**fields: object) -> bytes:
    return bytes(msgpack.packb({k.encode(): v for k, v in fields.items()}))


@pytest.mark.parametrize(
    "data",
    [
        hostile(nd=True, type="|O", kind=b"O", shape=[1], data=b"cos\nsystem\n(S'true'\ntR."),
        hostile(nd=True, type="|O", kind=b"", shape=[1], data=b"x" * 8),
        hostile(nd=True, type="<i4", kind=b"O", shape=[1], data=b"x" * 4),
        hostile(nd=True, type=[["a", "<i4"]], kind=b"V", shape=[1], data=b"x" * 4),
        hostile(nd=True, type="<i4", kind=b"", shape=[2], data=b"x" * 4),
        hostile(nd=True, type="<i4", kind=b"", shape=[-1], data=b"x" * 4),
        hostile(nd=True, type="<i4", kind=b"", shape=[2**40, 2**40], data=b""),
        hostile(nd=True, type="<i4", kind=b"", shape="ab", data=b"x" * 4),
        hostile(nd=True, type="<i4", shape=[1], data=b"x" * 4),
        hostile(nd=False, type="|O", data=b"x" * 8),
        hostile(nd=1, type="<i4", kind=b"", shape=[1], data=b"x" * 4),
        hostile(nd=[], data=b""),
        hostile(complex=True, data="1+1j"),
        b"\xc1",
        b"",
        b"\x81",
        b"\x93\x01",
        b"\x91" * 3000,
        b"x" * 100_000,
    ],
)
def test_a_hostile_record_is_refused_and_runs_nothing(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        arrays.unpack(data)


@given(st.binary(max_size=200))
def test_arbitrary_records_raise_nothing_but_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        arrays.unpack(data)


@pytest.mark.fuzz
@settings(max_examples=50_000, deadline=None)
@given(st.binary(max_size=2000), st.sampled_from([*DECODERS, arrays.unpack]))
def test_fuzz_arbitrary_bytes(data: bytes, decode: Callable[[bytes], object]) -> None:
    with contextlib.suppress(ProtocolError):
        decode(data)


@pytest.mark.fuzz
@settings(max_examples=50_000, deadline=None)
@given(from_clients | from_servers | from_workers, st.data())
def test_fuzz_damaged_messages(message: m.Message, data: st.DataObject) -> None:
    damaged = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for decode in DECODERS:
        with contextlib.suppress(ProtocolError):
            decode(bytes(damaged))


INFO = m.FeedInfo("feed", Leaf("int64", ()), 1, 1, False, "exact", 1, 0, None, None, None)


def position(**fields: object) -> bytes:
    return msgspec.msgpack.encode({"feed": INFO, "epoch": 0, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": 2**53 + 1},
        {"batches": 2**53 + 1},
        {"rows": 2**53 + 1},
        {"merged": 2**62},
        {"skip": 2**62},
        {"skip": -1},
        {"places": [[0, 2**62, b""]]},
        {"places": [[2**31, 0, b""]]},
        {"places": [[-1, 0, b""]]},
        {"places": [[0, 0, bytes(40_000)]]},
        {"ended": [[0, 2**62, 0, b""]]},
        {"ended": [[0, 0, 2**31 + 1, b""]]},
        {"digest": bytes(33)},
    ],
    ids=range(13),
)
def test_no_number_in_a_position_is_so_large_that_counting_on_from_it_would_overflow(fields: dict[str, object]) -> None:
    unpack(position())
    with pytest.raises(ProtocolError, match="malformed position"):
        unpack(position(**fields))


def nested(depth: int) -> dict[str, object]:
    spec: dict[str, object] = {"type": "leaf", "dtype": "int8", "shape": []}
    for _ in range(depth):
        spec = {"type": "tuple", "items": [spec]}
    return spec


def wide(leaves: int) -> dict[str, object]:
    few: dict[str, object] = {"type": "tuple", "items": [{"type": "tuple", "items": []}] * 64}
    return {"type": "tuple", "items": [few] * (leaves // 64)}


@pytest.mark.parametrize("spec", [nested(33), nested(246), nested(300), wide(1024 + 64), wide(64 * 1000)], ids=range(5))
def test_a_spec_that_is_deeper_or_wider_than_any_that_is_served_is_refused(spec: dict[str, object]) -> None:
    feed = msgspec.to_builtins(INFO)
    for decode, message in (
        (unpack, {"feed": {**feed, "spec": spec}, "epoch": 0}),
        (codec.from_server, {"type": "welcome", "session": bytes(16), "feed": {**feed, "spec": spec}, "unix": ""}),
        (codec.from_worker, {"type": "splitslisted", "run": 0, "count": 1, "nbytes": 0, "digest": b"x" * 32}),
        (codec.to_worker, {"type": "startrun", "run": 0, "feed": "f", "epoch": 0, "lane": 0, "splits": 0}),
    ):
        if "feed" not in message or isinstance(message["feed"], str):
            decode(msgspec.msgpack.encode({**message, "spec": nested(32)}))
            message = {**message, "spec": spec}
        with pytest.raises(ProtocolError, match=r"malformed|at most"):
            decode(msgspec.msgpack.encode(message))


def test_what_cannot_be_encoded_is_a_protocol_error_and_nothing_else() -> None:
    for message in (m.Pong, m.Begin(2**64), m.Hello(1, "\udc80"), m.Status(str)):
        with pytest.raises(ProtocolError, match="cannot be encoded"):
            codec.encode(message)  # type: ignore[arg-type]


def test_an_error_that_names_a_file_whose_name_is_no_utf8_can_be_sent() -> None:
    error = errors.GeneratorError("no \udcff.h5", split="\udcff.h5", remote_traceback="in \udcff")
    report = codec.from_server(codec.encode(m.Failed(m.ErrorReport.of(error))))
    assert isinstance(report, m.Failed)
    assert report.error.message == "no \\udcff.h5"


def test_whatever_ranks_are_missing_can_be_said() -> None:
    assert len(codec.encode(m.MissingRanks(tuple(range(m.MAX_WORLD))))) < codec.MAX_MESSAGE
    with pytest.raises(ProtocolError):
        codec.from_client(codec.encode(m.Open(bytes(16), b"", 1, 1, 1, world_size=m.MAX_WORLD + 1)))


def test_the_name_of_a_group_has_no_control_characters() -> None:
    with pytest.raises(ProtocolError):
        codec.from_client(codec.encode(m.Open(bytes(16), b"", 1, 1, 1, group="a\0b")))
