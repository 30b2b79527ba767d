"""Train a model from a run file, or resume an interrupted run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.commands import Reader, command, json_option, print_warnings
from tfkit.console.commands import HintedError
from tfkit.console.completion import complete_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tfkit.plugin.manager import Plugins
    from tfkit.run.checked_run import Run
    from tfkit.run.training.processes import Processes
    from tfkit.tools.common.history import History
    from tfkit.tools.train.per_process import LeastTime, PerProcess
    from tfkit.tools.train.plan import Plan
    from tfkit.tools.train.train import Trained


class Speed(click.ParamType):  # type: ignore[type-arg]
    """The speed of a network, such as `400Gb/s` or `50GB/s`, which is converted to bytes per second."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])([bB])/s", str(value))
        speed = 0.0 if match is None else float(match[1]) * UNITS[match[2]] / (8 if match[3] == "b" else 1)
        if speed == 0:
            self.fail(f"`{value}` is not a speed above zero; write it like `400Gb/s` or `50GB/s`", param, ctx)
        return speed


UNITS = {"M": 1e6, "G": 1e9, "T": 1e12}
NETWORK = 50e9
"""Bytes per second of a device's network adapter, by default: 400 Gb/s."""


@command(
    "train",
    section="Training",
    order=210,
    notes="""
    RUN is a YAML file, the name of a run that comes with tfkit, or a run folder.
    DIR gets the resolved run, its metrics in metrics.jsonl, its curves in
    report.html, and checkpoints, which other commands accept as models. The same
    command resumes an interrupted run, with bit-identical results. SIGTERM and
    Ctrl-C write a checkpoint before the process ends. `--set model.PATH=VALUE`
    changes the model. To train in several processes, start them with torch's
    launcher: `torchrun --nproc-per-node 4 -m tfkit train RUN`.
    """,
    examples="""
    tfkit train minigpt_relu --plan
    tfkit train minigpt_relu -o out --set steps=200
    tfkit train my_run.yaml --set model.decoder.ffn.kind=swiglu
    """,
)
@click.argument("run", shell_complete=complete_document("run"))
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The run folder.  [default: runs/NAME-HASH]",
)
@click.option("--plan", is_flag=True, help="Print the run's length and costs; train nothing.")
@click.option("--roles", is_flag=True, help="With --plan: print the role and the settings of each weight.")
@click.option("--processes", type=click.IntRange(1), metavar="N", help="With --plan: predict for N processes.")
@click.option("--device", metavar="NAME", help="With --processes: the device of each process.")
@click.option(
    "--network",
    type=Speed(),
    metavar="SPEED",
    help="With --device: the speed of each network adapter.  [default: 400Gb/s]",
)
@click.option("--stop-after", type=click.IntRange(1), metavar="N", help="End this process after step N.")
@click.option("--allow-change", is_flag=True, help="Resume although the code of the run's kinds has changed.")
@json_option
def train(
    reader: Reader,
    run: str,
    output: Path | None,
    plan: bool,
    roles: bool,
    processes: int | None,
    device: str | None,
    network: float | None,
    stop_after: int | None,
    allow_change: bool,
    json: bool,
) -> None:
    if network and not (device and processes and processes > 8):
        raise click.UsageError("--network needs --device and more than 8 processes, the devices of a machine")
    if processes and not plan:
        help = f"torchrun --nproc-per-node {processes} -m tfkit train RUN starts {processes} processes"
        raise HintedError("--processes needs --plan", None, help)
    if device and not processes:
        help = f"`--set machine.device={device}` trains on a device"
        raise HintedError("--device needs --plan and --processes", None, help)
    if roles and (not plan or processes):
        raise click.UsageError("--roles needs --plan, without --processes")
    if plan and (output is not None or stop_after is not None or allow_change):
        raise click.UsageError("--plan cannot be combined with -o, --stop-after or --allow-change")

    from tfkit.run.training.processes import launched_count

    if plan:
        _plan(reader, run, processes, device, network, roles=roles, json=json)
    elif launched_count() > 1:
        from tfkit.run.training.parallel import distributed_processes

        with distributed_processes() as connected:
            _train_in_process(reader, run, output, stop_after, connected, allow_change=allow_change, json=json)
    else:
        _train_in_process(reader, run, output, stop_after, None, allow_change=allow_change, json=json)


def _plan(
    reader: Reader,
    run: str,
    processes: int | None,
    device: str | None,
    network: float | None,
    *,
    roles: bool,
    json: bool,
) -> None:
    from tfkit.run.training.start import check_start

    loaded = _load_run(reader, run)
    check_start(loaded)
    if roles:
        _show_roles(loaded, json=json)
    elif processes is None:
        _plan_run(loaded, reader.plugins, json=json)
    else:
        _plan_processes(reader, loaded, processes, device, network, json=json)


