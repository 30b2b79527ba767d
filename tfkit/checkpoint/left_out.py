"""Tensors of a file that a model omits: reported when the file is loaded, and again before it is saved without them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from tfkit.checkpoint.files import Checkpoint
from tfkit.checkpoint.header import shown
from tfkit.checkpoint.mismatch import collapsed
from tfkit.checkpoint.weights import WeightMap
from tfkit.errors import Diagnostic, LeftOutWarning, SpecError, listing
from tfkit.spec.family import FamilyConfig

MOST = 8
"""The maximum number of names listed per reason."""


def lines(reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each reason, with the names of its tensors."""
    names: dict[str, list[str]] = {}
    for name, reason in collapsed(reasons):
        names.setdefault(reason, []).append(name)
    return tuple(f"{reason}: {listing(tensors, MOST)}" for reason, tensors in names.items())


def note(reasons: Mapping[str, str], file: str) -> Diagnostic:
    """Return the diagnostic that lists the tensors of a file which the model omits."""
    count = "1 tensor" if len(reasons) == 1 else f"{len(reasons):,} tensors"
    return Diagnostic(f"the model leaves out {count} of {file}", notes=lines(reasons))


def left_out_of(folder: Path, family: FamilyConfig) -> Iterator[Diagnostic]:
    """Yield the note about the weights in a folder, derived only from the names of a family.

    Yield nothing if they cannot be read yet.
    """
    with suppress(SpecError), Checkpoint.open(folder) as opened:
        names = opened.names
        all_weights = WeightMap((), {}, family.prefix, family.copies, family.ignored)
        if reasons := all_weights.for_names(names).left_out(names):
            yield note(reasons, shown(folder))


def warn_of(reasons: Mapping[str, str], file: str) -> None:
    """Warn if the model omits tensors of a file."""
    if reasons:
        text = note(reasons, file).render("warning").removeprefix("warning: ")
        warnings.warn(text, LeftOutWarning, stacklevel=4)
