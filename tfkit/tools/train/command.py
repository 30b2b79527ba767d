"""Train a model as a run says; the same folder continues."""

from __future__ import annotations

import os
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console.commands import command
from tfkit.console.options import json_option
from tfkit.console.reader import Reader, warn

if TYPE_CHECKING:
    from tfkit.graph.run import Run
    from tfkit.tools.train.plan import Plan
    from tfkit.tools.train.progress import Watch
    from tfkit.tools.train.record import RunFolder
    from tfkit.training.processes import Processes


@command(
    "train",
    notes="""
    RUN is a YAML file, the name of a run that comes with tfkit, or the folder of a
    run. The folder DIR has the run, its numbers in metrics.jsonl, and checkpoints
    that other commands read: tfkit generate DIR. An interrupted run is continued
    by the same command, to the same last bit. SIGTERM and Ctrl-C write a checkpoint
    first. --set model.PATH=VALUE changes the model. Several processes train one run
    if torch's launcher starts them: torchrun --nproc-per-node 4 -m tfkit train RUN.
    """,
    examples="""
    tfkit train minigpt_relu --plan
    tfkit train minigpt_relu -o out --set steps=200
    tfkit train my_run.yaml --set model.decoder.ffn.kind=swiglu
    """,
)
@click.argument("run")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The run's folder.  [default: runs/NAME-HASH]",
)
@click.option("--plan", is_flag=True, help="Print its length and costs; train nothing.")
@click.option("--stop-after", type=click.IntRange(1), metavar="N", help="End this process after step N.")
@json_option
def train(reader: Reader, run: str, output: Path | None, plan: bool, stop_after: int | None, json: bool) -> None:
    if plan and (output is not None or stop_after is not None):
        raise click.UsageError("--plan trains nothing: it goes without -o and --stop-after")
    if plan:
        _plan(_loaded(reader, run), json=json)
    elif "LOCAL_RANK" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:  # torchrun has started several processes
        from tfkit.training.parallel import together

        with together() as processes:
            _train(reader, run, output, stop_after, processes, json=json)
    else:
        _train(reader, run, output, stop_after, None, json=json)


def _loaded(reader: Reader, run: str, *, quiet: bool = False) -> Run:
    from tfkit.graph.run import load_run
    from tfkit.tools.cost.of_run import flops_of_step

    loaded = load_run(run, reader.plugins, sets=reader.sets, count=flops_of_step)
    if not quiet:
        warn(loaded.file.notes)
    return loaded


def _plan(run: Run, *, json: bool) -> None:
    from tfkit.console.output import print_json
    from tfkit.tools.train.plan import plan

    found = plan(run)
    print_json(found) if json else _show_plan(found)


def _folder(name: str, run: Run) -> Path:
    """The folder of a run that is not named: the one that it was read from, or one by its meaning."""
    from tfkit.spec.folder import RUN

    return Path(name) if (Path(name) / RUN).is_file() else Path("runs") / f"{run.config.name}-{run.digest[:8]}"


def _train(
    reader: Reader, name: str, output: Path | None, stop_after: int | None, others: Processes | None, *, json: bool
) -> None:
    """Train in this process, beside others if there are any."""
    run = _loaded(reader, name, quiet=others is not None and others.rank > 0)
    folder = output or _folder(name, run)

    from tfkit.training.processes import Processes

    processes = others or Processes()
    processes.check_equal(run.digest, "reads a run of another meaning: its file, its data or its versions")
    if processes.rank == 0:
        _write(reader, run, folder, stop_after, processes, json=json)
    else:
        _follow(run, folder, stop_after, processes)


def _write(reader: Reader, run: Run, folder: Path, stop_after: int | None, processes: Processes, *, json: bool) -> None:
    """Train, and write the folder of the run."""
    from tfkit.console.signals import asked_to_end
    from tfkit.tools.train.environment import bits_of, environment
    from tfkit.tools.train.progress import Watch
    from tfkit.tools.train.record import RunFolder, locked
    from tfkit.training.loop import Trainer

    with locked(folder):
        record = RunFolder(folder, run, bits_of(run, processes.count), environment(reader.plugins))
        if processes.agreed(record.facts.ended):
            _report(record, None, folder, run, json=json)
            return
        for note in record.notes:
            click.echo(f"warning: the last digits may differ from before: {note}", err=True)
        watch = Watch(run.tokens_of_step, quiet=json)
        begin = time.perf_counter()
        with asked_to_end() as asked:
            trainer = Trainer(run, record, watchers=[watch], until=stop_after, asked_to_end=asked, processes=processes)
            record.begin(shlex.join(["tfkit", *sys.argv[1:]]), datetime.now(UTC).isoformat(timespec="seconds"))
            for name, text in trainer.notes.items():
                click.echo(f"{name}: {text}", err=True)
            how = "failed"
            try:
                how = trainer.train()
            finally:
                watch.stop()
                finished = trainer.ended is not None and how != "failed"
                record.end(how, time.perf_counter() - begin, trainer.step, finished=finished)
        _report(record, watch, folder, run, json=json)


def _follow(run: Run, folder: Path, stop_after: int | None, processes: Processes) -> None:
    """Train beside the process that writes the folder, unless it finds the run complete."""
    from tfkit.console.signals import asked_to_end
    from tfkit.tools.train.record import Follower
    from tfkit.training.loop import Trainer

    if processes.agreed(None) is None:
        with asked_to_end() as asked:
            Trainer(run, Follower(folder), until=stop_after, asked_to_end=asked, processes=processes).train()


def _report(record: RunFolder, watch: Watch | None, folder: Path, run: Run, *, json: bool) -> None:
    """Print the result: as a table, or as JSON."""
    from tfkit.console.output import print_json, show, table
    from tfkit.tools.train.utilisation import known_device, utilisation

    last = record.facts.sessions[-1]
    numbers: dict[str, Any] = {} if watch is None else watch.numbers
    speed = None if watch is None else watch.tokens_per_second
    mfu = utilisation(run, speed, known_device(run)) if speed else None
    if json:
        result = {"folder": str(folder), "step": last["step"], "ended": last["ended"]}
        print_json({**result, "numbers": numbers, "tokens_per_second": speed, "mfu": mfu})
        return
    if watch is None:
        click.echo(f"the run in {folder} is complete: {last['ended']} after step {last['step']:,}")
        return
    rows = [("step", f"{last['step']:,}"), ("ended", last["ended"])]
    rows += [(name, f"{number:.4g}") for name, number in numbers.items()]
    rows += [("tokens/s", f"{speed:,.0f}")] if speed else []
    rows += [("MFU, causal", f"{mfu.causal:.1%}"), ("MFU, full", f"{mfu.full:.1%}")] if mfu else []
    show(table([str(folder), ""], rows, right=[""]))


def _show_plan(plan: Plan) -> None:
    from tfkit.console.output import show, table
    from tfkit.tools.common.units import bytes_text, flops_text

    rows = [
        ("parameters", f"{plan.parameters:,}"),
        ("steps", f"{plan.steps:,}"),
        ("tokens", f"{plan.tokens:,}"),
        ("passes over the data", f"{plan.passes:,.2f}"),
        ("FLOPs", flops_text(plan.flops)),
        ("memory, predicted", bytes_text(plan.memory)),
        ("least time", "-" if plan.seconds is None else f"{plan.seconds:,.0f} s"),
        *((f"rate at step {step:,}", f"{rate:.3g}") for step, rate in plan.rates),
    ]
    show(table([plan.name, plan.digest[:8]], rows, right=[plan.digest[:8]]))
