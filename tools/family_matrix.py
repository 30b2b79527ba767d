"""Prove every family with every class that transformers has for it, and write the table of specs/README.md.

python tools/family_matrix.py
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.families import conftest  # noqa: E402, F401  classes without a name in the automatic ones
from tests.families.case import Case, Kind  # noqa: E402
from tests.families.cases import CASES  # noqa: E402
from tests.families.changed_fields import quiet  # noqa: E402
from tests.families.generated import HEADS, Outcome, outcome, varied  # noqa: E402

PAGE = ROOT / "specs" / "README.md"
START, END = "<!-- classes -->\n", "<!-- end of classes -->\n"
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


def cases() -> Iterator[tuple[str, Case]]:
    """Every case with its own head, with many fields changed, and with every other head."""
    yield from CASES.items()
    yield from HEADS.items()
    first = {case.model_type: (name, case) for name, case in reversed(CASES.items())}
    for name, case in first.values():
        with TemporaryDirectory() as folder:
            yield f"{name}, varied", varied(name, case, Path(folder))


def row(kind: Kind, found: Sequence[tuple[Case, Outcome, str]]) -> str:
    """A line of the table."""
    refused = defaultdict(set)
    for case, verdict, why in found:
        if verdict != "passed":
            refused[why if verdict == "refused" else f"{verdict}: {why}"].add(f"`{case.model_type}`")
    why = "; ".join(f"{', '.join(sorted(types))}: {reason}" for reason, types in refused.items())
    passed = sum(verdict == "passed" for _, verdict, _ in found)
    types = len({case.model_type for case, _, _ in found})
    return f"| {WORDS[kind]} | {types} | {len(found)} | {passed} | {why} |\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    found: dict[Kind, list[tuple[Case, Outcome, str]]] = {kind: [] for kind in WORDS}
    for name, case in cases():
        with TemporaryDirectory() as folder, quiet():
            verdict, why = outcome(case, Path(folder))
        found[case.kind].append((case, verdict, why))
        print(name, case.kind, verdict, why, flush=True)
    rows = "".join(row(kind, one) for kind, one in found.items())
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(f"{before}{START}{HEAD}{rows}{END}{rest.partition(END)[2]}", encoding="utf-8")
