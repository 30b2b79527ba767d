"""Tensors of a file that a model leaves out: said when it is loaded, and once more before it is saved without them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from tfkit.checkpoint.files import Checkpoint
from tfkit.checkpoint.mismatch import collapsed
from tfkit.checkpoint.names import matcher
from tfkit.checkpoint.weights import WeightMap
from tfkit.errors import Diagnostic, LeftOutWarning, SpecError, listing
from tfkit.spec.brackets import expanded
from tfkit.spec.family import FamilyConfig
from tfkit.spec.header import shown

MOST = 8
"""The most names that are listed for one reason."""


def lines(reasons: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each reason, with the names of its tensors."""
    names: dict[str, list[str]] = {}
    for name, reason in collapsed(reasons):
        names.setdefault(reason, []).append(name)
    return tuple(f"{reason}: {listing(some, MOST)}" for reason, some in names.items())


def note(reasons: Mapping[str, str], file: str) -> Diagnostic:
    """The diagnostic that says what the model of a file leaves out."""
    count = "1 tensor" if len(reasons) == 1 else f"{len(reasons):,} tensors"
    return Diagnostic(f"the model leaves out {count} of {file}", notes=lines(reasons))


def left_out_of(folder: Path, family: FamilyConfig) -> Iterator[Diagnostic]:
    """The note about the weights in a folder, by the names of a family alone; none if they cannot be read yet."""
    with suppress(SpecError), Checkpoint.open(folder) as opened:
        names = opened.names
        # Whether a tensor in `tensors` is read depends on the spec: loading reports it if not.
        texts = [text for text in family.tensors.values() if isinstance(text, str)]
        files = [family.in_file(name) for text in texts for name in expanded(text)]
        entries = matcher([*files, *(f"{name}.*" for name in files)])
        ignored = {name: why for name, why in family.ignored.items() if not entries.fullmatch(name)}
        whole = WeightMap((), {}, family.prefix, family.copies, ignored)
        if reasons := whole.for_names(names).left_out(names):
            yield note(reasons, shown(folder))


def warn_of(reasons: Mapping[str, str], file: str) -> None:
    """Give a warning if the model leaves out tensors of a file."""
    if reasons:
        text = note(reasons, file).render("warning").removeprefix("warning: ")
        warnings.warn(text, LeftOutWarning, stacklevel=4)
