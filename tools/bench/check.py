"""Measure `tfkit check`: GPT-2, Llama 3 405B at the full level, and other specs.

    python tools/bench/check.py [SPEC ...] [--all]

CPU time and peak memory of fresh processes, one after the other, on one thread.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date

from build_time import Target
from measure import machine, run_once, version

FIRST = {"gpt2": ("quick", 10.0), "llama3_405b": ("full", 60.0)}
"""Specs that are always measured: the level, and the target in CPU seconds."""
SECONDS, MEGABYTES = 10.0, 2000.0
"""Targets: CPU seconds of every other spec at level quick, and memory of each spec."""


def measured(spec: str, level: str, limit: float) -> list[Target]:
    """Measure the CPU seconds and megabytes of a check. Raises RuntimeError if a property is broken."""
    run = run_once([sys.executable, "-m", "tfkit", "check", spec, "--level", level], timeout=600)
    what = f"{spec}, level {level}"
    return [Target(f"{what}, CPU seconds", limit, run["cpu"]), Target(f"{what}, MB", MEGABYTES, run["rss"])]


def main() -> None:
    """Measure, and compare with the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="further specs, at level quick")
    parser.add_argument("--all", action="store_true", help="every spec with a bare name")
    options = parser.parse_args()
    specs = options.specs
    if options.all:
        from tfkit.plugin.manager import available_plugins

        specs = [name for name in available_plugins().specs.files if name not in FIRST]
    print(date.today(), machine(), f"torch {version('torch')}, CPU seconds on one thread", sep="\n")
    cases = {**FIRST, **dict.fromkeys(specs, ("quick", SECONDS))}
    targets = []
    for name, (level, limit) in cases.items():
        targets += measured(name, level, limit)
        print(*targets[-2:], sep="\n", flush=True)
    sys.exit(not all(target.met for target in targets))


if __name__ == "__main__":
    main()
