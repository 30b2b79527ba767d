"""Write a model as one file of plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import click

from tfkit.commands import Reader, command, complete_spec, json_option, output_option, print_json, stages
from tfkit.errors import printable_text


@command(
    "eject",
    section="Tools",
    order=490,
    notes="""
    The file needs only torch. Its classes are the code of tfkit after everything
    that the spec decides is resolved: the same tensor names, the same results to
    the last bit. Both are checked before it is written; of models with more than
    1B parameters only the tensors are compared.

    A new model has initial weights as in the spec's init. It loads the state dict
    of the built model, or the files of tfkit save.
    """,
    examples="""
    tfkit eject gpt2 -o gpt2.py
    tfkit eject my_model.yaml | less
    """,
)
@click.argument("spec", metavar="SPEC", shell_complete=complete_spec)
@output_option("FILE", "Write to this file.  [default: print it]", dir_okay=False)
@json_option
def eject(reader: Reader, spec: str, output: Path | None, json: bool) -> None:
    if output is not None and output.suffix != ".py":
        raise click.BadParameter(f"`{output.name}` must end in .py", param_hint="--output")
    from tfkit.commands import check_file, write_file

    if output is not None:
        check_file(output)
    graph = reader.load(spec)
    with stages() as stage:
        stage("writing the code")
        from tfkit.tools.eject.proof import Alone, check
        from tfkit.tools.eject.write import eject as written

        with Alone() as alone:  # imports torch
            text = written(graph)
            stage("comparing it with the model")
            proof = check(graph, text, alone)
    lines = len(text.splitlines())
    if output is not None:
        write_file(output, text)
    if json:
        print_json({"name": graph.name, "lines": lines, "ran": proof.ran, "code": text})
    elif output is None:
        click.echo(text, nl=False)
    else:
        how = "equal to the last bit" if proof.ran else "too large to run here"
        summary = f"{lines} lines, {proof.tensors} tensors, {proof.parameters:,} parameters"
        click.echo(f"wrote {printable_text(str(output))}: {summary}; {how}")
