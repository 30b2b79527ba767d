"""The cost of a training step (forward, loss, backward and AdamW) in tfkit and in the same model of other libraries.

    python tools/bench/train_step.py [--shape gpt2] [--rounds 20] [--compile] [--operators] [--json]
                                     [--python litgpt=../peers/bin/python ...]

Each contender is a separate process, in the environment of `--python` if it names one. They take turns, a step each, on
one thread. The figure is CPU time; on a GPU, the time between two CUDA events. All begin with the same weights, and
must return the same logits. `--compile` measures tfkit and the handwritten model, each compiled as a single graph.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from measure import accelerator, compare_speeds, machine, ratio, take_turns
from peers import FILES, Shape
from worker import Answer, Worker, interpreter

SHAPES = {
    "gpt2": Shape("gpt2", 6, 384, 6, 6, 1536, vocab_size=8192, length=256, batch=4),
    "llama": Shape("llama", 8, 512, 8, 2, 1408, vocab_size=8192, length=256, batch=4),
}
GOALS = {"gpt2": ["by hand"], "llama": ["litgpt", "transformers"]}
CONTENDERS = ["tfkit", "by hand"]
TOLERANCE, LEARNED = 1e-5, 1e-2
WHERE = {"cpu": "CPU time on one thread", "cuda": "time between CUDA events"}
Operators = dict[str, tuple[int, float]]


@dataclass
class Race:
    """The results for a shape."""

    shape: Shape
    goals: Sequence[str]
    """Contenders that must not be faster than tfkit."""
    contenders: dict[str, Answer] = field(default_factory=dict)
    """The description that each contender returns."""
    missing: dict[str, str] = field(default_factory=dict)
    """The contenders that were not measured, with the reasons."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    """The loss before the last step: equal if the same model was trained."""
    operators: dict[str, Operators] = field(default_factory=dict)
    """By contender, the calls of each operator in a step, and their milliseconds."""

    def verdicts(self) -> dict[str, str]:
        """Return for each goal: `met`, `level` if a ratio of 1 is within the middle half of the rounds, or `MISSED`."""
        results = {}
        for name in self.goals:
            if name in self.seconds:
                result = ratio(self.seconds[name], self.seconds["tfkit"])
                results[name] = "met" if result.of_minima >= 1 else "level" if result.quartiles[1] >= 1 else "MISSED"
        return results


class Stepper:
    """A running contender: each call takes a step and returns its duration."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.loss = float("nan")

    def __call__(self) -> float:
        answer = self.worker.ask("step")
        self.loss = answer["loss"]
        return answer["seconds"]


def run(race: Race, names: Sequence[str], options: argparse.Namespace) -> None:
    """Build all contenders, check that they are the same model, and measure their steps."""
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        details = {"shape": asdict(race.shape), "folder": folder, "compiled": options.compile, "device": device()}
        for name in names:
            python = dict(options.python).get(name, sys.executable)
            worker = Worker([python, str(Path(__file__).with_name("train_worker.py"))])
            stack.callback(worker.close)
            try:
                race.contenders[name] = worker.ask("build", name=name, **details)
                workers[name] = worker
            except RuntimeError as error:
                race.missing[name] = str(error)
        check(race)
        steppers = {name: Stepper(worker) for name, worker in workers.items()}
        race.seconds = take_turns(steppers, options.rounds)
        race.loss = {name: stepper.loss for name, stepper in steppers.items()}
        if options.operators:
            race.operators = operators({name: workers[name] for name in CONTENDERS})
    check_loss(race)


def device() -> str:
    """Return the device of the steps."""
    return "cuda" if accelerator() else "cpu"


def check(race: Race) -> None:
    """Exit if a contender is a different model without stating a reason, or uses a different version of torch."""
    if "tfkit" not in race.contenders:
        sys.exit(f"tfkit: {race.missing['tfkit']}")
    ours = race.contenders["tfkit"]
    for name, details in race.contenders.items():
        same = details["parameters"] == ours["parameters"] and details["difference"] <= TOLERANCE
        if not same and not details["differs"]:
            difference = f"{details['parameters']:,} parameters, logits off by {details['difference']:.0e}"
            sys.exit(f"{name} is another model: {difference}")
        if details["versions"]["torch"] != ours["versions"]["torch"]:
            sys.exit(f"{name} has torch {details['versions']['torch']}, tfkit {ours['versions']['torch']}")


