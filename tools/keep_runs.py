"""Copy the records of finished runs, without weights, to docs/experiments. Its page is generated from these records.

`python tools/keep_runs.py out` copies the runs of the sweep in `out`: `run.yaml`, `run.json` and the metrics of the
evaluations. `tfkit sweep NAME -o docs/experiments --so-far` compares these runs, and `tfkit sweep NAME -o
docs/experiments` trains only the missing runs. The records contain no digests of the code, so they also match later
code.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.run.run_facts import FACTS, Facts, read_facts
from tfkit.spec.folder import RUN
from tfkit.tools.common.atomic_files import written_folder
from tfkit.tools.common.history import METRICS, read_metric_lines

RUNS = Path(__file__).parents[1] / "docs" / "experiments" / "runs"


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


def keep(run: Path, facts: Facts) -> None:
    """Write the record of a run without the steps between evaluations, and without names of this machine."""
    environment = {name: value for name, value in facts.environment.items() if name != "system"}
    sessions = [
        {name: value for name, value in session.items() if name != "code"} | {"command": f"tfkit train {run.name}"}
        for session in facts.sessions
    ]
    kept = {**vars(facts), "environment": environment, "sessions": sessions}
    evaluations = [line for line in read_metric_lines(run) if "lr" not in line]
    with written_folder(RUNS / run.name) as target:
        shutil.copyfile(run / RUN, target / RUN)
        (target / FACTS).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        (target / METRICS).write_text("".join(json.dumps(line) + "\n" for line in evaluations), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of a sweep")
    try:
        main(parser.parse_args().folder)
    except SpecError as error:
        sys.exit(str(error))
