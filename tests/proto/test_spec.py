"""The element spec and the slab's layout alone."""

from __future__ import annotations

import enum
import functools
import subprocess
import sys
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_proto import DictSpec, Leaf, SpecError, TupleSpec, spec
from penstock_proto.batches.inferring import as_text, infer
from penstock_proto.batches.layout import (
    ALIGN,
    HEADER,
    SlotLayout,
    aligned,
    batch_spec,
    fixed_layout,
    is_fixed,
    lay_out,
)
from penstock_proto.spec import Spec
from penstock_proto.value_text import shown


class Color(enum.Enum):
    """A value that has no dtype."""

    RED = 1


@dataclass
class Record:
    """A sample that is no dict."""

    x: int


def test_a_sample_of_nested_tuples_and_dicts_becomes_a_tree() -> None:
    sample = ({"y": np.zeros((2, 3), "f4"), "x": 1}, (True, 2.5), np.uint8(3), [1, 2])
    assert infer(sample) == TupleSpec(
        (
            DictSpec(("x", "y"), (Leaf("int64", ()), Leaf("float32", (2, 3)))),
            TupleSpec((Leaf("bool", ()), Leaf("float64", ()))),
            Leaf("uint8", ()),
            Leaf("int64", (2,)),
        )
    )


def test_big_endian_arrays_have_the_spec_of_native_ones() -> None:
    assert infer(np.zeros(2, ">f4")) == Leaf("float32", (2,))


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ("\ud800", r"'\\ud800' is not valid Unicode, so it has no UTF-8: yield bytes"),
        (np.array(["a", 1], object), "it mixes text and numbers: yield a tuple"),
        ([("a", 1), ("b", 2)], "it mixes text and numbers: yield a tuple"),
        (np.array([None]), "None has no dtype: leave it out"),
        ([1.0, None], "None has no dtype: leave it out"),
        (None, r"None has no dtype: leave it out.*Feed\(transform=\)"),
        (Decimal("1.5"), r"yield float\(\) of it.*Feed\(transform=\)"),
        (Fraction(1, 2), r"yield float\(\) of it"),
        (Path("x"), r"yield str\(\) of it"),
        (Color.RED, r"yield its \.value"),
        (datetime(2026, 1, 1), r"yield its \.timestamp\(\)"),
        (date(2026, 1, 1), r"yield its \.toordinal\(\)"),
        (timedelta(1), r"yield its \.total_seconds\(\)"),
        ({1, 2}, r"yield sorted\(\) of it"),
        (frozenset("a"), r"yield sorted\(\) of it"),
        ([{1}, {2}], r"it holds set objects, and for each: .* yield sorted\(\) of it"),
        (Record(1), r"yield numbers, text and arrays, or tuples and dicts of them, such as vars\(\) of it"),
        (10**30, "it needs more than 64 bits"),
        pytest.param(iter([1]), "it is an iterator: yield each of its items", id="iterator"),
        (len, "it is a function or a class: yield what it returns"),
        ([{"a": 1, "b": 2}] * 2, r"it holds dicts: yield one dict of lists, {'a': \[...\], 'b': \[...\]}, or a tuple"),
        ({"boxes": [{"a": 1}]}, r"sample\['boxes'\] .* it holds dicts: yield one dict of lists"),
        (np.array([np.zeros(2), np.zeros(3)], object), r"its items differ in length: give Feed\(batching="),
        (np.array([1, 2.5], object), r"an array of objects, which are numbers: .* \.astype\('float32'\)"),
        (np.zeros(3, [("a", "f4"), ("b", "i4")]), r"yield a dict of its fields, such as {'a': array\['a'\]}"),
        (np.ma.masked_array([1, 2], [0, 1]), r"masked array.*\.filled"),
        (np.datetime64("2026-01-01"), "astype"),
        ({1: 2}, "a key that is not text, 1: use str keys"),
        ({"k" * 257: 2}, "a key of 257 characters, 'kkk.*: use keys of up to 256 characters"),
        ({"\ud800": 2}, "a key that is not valid Unicode"),
        (
            {f"{i:0200}": i for i in range(1000)},
            "spec of a sample takes 2[0-9]{5} bytes, .* of 1000 leaves.*shorter keys",
        ),
        (tuple(range(1025)), "has 1025 items; up to 1024 can be served"),
        (({str(i): i for i in range(1000)},) * 2, "a sample has 2000 leaves; 1 to 1024 can be served: stack"),
        (functools.reduce(lambda sample, _: (sample,), range(100), 1), "nested more than 32 deep"),
        (np.broadcast_to(np.zeros(()), (2**41, 0)), "a dimension can be up to"),
        (np.broadcast_to(np.zeros(()), (2**40, 2**15)), "a sample takes .* bytes, more than any machine has"),
        (
            ([np.zeros(3), np.zeros(3)], 1),
            r"sample\[0\] is a list of 2 arrays: yield a tuple of them, .* or np.stack.*Feed\(transform=\)",
        ),
        ({"x": [[np.zeros(3)], [np.zeros(3)]]}, r"sample\['x'\] is a list of 2 arrays"),
        (
            [[1], [1, 2]],
            r'declare it with batching="ragged" and spec=, here Leaf\("int64", \(None, None\), ragged=True\)',
        ),
        ((), "0 leaves"),
        (np.zeros((1,) * 17), "17 dimensions"),
    ],
    ids=lambda value: shown(value, 40),
)
def test_what_cannot_be_served_is_refused_with_what_to_do(sample: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        infer(sample)


def test_samples_are_understood_without_masked_arrays() -> None:
    """Each worker would import their module, for 10 ms."""
    code = "import sys\nimport numpy as np\nfrom penstock_proto.batches.inferring import as_array, as_text, infer\n"
    code += "infer((1, 'a', np.zeros(3), [1, 2]))\nas_array(np.zeros(3))\nas_text(np.zeros(3))\n"
    subprocess.run([sys.executable, "-c", code + "assert 'numpy.ma' not in sys.modules"], check=True)


class Strings:
    """A tensor of strings, as TensorFlow has them."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.dtype = SimpleNamespace(name="string")

    def numpy(self) -> Any:
        return self._value


def test_a_tensor_of_strings_is_text() -> None:
    assert infer(Strings(b"a")) == Leaf("string", ())
    assert infer(Strings(np.array([b"a", b"bc\0"], object))) == Leaf("string", (2,))
    assert as_text(Strings(np.array([b"a", b"bc\0"], object))).tolist() == [b"a", b"bc\0"]  # type: ignore[union-attr]


def test_flatten_and_unflatten_are_inverse_whatever_the_order_of_keys() -> None:
    tree = infer({"b": 1, "a": (2, 3)})
    flat = spec.flatten(tree, {"a": (20, 30), "b": 10})
    assert flat == [20, 30, 10]
    assert spec.unflatten(tree, flat) == {"a": (20, 30), "b": 10}


def test_a_dict_keeps_the_order_of_its_keys_and_specs_are_equal_whatever_it_is() -> None:
    tree, other = infer({"b": 1, "a": ({"z": 2, "y": 3},)}), infer({"a": ({"y": 3, "z": 2},), "b": 1})
    assert tree == other
    assert (tree != other) is False
    assert tree != infer({"a": ({"y": 3},), "b": 1})
    assert hash(tree) == hash(other)
    for one, keys, inner in ((tree, ["b", "a"], ["z", "y"]), (other, ["a", "b"], ["y", "z"])):
        for same in (one, spec.map_leaves(lambda leaf: leaf, one), msgspec.convert(msgspec.to_builtins(one), Spec)):
            built = spec.unflatten(same, [30, 20, 10])
            assert built == {"a": ({"y": 30, "z": 20},), "b": 10}
            assert list(built) == keys
            assert list(built["a"][0]) == inner
    assert str(tree) == "{'b': int64[], 'a': ({'z': int64[], 'y': int64[]},)}"
    for wrong in ((0,), (0, 0), (1, 2)):
        with pytest.raises(ValueError, match="the number of each of its 2 keys once"):
            DictSpec(("a", "b"), (Leaf("int64", ()), Leaf("int64", ())), wrong)


def test_keys_of_a_subclass_of_str_are_their_text() -> None:
    class Key(enum.StrEnum):
        X = "x"

    assert infer({Key.X: 1, np.str_("y"): 2}) == infer({"x": 1, "y": 2})
    assert type(infer({np.str_("y"): 2}).keys[0]) is str  # type: ignore[union-attr]


class Hostile:
    """Raises whatever it is asked for."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt

    def __len__(self) -> int:
        raise SystemExit


class HostileDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Hostile(), "<Hostile>"),
        ((1, Hostile()), "(1, <Hostile>)"),
        ({"x": Hostile()}, "{'x': <Hostile>}"),
        (HostileDict(x=1), "<HostileDict>"),
        ("a\udcff", "'a\\udcff'"),
        ("x" * 1000, "'" + "x" * 116 + "..."),
    ],
    ids=range(6),
)
def test_anything_can_be_shown_in_a_message(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize("sample", [(1,), (1, 2, 3), [1, 2], {"a": 1}, 7])
def test_another_structure_is_refused(sample: Any) -> None:
    with pytest.raises(SpecError, match=r"tuple of 2.*same structure"):
        spec.flatten(infer((1, 2)), sample)


@pytest.mark.parametrize("sample", [{}, {"a": 1, "b": 2}, {"b": 1}, (1,)])
def test_other_keys_are_refused(sample: Any) -> None:
    with pytest.raises(SpecError, match=r"keys \['a'\].*same structure"):
        spec.flatten(infer({"a": 1}), sample)


def test_the_batch_dimension_is_known_only_when_the_remainder_is_dropped() -> None:
    sample = TupleSpec((Leaf("uint8", (4, 5)), Leaf("int64", ())))
    assert batch_spec(sample, 8, False) == TupleSpec((Leaf("uint8", (None, 4, 5)), Leaf("int64", (None,))))
    assert batch_spec(sample, 8, True) == TupleSpec((Leaf("uint8", (8, 4, 5)), Leaf("int64", (8,))))
    assert batch_spec(sample, None, False) == sample


def test_only_batches_of_one_shape_are_fixed() -> None:
    assert is_fixed(Leaf("uint8", (3,)), 4)
    assert not is_fixed(Leaf("uint8", (None,)), 4)
    assert not is_fixed(Leaf("uint8", (3,)), None)


leaves = st.tuples(
    st.sampled_from(["bool", "uint8", "int16", "float32", "float64", "complex128"]),
    st.lists(st.integers(0, 7), max_size=3),
)


@given(st.lists(leaves, min_size=1, max_size=6), st.integers(1, 5))
def test_leaves_lie_aligned_behind_the_headers_and_never_overlap(
    parts: list[tuple[str, list[int]]], batches: int
) -> None:
    layout = lay_out([dtype for dtype, _ in parts], [shape for _, shape in parts], batches)
    end = batches * HEADER
    for place in layout.places:
        assert place.offset % ALIGN == 0
        assert place.offset >= end
        end = place.offset + batches * place.nbytes
    assert layout.nbytes >= end
    assert layout.nbytes % ALIGN == 0


@given(st.lists(leaves, min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 4))
def test_leaves_hold_what_is_written_to_them(parts: list[tuple[str, list[int]]], batch: int, turn: int) -> None:
    layout = fixed_layout(TupleSpec(tuple(Leaf(dtype, tuple(shape)) for dtype, shape in parts)), batch, turn)
    slot = np.zeros(layout.nbytes, np.uint8)
    written = []
    for leaf, (dtype, shape) in zip(layout.leaves(slot), parts, strict=True):
        assert leaf.shape == (turn, batch, *shape)
        values = np.arange(leaf.size).reshape(leaf.shape).astype(dtype)
        leaf[...] = values
        written.append(values)
    assert not layout.headers(slot).any()
    layout.headers(slot)[:] = 7
    for leaf, values in zip(layout.leaves(slot), written, strict=True):
        np.testing.assert_array_equal(leaf, values)


@st.composite
def slabs_with_gaps(draw: st.DrawFn) -> tuple[SlotLayout, int, int, int]:
    """Return a layout, and the first place, the batches and the stride of a slab in it."""
    parts, turn = draw(st.lists(leaves, min_size=1, max_size=4)), draw(st.integers(1, 7))
    layout = lay_out([dtype for dtype, _ in parts], [shape for _, shape in parts], turn)
    first = draw(st.integers(0, turn - 1))
    batches = draw(st.integers(1, turn - first))
    stride = draw(st.integers(1, (turn - first - 1) // (batches - 1))) if batches > 1 else 1
    return layout, first, batches, stride


@given(slabs_with_gaps())
def test_the_regions_of_a_slab_are_its_batches_and_nothing_else(slab: tuple[SlotLayout, int, int, int]) -> None:
    layout, first, batches, stride = slab
    turn = layout.batches
    source, target = np.full(layout.nbytes, 1, np.uint8), np.zeros(layout.nbytes, np.uint8)
    for start, stop in layout.regions(first, batches, stride):
        target[start:stop] += source[start:stop]
    assert target.max() == 1
    assert target.sum() == layout.nbytes_of(batches)
    for array in (layout.headers(target), *layout.leaves(target)):
        flat = np.ascontiguousarray(array).reshape(turn, -1).view(np.uint8)
        own = np.s_[first : first + (batches - 1) * stride + 1 : stride]
        assert flat[own].all()
        assert not (np.delete(flat, own, 0).any() and batches < turn)


@given(slabs_with_gaps())
def test_a_copied_slab_lies_at_the_first_places(slab: tuple[SlotLayout, int, int, int]) -> None:
    layout, first, batches, stride = slab
    turn = layout.batches
    source, target = np.zeros(layout.nbytes, np.uint8), np.full(layout.nbytes, 9, np.uint8)
    layout.headers(source)[:, 0] = range(turn)
    for leaf in layout.leaves(source):
        leaf[:] = np.arange(turn).reshape(turn, *[1] * (leaf.ndim - 1)).astype(leaf.dtype)
    layout.copy(source, target, first, batches, stride)
    for copied, of in zip(
        [layout.headers(target), *layout.leaves(target)], [layout.headers(source), *layout.leaves(source)], strict=True
    ):
        for number in range(batches):
            np.testing.assert_array_equal(copied[number], of[first + number * stride])
        assert (np.ascontiguousarray(copied[batches:]).view(np.uint8) == 9).all()


def test_sizes_round_up_to_the_alignment() -> None:
    assert [aligned(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
