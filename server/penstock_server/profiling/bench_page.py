"""The page of `penstock bench --report`: speed, time of each part, verdict, and a profile of the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .page import bars, document, profile_sections, table
from .profile import Profile

Parts = Sequence[tuple[str, Sequence[tuple[str, float, str]]]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What bench measured, in words and shares.

    Attributes:
        target: what the user asked for.
        when: the date and time.
        headline: the speed.
        verdict: what limits it.
        rows: the figures, by name.
        parts: how consumer and workers spent their time (see `bars`).
        rates: batches/s in successive parts of the time.
    """

    target: str
    when: str
    headline: str
    verdict: str
    rows: Mapping[str, str]
    parts: Parts
    rates: Sequence[float]


def bench_page(seen: Measured, profile: Profile | None, why_not: str) -> str:
    """Return the page.

    Args:
        seen: what was measured.
        profile: of the workers, in the seconds after the measurement.
        why_not: why there is none, if it is None.
    """
    sections = [
        f'<p class="verdict">{escape(seen.verdict)}</p>',
        "<h2>Time of each part</h2>",
        bars(seen.parts),
        _key(),
        "<h2>Speed over time</h2>",
        _columns(seen.rates),
        "<h2>Figures</h2>",
        table(seen.rows),
    ]
    if profile is None:
        sections += ["<h2>Profile of the workers</h2>", f"<p>There is none: {escape(why_not)}</p>"]
    else:
        sections += [
            "<h2>Profile of the workers</h2>",
            f'<p class="muted">Sampled for {profile.seconds:.1f} s after the measurement, not during it.</p>',
            *profile_sections(profile, reads=True),
        ]
    return document(f"{seen.target}: {seen.headline}", f"penstock bench, {seen.when}", sections)


def _key() -> str:
    kinds = {"user": "your code", "penstock": "Penstock", "lacking": "ready to run, without a CPU", "idle": "waiting"}
    keys = " &ensp; ".join(f'<span class="key of-{kind}"></span>{text}' for kind, text in kinds.items())
    return f'<p class="muted legend">{keys}</p>'


def _columns(rates: Sequence[float]) -> str:
    """Return a bar chart of speeds, from 0 on."""
    if not rates:
        return ""
    width, height, gap = 46, 90, 4
    most = max(rates)
    columns = []
    for at, rate in enumerate(rates):
        tall = max(1.0, height * rate / most)
        x = at * width
        columns.append(
            f'<rect x="{x + gap}" y="{18 + height - tall:.1f}" width="{width - 2 * gap}" '
            f'height="{tall:.1f}" rx="2"/><text x="{x + width / 2}" y="{13 + height - tall:.1f}">{_short(rate)}</text>'
        )
    label = f"batches/s in {len(rates)} successive parts of the time: {', '.join(map(_short, rates))}"
    size = f'width="{width * len(rates)}" height="{height + 20}"'
    return (
        f'<div class="scrolls"><svg class="columns" {size} role="img" aria-label="{escape(label)}">'
        f'{"".join(columns)}</svg></div><p class="muted">batches/s in {len(rates)} successive parts of the time</p>'
    )


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
