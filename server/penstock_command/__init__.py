"""The console command `penstock`: the server's commands, and one file for each command that also uses the client.

This is the only package that imports both the server and the client.
"""

from __future__ import annotations

from penstock_server.cli.main import main

# isort: split
from .bench import bench  # after penstock_server.cli.main, which says what to install if click is missing
from .peek import peek
from .profile import profile
from .reading import read_for_check
from .top import top

__all__ = ["main"]

for command in (bench, profile, top, peek):
    main.add_command(command)
main.context_settings["obj"] = read_for_check  # for `check URL`: a server command, which cannot import the client
