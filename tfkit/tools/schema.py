"""Print the JSON Schema of specs or runs, all plugins included."""

from __future__ import annotations

from pathlib import Path

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_type
from tfkit.console.options import output_option


@command(
    "schema",
    section="The language",
    order=610,
    sets=False,
    notes="""
    Editors complete and check a spec that begins with the line
    # yaml-language-server: $schema=schema.json
    TYPE is a type of document with a model, such as `run`. Without TYPE, the schema
    is the schema of specs.
    """,
    examples="""
    tfkit schema -o schema.json
    tfkit schema --plugin-dir plugins/ -o schema.json
    tfkit schema run -o run_schema.json
    """,
)
@click.argument("sort", required=False, metavar="[TYPE]", shell_complete=complete_type)
@output_option("FILE", "Write to a file.")
def schema(reader: Reader, sort: str | None, output: Path | None) -> None:
    import json

    from tfkit.spec.schema import json_schema

    schema_of = json_schema if sort is None else reader.type_named(sort).schema
    text = json.dumps(schema_of(reader.plugins), indent=2)
    if output is None:
        click.echo(text)
        return
    from tfkit.tools.common.atomic_files import write_file

    write_file(output, f"{text}\n")
