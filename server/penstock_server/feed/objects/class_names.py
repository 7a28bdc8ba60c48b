"""Finds the names of a source's classes, for the trainers that read its labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock_proto.messages import MAX_CLASSES

_MOST_COLUMNS = 64


def classes_of(source: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the names of the classes of each column that has labels, by label: those of the source's attribute
    `classes`, a list of text (then the column is ""), or a dict of such lists. Folders of images, CSV files and the
    datasets of torchvision have it. Empty if there are none, or more than trainers are told.
    """
    try:
        found = getattr(source, "classes", None)
    except Exception:
        return ()
    columns = found if isinstance(found, Mapping) else {"": found}
    if len(columns) > _MOST_COLUMNS or not all(map(_is_list_of_names, columns.values())):
        return ()
    classes = tuple((str(column)[:1024], tuple(names)) for column, names in columns.items() if names)
    try:
        nbytes = sum(len(name.encode()) for column, names in classes for name in (column, *names))
    except UnicodeEncodeError:  # the name of a folder that is no UTF-8
        return ()
    return classes if nbytes <= MAX_CLASSES else ()


def _is_list_of_names(names: Any) -> bool:
    return isinstance(names, list | tuple) and all(type(name) is str and len(name) <= 1024 for name in names)
