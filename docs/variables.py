"""Write the table of environment variables into commands.md, from the commands: `python docs/variables.py`."""

from __future__ import annotations

from pathlib import Path

import click

from penstock_command import main
from penstock_server.cli.command_group import variables

PAGE = Path(__file__).parent / "commands.md"
BEGIN, END = "<!-- variables.py begins -->\n", "<!-- variables.py ends -->\n"


def rows() -> list[str]:
    """Return a line of the table for each option of each command."""
    lines = []
    for name, command in sorted(main.commands.items()):
        context = click.Context(command)
        for option, variable in variables(name, command):
            value = "" if option.is_flag else f" {option.make_metavar(context)}".replace("|", "\\|")
            repeats = " ..." if option.multiple else ""
            lines.append(f"| `penstock {name}` | `{max(option.opts, key=len)}{value}{repeats}` | `{variable}` |")
    return lines


def page(text: str) -> str:
    """Return the page with the table written again."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    table = "\n".join(["| command | option | variable |", "|---|---|---|", *rows()])
    return f"{before}{BEGIN}\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
