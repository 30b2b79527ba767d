"""Keep the records of finished runs, without their weights, in docs/experiments: what its page is made from.

`python tools/keep_runs.py out` takes those of the sweep in `out`. Of each run, `run.yaml`, `run.json` and the numbers
of its evaluations stay: `tfkit sweep NAME -o docs/experiments --so-far` compares them, and `tfkit sweep NAME -o
docs/experiments` makes only the runs that are not there.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tfkit.spec.folder import RUN
from tfkit.tools.common.atomic_files import write_file
from tfkit.tools.train.history import lines
from tfkit.tools.train.record import FACTS, METRICS, read_facts

KEPT = Path(__file__).parents[1] / "docs" / "experiments" / "runs"


def main(folders: list[str]) -> None:
    """Keep the finished runs of the folders of sweeps."""
    for run in (run for folder in folders for run in sorted(Path(folder, "runs").iterdir())):
        facts = read_facts(run)
        if facts is not None and facts.ended is not None:
            keep(run, vars(facts), KEPT / run.name)
            print(run.name)


def keep(run: Path, facts: dict[str, Any], target: Path) -> None:
    """Write the record of a run without the steps between its evaluations, and without names of this machine."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / RUN, target / RUN)
    facts["environment"].pop("system", None)
    for session in facts["sessions"]:
        session["command"] = f"tfkit train {run.name}"
    write_file(target / FACTS, json.dumps(facts, indent=1) + "\n")
    evaluations = [line for line in lines(run) if "lr" not in line]
    write_file(target / METRICS, "".join(json.dumps(line) + "\n" for line in evaluations))


if __name__ == "__main__":
    main(sys.argv[1:])
