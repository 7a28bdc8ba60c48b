"""Describes Parquet files, by their metadata: columns, row groups, compression."""

from __future__ import annotations

from typing import Any

from penstock_proto.status.figures import size

from ..arrow_columns import can_be_served, why_not_served
from ..bounds import AT_ONCE, COLUMNS
from ..description import Column, Description
from .reader import RowGroup, divided, opened_parquet, readable


def describe(file: str) -> Description:
    """Describe a Parquet file.

    Raises:
        ImportError: pyarrow is not installed.
        OSError: the file cannot be read; the message names it.
        ValueError: a row group is too large to be read, or there are too many columns.
    """
    with opened_parquet(file) as parquet, readable(file):
        meta, schema = parquet.metadata, parquet.schema_arrow
        if len(schema) > COLUMNS:
            first = ", ".join(f"{field.name} ({field.type})" for field in [schema.field(at) for at in range(5)])
            raise ValueError(
                f"{file} has {len(schema):,} columns, the first of which are {first}. Name those to serve: penstock "
                "serve FILE --leaf NAME=COLUMN ... If the columns are the elements of an array, write them as one "
                "column of lists"
            )
        groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
        largest = max(map(_stored, groups), default=0)
        if largest > AT_ONCE:
            raise ValueError(
                f"{file} has row groups of up to {size(largest)}, and each has to be read as a whole, by workers too: "
                "write smaller ones (row_group_size=)"
            )
        chunks = _chunks(groups)
        left_out: dict[str, str] = {}
        columns = []
        for field in schema:
            found = chunks.get(field.name, [])
            nulls = _nulls(found) if len({chunk.path_in_schema for chunk in found}) == 1 else 0
            if not can_be_served(field.type):
                left_out[field.name] = why_not_served(field.type)
            elif nulls and found[0].path_in_schema == field.name:  # in a column of lists, empty lists count as nulls
                left_out[field.name] = f"holds {nulls} nulls: fill them when you write the file"
            else:
                columns.append(Column(field.name, field.name, _storage(field, found)))
        facts = _facts(groups)
        return Description(tuple(columns), left_out, facts, meta.num_rows)


def _stored(group: Any) -> int:
    return sum(group.column(number).total_compressed_size for number in range(group.num_columns))


def _facts(groups: list[Any]) -> tuple[str, ...]:
    rows = [group.num_rows for group in groups]
    if not rows:
        return ()
    largest = max(map(_stored, groups))
    many = f"{len(rows)} row groups" if len(rows) > 1 else "1 row group"
    span = f"{min(rows)} to {max(rows)}" if min(rows) < max(rows) else str(rows[0])
    groups_of = [
        (RowGroup("", number, group.num_rows, None), group.total_byte_size) for number, group in enumerate(groups)
    ]
    splits = divided(groups_of)
    if len(splits) > len(rows):
        facts = [
            f"{many} of {span} rows, up to {size(largest)}, divided into {len(splits)} splits. Each decodes its row "
            "group up to its own rows: smaller row groups (row_group_size=) cost less"
        ]
    else:
        facts = [f"{many} of {span} rows, up to {size(largest)}; each is a split"]
        if len(rows) < 4 and sum(rows) > 1000:
            facts.append("few row groups mean few workers: write more of them (row_group_size=)")
    return tuple(facts)


def _chunks(groups: list[Any]) -> dict[str, list[Any]]:
    """Return the column chunks in all row groups, by the column's name and by its full path."""
    found: dict[str, list[Any]] = {}
    for group in groups:
        for number in range(group.num_columns):
            chunk = group.column(number)
            for name in {chunk.path_in_schema, chunk.path_in_schema.partition(".")[0]}:
                found.setdefault(name, []).append(chunk)
    return found


def _nulls(chunks: list[Any]) -> int:
    return sum(chunk.statistics.null_count or 0 for chunk in chunks if chunk.statistics is not None)


def _storage(field: Any, chunks: list[Any]) -> str:
    words = [f"column {field.name!r}, {_type(field.type)}"]
    if chunks:
        words.append(str(chunks[0].compression).lower().replace("uncompressed", "not compressed"))
        stored = sum(chunk.total_compressed_size for chunk in chunks)
        whole = sum(chunk.total_uncompressed_size for chunk in chunks)
        words.append(size(stored))
        if stored and whole > 1.05 * stored:
            words.append(f"{whole / stored:.1f} times smaller")
    return ", ".join(words)


def _type(kind: Any) -> str:
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType):
        return f"tensors of {kind.value_type}{list(kind.shape)}"
    return str(kind)