def _load_run(reader: Reader, run: str, *, quiet: bool = False) -> Run:
    from tfkit.run.checked_run import load_run
    from tfkit.tools.common.plugin_checks import warnings_of
    from tfkit.tools.cost.of_run import flops_of_step

    loaded = load_run(run, reader.plugins, sets=reader.sets, count=flops_of_step)
    if not quiet:
        print_warnings(loaded.file.notes)
        print_warnings(warnings_of(loaded.graph, reader.plugins))
    return loaded


def _plan_run(run: Run, plugins: Plugins, *, json: bool) -> None:
    from tfkit.commands import print_json
    from tfkit.tools.train.plan import metric_floors, run_plan

    planned, floors = run_plan(run), metric_floors(run, plugins)
    print_json({**vars(planned), "floors": floors}) if json else _show_plan(planned, floors)


def _show_roles(run: Run, *, json: bool) -> None:
    """Print the role of each weight in the parametrization, and its settings."""
    from tfkit.commands import group_layers, print_json, print_tables, table
    from tfkit.tools.train.weight_settings import weight_settings

    settings = weight_settings(run)
    if not settings:
        raise run.error(
            "the run has no base sizes, from which roles follow",
            "parametrization",
            help="set `parametrization: {kind: mup, base: {model.d_model: 64}}`",
        )
    if json:
        print_json({"parametrization": run.config.parametrization.kind_name(), "weights": settings})
        return
    columns = ["weight", "role", "rate", "decay", "eps", "std"]
    rows = [
        (label, weight.role, *_settings_text(weight.lr, weight.weight_decay, weight.eps, weight.std))
        for label, (weight, *_) in group_layers((name, weight, weight) for name, weight in settings.items())
    ]
    print_tables(table(columns, rows, right=columns[2:]))


def _settings_text(lr: float, weight_decay: float, eps: float | None, *std: float | None) -> tuple[str, str, str, str]:
    deviations = [*dict.fromkeys(f"{number:.3g}" for number in std if number is not None)]
    return f"{lr:.3g}", f"{weight_decay:.3g}", "-" if eps is None else f"{eps:.3g}", "-".join(deviations) or "-"


def _plan_processes(
    reader: Reader, run: Run, count: int, name: str | None, network: float | None, *, json: bool
) -> None:
    """Print the memory of each process, the minimum time of a step, and changes with which a process fits a device."""
    from tfkit.commands import bytes_text, print_json, print_tables, table, time_text
    from tfkit.tools.cost.command import limits_of
    from tfkit.tools.train.per_process import fitting_changes, fitting_count, least_time, per_process
    from tfkit.tools.train.plan import states_of

    device = None if name is None else limits_of(reader, name)
    if network and device and device.interconnect is None:
        raise click.UsageError(f"--network needs a device with `interconnect`; {name} has none")
    network = network or NETWORK
    needs = per_process(run, count, states_of(run))
    try:
        time = None if device is None else least_time(needs, run.config.fastest, device, network)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from None
    fits = device is None or needs.peak <= device.memory
    change = None
    if device is not None and not fits:
        change = fitting_changes(run, count, states_of(run), device, network)
        change = change or fitting_count(run, count, states_of(run), device)
    if json:
        sums = {"total": needs.total, "fits": None if device is None else fits, "change": change}
        duration = time and {**vars(time), "seconds": time.seconds, "bound": time.bound, "usual": time.usual}
        print_json({**vars(needs), **sums, "least_time": duration})
        return
    title = f"each of {count:,} processes" if count > 1 else "a single process"
    print_tables(table([title, "predicted"], list(_process_rows(needs, time)), right=["predicted"]))
    if time is not None:
        click.echo(f"a step takes at least {time_text(time.seconds)} on {name}, bound by {time.bound}")
    if device is not None and fits:
        click.echo(f"each process fits {name}")
    elif device is not None:
        largest = "evaluation" if needs.evaluation > needs.total else max(needs.parts, key=needs.parts.__getitem__)
        lack = f"{bytes_text(needs.peak - device.memory)} do not fit {name}; the largest part is {largest}"
        click.echo(f"{lack}: {change}")


def _process_rows(needs: PerProcess, time: LeastTime | None) -> Iterator[tuple[str, str]]:
    from tfkit.commands import bytes_text, time_text
    from tfkit.tools.train.per_process import USUAL_FRACTION

    yield from ((part, bytes_text(size)) for part, size in needs.parts.items() if size)
    yield "total", bytes_text(needs.total)
    if needs.evaluation:
        yield "total in an evaluation", bytes_text(needs.evaluation)
    if needs.sent:
        yield "sent in a step", bytes_text(needs.sent)
    if time is not None:
        yield from ((f"least time, {part}", time_text(seconds)) for part, seconds in vars(time).items())
        yield f"at {USUAL_FRACTION:.0%} of the peak", time_text(time.usual)


