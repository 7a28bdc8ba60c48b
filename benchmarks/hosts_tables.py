"""The tables of hosts.py, from its measurements."""

import statistics
from typing import Any

from measure import Spread
from transport import aligned, size_name

STEP = 0.25
"""Seconds of each step in which speeds are counted around the loss of a host."""
LABELS = {"penstock": "Penstock", "tfdata": "tf.data service", "ray": "Ray Data"}


def tables(result: dict[str, Any]) -> list[str]:
    return [TABLES[name](result[name]) for name in TABLES if name in result]


def spread(values: list[float]) -> str:
    return str(Spread.of(values)) if values else "-"


def over(values: list[float | None], units: list[float | None]) -> list[float]:
    """Return the values over the units of the same round, for the rounds that have both."""
    pairs = zip(values, units, strict=True)
    return [value / unit for value, unit in pairs if value is not None and unit is not None]


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number > 1 else ''}"


def links_table(found: list[dict[str, Any]]) -> str:
    rows = [["hosts behind 200 Mbit/s each; median (least-greatest)", "MB/s", "of linear"]]
    for case in found:
        one = next(other for other in found if other["head_megabits"] == case["head_megabits"] and other["hosts"] == 1)
        speeds, ones = case["megabytes_per_second"], one["megabytes_per_second"]
        # of the head's cable, as of a host's, what one connection gets
        most = [single * case["head_megabits"] / 200 for single in ones]
        linear = [min(single * case["hosts"], limit) for single, limit in zip(ones, most, strict=True)]
        share = [speed / full for speed, full in zip(speeds, linear, strict=True)]
        label = f"{counted(case['hosts'], 'host')}, the head's link {case['head_megabits']} Mbit/s"
        rows.append([label, str(Spread.of(speeds)), str(Spread.of(share))])
    return "\n".join(aligned(rows))


def workers_table(found: list[dict[str, Any]]) -> str:
    rows = [["samples of 50 ms; median (least-greatest)", "samples/s", "of 20/s a worker"]]
    for case in found:
        speeds = case["samples_per_second"]
        label = f"{counted(case['workers'], 'worker')} on {counted(case['hosts'], 'host')}"
        rows.append([label, str(Spread.of(speeds)), str(Spread.of([one / case["workers"] / 20 for one in speeds]))])
    return "\n".join(aligned(rows))


def kill_table(found: list[dict[str, Any]]) -> str:
    rows = [
        ["1 of 4 hosts; median (least-greatest)", "samples/s before", "after", "of before", "pause, s", "recovered, s"]
    ]
    steps = []
    for case in found:
        runs = case["runs"]
        values = [[run[key] for run in runs] for key in ("before", "after")]
        values.append([run["after"] / run["before"] for run in runs])
        values += [[run[key] for run in runs] for key in ("pause", "recovered")]
        rows.append([case["event"], *(str(Spread.of(one)) for one in values)])
        first = runs[0]
        width = 1 if case["event"] == "killed" else 8
        speeds = [statistics.mean(first["steps"][n : n + width]) for n in range(0, len(first["steps"]), width)]
        shown = " ".join(f"{speed / first['before']:.1f}" for speed in speeds[:16])
        steps.append(f"{case['event']}: speed over that before, in steps of {STEP * width:g} s from then on: {shown}")
    return "\n".join([*aligned(rows), "", *steps])


def head_table(found: list[dict[str, Any]]) -> str:
    rows = [["CPU of the head's daemon; median (least-greatest)", "us a batch", "ms a MB", "batches/s"]]
    for case in found:
        label = f"batches of {size_name(case['batch_bytes'])}, "
        label += "of two hosts" if case["source"] == "hosts" else "of its own two workers"
        keys = ("us_a_batch", "ms_a_megabyte", "batches_per_second")
        rows.append([label, *(str(Spread.of([run[key] for run in case["runs"]])) for key in keys)])
    return "\n".join(aligned(rows))


