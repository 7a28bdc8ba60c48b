"""Draw the tables and plots of docs/benchmarks.md from the newest result of each kind in benchmarks/results/.

    python benchmarks/report.py

A result is KIND-DATE.json, as the benchmark KIND wrote it. Its tables replace the text of docs/benchmarks.md between
`<!-- KIND: begin -->` and `<!-- KIND: end -->`; all other text is kept. Plots, for the kinds that have one, go to
docs/benchmarks/KIND.svg.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache
import compare
import coordinator
import first_batch
import formats
import gil
import gpu
import hosts_tables
import mixing
import page as web_page
import pipelines
import recovery
import sharing
import transport
import undivided
import workers
from contestants import CONTESTANTS
from loaders import LOADERS
from measure import Quartiles, Spread, ratios

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "benchmarks"
OURS, OTHERS = "#2a6fb0", "#9a9a9a"
RECOVERY_GROUPS = ("worker", "daemon", "link", "replay")


def newest(kind: str) -> Path | None:
    """Return the result with the latest date in its name."""
    return max(RESULTS.glob(f"{kind}-*.json"), default=None)


def replaced(page: str, kind: str, text: str) -> str:
    """Return the page with `text` between the marks of `kind`.

    Raises:
        ValueError: the page lacks these marks, or has more than one pair.
    """
    begin, end = f"<!-- {kind}: begin -->", f"<!-- {kind}: end -->"
    parts = re.split(f"({begin}\n|{end})", page)
    if parts[1::2] != [f"{begin}\n", end]:
        raise ValueError(f"{PAGE.name} needs one {begin} on a line of its own, and one {end} after it")
    return "".join([*parts[:2], f"\n{text}\n\n", *parts[3:]])


def heading(path: Path, result: dict[str, Any]) -> str:
    """Return where and when the result was measured, as text."""
    date = path.stem.partition("-")[2]
    if "machine" not in result:
        return f"Computed, {date} (`{path.relative_to(ROOT)}`)."
    machine = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    note = f" {result['note']}" if "note" in result else ""
    return (
        f"On {machine['cores']} cores, CPU {machine['cpu']}, {date} (`{path.relative_to(ROOT)}`).{note} "
        f"Python {machine['python']}, {versions}; load average at the start: {machine['load']:.1f}."
    )


def code(tables: list[str]) -> str:
    return "```text\n" + "\n\n".join(tables) + "\n```"


def transport_text(result: dict[str, Any]) -> str:
    return code([*map(transport.table, result["loads"]), transport.figures_table(result["figures"])])


def transport_plot(result: dict[str, Any], figure: Any) -> None:
    """Plot GB/s over the size of a batch, one line for each contestant, with the load of the fewest leaves at each
    size."""
    fewest: dict[int, dict[str, Any]] = {}
    for entry in sorted(result["loads"], key=lambda entry: (entry["bytes"], entry["leaves"])):
        fewest.setdefault(entry["bytes"], entry)
    figure.set_size_inches(7.5, 4)
    axes = figure.subplots()
    for name, contestant in CONTESTANTS.items():
        if contestant.module == "contestants.in_process":
            continue  # it moves nothing
        there = [entry for entry in fewest.values() if name in entry["results"]]
        speeds = [
            Quartiles.of(transport.values(entry["results"][name], "per_second", entry["bytes"] / 1e9))
            for entry in there
        ]
        sizes = [entry["bytes"] for entry in there]
        color = OURS if name.startswith("penstock") else OTHERS
        style = {"memcpy": ":", "loopback": "--", "penstock-tcp": "--", "msgpack-zmq": "-."}.get(name, "-")
        medians = [speed.median for speed in speeds]
        marker = "s" if name == "shared" else "o"
        axes.plot(sizes, medians, style, color=color, marker=marker, markersize=4, label=contestant.label)
        axes.vlines(sizes, [speed.lower for speed in speeds], [speed.upper for speed in speeds], color)
    axes.set(xscale="log", yscale="log", xlabel="a batch", ylabel="GB/s")
    axes.set_xticks(list(fewest), [transport.size_name(size) for size in fewest], rotation=45)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def recovery_text(result: dict[str, Any]) -> str:
    tables = [recovery.state_table(result["state"])] if "state" in result else []
    return code([*tables, *(recovery.table(group, rows) for group, rows in recovery_rows(result).items())])


def recovery_rows(result: dict[str, Any]) -> dict[str, list[tuple[recovery.Case, list[recovery.Pause]]]]:
    return {
        group: [
            (recovery.Case(**row["case"]), [recovery.Pause(**event) for event in row["events"]])
            for row in result[group]
        ]
        for group in RECOVERY_GROUPS
        if group in result
    }


def recovery_plot(result: dict[str, Any], figure: Any) -> None:
    """Plot the least, median and greatest pause of each event."""
    rows = [row for some in recovery_rows(result).values() for row in some]
    figure.set_size_inches(7.5, 0.6 + 0.27 * len(rows))
    axes = figure.subplots()
    for y, (_, pauses) in enumerate(rows):
        spread = Spread.of([one.pause for one in pauses])
        axes.plot([spread.least, spread.greatest], [y, y], color=OTHERS, linewidth=3, solid_capstyle="round")
        axes.plot(spread.median, y, "o", color=OURS)
    axes.set_yticks(range(len(rows)), [case.label for case, _ in rows])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="pause, seconds: median, least and greatest")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.4)


def pipelines_text(result: dict[str, Any]) -> str:
    return "\n\n".join(pipelines.table(entry, result["machine"]["cores"]) for entry in result["pipelines"])


def pipelines_plot(result: dict[str, Any], figure: Any) -> None:
    """Plot batches a second of the eager loop over those of the unit, one panel for each pipeline."""
    entries = result["pipelines"]
    names = [name for name in entries[0]["loaders"] if not LOADERS[name].limit and name != "unit"]
    figure.set_size_inches(9, 0.6 + 0.25 * (len(names) + 3) * -(-len(entries) // 3))
    panels = figure.subplots(-(-len(entries) // 3), min(3, len(entries)), sharey=True, squeeze=False).flat
    for axes, entry in zip(panels, entries, strict=False):
        units = entry["loaders"]["unit"]["runs"]
        for y, name in enumerate(names):
            values = ratios(entry["loaders"][name]["runs"], units)
            if not values:
                axes.text(0, y, f" {entry['loaders'][name]['failures'][-1].partition(':')[0]}", va="center", size=7)
                continue
            spread = Quartiles.of(values)
            axes.barh(y, spread.median, color=OURS if name.startswith("penstock") else OTHERS)
            axes.hlines(y, spread.lower, spread.upper, "black", linewidth=1)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.axvline(result["machine"]["cores"], color="black", linewidth=0.8, linestyle=":")
        axes.set_title(entry["label"].partition(":")[0], size=9)
        axes.set_yticks(range(len(names)), [LOADERS[name].label for name in names], size=8)
        axes.tick_params(axis="x", labelsize=8)
    figure.axes[0].invert_yaxis()
    for axes in list(panels):
        axes.remove()
    figure.supxlabel(
        "batches a second in an eager loop, over those of the unit (line); dotted: the unit times the cores", size=9
    )


def gpu_text(result: dict[str, Any]) -> str:
    return code(gpu.tables(result))


def gpu_plot(result: dict[str, Any], figure: Any) -> None:
    """Plot images a second of each way of feeding, one panel for each feed."""
    figure.set_size_inches(9, 2)
    panels = figure.subplots(1, len(result["feeds"]), sharey=True)
    for axes, feed in zip(panels, result["feeds"], strict=True):
        for y, (name, trials) in enumerate(feed["trials"].items()):
            spread = Quartiles.of([trial["per_second"] * result["batch_size"] for trial in trials])
            axes.barh(y, spread.median, color=OURS if result["labels"][name].startswith("Penstock") else OTHERS)
            axes.hlines(y, spread.lower, spread.upper, "black", linewidth=1)
        axes.set_yticks(range(len(feed["trials"])), [result["labels"][name] for name in feed["trials"]])
        axes.set_title(gpu.WORKS[feed["work"]].removeprefix("samples are "), size=9)
    panels[0].invert_yaxis()
    figure.supxlabel("images a second", size=9)


def first_batch_text(result: dict[str, Any]) -> str:
    return code([first_batch.table(result["seconds"])])


def workers_text(result: dict[str, Any]) -> str:
    return code([workers.table(result["cases"])])


def undivided_text(result: dict[str, Any]) -> str:
    return code([undivided.table(result["rounds"])])


def cache_text(result: dict[str, Any]) -> str:
    return code([cache.table(result["rounds"])])


def formats_text(result: dict[str, Any]) -> str:
    return code([formats.table(result["cases"])])


def stages_text(result: dict[str, Any]) -> str:
    return code([f"  now     {result['now']}\n  before  {result['before']}", compare.table(result)])


def page_text(result: dict[str, Any]) -> str:
    return code([web_page.table(result)])


def gil_text(result: dict[str, Any]) -> str:
    return code([gil.table(result["loads"])])


def sharing_text(result: dict[str, Any]) -> str:
    return code(sharing.tables(result))


def mixing_text(result: dict[str, Any]) -> str:
    return code(mixing.tables(result))


def mixing_plot(result: dict[str, Any], figure: Any) -> None:
    """Plot distinct splits in a batch over `shuffle`, and below the output positions of the input's samples."""
    figure.set_size_inches(8, 7.2)
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.75))
    names = [mixing.shuffle_name(shuffle) for shuffle in mixing.SHUFFLES]
    for axes, files in zip(above.subplots(1, len(mixing.FILES)), mixing.FILES, strict=True):
        shown = [one for one in result["cases"] if (one["files"], one["samples"]) == (files, mixing.SHOWN[1])]
        for label, name, style, color in (
            ("full", "full shuffle", ":", "black"),
            ("tf.data", "tf.data", "s-", OTHERS),
            ("penstock, 100 B", "Penstock", "o-", OURS),
        ):
            axes.plot([one["orders"][label][0] for one in shown], style, color=color, label=name, markersize=4)
        axes.set_title(f"{files} files of {mixing.SHOWN[1]} samples", size=9)
        axes.set_xticks(range(len(names)), names)
        axes.set(ylim=(0, 34), xlabel="shuffle")
    above.axes[0].set_ylabel(f"files in a batch of {mixing.BATCH}")
    above.axes[0].legend(loc="upper left", frameon=False, fontsize=8)
    panels = below.subplots(2, len(names), sharex=True, sharey=True)
    for column, name in zip(panels.T, names, strict=True):
        for axes, way, color in zip(column, ("penstock", "tf.data"), (OURS, "#555555"), strict=True):
            place = result["points"][name][way]
            axes.plot(range(len(place)), place, ".", color=color, markersize=1.2, rasterized=True)
            axes.set(xticks=[], yticks=[])
        column[0].set_title(f"shuffle {name}", size=9)
    for axes, way in zip(panels[:, 0], ("Penstock", "tf.data"), strict=True):
        axes.set_ylabel(f"{way}: position in")
    below.supxlabel(f"position out, in an epoch of {mixing.SHOWN[0]} files of {mixing.SHOWN[1]} samples", size=9)


