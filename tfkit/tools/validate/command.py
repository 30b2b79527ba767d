"""Check specs and list all their errors."""

from __future__ import annotations

import click

from tfkit.console.commands import command
from tfkit.console.completion import complete_spec
from tfkit.console.options import Reader, json_option
from tfkit.errors import SpecError


@command(
    "validate",
    notes="With --json, the result lists the errors of each spec.",
    examples="""
    tfkit validate my_model.yaml
    tfkit validate specs/*.yaml
    """,
)
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...", shell_complete=complete_spec)
@json_option
def validate(reader: Reader, specs: tuple[str, ...], json: bool) -> None:
    from tfkit.console.output import print_json

    _ = reader.plugins  # an error of a plugin is not the fault of a spec
    results = []
    for spec in specs:
        wrong = _wrong(reader, spec)
        results.append({"spec": spec, "errors": [one.to_dict() for one in wrong.diagnostics] if wrong else []})
        if not json:
            click.echo(f"{wrong}\n" if wrong else f"{spec}: ok", err=wrong is not None)
    if json:
        print_json(results)
    if any(result["errors"] for result in results):
        raise click.exceptions.Exit(1)


def _wrong(reader: Reader, spec: str) -> SpecError | None:
    try:
        reader.load(spec)
    except SpecError as wrong:
        return wrong
    return None
