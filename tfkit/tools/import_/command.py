"""Derive a spec from a config.json."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tfkit.console.commands import Reader, command, print_warnings
from tfkit.console.completion import complete_spec
from tfkit.console.options import json_option
from tfkit.errors import printable_text


@command(
    "import",
    section="Published models",
    order=310,
    sets=False,
    notes="""
    CONFIG is a config.json of transformers, the folder that holds it, or the name
    of a model on the Hugging Face Hub. The spec has the model's graph and the
    names of its tensors, so that the weights in that folder can be loaded:
    tfkit build SPEC --weights FOLDER. A field whose value no spec of the family
    can have is an error. For a type that is unknown, --draft writes the beginning
    of a family, from the one that has the most of its fields and tensors. For
    weights without a config.json, it writes the beginning of a config.json: the
    family and the fields that the names and shapes of the tensors decide.
    """,
    examples="""
    tfkit import downloads/Llama-3.2-1B -o llama.yaml
    tfkit import config.json --family my_family.yaml
    tfkit import downloads/new --draft families/new.yaml
    """,
)
@click.argument("config", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write the spec to this file.")
@click.option(
    "--family",
    metavar="SPEC",
    shell_complete=complete_spec,
    help="The spec that defines the fields.  [default: by model_type]",
)
@click.option(
    "--draft",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write a draft of a family or config.json to this file.",
)
@click.option("--name", metavar="NAME", help="The name of the model.  [default: its folder]")
@json_option
def import_(
    reader: Reader,
    config: Path,
    output: Path | None,
    family: str | None,
    draft: Path | None,
    name: str | None,
    json: bool,
) -> None:
    from tfkit.console.hub import local_path
    from tfkit.console.output import print_json
    from tfkit.tools.common.atomic_files import check_file, write_file
    from tfkit.tools.import_.importing import import_config

    config = local_path(config, ["config.json"])
    if draft is not None:
        if output is not None or family is not None or name is not None:
            raise click.UsageError(
                "--draft cannot be combined with --output, --family or --name: it writes a family instead of a spec"
            )
        _write_draft(reader, config, draft, json=json)
        return
    if output is not None:
        check_file(output)
    imported = import_config(config, family=family, name=name, plugins=reader.plugins)
    print_warnings(imported.notes)
    if output is not None:
        from tfkit.spec.render import schema_line

        write_file(output, schema_line(output.parent) + imported.text)
    if json:
        left_out = {"fields": imported.fields_left_out, "tensors": imported.tensors_left_out}
        values = {"name": imported.graph.name, "family": imported.family, "spec": imported.text}
        print_json({**values, "left_out": left_out})
    elif output is None:
        click.echo(imported.text, nl=False)
    else:
        names = f", with the names of {imported.family}" if imported.family else ""
        click.echo(f"wrote {printable_text(str(output))}: {imported.graph.name}{names}")


def _write_draft(reader: Reader, config: Path, draft: Path, *, json: bool) -> None:
    from tfkit.console.output import print_json
    from tfkit.spec.folder import CONFIG, has_weights
    from tfkit.tools.common.atomic_files import check_file, write_file
    from tfkit.tools.import_.importing import draft_family, draft_of_weights

    check_file(draft)
    if config.suffix == ".safetensors" or (has_weights(config) and not os.path.lexists(config / CONFIG)):
        drafted = draft_of_weights(config, reader.plugins)
        print_warnings([drafted.note])
        write_file(draft, drafted.text)
        if json:
            equal = drafted.types[: drafted.n_equal]
            print_json({"types": drafted.types, "equal": equal, "open": drafted.open, "config": drafted.text})
        else:
            click.echo(f"wrote {printable_text(str(draft))}: a config.json of {drafted.types[0]}")
        return
    text, near, other = draft_family(config, reader.plugins.specs)
    print_warnings([other] if other else [])
    write_file(draft, text)
    if json:
        print_json({"nearest": near, "family": text})
    else:
        click.echo(f"wrote {printable_text(str(draft))}: from {near}")
