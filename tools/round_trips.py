"""Import and save published folders of transformers, and compare what surrounds their weights.

`python tools/round_trips.py` makes a folder of each model type that generates, with ids, a generation config and a
tokenizer that differ from the defaults of the class. It takes each folder through `import` and `save`, and again with a
short fine-tuning run in between. Then transformers opens both folders. `python tools/round_trips.py llama t5` takes
these cases only.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.families import conftest  # noqa: E402, F401  classes without a name in the automatic ones
from tests.families.changed_fields import quiet  # noqa: E402
from tests.families.round_trip import TYPES, round_trip  # noqa: E402


def outcome(name: str, *, trained: bool) -> list[str]:
    """Return the differences after a round trip, or its exception."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with TemporaryDirectory() as folder, quiet():
        try:
            return round_trip(name, Path(folder), trained=trained)
        except Exception as error:  # a line of the table for each case, whatever fails
            return [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]


def of_job(job: tuple[str, bool]) -> list[str]:
    """Return the outcome of a case, with or without a run in between."""
    return outcome(job[0], trained=job[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=TYPES, help="cases of tests/families")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    jobs = [(name, trained) for name in options.cases for trained in (False, True)]
    equal = 0
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as processes:
        for (name, trained), differences in zip(jobs, processes.map(of_job, jobs), strict=True):
            print(f"{name:24} {'trained' if trained else 'saved':8} {'; '.join(differences) or 'equal'}", flush=True)
            equal += not differences
    print(f"{equal} of {len(jobs)} round trips are equal")
    sys.exit(equal < len(jobs))
