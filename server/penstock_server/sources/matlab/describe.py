"""Describes MATLAB files: the arrays that can share a number of samples."""

from __future__ import annotations

from collections import Counter

from ..description import Column, Description, leaf_names
from .variables import common_length, open_variables

_LEAVES = 100
"""Arrays that are proposed as leaves, at most."""


def describe(file: str) -> Description:
    """Describe a MATLAB file.

    Raises:
        ImportError: scipy is not installed, and the file needs it.
        OSError: the file cannot be read; the message names it.
        ValueError: too many arrays share a length.
    """
    with open_variables(file) as (variables, h5):
        version = "7.3 (HDF5)" if h5 is not None else "7 or older, which each worker holds as a whole"
        left_out = {one.name: one.unfit for one in variables if one.unfit}
        fit = [one for one in variables if not one.unfit]
        often = Counter(length for one in fit for length in one.lengths)
        rows = max(often, key=lambda length: (often[length], length), default=None)
        left_out |= {
            one.name: f"is {'x'.join(map(str, one.shape))}, and has no dimension of {rows} samples, first or last"
            for one in fit
            if rows not in one.lengths
        }
        proposed = [one for one in fit if rows in one.lengths]
        if len(proposed) > _LEAVES:
            raise ValueError(
                f"{file} has {len(proposed)} arrays of length {rows}: if each is a sample, write a generator that "
                "yields them, and give its feed as MODULE:ATTR. Otherwise name those to serve with --leaf NAME=VARIABLE"
            )
        options: dict[str, object] = {}
        if proposed and rows and common_length(proposed, None) != rows:
            options["axis"] = -1
        short = leaf_names([one.name for one in proposed])
        columns = tuple(
            Column(
                one.name,
                short[one.name],
                f"{one.kind} {'x'.join(map(str, one.shape))}, with the samples in its "
                f"{'first' if one.axis(rows or 0, None) == 0 else 'last'} dimension",
            )
            for one in proposed
        )
    return Description(columns, left_out, (f"version {version}",), rows, options=options)
