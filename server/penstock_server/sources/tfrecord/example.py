"""Reads `tf.train.Example` and `SequenceExample` messages without TensorFlow.

The two have the same form, but for the feature lists of the second.

The messages are declared here, in a private protobuf pool and under another name. A second `tensorflow.BytesList` in
the global pool would crash a process that also imports TensorFlow.

A parser of our own, in Python, took 20 us for an Example with four features. This one takes 7 (with protobuf in C).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock_proto import distribution

from ..features import Feature, FixedLen, FixedLenSequence, VarLen

_LISTS = {"bytes": "bytes_list", "float32": "float_list", "int64": "int64_list"}
_SHOWN = 20
DTYPES = {name: dtype for dtype, name in _LISTS.items()}


class BadExample(ValueError):
    """A record is not an Example, or does not have the declared features."""


@functools.cache
def example_class() -> Any:
    """Return the class of Example messages.

    Raises:
        ImportError: protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise ImportError(f"TFRecord files need protobuf: {distribution.pip_install('tfrecord')}") from None
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="penstock/example.proto", package="penstock", syntax="proto3")

    def add(message: Any, field: str, number: int, what: int, *, many: bool = False, of: str = "") -> Any:
        label = kind.LABEL_REPEATED if many else kind.LABEL_OPTIONAL
        return message.field.add(name=field, number=number, type=what, label=label, type_name=of or None)

    def message(name: str) -> Any:
        return file.message_type.add(name=name)

    add(message("BytesList"), "value", 1, kind.TYPE_BYTES, many=True)
    add(message("FloatList"), "value", 1, kind.TYPE_FLOAT, many=True)
    add(message("Int64List"), "value", 1, kind.TYPE_INT64, many=True)
    feature = message("Feature")
    feature.oneof_decl.add(name="kind")
    for number, (field, of) in enumerate(
        (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")), 1
    ):
        add(feature, field, number, kind.TYPE_MESSAGE, of=f".penstock.{of}").oneof_index = 0
    features = message("Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, kind.TYPE_STRING)
    add(entry, "value", 2, kind.TYPE_MESSAGE, of=".penstock.Feature")
    add(features, "feature", 1, kind.TYPE_MESSAGE, many=True, of=".penstock.Features.FeatureEntry")
    add(message("FeatureList"), "feature", 1, kind.TYPE_MESSAGE, many=True, of=".penstock.Feature")
    lists = message("FeatureLists")
    entry = lists.nested_type.add(name="FeatureListEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, kind.TYPE_STRING)
    add(entry, "value", 2, kind.TYPE_MESSAGE, of=".penstock.FeatureList")
    add(lists, "feature_list", 1, kind.TYPE_MESSAGE, many=True, of=".penstock.FeatureLists.FeatureListEntry")
    example = message("Example")
    add(example, "features", 1, kind.TYPE_MESSAGE, of=".penstock.Features")  # the context of a SequenceExample
    add(example, "feature_lists", 2, kind.TYPE_MESSAGE, of=".penstock.FeatureLists")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("penstock.Example"))


class ExampleParser:
    """Turns serialized Examples into samples.

    Args:
        features: their declarations, by name.
    """

    def __init__(self, features: Mapping[str, Feature]) -> None:
        self._parse = example_class().FromString
        from google.protobuf.message import DecodeError

        self._error = DecodeError
        self._features = [
            (name, feature, _LISTS[feature.dtype], _reader(feature)) for name, feature in features.items()
        ]

    def __call__(self, record: bytes) -> dict[str, Any]:
        """Return the sample of a record.

        Raises:
            BadExample: it is not an Example, or a feature is missing or has other values than declared.
        """
        try:
            example = self._parse(record)
        except self._error:
            raise BadExample("it is not a tf.train.Example") from None
        found, lists = example.features.feature, example.feature_lists.feature_list
        sample = {}
        for name, feature, wanted, read in self._features:
            message = found.get(name)
            if isinstance(feature, FixedLenSequence):
                if name not in lists:
                    raise BadExample(_no_list(name, feature, message))
                sample[name] = _steps(name, feature, wanted, read, lists[name].feature)
                continue
            has = message.WhichOneof("kind") if message is not None else None
            if has == wanted:
                try:
                    sample[name] = read(getattr(message, wanted).value)
                except BadExample as error:
                    raise BadExample(f"feature {name!r} {error}") from None
            elif has is not None:
                raise BadExample(f"feature {name!r} is {DTYPES[has]}, and {feature.dtype} was declared")
            elif name in lists:
                raise BadExample(
                    f"{name!r} is a feature list of a SequenceExample: declare it as FixedLenSequence, with the shape "
                    "and the dtype of a step"
                )
            elif isinstance(feature, VarLen):
                sample[name] = read(())
            elif feature.default is not None:
                sample[name] = _copied(feature)
            else:
                raise BadExample(
                    f"it has no feature {name!r}: give FixedLen(default=...), or declare it as VarLen. It has "
                    f"{', '.join(sorted(found)[:_SHOWN]) or 'none'}"
                )
        return sample


def _copied(feature: FixedLen) -> Any:
    if feature.dtype == "bytes" and feature.decode is None and feature.shape:
        return _objects([feature.default] * feature.count).reshape(feature.shape)
    return feature.default


def _no_list(name: str, feature: FixedLenSequence, message: Any) -> str:
    if message is None:
        return f"it has no feature list {name!r}"
    one = "a single feature, not a feature list"
    return f"{name!r} is {one}: declare FixedLen({feature.shape}, {feature.dtype!r}) or VarLen"


def _steps(name: str, feature: FixedLenSequence, wanted: str, read: Callable[[Any], Any], messages: Any) -> Any:
    """Return an array with a row for each step of a feature list."""
    rows = []
    for number, message in enumerate(messages):
        has = message.WhichOneof("kind")
        try:
            if has != wanted:
                raise BadExample(f"is {DTYPES[has] if has else 'empty'}, and {feature.dtype} was declared")
            rows.append(read(getattr(message, wanted).value))
        except BadExample as error:
            raise BadExample(f"step {number} of feature list {name!r} {error}") from None
    if feature.dtype == "bytes" and feature.decode is None:
        flat = [item for row in rows for item in (row.reshape(-1) if feature.shape else (row,))]
        return _objects(flat).reshape(len(rows), *feature.shape)
    return np.array(rows, feature.decode or feature.dtype).reshape(len(rows), *feature.shape)


def _reader(feature: Feature) -> Callable[[Any], Any]:
    """Return a function that makes a sample's value, or the value of a step, from a feature's list."""
    if isinstance(feature, FixedLenSequence):
        return _reader(feature.step)
    if isinstance(feature, VarLen):
        return functools.partial(_varying, feature)
    if feature.decode is not None:
        return functools.partial(_raw, feature.shape, np.dtype(feature.decode).newbyteorder("<"))
    if not feature.shape:
        return functools.partial(_scalar, {"float32": np.float32, "int64": np.int64, "bytes": bytes}[feature.dtype])
    return functools.partial(_fixed, feature)


def _scalar(make: Callable[[Any], Any], values: Any) -> Any:
    if len(values) != 1:
        raise BadExample(f"has {len(values)} values, and one was declared: declare its shape, or VarLen")
    return make(values[0])


def _fixed(feature: FixedLen, values: Any) -> Any:
    if len(values) != feature.count:
        raise BadExample(
            f"has {len(values)} values, and shape {list(feature.shape)} was declared, which has {feature.count}: "
            "correct the shape, or declare VarLen"
        )
    if feature.dtype == "bytes":
        return _objects(values).reshape(feature.shape)
    return np.array(values, feature.dtype).reshape(feature.shape)


def _raw(shape: tuple[int, ...], dtype: np.dtype[Any], values: Any) -> Any:
    if len(values) != 1:
        raise BadExample(f"has {len(values)} values, and decode= takes one")
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if len(values[0]) != nbytes:
        raise BadExample(
            f"has {len(values[0])} bytes, and {dtype.name}{list(shape)} has {nbytes}: correct shape= or decode="
        )
    return np.frombuffer(values[0], dtype).reshape(shape)[()]


def _varying(feature: VarLen, values: Any) -> Any:
    make = _objects if feature.dtype == "bytes" else functools.partial(np.array, dtype=feature.dtype)
    length = feature.pad_to
    if length is None:
        return make(values)
    if len(values) > length and not feature.cap:
        raise BadExample(f"has {len(values)} values, more than pad_to={length}: make it larger, or give cap=True")
    padded = np.full(length, feature.pad_value, object if feature.dtype == "bytes" else feature.dtype)
    count = min(length, len(values))
    padded[:count] = make(values[:count])
    return padded


def _objects(values: Any) -> Any:
    found = np.empty(len(values), object)
    found[:] = list(values)
    return found
