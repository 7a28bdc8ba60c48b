"""`python -m penstock_server` is the command `penstock`."""

from .cli import main

main(prog_name="penstock")
