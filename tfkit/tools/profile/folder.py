"""The folder that a profile is written to, completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.tools.common.atomic_files import names_in
from tfkit.tools.profile.result import Profile, rows

DATA, REPORT = "profile.json", "report.html"
TRACE = "pt.trace.json.gz"
"""The ending of traces for torch-tb-profiler; Perfetto and chrome://tracing open them as well."""


def check_folder(folder: Path) -> None:
    """Raise SpecError if `folder` must not be written: it is a file, or holds more than a profile."""
    if find_spec("tensorboard") is None:
        message = "a log needs `tensorboard`, which is not installed"
        raise SpecError(Diagnostic(message, help='pip install "tfkit[profile]"'))
    known = {DATA, REPORT, *_folders(folder / DATA)}
    if others := [name for name in names_in(folder) or [] if name not in known]:
        message = f"{quoted(str(folder))} holds other files than a profile's: {listing(others, 4)}"
        raise SpecError(Diagnostic(message, help="name a new folder"))


def _folders(data: Path) -> list[str]:
    """The folders that a former profile lists as its own."""
    try:
        return [str(one["folder"]) for one in json.loads(data.read_text(encoding="utf-8"))["profiles"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def folders_of(names: Sequence[str]) -> list[str]:
    """A folder for each model; a repeated name gets a number."""
    made: list[str] = []
    for name in names:
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).lstrip(".") or "model"
        others = (f"{safe}_{number}" for number in count(2))
        made.append(next(one for one in chain([safe], others) if one not in made))
    return made


def write_profiles(profiles: Sequence[Profile], names: Sequence[str], target: Path) -> None:
    """Write the data, the report, and for each profile the scalars for TensorBoard beside its trace."""
    from tfkit.tools.profile.report.page import report

    for profile, name in zip(profiles, names, strict=True):
        _write_scalars(profile, target / name)
    found = [{"folder": name, **to_dict(profile)} for profile, name in zip(profiles, names, strict=True)]
    text = json.dumps({"profiles": found}, indent=2, ensure_ascii=False)
    (target / DATA).write_text(f"{text}\n", encoding="utf-8")
    (target / REPORT).write_text(report(profiles), encoding="utf-8", errors="replace")


def to_dict(profile: Profile) -> dict[str, Any]:
    """A profile as data, with values derived from its fields."""
    derived = {"step": profile.step, "plain_step": profile.plain_step, "attributed": profile.attributed}
    return asdict(profile) | derived | {"tokens_per_second": profile.tokens / profile.plain_step}


def _write_scalars(profile: Profile, folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for index, seconds in enumerate(profile.plain_steps):
            writer.add_scalar("step/milliseconds", 1000 * seconds, index)
            writer.add_scalar("step/tokens per second", profile.tokens / seconds, index)
        for index, seconds in enumerate(profile.steps):
            writer.add_scalar("step/milliseconds under the profiler", 1000 * seconds, index)
        for row in rows(profile):
            writer.add_scalar(f"milliseconds/{row.label}", 1000 * row.time, 0)
            writer.add_scalar(f"bytes at the peak/{row.label}", row.at_peak, 0)
        writer.add_scalar("memory/peak", profile.memory.peak, 0)
        writer.add_scalar("memory/before a step", profile.memory.at_start, 0)
