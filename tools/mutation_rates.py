"""Plant bugs in each kind with `tfkit check --mutate`, and write the rates of docs/check_mutants.md.

    python tools/mutation_rates.py              every kind that has a small model, built in or of an installed plugin
    python tools/mutation_rates.py norm ffn     the kinds of these slots, without the table
    python tools/mutation_rates.py --bugs 60    more bugs for each kind: the default is 20

Results are appended to out/mutation_rates.jsonl, and a kind in this file is not run again. The bugs that survive are
printed at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tfkit.errors import SpecError  # noqa: E402
from tfkit.plugin.manager import load_plugins  # noqa: E402
from tfkit.tools.check.check import Work  # noqa: E402
from tfkit.tools.check.mutants import plant_bugs  # noqa: E402
from tools.pages import write_table  # noqa: E402

PAGE = ROOT / "docs" / "check_mutants.md"
RESULTS = ROOT / "out" / "mutation_rates.jsonl"
HEAD = "| kind | bugs | seen | survive |\n|---|---|---|---|\n"
PLUGINS = load_plugins()


def measured(name: str, limit: int) -> dict[str, Any]:
    """Plant bugs in a kind; return the results, or the error if no bug can be planted."""
    work, start = Work(PLUGINS), time.process_time()
    try:
        planted = plant_bugs(work, partial(work.of_components, name, None), work.components(name, None), limit=limit)
    except SpecError as error:
        return {"kind": name, "error": str(error)}
    bugs = [asdict(bug) for bug in planted.bugs]
    seconds = round(time.process_time() - start, 1)
    return {"kind": name, "possible": planted.n_possible, "counts": dict(planted.counts), "bugs": bugs, "cpu": seconds}


def row(result: dict[str, Any]) -> str:
    """Format a line of the table."""
    counts = result["counts"]
    return f"| `{result['kind']}` | {len(result['bugs'])} | {counts.get('seen', 0)} | {counts.get('survives', 0)} |\n"


def main() -> None:
    """Measure the kinds that have no result, and print what survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slots", nargs="*", metavar="SLOT")
    parser.add_argument("--bugs", type=int, default=20, metavar="N")
    options = parser.parse_args()
    registry, models = PLUGINS.registry, Work(PLUGINS).available
    slots = [slot for slot in registry.slots() if slot in models.slots and models.type_of(slot) is None]
    names = [f"{slot}.{kind}" for slot in options.slots or slots for kind in registry.kinds(slot)]
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    results = {result["kind"]: result for result in map(json.loads, lines)}
    RESULTS.parent.mkdir(exist_ok=True)
    missing = [name for name in names if name not in results]
    # A process for each kind: a bug may leave state behind in the classes of other kinds.
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool, RESULTS.open("a", encoding="utf-8") as file:
        for result in pool.imap(partial(measured, limit=options.bugs), missing):
            results[result["kind"]] = result
            print(json.dumps(result), file=file, flush=True)
            print(result["kind"], result.get("counts") or result["error"], flush=True)
    chosen = [results[name] for name in names if "bugs" in results[name]]
    for result in chosen:
        for bug in result["bugs"]:
            if bug["result"] == "survives":
                print(f"{result['kind']} {Path(bug['file']).name}:{bug['line']} {bug['before']} -> {bug['after']}")
    if not options.slots:
        write_table(PAGE, "rates", HEAD + "".join(map(row, chosen)))


if __name__ == "__main__":
    main()