def hosts_text(result: dict[str, Any]) -> str:
    return code(hosts_tables.tables(result))


def hosts_plot(result: dict[str, Any], figure: Any) -> None:
    """Plot MB/s over the number of hosts, and samples/s around the loss of one."""
    figure.set_size_inches(9, 3.2)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.7))
    lines = [
        (
            f"Penstock, head: {megabits} Mbit/s",
            style,
            OURS,
            [one for one in result["links"] if one["head_megabits"] == megabits],
        )
        for megabits, style in ((1000, "o-"), (400, "o:"))
    ]
    others = result.get("others", {"versions": {}})
    for loader, style in zip(others["versions"], ("s--", "^:"), strict=False):
        cases = [one for one in others["cases"] if one["loader"] == loader]
        lines.append((f"{hosts_tables.LABELS[loader]}, head: 1000 Mbit/s", style, OTHERS, cases))
    for label, style, color, cases in lines:
        speeds = [[one for one in case["megabytes_per_second"] if one is not None] for case in cases]
        medians = [Spread.of(some).median if some else math.nan for some in speeds]
        left.plot([case["hosts"] for case in cases], medians, style, color=color, label=label, markersize=4)
    left.set(xticks=[1, 2, 4], xlabel="hosts behind 200 Mbit/s each", ylabel="MB/s", ylim=(0, None))
    left.legend(frameon=False, fontsize=8)
    for case, color in zip(result["kill"], (OURS, OTHERS), strict=True):
        run = case["runs"][0]
        width = 4  # steps are shown by the second
        speeds = [sum(run["steps"][n : n + width]) / width for n in range(0, len(run["steps"]) - width, width)]
        right.plot([-1, 0, *(n + 0.5 for n in range(len(speeds)))], [run["before"]] * 2 + speeds, ".-", color=color)
        right.plot([], [], ".-", color=color, label=case["event"])
    right.axvline(0, color="black", linewidth=0.8)
    right.set(xlabel="seconds since 1 of 4 hosts was lost", ylabel="samples/s", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)