def _train_in_process(
    reader: Reader,
    name: str,
    output: Path | None,
    stop_after: int | None,
    launched: Processes | None,
    *,
    allow_change: bool,
    json: bool,
) -> None:
    """Train in this process, with any other processes of the launch."""
    run = _load_run(reader, name, quiet=launched is not None and launched.rank > 0)

    from tfkit.run.run_code import code_of, digest_of
    from tfkit.run.run_facts import continued_run
    from tfkit.run.training.processes import Processes
    from tfkit.tools.train.progress import TrainingProgress
    from tfkit.tools.train.train import folder_of, follow_run, train_run

    folder, processes = output or folder_of(name, run), launched or Processes()
    run = continued_run(run, folder)
    processes.check_equal(run.digest, "reads a different run: its file, its data or its versions differ")
    if processes.count > 1:
        processes.check_equal(digest_of(code_of(run)), "has different code, of tfkit or of a plugin")
    if processes.rank > 0:
        follow_run(run, folder, processes, until=stop_after)
        return
    command = shlex.join(["tfkit", *sys.argv[1:]])
    trained = train_run(
        run,
        folder,
        reader.plugins,
        command=command,
        until=stop_after,
        allow_change=allow_change,
        progress=TrainingProgress(run.tokens_before, quiet=json),
        processes=processes,
    )
    _show_result(trained, run, json=json)


def _show_result(trained: Trained, run: Run, *, json: bool) -> None:
    """Print the result as a table, or as JSON."""
    from tfkit.commands import print_json, print_tables, table
    from tfkit.tools.train.components import without_components
    from tfkit.tools.train.plan import device_of_run, device_utilisation, padding_of

    numbers, speed = trained.history.latest, trained.tokens_per_second
    mfu = device_utilisation(run, speed, device_of_run(run)) if speed else None
    if json:
        result = {"folder": str(trained.folder), "step": trained.step, "ended": trained.ended}
        speeds = {"tokens_per_second": speed, "padding_per_second": speed and speed * padding_of(run)}
        print_json({**result, "numbers": numbers, **speeds, "mfu": mfu})
        return
    if not trained.steps_made and trained.ended != "interrupted":
        click.echo(f"the run in {trained.folder} is complete: {trained.ended} after step {trained.step:,}")
        return
    rows = [("step", f"{trained.step:,}"), ("ended", trained.ended)]
    rows += [(name, f"{numbers[name]:.4g}") for name in without_components(numbers)]
    rows += [("tokens/s", f"{speed:,.0f}")] if speed else []
    rows += [("padding/s, in addition", f"{speed * padding:,.0f}")] if speed and (padding := padding_of(run)) else []
    rows += [("MFU, causal", f"{mfu.causal:.1%}"), ("MFU, full", f"{mfu.full:.1%}")] if mfu else []
    print_tables(table([str(trained.folder), ""], rows, right=[""]))
    _show_components(trained.history)


def _show_components(history: History) -> None:
    """Print the last numbers of the components, and conspicuous values, if the run measures its components."""
    from tfkit.commands import print_tables, table
    from tfkit.tools.train.components import component_findings, component_table, heat_maps

    columns, rows = component_table(history)
    if rows:
        print_tables("", table(columns, rows, right=columns[1:]))
        for text in component_findings(heat_maps(history)):
            click.echo(text)


def _show_plan(plan: Plan, floors: Mapping[str, float]) -> None:
    from tfkit.commands import bytes_text, flops_text, print_tables, table

    rows = [
        ("parameters", f"{plan.parameters:,}"),
        *([("trained, of adapters", f"{plan.trained:,}")] if plan.trained else []),
        ("steps", f"{plan.steps:,}"),
        ("tokens", f"{plan.tokens:,}"),
        *([("padding, in addition", f"{plan.padding:,}")] if plan.padding else []),
        ("epochs", f"{plan.epochs:,.2f}"),
        ("FLOPs", flops_text(plan.flops)),
        *([("FLOPs of evaluations", flops_text(plan.flops_of_evaluations))] if plan.flops_of_evaluations else []),
        ("memory, predicted", bytes_text(plan.memory)),
        ("least time", "-" if plan.seconds is None else f"{plan.seconds:,.0f} s"),
        *([("float8", plan.float8)] if plan.float8 else []),
        *((f"rate at step {step:,}", f"{rate:.3g}") for step, rate in plan.rates),
        *((name, f"{score:.4f}") for name, score in floors.items()),
    ]
    print_tables(table([plan.name, plan.digest[:8]], rows, right=[plan.digest[:8]]))
    if plan.groups:
        from tfkit.tools.train.weight_settings import NOT_COVERED

        columns = ["role", "weights", "parameters", "rate", "decay", "eps", "std"]
        groups = []
        for group in plan.groups:
            settings = _settings_text(group.lr, group.weight_decay, group.eps, *(group.std or ()))
            groups.append((group.role, f"{group.weights:,}", f"{group.parameters:,}", *settings))
        print_tables("", table(columns, groups, right=columns[1:]))
        for node, ratios in plan.growth.items():
            click.echo(f"{node}: {', '.join(f'{name} x {ratio:g}' for name, ratio in ratios.items())}")
        for path, number in plan.factors.items():
            click.echo(f"factor in the spec: {path} = {number:.6g}")
        click.echo(NOT_COVERED)
