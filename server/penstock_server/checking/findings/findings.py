"""Findings: what is wrong with a feed, where, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

ERROR, WARNING, NOTE = "error", "warning", "note"
"""How severe a finding is. An error breaks the feed or its promises. A warning costs time or memory. A note is just
something to know."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about a feed, a machine or a connection.

    Attributes:
        severity: ERROR, WARNING or NOTE.
        about: a keyword for programs, such as "import" or "runs".
        what: what is wrong.
        where: a file and line, or a split; empty if there is no such place.
        fix: what to do; empty if `what` says it already.
        traceback: user code's traceback, or empty.
    """

    severity: str
    about: str
    what: str
    where: str = ""
    fix: str = ""
    traceback: str = ""


def by_severity(findings: list[Finding]) -> list[Finding]:
    """Return the findings, the most severe first."""
    return sorted(findings, key=lambda finding: [ERROR, WARNING, NOTE].index(finding.severity))


def failed(findings: list[Finding], *, strict: bool) -> bool:
    """Return whether the check fails: on an error or, if `strict`, on a warning too."""
    return any(finding.severity == ERROR or (strict and finding.severity == WARNING) for finding in findings)
