"""Train a model as a run says; the same folder continues."""

from __future__ import annotations

import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console.commands import command
from tfkit.console.options import Reader, json_option

if TYPE_CHECKING:
    from tfkit.graph.run import Run
    from tfkit.tools.train.plan import Plan
    from tfkit.tools.train.progress import Watch
    from tfkit.tools.train.record import RunFolder


@command(
    "train",
    notes="""
    RUN is a YAML file, the name of a run that comes with tfkit, or the folder of a
    run. The folder DIR has the run, its numbers in metrics.jsonl, and checkpoints
    that other commands read: tfkit generate DIR. An interrupted run is continued
    by the same command, to the same last bit. SIGTERM and Ctrl-C write a checkpoint
    first. --set model.PATH=VALUE changes the model.
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
    from tfkit.console.output import print_json
    from tfkit.graph.run import load_run

    if plan and (output is not None or stop_after is not None):
        raise click.UsageError("--plan trains nothing: it goes without -o and --stop-after")
    loaded = load_run(run, reader.plugins, sets=reader.sets)
    for note in loaded.file.notes:
        click.echo(f"{note.render('warning')}\n", err=True)
    if plan:
        from tfkit.tools.train.plan import plan as of

        found = of(loaded)
        print_json(found) if json else _show_plan(found)
        return
    _train(reader, loaded, output or _folder(run, loaded), stop_after, json=json)


def _folder(name: str, run: Run) -> Path:
    """The folder of a run that is not named: the one that it was read from, or one by its meaning."""
    from tfkit.spec.folder import RUN

    return Path(name) if (Path(name) / RUN).is_file() else Path("runs") / f"{run.config.name}-{run.digest[:8]}"


def _train(reader: Reader, run: Run, folder: Path, stop_after: int | None, *, json: bool) -> None:
    from tfkit.console.signals import asked_to_end
    from tfkit.tools.train.environment import bits_of, environment
    from tfkit.tools.train.progress import Watch
    from tfkit.tools.train.record import RunFolder, locked
    from tfkit.training.loop import Trainer

    with locked(folder):
        record = RunFolder(folder, run, bits_of(run), environment(reader.plugins))
        if record.facts.ended is not None:
            _report(record, None, folder, run, json=json)
            return
        for note in record.notes:
            click.echo(f"warning: the last digits may differ from before: {note}", err=True)
        watch = Watch(run.tokens_of_step, quiet=json)
        begin = time.perf_counter()
        with asked_to_end() as asked:
            trainer = Trainer(run, record, watchers=[watch], until=stop_after, asked_to_end=asked)
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


def _report(record: RunFolder, watch: Watch | None, folder: Path, run: Run, *, json: bool) -> None:
    """Print the result: as a table, or as JSON."""
    from tfkit.console.output import print_json, show, table
    from tfkit.tools.train.utilisation import device_of, utilisation

    last = record.facts.sessions[-1]
    numbers: dict[str, Any] = {} if watch is None else watch.numbers
    speed = None if watch is None else watch.tokens_per_second
    mfu = utilisation(run, speed, device_of(run)) if speed else None
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
