"""Record batches of an Arrow stream are found by the heads of its messages, and read without those before them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_server import Feed
from penstock_server.sources.arrow.reader import opened_arrow
from penstock_server.sources.arrow.stream_index import StreamIndex, index_of

pa = pytest.importorskip("pyarrow")

TABLE = pa.table(
    {
        "id": range(60),
        "x": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(60_000.0)), 1000),
        "text": [f"row {number}" * (number % 4) for number in range(60)],
        "tokens": [[number] * (number % 3) for number in range(60)],
    }
)


def stream_of(table: Any = TABLE, rows: int = 7, **options: Any) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


def index(data: bytes) -> StreamIndex:
    return index_of(io.BytesIO(data), len(data))


def read(file: Path) -> list[Any]:
    feed = Feed.from_files(file, batch_size=4)
    splits: Any = feed.splits
    generate: Any = feed.generate
    return [sample for split in reversed(splits()) for sample in reversed(list(generate(split)))][::-1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "zstd"},
        {"compression": "lz4"},
        {"allow_64bit": True},
        {"use_legacy_format": True, "metadata_version": pa.ipc.MetadataVersion.V4},
    ],
)
def test_each_record_batch_is_read_from_its_place(tmp_path: Path, options: dict[str, Any]) -> None:
    data = stream_of(**options)
    found = index(data).places
    assert found is not None
    assert len(found) == 9
    (tmp_path / "a.arrow").write_bytes(data)
    with opened_arrow(str(tmp_path / "a.arrow")) as arrow:
        for start, stop in [(8, 9), (3, 5), (0, 9), (5, None), (9, 12)]:
            read_now = [batch for _, batch in arrow.batches(start, stop)]
            expected = TABLE.slice(7 * start, None if stop is None else 7 * (stop - start))
            assert pa.Table.from_batches(read_now, TABLE.schema).equals(expected)
            assert [number for number, _ in arrow.batches(start, stop)] == [*range(start, min(stop or 9, 9))]


def test_the_data_of_record_batches_are_not_read_to_find_them() -> None:
    class Counting(io.BytesIO):
        read_bytes = 0

        def read(self, count: int | None = -1) -> bytes:
            data = super().read(count)
            self.read_bytes += len(data)
            return data

    data = stream_of()
    stream = Counting(data)
    assert len(index_of(stream, len(data)).places or ()) == 9
    assert stream.read_bytes < len(data) / 20


def test_a_split_is_read_from_a_stream_whose_earlier_batches_are_damaged(tmp_path: Path) -> None:
    """So it was read without them."""
    data = stream_of()
    found = index(data).places
    assert found is not None
    file = tmp_path / "a.arrow"
    file.write_bytes(data)
    feed = Feed.from_files(file, "id", batch_size=4)
    splits: Any = feed.splits
    generate: Any = feed.generate
    listed = splits()
    file.write_bytes(data[: found[1] + 200] + b"\xff" * (found[2] - found[1] - 200) + data[found[2] :])
    assert list(generate(listed[3])) == [*range(21, 28)]


def test_a_stream_with_dictionaries_is_read_from_its_beginning(tmp_path: Path) -> None:
    names = pa.array([f"class {number % 3}" for number in range(60)])
    table = TABLE.append_column("class", names.dictionary_encode())
    data = stream_of(table)
    assert index(data) == StreamIndex(True, None)
    (tmp_path / "a.arrow").write_bytes(data)
    with opened_arrow(str(tmp_path / "a.arrow")) as arrow:
        found = pa.Table.from_batches([batch for _, batch in arrow.batches(2, 5)], table.schema)
    assert found.equals(table.slice(14, 21))
    with opened_arrow(str(tmp_path / "a.arrow")) as arrow:
        assert arrow.count == 9


@pytest.mark.parametrize("big", [False, True])
def test_a_big_endian_stream_is_read_from_its_beginning_where_pyarrow_swaps_bytes(big: bool) -> None:
    flatbuffers = pytest.importorskip("flatbuffers")
    builder = flatbuffers.Builder(0)
    builder.StartObject(4)
    builder.PrependInt16Slot(0, int(big), 0)  # Schema.endianness
    schema = builder.EndObject()
    builder.StartObject(5)
    builder.PrependInt16Slot(0, 4, 0)  # Message.version: V5
    builder.PrependUint8Slot(1, 1, 0)  # .header_type: Schema
    builder.PrependUOffsetTRelativeSlot(2, schema, 0)  # .header
    builder.PrependInt64Slot(3, 0, 0)  # .bodyLength
    builder.Finish(builder.EndObject())
    head = bytes(builder.Output())
    data = b"\xff" * 4 + len(head).to_bytes(4, "little") + head + b"\xff" * 4 + bytes(4)
    assert index(data) == StreamIndex(True, None if big else ())


@pytest.mark.parametrize("legacy", [False, True])
def test_damage_is_noticed(tmp_path: Path, legacy: bool) -> None:
    """A stream of before Arrow 0.15 has no marks before the lengths of heads."""
    data = stream_of(use_legacy_format=legacy)
    found = index(data).places
    assert found is not None
    mark = 0 if legacy else 4
    damaged = [
        b"",
        b"\0" * 8,
        data[: -mark - 4],
        data[:-1],
        data[: found[3]],
        data[: found[3] + 10],
        data[: found[4] - 8],
    ]
    for at in (0, found[3]):
        head = at + mark + 4
        damaged += [
            data[: at + mark] + (1 << 30).to_bytes(4, "little") + data[at + mark + 4 :],  # the length of the head
            data[:head] + b"\xff" * 4 + data[head + 4 :],  # where the table is
            data[:head] + bytes(40) + data[head + 40 :],
        ]
        damaged += [] if legacy else [data[:at] + b"\0" + data[at + 1 :]]  # the mark
    end = found[3] + mark + 4 + int.from_bytes(data[found[3] + mark : found[3] + mark + 4], "little")
    length = (found[4] - end).to_bytes(8, "little")
    assert length in data[found[3] : end]
    endless = data[found[3] : end].replace(length, (2**63 - 1).to_bytes(8, "little"))  # no file can be read from there
    damaged.append(data[: found[3]] + endless + data[end:])
    for one in damaged:
        assert index(one) == StreamIndex(False, None)
        (tmp_path / "a.arrow").write_bytes(one)
        with pytest.raises(OSError, match=r"a\.arrow: it is not an Arrow file, or a stream that is damaged or cut off"):
            Feed.from_files(tmp_path / "a.arrow", batch_size=4).splits()  # type: ignore[operator]


def test_a_stream_that_was_written_again_is_not_read_at_its_old_places(tmp_path: Path) -> None:
    file = tmp_path / "a.arrow"
    file.write_bytes(stream_of())
    assert [row["id"] for row in read(file)] == [*range(60)]
    file.write_bytes(stream_of(TABLE.slice(0, 31), rows=11))
    assert [row["id"] for row in read(file)] == [*range(31)]
