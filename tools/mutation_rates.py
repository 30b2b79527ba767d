"""Plant bugs in each kind with `tfkit check --mutate`, and write the rates of docs/check_mutants.md.

    python tools/mutation_rates.py              every kind that has a small model, built in or of an installed plugin
    python tools/mutation_rates.py norm ffn     the kinds of these slots, without the table

Bugs that survive are printed. All kinds take about 11 minutes of CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tfkit.errors import SpecError  # noqa: E402
from tfkit.plugin.manager import load_plugins  # noqa: E402
from tfkit.tools.check.check import Work  # noqa: E402
from tfkit.tools.check.mutants import PlantedBugs, plant_bugs  # noqa: E402
from tools.pages import write_table  # noqa: E402

PAGE = ROOT / "docs" / "check_mutants.md"
HEAD = "| kind | bugs | seen | survive |\n|---|---|---|---|\n"
LIMIT = 20
"""Number of bugs in each kind."""
PLUGINS = load_plugins()


def planted(name: str) -> PlantedBugs | str:
    """Plant bugs in a kind; return the results, or the error if no bug can be planted."""
    work = Work(PLUGINS)
    try:
        return plant_bugs(work, partial(work.of_components, name, None), work.components(name, None), limit=LIMIT)
    except SpecError as error:
        return str(error)


def rows(names: list[str]) -> Iterator[str]:
    """Yield a line of the table for each kind with bugs, and print errors and the bugs that survive."""
    # A process for each kind: a bug may leave state behind in the classes of other kinds.
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name, result in zip(names, pool.imap(planted, names), strict=True):
            if isinstance(result, str):
                print(name, result, flush=True)
                continue
            counts = result.counts
            print(name, dict(counts), flush=True)
            for bug in result.bugs:
                if bug.result == "survives":
                    print(f"  {Path(bug.file).name}:{bug.line} {bug.before} -> {bug.after}")
            yield f"| `{name}` | {len(result.bugs)} | {counts['seen']} | {counts['survives']} |\n"


def main() -> None:
    """Measure the kinds, and write the table if no slots are chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slots", nargs="*", metavar="SLOT")
    slots = parser.parse_args().slots
    registry, models = PLUGINS.registry, Work(PLUGINS).available
    of_models = [slot for slot in registry.slots() if slot in models.slots and models.type_of(slot) is None]
    table = "".join(rows([f"{slot}.{kind}" for slot in slots or of_models for kind in registry.kinds(slot)]))
    if not slots:
        write_table(PAGE, "rates", HEAD + table)


if __name__ == "__main__":
    main()
