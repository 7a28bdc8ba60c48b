"""Where Penstock's own code lies, to tell its frames from those of user code."""

from __future__ import annotations

import os

import penstock_proto

OURS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(penstock_proto.__file__)) + os.sep,
)
"""The folders of Penstock's packages in a worker."""
