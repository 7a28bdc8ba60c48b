"""Makes the table of the metrics for monitoring.md, from the code. conf.py calls it."""

from __future__ import annotations

from penstock_server.http.metrics import METRICS


def page() -> str:
    """Return the table, as Markdown, sorted by name."""
    lines = ["| name | labels | meaning |", "|---|---|---|"]
    for name, metric in sorted(METRICS.items()):
        shown = f"{name}_info" if name == "penstock_daemon" else name
        lines.append(f"| `{shown}` | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.means} |")
    return "\n".join(lines) + "\n"
