"""Words for how a process ended, and advice for the user. No I/O.

The words go into the log, into errors, and from a joined host to the head. The advice depends on them, so both are made
here.
"""

from __future__ import annotations

import contextlib
import signal

NO_SAMPLE = "made no sample for"
"""The first words for a worker that hung in user code and was killed; hang_detection.py has the rest."""

CUT_OFF = "ended because user code closed or replaced its connection to the daemon (as os.closerange does)"

ENDED = "was ended, as it was to leave and still had work"
"""For a worker that Penstock itself killed, as `penstock scale --now` asks. This is no failure."""

INVALID = "was killed, because it sent an invalid message"

_KILLED = "was killed by "
_EXITED = "exited with status "

_ADVICE = {
    NO_SAMPLE: "If a sample may take that long, give --hang-timeout more seconds",
    _KILLED + "SIGKILL": "If memory ran out (`dmesg` says so), fewer workers or a smaller shuffle need less",
    _KILLED + "SIGBUS": (
        "A file that the feed maps into memory became shorter, or shared memory is full (`df /dev/shm`); `penstock "
        "check` shows the line"
    ),
    _EXITED: (
        "Code that the feed calls ended the process, such as os._exit or a C library; its last output is in the log"
    ),
    **dict.fromkeys(
        (_KILLED + name for name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE")),
        "A library that the feed calls crashed; `penstock check` shows the line",
    ),
    _KILLED: "Another program sent it this signal, or its own code did",
}
"""Advice, by the first words for the end. The first match counts."""


def ended_how(code: int | None) -> str:
    """Return in words how a process with this exit status ended. None: unknown, because the fork server ended too."""
    if code is None:
        return "died with the fork server"
    if code >= 0:
        return f"{_EXITED}{code}"
    name = str(-code)
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    hint = " (the kernel's out-of-memory killer sends it too)" if name == "SIGKILL" else ""
    return f"{_KILLED}{name}{hint}"


def advice(how: str) -> str:
    """Return advice about a worker that ended like this, to be appended to the words, or "" if there is none."""
    return next((f". {text}" for words, text in _ADVICE.items() if how.startswith(words)), "")
