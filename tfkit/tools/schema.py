"""Print the JSON Schema of specs or runs, all plugins included."""

from __future__ import annotations

from pathlib import Path

import click

from tfkit.console.commands import Reader, command
from tfkit.console.options import output_option


@command(
    "schema",
    section="The language",
    order=610,
    sets=False,
    notes="""
    Editors complete and check a spec that begins with the line
    # yaml-language-server: $schema=schema.json
    """,
    examples="""
    tfkit schema -o schema.json
    tfkit schema --plugin-dir plugins/ -o schema.json
    tfkit schema --run -o run_schema.json
    """,
)
@click.option("--run", is_flag=True, help="The schema of runs instead of specs.")
@output_option("FILE", "Write to a file.")
def schema(reader: Reader, run: bool, output: Path | None) -> None:
    import json

    if run:
        from tfkit.run.run_schema import run_schema as schema_of
    else:
        from tfkit.spec.schema import json_schema as schema_of
    text = json.dumps(schema_of(reader.plugins), indent=2)
    if output is None:
        click.echo(text)
        return
    from tfkit.tools.common.atomic_files import write_file

    write_file(output, f"{text}\n")
