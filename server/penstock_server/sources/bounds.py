"""The bounds that sizes in data files are compared with, before anything is allocated for them."""

from __future__ import annotations

from penstock_proto.status.figures import size

AT_ONCE = 2 << 30
"""Bytes that can only be read together, such as a row, a chunk or a compressed page."""

SPLITS = 1 << 20
"""Splits of a feed: their list is kept, and sent to the daemon."""

COLUMNS = 1000
"""Columns of a file that are served when none is named."""


def check_at_once(nbytes: int, where: str, what: str) -> None:
    """Check the size of something that can only be read as a whole.

    Args:
        nbytes: its size, as the file claims it.
        where: the file, and the place in it.
        what: what it is, in the plural, such as "rows".

    Raises:
        ValueError: it is too large.
    """
    if nbytes > AT_ONCE:
        raise ValueError(
            f"{where} has {what} of {size(nbytes)}, and more than {size(AT_ONCE)} are not read at once: leave it out, "
            f"or write smaller {what}"
        )
