"""A copy of a sample is the same to the last bit and stride, or is refused."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from penstock_server.worker.reading.sample_copies import NotCopied, SampleCopy

TABLE = np.arange(48.0).reshape(6, 8)


class Pair(NamedTuple):
    x: Any
    y: Any


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        TABLE,
        TABLE.T,
        TABLE[::-1],
        TABLE[:, ::-1],
        TABLE[:, ::2],
        TABLE[1:4, 2:7],
        TABLE[:, :, None].transpose(2, 1, 0),
        np.broadcast_to(TABLE, (3, 6, 8)),
        np.zeros((0, 3)),
        np.array(5, ">i4"),
        np.arange(6, dtype=">u2")[::-1],
        np.array(["a", "bcd"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(3, [("a", "<i4"), ("b", "S3")]),
        np.frombuffer(b"abc", np.uint8),
        read_only(np.arange(3)),
        np.asfortranarray(TABLE[:, 1:]),
    ],
)
def test_an_array_keeps_its_strides_and_flags(array: Any) -> None:
    copied = SampleCopy(array)
    copy = copied.sample
    assert copy is not array
    assert not np.shares_memory(copy, array)
    assert copy.dtype == array.dtype
    assert copy.strides == array.strides
    assert copy.flags.writeable == array.flags.writeable
    np.testing.assert_array_equal(copy, array)
    assert copied.nbytes >= array.nbytes


def test_a_structure_is_copied_with_all_that_may_change() -> None:
    x = np.arange(3)
    sample = {"a": [x, (x, "text")], "p": Pair(np.float32(1), None), 3: b"bytes", "d": datetime.date(2020, 1, 1)}
    copied = SampleCopy(sample)
    x += 1
    copy = copied.sample
    assert copy["a"][0].tolist() == [0, 1, 2]
    assert copy["a"][0] is copy["a"][1][0], "an array that occurs twice is one array in the copy"
    assert copy["p"] == Pair(1, None)
    assert type(copy["p"]) is Pair
    assert type(copy["p"].x) is np.float32
    assert list(copy) == list(sample)
    assert copied.nbytes >= x.nbytes + 9


def test_values_that_never_change_are_not_copied() -> None:
    for value in (1 << 80, "text", b"bytes", 2.5, decimal.Decimal(1), pathlib.Path("a"), np.datetime64("2020"), None):
        assert SampleCopy(value).sample is value


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: int = 2


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


@pytest.mark.parametrize("kind", [Frozen, Slotted])
def test_a_dataclass_is_copied_with_its_fields(kind: type) -> None:
    x = np.arange(3)
    copy = SampleCopy(kind(x)).sample
    x += 1
    assert type(copy) is kind
    assert copy.x.tolist() == [0, 1, 2]
    assert getattr(copy, "y", 2) == 2
    other = Frozen(x)
    other.__dict__["more"] = 1
    with pytest.raises(NotCopied, match="further attributes"):
        SampleCopy(other)
    with pytest.raises(NotCopied, match="of type object"):
        SampleCopy(kind(object()))


def test_a_tensor_is_not_copied(tf: Any) -> None:
    tensor = tf.zeros((3, 4))
    copied = SampleCopy((tensor, tf.constant(2, tf.int64)))
    assert copied.sample[0] is tensor
    assert copied.nbytes >= 56
    with pytest.raises(NotCopied):  # nobody knows its size
        SampleCopy(tf.constant("text"))


def test_a_picture_in_memory_is_copied_and_one_in_a_file_is_not(tmp_path: pathlib.Path) -> None:
    image = Image.new("RGB", (4, 3), (1, 2, 3))
    copy = SampleCopy((image, 1)).sample[0]
    image.putpixel((0, 0), (9, 9, 9))
    assert copy.getpixel((0, 0)) == (1, 2, 3)
    assert type(copy) is type(image)
    image.save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as opened, pytest.raises(NotCopied):
        SampleCopy(opened)
    image.mine = 1  # type: ignore[attr-defined]
    with pytest.raises(NotCopied):
        SampleCopy(image)


@pytest.mark.parametrize(
    "sample",
    [
        (TABLE, TABLE[1:]),
        [TABLE[1:], {"y": TABLE[:, 0]}],
        TABLE[:, ::4],
        np.frombuffer(b"x" * 17, np.uint8)[1:9].view("<f8"),
        np.array([None]),
        np.zeros(1, [("a", object)]),
        np.zeros(2).view(np.recarray),
        np.ma.masked_array([1.0]),
        np.zeros(1, "V4")[0],
        np.array(["text"], np.dtypes.StringDType()),
        {1, 2},
        bytearray(b"x"),
        collections.OrderedDict(a=1),
        object(),
        iter(()),
    ],
)
def test_what_may_differ_or_change_is_refused(sample: Any) -> None:
    with pytest.raises(NotCopied):
        SampleCopy(sample)


def test_parts_of_one_array_that_do_not_overlap_are_copied_apart() -> None:
    x, y = SampleCopy((TABLE[0], TABLE[1])).sample
    assert x.tolist() == TABLE[0].tolist()
    assert y.tolist() == TABLE[1].tolist()
