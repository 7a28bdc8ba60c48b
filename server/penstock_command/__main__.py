"""`python -m penstock_command`: the console command."""

from __future__ import annotations

from . import main

if __name__ == "__main__":
    main(prog_name="penstock")
