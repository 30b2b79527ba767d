"""The code that trained a run, as digests, and the differences from the code of this process.

The digests are stored in `run.json`, once for each process that changed them. They are not part of the run's digest, so
a change of code does not rename the folder, and an error can name the kinds whose code has changed. A record without
digests, from an earlier version of tfkit, matches any code.

Trackers are excluded, because they change no result. The digests also cover a few examples of each split: they reveal a
change in generated data, caused by a library or a machine for instance, for which no file can be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tfkit.component import Component, parts
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.run.checked_run import Run
from tfkit.run.contract import Batch, TrackerConfig
from tfkit.run.reach import digests_of_class
from tfkit.run.run_facts import Facts, read_facts
from tfkit.spec.folder import FACTS, latest_checkpoint
from tfkit.spec.header import quoted_path

Code: TypeAlias = Mapping[str, Mapping[str, str]]
"""Digests of the modules that a kind depends on, by slot and kind: `ffn swiglu`."""
LOOP, EXAMPLES = "training loop", "examples"
"""Keys for the code of the training loop, and for the examples of the splits."""
SAMPLE = 4
"""Number of examples of each split that are compared."""
MAX_KINDS = 4
CHANGE_MESSAGE = "the code of the run in {} has changed since it began"


def code_of(run: Run) -> Code:
    """Return the digests of the kinds that a run uses, of the training loop, and of some examples."""
    from tfkit.run.training.loop import Trainer  # not imported by commands that load a trained model

    code = kinds_of(run.config, run.graph.spec.model)
    return {**code, LOOP: dict(digests_of_class(Trainer)), EXAMPLES: _example_digests(run)}


def kinds_of(*roots: object) -> dict[str, Mapping[str, str]]:
    """Return the digests of the kinds in configs, except trackers."""
    configs = (part for root in roots for _, part in parts((), root))
    used = (config for config in configs if isinstance(config, Component) and not isinstance(config, TrackerConfig))
    kinds = {f"{config.slot} {config.kind_name()}": type(config) for config in used}
    return {name: dict(digests_of_class(kind)) for name, kind in sorted(kinds.items())}


def digest_of(code: Code) -> str:
    """Return 32 hexadecimal digits for all of the code."""
    return hashlib.blake2b(json.dumps(code, sort_keys=True).encode(), digest_size=16).hexdigest()


def session_code(facts: Facts, folder: Path, code: Code) -> dict[str, Code]:
    """Return the code for the record of a new process; empty if the previous process had the same code.

    The code of processes that left no checkpoint is removed from `facts`, because the run contains none of their steps.
    """
    if not _has_result(facts, folder):
        for session in facts.sessions:
            session.pop("code", None)
    return {} if _last_code(facts) == code else {"code": code}


def recorded_codes(facts: Facts) -> list[Code]:
    """Return the code of each process that changed it."""
    return [session["code"] for session in facts.sessions if "code" in session]


def check_code(runs: Iterable[tuple[Path, Facts, Code]], *, help: str) -> None:
    """Raise SpecError if the code of a run in these folders has changed since it was trained."""
    changed = {folder: notes for folder, facts, code in runs if (notes := code_changes(facts, folder, code))}
    if not changed:
        return
    notes = list(dict.fromkeys(note for notes in changed.values() for note in notes))
    if len(changed) == 1:
        message = CHANGE_MESSAGE.format(quoted(str(*changed)))
    else:
        message = f"the code of {len(changed)} runs has changed since they began"
        notes.append(f"runs: {listing(map(str, changed))}")
    raise SpecError(Diagnostic(message, notes=tuple(notes), help=help))


def warnings_about(weights: Path, *roots: object) -> list[Diagnostic]:
    """Return a warning if weights belong to a run, and the code of the kinds in `configs` has changed since then."""
    folder = next((path for path in (weights, *weights.parents[:2]) if os.path.isfile(path / FACTS)), None)
    if folder is None:
        return []
    try:
        facts = read_facts(folder)
        notes = code_changes(facts, folder, kinds_of(*roots)) if facts else []
    except SpecError as error:  # the weights do not depend on the file
        message = f"changes of code since the training are unknown: {error.diagnostics[0].message}"
        return [Diagnostic(message)]
    return [Diagnostic(CHANGE_MESSAGE.format(quoted_path(folder)), notes=tuple(notes))] if notes else []


def code_changes(facts: Facts, folder: Path, code: Code) -> list[str]:
    """Return the modules that have changed since a run was trained, with the kinds that depend on them."""
    before = _last_code(facts) if _has_result(facts, folder) else None
    if before is None:
        return []
    kinds: dict[str, list[str]] = {}
    for kind, now in code.items():
        old = before.get(kind, now)
        for module in sorted({**old, **now}):
            if old.get(module) != now.get(module):
                kinds.setdefault(module, []).append(kind)
    return [_change_note(module, users) for module, users in kinds.items()]


def _change_note(module: str, kinds: Sequence[str]) -> str:
    if list(kinds) == [EXAMPLES]:
        return f"examples of split `{module}`"
    return f"module `{module}`, used by {listing(map(kind_text, kinds), MAX_KINDS)}"


def kind_text(name: str) -> str:
    """Return the name of a kind for a message: ffn `swiglu`."""
    slot, _, kind = name.partition(" ")
    return name if name == LOOP else f"{slot} {quoted(kind)}"


def _last_code(facts: Facts) -> Code | None:
    """Return the code of the newest process; None if the record has none."""
    records = recorded_codes(facts)
    return records[-1] if records else None


def _has_result(facts: Facts, folder: Path) -> bool:
    """Return True if a process has left a result from which another process would continue."""
    return facts.ended is not None or latest_checkpoint(folder) is not None


def _example_digests(run: Run) -> dict[str, str]:
    """Return a digest of a few examples of each split."""
    digests = {}
    for split in run.data.splits:
        examples = run.data.examples(split, run.config.data.order)
        indices = np.unique(np.linspace(0, len(examples) - 1, SAMPLE).astype(np.int64))
        digests[split] = _batch_digest(examples.batch(indices))
    return digests


def _batch_digest(batch: Batch) -> str:
    digest = hashlib.blake2b(digest_size=8)
    masks = {f"{name}_mask": mask for name, mask in batch.masks.items()}
    arrays: dict[str, Any] = {**batch.inputs, **masks, "targets": batch.targets, "documents": batch.documents}
    arrays["counted"] = batch.counted
    arrays |= {f"targets of {name}": ids for name, ids in batch.further_targets.items()}
    for name, array in sorted(arrays.items()):
        if array is not None:
            stored = "<f8" if array.dtype.kind == "f" else "<i8"
            digest.update(f"{name} {array.shape} ".encode() + array.astype(stored).tobytes())
    return digest.hexdigest()
