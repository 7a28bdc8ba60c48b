"""`penstock params`: lists the parameters of a function that returns a feed."""

from __future__ import annotations

import inspect

import click


@click.command()
@click.argument("target", metavar="MODULE:FUNCTION")
def params(target: str) -> None:
    """List the parameters of a function that returns a feed.

    They are those of its signature, with their types and defaults, and what its docstring says. `penstock serve`,
    `check`, `bench`, `peek` and `join` set them with --param NAME=VALUE and --params FILE. The module is imported.

    \b
    Examples:
      penstock params scenes.py:make
    """  # noqa: D301 (click wants a real \b)
    from penstock_proto import StartError

    from ..targets.factory import described, is_factory, parameters_of
    from ..targets.importing import load_function
    from ..targets.world import as_served

    as_served(target)
    if target.endswith(".py"):
        raise StartError(f"{target}: which function in it? Write {target}:make")
    factory = load_function(target)
    if not is_factory(factory):
        raise StartError(f"{target} is not a function that returns a feed")
    found = parameters_of(factory)
    click.echo(f"{target}: {'its parameters' if found else 'it has no parameters'}")
    for one in found:
        click.echo(f"  {described(one)}{'' if one.default is not one.empty else '  (required)'}")
    if text := inspect.getdoc(factory):
        click.echo(f"\n{text}")
