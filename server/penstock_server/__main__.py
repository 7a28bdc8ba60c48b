"""`python -m penstock_server` is the command `penstock` without `bench`. Private daemons are started with it."""

from .cli.main import main

main(prog_name="penstock")
