"""Count FLOPs, bytes and memory of a step, and its minimum time on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.options import batch_option, by_option, count_option, dtype_option, json_option
from tfkit.console.output import group_layers, percent, print_json, print_tables, table
from tfkit.errors import Invalid, SpecError
from tfkit.tools.common.modes import OPTIMIZERS, Mode, mode_option
from tfkit.tools.common.units import bytes_text, count_text, flops_text

if TYPE_CHECKING:
    from tfkit.tools.common.ownership import By
    from tfkit.tools.cost.cost import Cost, CostRow
    from tfkit.tools.cost.devices import Device


@command(
    "cost",
    section="Tools",
    order=450,
    notes="""
    Nothing is allocated, so the model may have any size. FLOPs are of matrix
    products, two for each multiplication and addition, with every pair of query
    and key; `visible` omits the pairs that the mask hides. The floor is the larger
    of the times for FLOPs and for bytes at the device's limits: no step is faster,
    and real steps take longer.

    All memory is in --dtype. The optimizer is adamw, sgd, sgd_momentum, or
    adamw_float32. The last stores its states in float32 and, if the weights have a
    shorter dtype, also a float32 copy of the weights, as mixed precision does.

    A file of figures has FLOPs per second of dense matrix products by type, bytes
    per second, and bytes:

        title: My accelerator          # by default, the file's name
        flops: {bfloat16: 300e12, float32: 60e12}
        bandwidth: 2e12
        memory: 80e9
    """,
    examples="""
    tfkit cost gpt2 --batch 8 --device h200
    tfkit cost llama3_8b --mode decode --length 8192 --device h100
    tfkit cost my_model.yaml --by layer --recompute
    """,
)
@click.argument("spec", shell_complete=complete_spec)
@batch_option
@count_option("--length", "Tokens of each sequence; in decode, in the cache.  [default: 2048, or max_len]")
@count_option("--memory-length", "Tokens of the encoder's input.  [default: --length]")
@mode_option("train, prefill (read a prompt) or decode (one more token).")
@dtype_option("float32, bfloat16, float16 or float64.", default="bfloat16")
@click.option(
    "--device",
    metavar="NAME",
    help="Add the minimum time on a device: h200, a100, ... or a YAML file with the figures of a device.",
)
@by_option
@click.option("--recompute", is_flag=True, help="Recompute layers in the backward pass to save memory.")
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), metavar="NAME", help="See below.  [default: adamw]")
@json_option
def cost(
    reader: Reader,
    spec: str,
    mode: Mode,
    dtype: str,
    device: str | None,
    by: By,
    recompute: bool,
    optimizer: str | None,
    json: bool,
    **sizes: Any,
) -> None:
    limits = None if device is None else limits_of(reader, device)
    for name, value in (("recompute", recompute), ("optimizer", optimizer)):
        if value and mode != "train":
            raise click.UsageError(f"--{name} has no effect without a backward pass: omit it, or use --mode train")
    if limits is not None and dtype not in limits.tera_flops:
        dtypes = ", ".join(limits.tera_flops)
        raise click.UsageError(f"there are no figures for {dtype} on {limits.title}; known: {dtypes}")
    graph = reader.load(spec)
    from tfkit.tools.cost.cost import cost as count

    try:
        costs = count(
            graph,
            mode=mode,
            dtype=dtype,
            optimizer=optimizer,  # type: ignore[arg-type]
            recompute=recompute,
            **sizes,
        )
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise click.UsageError(str(error)) from None
    if json:
        print_json(_as_data(costs, by, limits))
    else:
        _print_costs(costs, by, limits)


def limits_of(reader: Reader, device: str) -> Device:
    """Return the device of an option `--device`: a name, or a file that describes it."""
    from tfkit.tools.cost.devices import find_device

    try:
        return find_device(device, plugins=reader.plugins)
    except Invalid as error:
        raise click.BadParameter(f"{error.message}; {error.help}", param_hint="--device") from None


def _as_data(costs: Cost, by: By, device: Device | None) -> dict[str, Any]:
    """Return the costs as mappings and lists."""
    data = {name: getattr(costs, name) for name in _HEAD}
    rows = [_row_data(row) for row in costs.rows(by)]
    data |= {"by": by, "rows": rows, "total": _row_data(costs.total), "memory": vars(costs.memory)}
    return data if device is None else data | {"floor": vars(costs.floor(device)), "device": vars(device)}


_HEAD = ("name", "mode", "batch", "length", "memory_length", "dtype", "optimizer", "recompute")


def _row_data(row: CostRow) -> dict[str, Any]:
    return {**vars(row), "intensity": row.intensity}


def _print_costs(costs: Cost, by: By, device: Device | None) -> None:
    columns = ["each layer" if by == "layer" else by, *_column_names(costs, device)]
    rows = []
    for row, parts in costs.groups(by):
        seconds = None if device is None else costs.floor(device, parts).seconds
        rows.append([row.label, *_row_cells(costs, row, seconds)])
    if by == "layer":
        merged = group_layers((label, tuple(cells), cells) for label, *cells in rows)
        rows = [[label, *cells[0]] for label, cells in merged]
    total = None if device is None else costs.floor(device).seconds
    rows.append(["total", *_row_cells(costs, costs.total, total)])
    print_tables(
        _table_title(costs), "", table(columns, rows, right=columns[1:], footer=1), "", *_table_notes(costs, device)
    )


def _column_names(costs: Cost, device: Device | None) -> list[str]:
    train = ["backward"] if costs.mode == "train" else []
    columns = ["saved"] if costs.mode == "train" else ["moved"]
    return ["FLOPs", "share", *train, "weights", *columns, "FLOP/B", *(["floor"] if device else [])]


def _row_cells(costs: Cost, row: CostRow, seconds: float | None) -> list[str]:
    train = costs.mode == "train"
    cells = [flops_text(row.flops_forward), percent(row.flops_forward, costs.total.flops_forward)]
    cells += [flops_text(row.flops_backward)] if train else []
    cells += [count_text(row.parameters) if row.parameters else "-"]
    cells += [_bytes_or_dash(row.saved if train else row.traffic)]
    cells += [f"{row.intensity:,.{0 if row.intensity >= 100 else 1}f}" if row.flops else "-"]
    return cells if seconds is None else [*cells, time_text(seconds)]


def _bytes_or_dash(n: int) -> str:
    return bytes_text(n) if n else "-"


def _table_title(costs: Cost) -> str:
    step = {
        "train": "one training step",
        "prefill": "reading a prompt",
        "decode": f"one more token after {costs.length - 1:,}",
    }[costs.mode]
    sequences = f"{costs.batch:,} x {costs.length:,} tokens" if costs.mode != "decode" else f"batch {costs.batch:,}"
    memory = "" if costs.memory_length is None else f", {costs.memory_length:,} of the memory"
    return f"{costs.name}: {step}, {sequences}{memory}, {costs.dtype}"


def _table_notes(costs: Cost, device: Device | None) -> Iterator[str]:
    """Yield the notes below the table."""
    total = costs.total
    share = percent(total.scores_forward, total.flops_forward)
    visible = f"{flops_text(total.visible)} visible"
    yield f"FLOPs: {flops_text(total.flops)}, {visible}; pairs of query and key are {share} of them"
    if total.active_parameters != total.parameters:
        yield f"parameters: {count_text(total.parameters)}, of which a token uses {count_text(total.active_parameters)}"
    yield from _memory_notes(costs)
    if device is not None:
        floor = costs.floor(device)
        bound = "FLOPs" if floor.compute > floor.transfer else "bytes"
        fits = "" if floor.fits else f"; does not fit into its {_bytes_or_dash(device.memory)}"
        yield f"floor on {device.title}: {time_text(floor.seconds)}, mostly {bound}{fits}"


def _memory_notes(costs: Cost) -> Iterator[str]:
    memory = costs.memory
    if costs.mode == "train":
        saved = memory.activations_recomputed if costs.recompute else memory.activations
        yield (
            f"memory: weights {_bytes_or_dash(memory.weights)}, gradients {_bytes_or_dash(memory.gradients)}, "
            f"{costs.optimizer} {_bytes_or_dash(memory.optimizer)}, activations {_bytes_or_dash(saved)}"
        )
        yield f"peak {_bytes_or_dash(memory.peak)}, with --recompute {_bytes_or_dash(memory.peak_recomputed)}"
        return
    weights, cache, peak = map(_bytes_or_dash, (memory.weights, memory.cache, memory.peak))
    yield f"memory: weights {weights}, cache {cache}, peak {peak}"
    if memory.cache_per_token:
        yield f"KV cache: {_bytes_or_dash(memory.cache_per_token)} for each token of a sequence"
    if memory.states:
        yield f"states: {_bytes_or_dash(memory.states)} for each sequence, of any length"


def time_text(seconds: float) -> str:
    """Return a duration as text, such as `1.2 ms`."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds * 1e9:,.0f} ns"