def check_loss(race: Race) -> None:
    """Exit if a contender that began as the same model has a different loss after training."""
    for name, loss in race.loss.items():
        if not race.contenders[name]["differs"] and abs(loss - race.loss["tfkit"]) > LEARNED:
            sys.exit(f"{name} was not trained as tfkit was: loss {loss:.4f} instead of {race.loss['tfkit']:.4f}")


def operators(workers: Mapping[str, Worker], times: int = 7) -> dict[str, Operators]:
    """Return, for each contender and operator, the calls in a step and their minimum time in several steps."""
    results: dict[str, Operators] = {name: {} for name in workers}
    for _ in range(times):
        for name, worker in workers.items():
            for operator, (calls, spent) in worker.ask("operators")["operators"].items():
                results[name][operator] = (calls, min(spent, results[name].get(operator, (0, spent))[1]))
    return results


def show(race: Race) -> None:
    """Print the results, each line within 80 columns."""
    print(f"\n{race.shape}")
    print(compare_speeds(race.seconds))
    ours = race.contenders["tfkit"]["parameters"]
    farthest = max(details["difference"] for details in race.contenders.values() if not details["differs"])
    print(f"  {ours:,} parameters each, logits within {farthest:.0e} of tfkit's")
    for name, details in race.contenders.items():
        if details["differs"]:
            print(f"  but {name} has {details['parameters']:,}, and logits off by {details['difference']:.0e}:")
            print(f"    {details['differs']}")
    for name, verdict in race.verdicts().items():
        print(f"  {verdict:8}at least as fast as {name}")
    for name, reason in race.missing.items():
        print(f"  not measured: {name} ({reason.partition(': ')[2] or reason}; see README.md)")
    if race.operators:
        show_operators(*(race.operators[name] for name in CONTENDERS))


def show_operators(ours: Operators, theirs: Operators) -> None:
    """Print the operators with different numbers of calls, and the most expensive ones."""
    print(f"\n  {'operators of one step':38}{'calls':>7}{'by hand':>9}{'ms':>9}{'by hand':>9}")
    rows = []
    for name in {*ours, *theirs}:
        (calls, spent), (calls_by_hand, spent_by_hand) = ours.get(name, (0, 0.0)), theirs.get(name, (0, 0.0))
        longest = max(spent, spent_by_hand)
        if calls != calls_by_hand or longest > 2:
            rows.append((longest, f"  {name[:38]:38}{calls:>7}{calls_by_hand:>9}{spent:>9.2f}{spent_by_hand:>9.2f}"))
    print(*(row for _, row in sorted(rows, reverse=True)[:28]), sep="\n")
    sums = [sum(spent for _, spent in times.values()) for times in (ours, theirs)]
    print(f"  {'all of them':54}{sums[0]:>9.2f}{sums[1]:>9.2f}")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="one of the shapes; all unless given")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each that count (default 20)")
    parser.add_argument("--compile", action="store_true", help="only tfkit and by hand, compiled")
    parser.add_argument("--operators", action="store_true", help="compare the two operator by operator")
    parser.add_argument("--json", action="store_true", help="print every round as JSON")
    where = {"action": "append", "default": [], "type": interpreter, "metavar": "NAME=PATH"}
    parser.add_argument("--python", **where, help="interpreter of a contender's own environment")
    return parser.parse_args()


def main() -> None:
    """Measure, and print the results."""
    options = arguments()
    names, shapes = CONTENDERS if options.compile else list(FILES), [options.shape] if options.shape else list(SHAPES)
    races = [Race(SHAPES[name], CONTENDERS[1:] if options.compile else GOALS[name]) for name in shapes]
    for race in races:
        run(race, names, options)
    versions = {
        key: text for race in races for details in race.contenders.values() for key, text in details["versions"].items()
    }
    about = {"date": str(date.today()), "machine": machine(), "gpu": accelerator(), "versions": versions}
    if options.json:
        results = [{**asdict(race), "verdicts": race.verdicts()} for race in races]
        print(json.dumps({**about, "compiled": options.compile, "races": results}, indent=2))
    else:
        print(machine(), ", ".join(f"{package} {text}" for package, text in versions.items()), sep="\n")
        how = "compiled" if options.compile else "eager"
        print(f"training step, float32, {how}, {options.rounds} rounds, {WHERE[device()]}")
        for race in races:
            show(race)
        print("\n" + (accelerator() or "not measured: anything on a GPU (there is none here)"))
    sys.exit(any("MISSED" in race.verdicts().values() for race in races))


if __name__ == "__main__":
    main()
