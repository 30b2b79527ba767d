"""Check specs and runs, and list all their errors."""

from __future__ import annotations

from collections.abc import Sequence

import click

from tfkit.console.commands import Reader, command, print_warnings
from tfkit.console.completion import complete_spec
from tfkit.console.options import json_option
from tfkit.console.output import print_json
from tfkit.errors import Diagnostic, SpecError


@command(
    "validate",
    section="Specs",
    order=520,
    notes="""
    Warnings are from plugins: what is valid and yet slow, or likely not meant. With
    --json, the result lists the errors and warnings of each spec.
    """,
    examples="""
    tfkit validate my_model.yaml
    tfkit validate specs/*.yaml
    """,
)
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...", shell_complete=complete_spec)
@json_option
def validate(reader: Reader, specs: tuple[str, ...], json: bool) -> None:
    _ = reader.plugins  # an error of a plugin is not the fault of a spec
    results = []
    for spec in specs:
        error, warnings = _diagnostics_of(reader, spec)
        errors = error.diagnostics if error else ()
        results.append({"spec": spec, **_as_data(errors=errors, warnings=warnings)})
        if not json:
            click.echo(f"{error}\n" if error else f"{spec}: ok", err=error is not None)
            print_warnings(warnings)
    if json:
        print_json(results)
    if any(result["errors"] for result in results):
        raise click.exceptions.Exit(1)


def _diagnostics_of(reader: Reader, spec: str) -> tuple[SpecError | None, Sequence[Diagnostic]]:
    """Return the errors of a spec or a document; or, if it has none, the warnings of plugins."""
    from tfkit.tools.common.plugin_checks import warnings_of

    try:
        if (document := reader.document_type(spec)) is not None:
            graph = document.check(spec, reader.plugins, sets=reader.sets)
        else:
            graph = reader.load(spec)
    except SpecError as error:
        return error, ()
    return None, warnings_of(graph, reader.plugins)


def _as_data(**groups: Sequence[Diagnostic]) -> dict[str, object]:
    return {name: [diagnostic.to_dict() for diagnostic in diagnostics] for name, diagnostics in groups.items()}
