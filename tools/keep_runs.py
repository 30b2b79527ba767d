"""Copy the records of finished runs, without weights, to docs/experiments. Pages are generated from these records.

    python tools/keep_runs.py out                     the runs of the sweep in `out`
    python tools/keep_runs.py --stated out            train the runs in `STATED`, keep them, compare their results
    python tools/keep_runs.py --stated out --only waves

A record is `run.yaml`, `run.json` and the metrics of the evaluations: settings with the seed, figures, date and commit.
`tfkit sweep NAME -o docs/experiments --so-far` compares the runs of a sweep, and `tfkit sweep NAME -o docs/experiments`
trains only the missing runs. The records contain no digests of the code, so they also match later code.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.plugin.known_specs import built_in_specs_folder
from tfkit.run.run_facts import FINISHED, Facts, read_facts
from tfkit.spec.folder import FACTS, RUN
from tfkit.tools.common.atomic_files import written_folder
from tfkit.tools.common.history import METRICS, read_metric_lines

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "docs" / "experiments" / "runs"


@dataclass(frozen=True)
class Result:
    """A result that a run reaches in its last evaluation, by the name of the metric."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def reached(self, figure: float) -> bool:
        """Return True if a figure is within the bounds; False for NaN."""
        return (self.at_least is None or figure >= self.at_least) and (self.at_most is None or figure <= self.at_most)

    def __str__(self) -> str:
        return f"at least {self.at_least:g}" if self.at_most is None else f"at most {self.at_most:g}"


STATED = {
    "diffusion_addition": Result("val.decoded_exact_match", at_least=0.98),
    "dit_shapes": Result("val.objective", at_most=0.29),
    "jepa_shapes": Result("val.linear_probe", at_least=0.58),  # 0.54 and 0.55 for the new models of two seeds
    "numerals": Result("val.recall", at_least=0.95),
    "preferred_sums": Result("val.reward_accuracy", at_least=0.9),
    "t5_spans": Result("val.loss", at_most=2.55),  # 2.57 from the previous target alone
    "waves": Result("val.r2", at_least=0.75),
}
"""The results of shipped runs, which train for about two minutes on two cores."""


def main(folder: Path) -> None:
    """Copy the finished runs of a sweep. Raise SpecError if it has no runs, or if a run cannot be read."""
    runs = folder / "runs"
    if not runs.is_dir():
        raise SpecError(Diagnostic(f"{quoted(str(folder))} has no folder `runs`", help="name the folder of a sweep"))
    for run in sorted(runs.iterdir()):
        facts = read_facts(run)
        if facts is not None and facts.ended is not None:
            keep(run, facts)
            print(run.name)


def keep(run: Path, facts: Facts) -> Path:
    """Write the record of a run without the steps between evaluations, and without names of this machine."""
    name = facts.digest[:16]
    environment = {name: value for name, value in facts.environment.items() if name != "system"}
    sessions = [
        {name: value for name, value in session.items() if name not in ("code", "environment")}
        | {"command": f"tfkit train {name}"}
        for session in facts.sessions
    ]
    record = {**vars(facts), "environment": environment, "sessions": sessions}
    evaluations = [line for line in read_metric_lines(run) if "lr" not in line]
    with written_folder(RUNS / name) as target:
        settings = (run / RUN).read_text(encoding="utf-8").replace(f"{built_in_specs_folder() / 'runs'}/", "")
        (target / RUN).write_text(settings, encoding="utf-8")
        (target / FACTS).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (target / METRICS).write_text("".join(json.dumps(line) + "\n" for line in evaluations), encoding="utf-8")
    return RUNS / name


def reach(names: Iterable[str], folder: Path) -> list[str]:
    """Train and keep runs, and return the names of the runs that do not reach their results.

    The record of an earlier version of the run is removed. A finished run in the folder is not trained again.
    """
    failures = []
    for name in names:
        subprocess.run([sys.executable, "-m", "tfkit", "train", name, "-o", folder / name], cwd=ROOT, check=True)
        facts = read_facts(folder / name)
        if facts is None or facts.ended != FINISHED:
            raise SpecError(Diagnostic(f"the run {quoted(str(folder / name))} has not finished"))
        for record in records_of(name):
            shutil.rmtree(record)
        figure, result = last_figure(keep(folder / name, facts), STATED[name].metric), STATED[name]
        failures += [] if result.reached(figure) else [name]
        print(table_row(name))
    return failures


def table_row(name: str) -> str:
    """Return the row of a run in the table of docs/objectives.md: run, metric, figure, stated result, seed and date."""
    (record,) = records_of(name)
    facts, result = read_facts(record), STATED[name]
    assert facts is not None
    cells = [
        f"[{name}](../specs/runs/{name}.yaml)",
        f"`{result.metric}`",
        f"{last_figure(record, result.metric):.3f}",
        str(result),
        str(facts.meaning["seed"]),
        facts.sessions[-1]["began"][:10],
    ]
    return f"| {' | '.join(cells)} |"


def records_of(name: str) -> list[Path]:
    """Return the records of a run in `STATED`. Sweeps do not have the names of these runs."""
    return [path.parent for path in sorted(RUNS.glob(f"*/{RUN}")) if f"\nname: {name}\n" in path.read_text("utf-8")]


def last_figure(record: Path, metric: str) -> float:
    """Return a metric of the last evaluation. Raise SpecError if the run does not report it."""
    last = list(read_metric_lines(record))[-1]
    if metric not in last:
        raise SpecError(Diagnostic(f"{quoted(str(record))} has no metric `{metric}`; it has {listing(last)}"))
    return float(last[metric])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of a sweep; with --stated, of the runs to train")
    parser.add_argument("--stated", action="store_true", help="train the shipped runs with a stated result")
    parser.add_argument("--only", nargs="+", choices=STATED, default=[*STATED], help="names of these runs")
    arguments = parser.parse_args()
    try:
        if not arguments.stated:
            main(arguments.folder)
        elif failures := reach(arguments.only, arguments.folder.absolute()):
            sys.exit(f"results that were not reached: {', '.join(failures)}")
    except SpecError as error:
        sys.exit(str(error))