def others_table(found: dict[str, Any]) -> str:
    cases = {(case["loader"], case["hosts"]): case for case in found["cases"]}
    rows = [["hosts behind 200 Mbit/s each; median (least-greatest)", "MB/s", "of linear", "over Penstock's"]]
    failures = []
    for (loader, hosts), case in sorted(cases.items(), key=lambda item: item[0][1]):  # Penstock comes first
        speeds = case["megabytes_per_second"]
        linear = [one and one * hosts for one in cases[loader, 1]["megabytes_per_second"]]
        ours = cases["penstock", hosts]["megabytes_per_second"]
        known = [one for one in speeds if one is not None]
        rows.append(
            [
                f"{counted(hosts, 'host')}: {LABELS[loader]}",
                spread(known),
                spread(over(speeds, linear)),
                spread(over(speeds, ours)),
            ]
        )
        failures += [f"  {LABELS[loader]}, {counted(hosts, 'host')}: failed, {why}" for why in case["failures"]]
    versions = ", ".join(f"{LABELS[loader]} {version}" for loader, version in found["versions"].items())
    left_out = [f"  {LABELS[loader]}: left out, {why}" for loader, why in found["left_out"].items()]
    return "\n".join([*aligned(rows), *failures, *left_out, "", f"  {versions}"])


def third_table(found: list[dict[str, Any]]) -> str:
    cases = {(case["at"], case["hosts"]): case["runs"] for case in found}
    rows = [
        [
            "200 Mbit/s for each host, and the head; median (least-greatest)",
            "MB/s",
            "of linear",
            "of that at the head",
            "head's CPU, ms a MB",
        ]
    ]
    for (at, hosts), runs in cases.items():
        speeds, ones, near = (
            [run["megabytes_per_second"] for run in some] for some in (runs, cases[at, 1], cases["head", hosts])
        )
        label = f"{counted(hosts, 'host')}, the trainer {'at the head' if at == 'head' else 'on a third machine'}"
        linear = [one * hosts for one in ones]
        head = [run["head_ms_a_megabyte"] for run in runs]
        rows.append([label, spread(speeds), spread(over(speeds, linear)), spread(over(speeds, near)), spread(head)])
    return "\n".join(aligned(rows))


def ranks_table(found: list[dict[str, Any]]) -> str:
    anywhere = [run["megabytes_per_second"] for run in found[0]["runs"]]
    rows = [
        ["4 ranks, 200 Mbit/s for each; median (least-greatest)", "MB/s", "of that of 15 lanes", "of it over cables"]
    ]
    for case in found:
        speeds = [run["megabytes_per_second"] for run in case["runs"]]
        crossed = [run["crossed"] for run in case["runs"]]
        rows.append([f"{case['lanes']} lanes", spread(speeds), spread(over(speeds, anywhere)), spread(crossed)])
    return "\n".join(aligned(rows))


def keys_table(found: list[dict[str, Any]]) -> str:
    cases = {(case["batch_bytes"], case["keys"]): case["runs"] for case in found}
    rows = [
        [
            "one host with two workers; median (least-greatest)",
            "batches/s",
            "MB/s",
            "of that without",
            "head's CPU, ms a MB",
            "host's CPU, ms a MB",
        ]
    ]
    for (size, keys), runs in cases.items():
        speeds, without = ([run["batches_per_second"] for run in some] for some in (runs, cases[size, False]))
        row = [f"batches of {size_name(size)}, {'with' if keys else 'without'} keys", spread(speeds)]
        row += [spread([speed * size / 1e6 for speed in speeds]), spread(over(speeds, without))]
        row += [spread([run[f"{who}_ms_a_megabyte"] for run in runs]) for who in ("head", "host")]
        rows.append(row)
    return "\n".join(aligned(rows))


TABLES = {
    "links": links_table,
    "others": others_table,
    "third": third_table,
    "ranks": ranks_table,
    "workers": workers_table,
    "kill": kill_table,
    "head": head_table,
    "keys": keys_table,
}
