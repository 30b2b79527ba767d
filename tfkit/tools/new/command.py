"""Write the project of a new plugin: a component, a spec, tests."""

from __future__ import annotations

from pathlib import Path

import click

from tfkit.console.commands import command
from tfkit.console.options import output_option
from tfkit.console.reader import Reader
from tfkit.errors import printable


@command(
    "new",
    sets=False,
    notes="""
    The plugin works at once: its FFN, or its mixer, is a kind NAME, its spec is
    NAME_tiny, and its tests prove what tfkit promises of a component. Its README
    says what to change first, and where `make test` gets tfkit from.
    """,
    examples="""
    tfkit new plugin shift
    cd tfkit-shift && make test
    tfkit new plugin token_shift -o ~/token-shift
    tfkit new plugin smooth --slot mixer
    """,
)
@click.argument("what", metavar="plugin", type=click.Choice(["plugin"]))
@click.argument("name", metavar="NAME")
@click.option("--slot", type=click.Choice(["ffn", "mixer"]), default="ffn", help="The slot of its component.")
@output_option("DIR", "The folder to write.  [default: tfkit-NAME]")
def new(reader: Reader, what: str, name: str, slot: str, output: Path | None) -> None:
    from tfkit.tools.new.plugin import checked_names, write_plugin

    names = checked_names(name, reader.found, slot)
    folder = output or Path(names.distribution)
    files = write_plugin(names, folder)
    click.echo(f"wrote {printable(str(folder))}: {len(files)} files; next: make test, in it")
