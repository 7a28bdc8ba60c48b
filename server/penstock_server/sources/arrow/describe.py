"""Describes Arrow files, by their schema."""

from __future__ import annotations

from ..arrow_columns import can_be_served, why_not_served
from ..description import Column, Description
from .reader import opened_arrow


def describe(file: str) -> Description:
    """Describe an Arrow file.

    Raises:
        ImportError: pyarrow is not installed.
        OSError: the file cannot be read; the message names it.
    """
    with opened_arrow(file) as arrow:
        left_out, columns = {}, []
        for field in arrow.schema:
            if can_be_served(field.type):
                columns.append(Column(field.name, field.name, f"column {field.name!r}, {field.type}"))
            else:
                left_out[field.name] = why_not_served(field.type)
        rows = [batch.num_rows for _, batch in arrow.batches()]
    many = f"{len(rows)} record batches" if len(rows) != 1 else "1 record batch"
    span = f" of {min(rows)} to {max(rows)} rows" if rows and min(rows) < max(rows) else ""
    span = f" of {rows[0]} rows" if rows and not span else span
    return Description(tuple(columns), left_out, (f"{many}{span}",), sum(rows))
