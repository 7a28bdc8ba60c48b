"""Options that several commands share."""

from __future__ import annotations

from penstock_server.cli.option_groups import Group, option
from penstock_server.cli.parameters import WholeNumber

workers_option = option(
    "--workers",
    group=Group.WORKERS,
    type=WholeNumber(1, 4096),
    default=None,
    metavar="N",
    show_default="one for each CPU that it may use",
    help="Worker processes of a private daemon.",
)
