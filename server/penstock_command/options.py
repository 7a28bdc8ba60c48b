"""Options that several commands have."""

from __future__ import annotations

import click

workers_option = click.option(
    "--workers",
    type=click.IntRange(1, 4096),
    default=None,
    metavar="N",
    show_default="the number of CPUs",
    help="Worker processes of a private daemon.",
)