KINDS: dict[str, tuple[Callable[[dict[str, Any]], str], Callable[[dict[str, Any], Any], None] | None, str]] = {
    "pipelines": (pipelines_text, pipelines_plot, "Batches a second of each loader over those of the unit"),
    "transport": (transport_text, transport_plot, "GB/s of each way over the size of a batch"),
    "first_batch": (first_batch_text, None, ""),
    "workers": (workers_text, None, ""),
    "gil": (gil_text, None, ""),
    "cache": (cache_text, None, ""),
    "undivided": (undivided_text, None, ""),
    "formats": (formats_text, None, ""),
    "stages": (stages_text, None, ""),
    "page": (page_text, None, ""),
    "sharing": (sharing_text, None, ""),
    "coordinator": (coordinator.tables, None, ""),
    "gpu": (gpu_text, gpu_plot, "Images a second of a GPU, fed in several ways"),
    "hosts": (hosts_text, hosts_plot, "MB/s of 1, 2 and 4 hosts, and samples/s around the loss of one"),
    "mixing": (mixing_text, mixing_plot, "Files in a batch, and position in against position out"),
    "recovery": (recovery_text, recovery_plot, "The pause of a stream after each event"),
}


def save(kind: str, draw: Callable[[dict[str, Any], Any], None], result: dict[str, Any]) -> None:
    """Write the plot, byte for byte the same for the same result."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": kind, "svg.fonttype": "none", "font.size": 9})
    figure = Figure(layout="constrained")
    draw(result, figure)
    PLOTS.mkdir(exist_ok=True)
    figure.savefig(PLOTS / f"{kind}.svg", metadata={"Date": None}, facecolor="white")


def main() -> int:
    page = PAGE.read_text()
    for kind, (text, draw, caption) in KINDS.items():
        path = newest(kind)
        if path is None:
            print(f"{kind}: no result in {RESULTS.relative_to(ROOT)}, so the page keeps its part", file=sys.stderr)
            continue
        result = json.loads(path.read_text())
        parts = [heading(path, result), text(result)]
        if draw is not None:
            parts.insert(1, f"![{caption}](benchmarks/{kind}.svg)")
            save(kind, draw, result)
        page = replaced(page, kind, "\n\n".join(parts))
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
