"""Find the sizes of a spec's family that fit a budget."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.commands import (
    TABLE_WIDTH,
    Reader,
    command,
    complete_spec,
    json_option,
    output_option,
    print_json,
    print_tables,
    print_warnings,
    stages,
    table,
)
from tfkit.errors import printable_text

if TYPE_CHECKING:
    from tfkit.tools.solve.budget import Budget, Size, Solved
    from tfkit.tools.solve.of_run import SizedRun
    from tfkit.tools.solve.solve import Kept


UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class Amount(click.ParamType):  # type: ignore[type-arg]
    """A number with a unit: `124M`, `1.5B`; or `80GB`, with other units."""

    name = "amount"

    def __init__(self, units: Mapping[str, float] = UNITS, example: str = "124M") -> None:
        self.units, self.example = units, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"\s*(\d[\d_,]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-z]*)\s*", str(value))
        unit = None if match is None else self.units.get(match[2].lower())
        amount = 0.0 if match is None or unit is None else float(match[1].replace(",", "")) * unit
        if not 0 < amount < float("inf"):
            self.fail(f"`{value}` is not an amount above zero; write it like `{self.example}`", param, ctx)
        return amount


@command(
    "solve",
    section="Tools",
    order=460,
    notes="""
    Layers and d_model vary; the layers of all stacks stay in proportion. d_ff and
    the heads of keys and values are in proportion to d_model. The rest stays: the
    width of a head, vocabulary, experts, the pattern of layers. Several sizes
    within 2% of the budget are listed: the spec's ratio of width to depth first,
    then deeper and wider models. --set of d_model or n_layers fixes that value.
    With -o, FILE gets a spec of the first size, which must be within 2%.
    --vary PATH varies a single number, and keeps all others.

    --memory requires a run, whose batch, optimizer, precision and machine
    determine the memory. It lists the largest sizes that fit, as predicted by
    tfkit train RUN --plan --processes N.
    """,
    examples="""
    tfkit solve gpt2 --params 350M
    tfkit solve llama3_8b --params 70B --set decoder.attention.n_kv_heads=8
    tfkit solve mixtral_8x7b --active 3B
    tfkit solve gpt2 --params 130M --vary decoder.ffn.d_ff
    tfkit solve run.yaml --memory 80GB --processes 64
    """,
)
@click.argument("spec", shell_complete=complete_spec)
@click.option("--params", type=Amount(), metavar="N", help="Number of parameters: 124M, 1.5B.")
@click.option("--active", type=Amount(), metavar="N", help="Parameters that a token uses: 3B.")
@click.option("--memory", type=Amount(BYTES, "80GB"), metavar="SIZE", help="Memory of each process of a run: 80GB.")
@click.option(
    "--processes", type=click.IntRange(1), metavar="N", help="With --memory: processes of the run.  [default: 1]"
)
@click.option(
    "--keep", type=click.Choice(["n_layers", "d_model"]), metavar="SIZE", help="Keep n_layers or d_model of the spec."
)
@click.option("--vary", metavar="PATH", help="Vary this value alone: decoder.ffn.d_ff.")
@output_option("FILE", "Write a spec of the first size.")
@json_option
def solve(
    reader: Reader,
    spec: str,
    params: float | None,
    active: float | None,
    memory: float | None,
    processes: int | None,
    keep: Kept | None,
    vary: str | None,
    output: Path | None,
    json: bool,
) -> None:
    from tfkit.commands import check_file

    if [params, active, memory].count(None) != 2:
        raise click.UsageError("exactly one budget must be set: --params, --active or --memory")
    if processes is not None and memory is None:
        raise click.UsageError("--processes needs --memory")
    if vary is not None and (keep or memory is not None):
        raise click.UsageError(f"--vary cannot be combined with {'--keep' if keep else '--memory'}")
    if output is not None:
        check_file(output)
    from tfkit.tools.solve.budget import Budget, Memory
    from tfkit.tools.solve.sizes import Family
    from tfkit.tools.solve.solve import sizes_of

    fixed = [keep] if keep else []
    with stages() as stage:
        stage("looking for sizes")
        run = _sized_run(reader, spec, fixed, needed=memory is not None, varies=vary is not None)
        budget = Budget("active", active) if active is not None else Budget("params", params or 1)
        if vary is not None:
            solved = _varied(reader, spec, run, vary, budget)
        elif run and memory is not None:
            solved = run.largest(Memory(memory, processes or 1))
        else:
            family = run.family if run else Family.of(spec, reader.plugins, sets=reader.sets, keep=fixed)
            solved = sizes_of(family, budget)
    if output is not None:
        _check_within_tolerance(solved)
        _write_spec(reader, spec, run, solved.sizes[0], output)
    if run:
        solved = replace(solved, sizes=tuple(replace(size, sets=run.changes(size.sets)) for size in solved.sizes))
    if json:
        print_json({**vars(solved), "file": output and str(output)})
    else:
        _show_sizes(_counting_command(reader, spec, solved), solved, output)


def _varied(reader: Reader, spec: str, run: SizedRun | None, path: str, budget: Budget) -> Solved:
    """Return the value of a path nearest to a budget. In a run, the path begins with `model.`, as for `--set`."""
    from tfkit.spec.extending import find_spec
    from tfkit.spec.load import read_tree
    from tfkit.tools.solve.vary import vary_value

    if run is None:
        file = str(find_spec(spec, reader.plugins.specs))
        return vary_value(read_tree(spec, reader.plugins.specs), file, reader.plugins, path, budget, reader.sets)
    changes = [change.strip().removeprefix("model.") for change in reader.sets if _is_inside(change)]
    inside = path.removeprefix("model.")
    return vary_value(run.tree, run.family.file, reader.plugins, inside, budget, changes)


def _is_inside(change: str) -> bool:
    return change.strip().startswith("model.")


def _sized_run(reader: Reader, name: str, keep: list[Kept], *, needed: bool, varies: bool) -> SizedRun | None:
    """Return the run of that name, None for a spec; raise SpecError for a spec if a run is needed.

    If a single value varies, the changes of the model are left to it: they need not give a size of the family.
    """
    if reader.sort_of(name) == "run":
        from tfkit.tools.solve.of_run import SizedRun

        sets = [change for change in reader.sets if not (varies and _is_inside(change))]
        run = SizedRun.of(name, reader.plugins, sets=sets, keep=keep)
        print_warnings(run.run.file.notes)
        return run
    if needed:
        from tfkit.errors import Diagnostic, SpecError
        from tfkit.run.run_spec import RunSpec
        from tfkit.spec.load import read_tree
        from tfkit.spec.read_document import find_document

        try:
            read_tree(name, reader.plugins.specs)
        except SpecError:
            find_document(name, RunSpec, reader.plugins.specs)
            raise
        message = f"--memory needs a run, whose batch and precision decide how much a size needs; `{name}` is not a run"
        new_run = shlex.join(["tfkit", "new", "run", name, "-o", "run.yaml"])
        help = f"name a run, or write one for this model: `{new_run}`"
        raise SpecError(Diagnostic(message, help=help))
    return None


def _check_within_tolerance(solved: Solved) -> None:
    """Raise SpecError if the first size is too far from a budget of parameters to be written."""
    from tfkit.errors import Diagnostic, SpecError
    from tfkit.tools.solve.search import TOLERANCE

    size, budget = solved.sizes[0], solved.budget
    share = size.difference / budget.amount
    if budget.of != "memory" and abs(share) > TOLERANCE:
        message = f"no size of {solved.name} is within {TOLERANCE:.0%} of {budget.text(budget.amount)}"
        note = f"the nearest size has {budget.text(size.value)} ({share:+.2%})"
        help = f"write that size with `--{budget.of} {size.value}`"
        raise SpecError(Diagnostic(message, notes=(note,), help=help))


def _write_spec(reader: Reader, spec: str, run: SizedRun | None, size: Size, output: Path) -> None:
    from tfkit.commands import write_file
    from tfkit.tools.solve.solve import extending_spec, standalone_spec

    words = f"{Path(spec).stem} with {_layer_counts(size)} layers of width {size.d_model}"
    values = {"description": words, "parameters": size.parameters}
    if run:
        text = standalone_spec(run.tree, size.sets, output, reader.plugins, **values)
    else:
        text = extending_spec(spec, size.sets, output, reader.plugins, **values)
    write_file(output, text)


def _show_sizes(counting: str, solved: Solved, output: Path | None) -> None:
    columns = ["layers", "d_model", "heads", "d_ff", "parameters", *COLUMNS[solved.budget.of]]
    rows = [_size_cells(solved, size) for size in solved.sizes]
    commands = [line for size in solved.sizes for line in ("", *_command_lines(counting, size))]
    print_tables(_budget_title(solved), "", table(columns, rows, right=columns), *commands)
    if output is not None:
        print_tables(
            "", f"wrote {printable_text(str(output))}: {_layer_counts(solved.sizes[0])} x {solved.sizes[0].d_model}"
        )


COLUMNS = {"params": ["off by"], "active": ["active", "off by"], "memory": ["memory", "free"]}


def _budget_title(solved: Solved) -> str:
    amount = solved.budget.text(solved.budget.amount)
    if solved.budget.of != "memory":
        return f"{solved.name} near {amount}"
    count = solved.budget.processes
    return f"{solved.name} in {amount} of " + (f"each of {count:,} processes" if count > 1 else "a single process")


def _counting_command(reader: Reader, spec: str, solved: Solved) -> str:
    """Return the command that counts the quantity of the budget for a size, without the changes of the size."""
    words = ["tfkit", "params", spec]
    if solved.budget.of == "memory":
        words = ["tfkit", "train", spec, "--plan", f"--processes={solved.budget.processes}"]
    return shlex.join([*words, *reader.plugin_options])


def _command_lines(line: str, size: Size) -> Iterator[str]:
    """Format a command for a size, over several lines if it is long."""
    for change in size.sets:
        word = f"--set {shlex.quote(change)}"
        if len(line) + len(word) + 3 > TABLE_WIDTH:
            yield f"{line} \\"
            line = " "
        line += f" {word}"
    yield line


def _layer_counts(size: Size) -> str:
    return " + ".join(map(str, size.n_layers.values()))


def _size_cells(solved: Solved, size: Size) -> list[str]:
    heads = "-" if size.n_heads is None else str(size.n_heads)
    heads += f" / {size.n_kv_heads}" if size.n_kv_heads not in (None, size.n_heads) else ""
    d_ff = "-" if size.d_ff is None else f"{size.d_ff:,}"
    sizes = [_layer_counts(size), f"{size.d_model:,}", heads, d_ff, f"{size.parameters:,}"]
    value = solved.budget.text(size.value)
    if solved.budget.of == "memory":
        return [*sizes, value, solved.budget.text(-size.difference)]
    active = [value.removesuffix(" active parameters")] if solved.budget.of == "active" else []
    return [*sizes, *active, f"{100 * size.difference / solved.budget.amount:+.2f}%"]
