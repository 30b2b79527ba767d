"""Compare every family with all of its classes in transformers, and write the table of specs/README.md.

python tools/family_matrix.py
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.families import conftest  # noqa: E402, F401  classes without a name in the automatic ones
from tests.families.case import Kind  # noqa: E402
from tests.families.cases import CASES  # noqa: E402
from tests.families.changed_fields import quiet  # noqa: E402
from tests.families.generated import HEADS, Outcome, outcome, varied  # noqa: E402
from tools.pages import write_table  # noqa: E402

PAGE = ROOT / "specs" / "README.md"
HEAD = "| classes | types | models | passed | refused |\n|---|---|---|---|---|\n"
WORDS: dict[Kind, str] = {
    "causal": "causal language models",
    "masked": "masked language models",
    "seq2seq": "encoder-decoders",
    "sequence": "classifiers of sequences",
    "token": "classifiers of tokens",
    "question": "answers in a text",
    "pretraining": "`ForPreTraining`",
}


VARIED = ", varied"
FIRST = {case.model_type: name for name, case in reversed(CASES.items())}
EVERY = [*CASES, *HEADS, *(f"{name}{VARIED}" for name in FIRST.values())]
"""Every case with its default head and with every other head, and the first of each type with many fields changed."""


def proved(name: str) -> tuple[Kind, str, Outcome, str]:
    """Compare a case. Return its kind, its model type, and the outcome with the reason."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    case = {**CASES, **HEADS}[name.removesuffix(VARIED)]
    with TemporaryDirectory() as folder, quiet():
        if name.endswith(VARIED):
            case = varied(name.removesuffix(VARIED), case, Path(folder) / "config", tries=20)
        return case.kind, case.model_type, *outcome(case, Path(folder))


def row(kind: Kind, results: Sequence[tuple[str, Outcome, str]]) -> str:
    """Format a line of the table."""
    refused = defaultdict(set)
    for model_type, verdict, why in results:
        if verdict != "passed":
            refused[why if verdict == "refused" else f"{verdict}: {why}"].add(f"`{model_type}`")
    why = "; ".join(f"{', '.join(sorted(types))}: {reason}" for reason, types in refused.items())
    passed = sum(verdict == "passed" for _, verdict, _ in results)
    return f"| {WORDS[kind]} | {len({result[0] for result in results})} | {len(results)} | {passed} | {why} |\n"


if __name__ == "__main__":
    results: dict[Kind, list[tuple[str, Outcome, str]]] = {kind: [] for kind in WORDS}
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        for name, (kind, *rest) in zip(EVERY, processes.map(proved, EVERY), strict=True):
            results[kind].append((rest[0], rest[1], rest[2]))
            print(name, *rest, flush=True)
    rows = "".join(row(kind, group) for kind, group in results.items())
    write_table(PAGE, "classes", HEAD + rows)
