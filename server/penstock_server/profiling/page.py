"""Pages in one file, without a network: a profile with its flame graph, and the report of `penstock bench`.

Everything that comes from a feed (names, paths, lines of code) is escaped, and the page may load nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .folding import IDLE
from .profile import Profile, frames_of
from .report import MOST_LINES, extent, parts_in_words, place_of, remarks, source_of

LABELLED = 0.08
"""Least share of a bar that has room for its name."""

_ASSETS = Path(__file__).parent / "assets"

_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
<h1>{title}</h1>
<p class="muted">{subtitle}</p>
"""

_GRAPH = """<h2>Flame graph</h2>
<div class="tools">
<label>Search <input type="search" id="search" placeholder="function or file" aria-describedby="found"></label>
<span id="found" class="muted" aria-live="polite"></span>
<label>Workers <select id="worker">{workers}</select></label>
<label><input type="checkbox" id="cpu" checked> on a CPU</label>
<label><input type="checkbox" id="wait" checked> waiting</label>
<label><input type="checkbox" id="idle"> without work</label>
<button type="button" id="reset">Show all</button>
</div>
<p id="says" class="muted" aria-live="polite"></p>
<div id="graph"></div>
<p class="muted legend"><span class="key of-user"></span>your code &ensp;
<span class="key of-library"></span>libraries &ensp; <span class="key of-penstock"></span>Penstock &ensp;
<span class="key key-cpu"></span>the part on a CPU &ensp; A block is a line, as wide as the time in it and below it;
callers are above. Click to zoom, Esc for all, / to search.</p>
<script type="application/json" id="profile-data">{data}</script>
<script>
{script}</script>
"""


def document(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """Return a page. `sections` are HTML."""
    css = (_ASSETS / "page.css").read_text()
    head = _HEAD.format(title=escape(title), subtitle=escape(subtitle), css=css)
    return head + "\n".join(sections) + "</body>\n</html>\n"


def profile_page(profile: Profile, target: str, when: str, *, reads: bool) -> str:
    """Return the page of `penstock profile`.

    Args:
        profile: what was sampled.
        target: what the user asked for.
        when: the date and time.
        reads: whether the command read the feed itself.
    """
    subtitle = f"{extent(profile)} ({when})"
    return document(f"Profile of {target}", subtitle, profile_sections(profile, reads=reads))


def profile_sections(profile: Profile, *, reads: bool) -> list[str]:
    """Return what a page shows of a profile: where the time went, the lines that took longest, the flame graph."""
    times = profile.times()
    parts = [("your code", times.generating, "user")]
    parts += [(word, seconds, "penstock") for word, seconds in times.words.items()]
    parts.append((IDLE, times.idle, "idle"))
    shown = [(name, seconds / times.seconds, kind) for name, seconds, kind in parts if seconds] if times.seconds else []
    return [
        "<h2>Time of the workers</h2>",
        bars([("all workers", shown)]),
        f'<p class="muted">{escape(parts_in_words(times))}.</p>' if shown else "",
        *(f"<p>{escape(text)}</p>" for text in remarks(profile, reads=reads)),
        _hot(profile),
        _graph(profile),
    ]


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]) -> str:
    """Return bars that are divided: for each its name, and the name, the share and the kind of each part."""
    made = []
    for name, parts in rows:
        spans = "".join(
            f'<span class="of-{kind}" style="width:{100 * share:.2f}%" title="{escape(part)}: {100 * share:.1f} %">'
            f"{f'{escape(part)} {100 * share:.0f} %' if share >= LABELLED else ''}</span>"
            for part, share, kind in parts
            if share >= 0.001
        )
        made.append(f'<span>{escape(name)}</span><div class="bar">{spans}</div>')
    return f'<div class="bars">{"".join(made)}</div>'


def table(rows: Mapping[str, str]) -> str:
    """Return a table of names and texts."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f'<div class="scrolls"><table>{cells}</table></div>'


def _hot(profile: Profile) -> str:
    rows = []
    for line in profile.lines(MOST_LINES):
        frame = line.frame
        button = '<button type="button" class="hot code"'
        search = f"{frame.file.rpartition('/')[2]}:{frame.line}" if frame.file else frame.name
        rows.append(
            f'<tr><td class="number">{100 * line.share:.1f} %</td><td class="number">{line.seconds:.2f} s</td>'
            f'<td class="number">{100 * line.on_cpu:.0f} %</td>'
            f'<td>{button} data-search="{escape(search)}">{escape(place_of(frame))}</button></td>'
            f"<td><code>{escape(source_of(frame)[:100])}</code></td></tr>"
        )
    if not rows:
        return ""
    return (
        "<h2>Lines that took longest</h2>"
        '<p class="muted">Of the time in which workers worked. What a line calls in libraries and in C counts as the '
        "line's.</p>"
        '<div class="scrolls"><table><tr><th class="number">time</th><th class="number"></th>'
        '<th class="number">on a CPU</th><th>line</th><th></th></tr>' + "".join(rows) + "</table></div>"
    )


def _graph(profile: Profile) -> str:
    data = _data(profile)
    if not data["stacks"]:
        return ""
    options = "".join(f'<option value="{at}">{escape(one["name"])}</option>' for at, one in enumerate(data["workers"]))
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    script = (_ASSETS / "flame.js").read_text()
    every = '<option value="all">all workers</option>'
    return _GRAPH.format(workers=every + options, data=text, script=script)


def _data(profile: Profile) -> dict[str, Any]:
    stacks = {stack: number for number, stack in enumerate(dict.fromkeys(s for s, _ in profile.stacks() if s))}
    frames = frames_of(iter(stacks))
    workers = []
    for worker in profile.workers:
        times: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        for stack, ns, on_cpu in worker.runs:
            if stack:
                times[stacks[stack]][not on_cpu] += ns
        samples = [[stack, cpu // 1000, wait // 1000] for stack, (cpu, wait) in times.items()]
        ended = ", ended" if worker.ended else ""
        workers.append({"name": f"worker {worker.name} (pid {worker.pid}{ended})", "samples": samples})
    return {
        "idle": IDLE,
        "frames": [[frame.name, frame.file, frame.line, frame.kind] for frame in frames],
        "stacks": [[frames[frame] for frame in stack] for stack in stacks],
        "workers": workers,
    }
