"""Find the sizes of a spec's family that fit a budget."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.options import json_option, output_option
from tfkit.console.output import WIDTH, print_json, show, stages, table
from tfkit.errors import printable

if TYPE_CHECKING:
    from tfkit.tools.solve.solve import Kept, Size, Solved


UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


class Amount(click.ParamType):  # type: ignore[type-arg]
    """A number with a unit: `124M`, `1.5B`."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"\s*(\d[\d_,]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-z]*)\s*", str(value))
        unit = None if match is None else UNITS.get(match[2].lower())
        amount = 0.0 if match is None or unit is None else float(match[1].replace(",", "")) * unit
        if not 0 < amount < float("inf"):
            self.fail(f"`{value}` is not an amount above zero; write it like `124M`", param, ctx)
        return amount


@command(
    "solve",
    notes="""
    Layers and d_model vary, the layers of all stacks in one proportion. The rest
    of the family stays: the width of a head, d_ff and the heads of keys and values
    in proportion, vocabulary, experts, the pattern of layers. One size is listed
    for each kind of shape, the spec's own first, within 2% of the budget. --set of
    d_model or n_layers keeps that value. With -o, FILE gets a spec of the first
    size.
    """,
    examples="""
    tfkit solve gpt2 --params 350M
    tfkit solve llama3_8b --params 70B --set decoder.attention.n_kv_heads=8
    tfkit solve mixtral_8x7b --active 3B
    """,
)
@click.argument("spec", shell_complete=complete_spec)
@click.option("--params", type=Amount(), metavar="N", help="Parameters: 124M, 1.5B.")
@click.option("--active", type=Amount(), metavar="N", help="Parameters that a token uses: 3B.")
@click.option("--keep", type=click.Choice(["n_layers", "d_model"]), metavar="SIZE", help="Keep n_layers or d_model.")
@output_option("FILE", "Write a spec of the first size.")
@json_option
def solve(
    reader: Reader,
    spec: str,
    params: float | None,
    active: float | None,
    keep: Kept | None,
    output: Path | None,
    json: bool,
) -> None:
    from tfkit.tools.common.atomic_files import check_file

    if (params is None) == (active is None):
        raise click.UsageError("exactly one budget must be set: --params or --active")
    if output is not None:
        check_file(output)
    from tfkit.tools.solve.solve import Budget
    from tfkit.tools.solve.solve import solve as find

    budget = Budget("params", params) if params is not None else Budget("active", active or 0)
    with stages() as stage:
        stage("looking for sizes")
        solved = find(spec, budget, sets=reader.sets, keep=[keep] if keep else [], plugins=reader.plugins)
    if output is not None:
        _write(reader, spec, solved.sizes[0], output)
    if json:
        print_json({**vars(solved), "file": output and str(output)})
    else:
        _show(spec, solved, output)


def _write(reader: Reader, spec: str, size: Size, output: Path) -> None:
    from tfkit.tools.common.atomic_files import write_file
    from tfkit.tools.solve.solve import extending

    layers = " + ".join(map(str, size.n_layers.values()))
    words = f"{Path(spec).stem} with {layers} layers of width {size.d_model}"
    text = extending(spec, size.sets, output, reader.plugins, description=words, parameters=size.parameters)
    write_file(output, text)


def _show(spec: str, solved: Solved, output: Path | None) -> None:
    params = solved.budget.of == "params"
    columns = ["layers", "d_model", "heads", "d_ff", "parameters", *([] if params else [solved.budget.of]), "off by"]
    rows = [_cells(solved, size) for size in solved.sizes]
    title = f"{solved.name} near {solved.budget.text(solved.budget.amount)}"
    commands = [line for size in solved.sizes for line in ("", *_command(spec, size))]
    show(title, "", table(columns, rows, right=columns), *commands)
    if output is not None:
        show("", f"wrote {printable(str(output))}: {_layers(solved.sizes[0])} x {solved.sizes[0].d_model}")


def _command(spec: str, size: Size) -> Iterator[str]:
    """Format a command that counts a size, over several lines if it is long."""
    line = f"tfkit params {shlex.quote(spec)}"
    for change in size.sets:
        word = f"--set {shlex.quote(change)}"
        if len(line) + len(word) + 3 > WIDTH:
            yield f"{line} \\"
            line = " "
        line += f" {word}"
    yield line


def _layers(size: Size) -> str:
    return " + ".join(map(str, size.n_layers.values()))


def _cells(solved: Solved, size: Size) -> list[str]:
    heads = "-" if size.n_heads is None else str(size.n_heads)
    heads += f" / {size.n_kv_heads}" if size.n_kv_heads not in (None, size.n_heads) else ""
    value = [] if solved.budget.of == "params" else [solved.budget.text(size.value)]
    value = [text.removesuffix(" active parameters") for text in value]
    off = f"{100 * size.difference / solved.budget.amount:+.2f}%"
    d_ff = "-" if size.d_ff is None else f"{size.d_ff:,}"
    return [_layers(size), f"{size.d_model:,}", heads, d_ff, f"{size.parameters:,}", *value, off]
