"""The contents of `run.json` in the folder of a run: its settings, and a record of each of its processes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.run.checked_run import CONTENT, WEIGHTS_CONTENT, Run
from tfkit.spec.adapter_files import base_help
from tfkit.spec.folder import FACTS, latest_checkpoint
from tfkit.spec.header import quoted_path, read_object

MAX_DIFFERENCES = 12
T = TypeVar("T")


class Session(BaseModel):
    """The record of a process that trained. A killed process has no time, memory and step.

    Attributes:
        environment: versions and commit of the process.
        code: digests of the code by kind and module, if they differ from the previous process.
        changed: the settings that this process changed in place.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    command: str
    began: str
    ended: str | None
    seconds: float | None = None
    memory: int | None = None
    step: int | None = None
    environment: dict[str, Any] = {}
    code: dict[str, dict[str, str]] = {}
    changed: list[str] = []


def _checked_session(values: dict[str, Any]) -> dict[str, Any]:
    Session.model_validate(values)
    return values


@dataclass
class Facts:
    """The contents of `run.json`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    digest: str
    meaning: Mapping[str, Any]
    bits: Mapping[str, Any]
    environment: Mapping[str, Any]
    """The environment of the newest process; each session also stores the environment of its process."""
    sessions: list[Annotated[dict[str, Any], AfterValidator(_checked_session)]]
    earlier: dict[str, list[str]] = field(default_factory=dict)
    """Digests of the run before changes in place, and the names of its callbacks then: older checkpoints have them."""
    ended: str | None = None
    """The reason why the run has ended; None while it can continue."""

    @property
    def seconds_of_step(self) -> float | None:
        """The mean time of a step, evaluations included; None if a process recorded no time, or without a step."""
        if not self.sessions or any(session.get("seconds") is None for session in self.sessions):
            return None
        step = self.sessions[-1]["step"]  # 0 if the run ended before its first step, which measures no speed
        return sum(session["seconds"] for session in self.sessions) / step if step else None


def rates_of(run: Run, seconds: float | None) -> dict[str, float]:
    """Return the units of a step that curves can be drawn over, in addition to steps; none if steps differ in size."""
    if len(run.positions.values) > 1:
        return {}
    return {"tokens": run.tokens_of_step, **({"seconds": seconds} if seconds else {})}


_FACTS = TypeAdapter(Facts)
FINISHED = "finished"
"""`ended` of a run with all its steps."""
IN_PLACE = frozenset({"eval", "checkpoint", "callbacks", "nonfinite"})
"""Settings of a run that may change when it continues."""


def read_facts(folder: Path) -> Facts | None:
    """Read `run.json`; return None if it does not exist. Raise SpecError if it cannot be read."""
    path = folder / FACTS
    if not os.path.lexists(path):
        return None
    facts = read_json(path, _FACTS)
    if facts.ended is not None and (not facts.sessions or facts.sessions[-1].get("step") is None):
        message = (
            f"cannot read {quoted_path(path)}: `ended` is {quoted(facts.ended)}, and the last session has no `step`"
        )
        raise SpecError(Diagnostic(message))
    return facts


def facts_of(folder: Path, run: Run, *, in_place: bool = False) -> Facts | None:
    """Read `run.json`; return None if it does not exist. Raise SpecError if the folder belongs to a different run.

    With `in_place`, settings that do not decide the weights may differ, unless the run has finished.
    """
    facts = read_facts(folder)
    differences = run.semantics.differences(facts.meaning) if facts else []
    if facts and in_place and all(path.partition(".")[0] in IN_PLACE for path in differences):
        if facts.ended != FINISHED:
            return facts
        if differences:
            message = (
                f"the run in {quoted(str(folder))} has finished, and {listing(differences, 4)} would have no effect"
            )
            help = "evaluate it with `tfkit eval`, or continue it as a `branch`"
            raise SpecError(Diagnostic(message, help=help))
    if facts and differences:
        help = "name a new folder with -o"
        if run.checkpoint is not None and run.config.adapters is not None and differences == [WEIGHTS_CONTENT]:
            help = f"{base_help(run.checkpoint)}, or {help}"
        raise _different_run_error(folder, differences, facts.meaning, run.semantics.values, help)
    return facts


def continued_run(run: Run, folder: Path) -> Run:
    """Return a run with the values that its folder has, if it continues there from a checkpoint.

    Raise SpecError if the folder cannot be read.
    """
    facts = read_facts(folder)
    if facts is None or (checkpoint := latest_checkpoint(folder)) is None:
        return run
    return replace(run, recorded=facts.meaning, checkpoint=checkpoint)


def callbacks_in(semantics: Mapping[str, Any]) -> list[str]:
    """Return the names of the callbacks in the settings of a run, in order, as `label_of` returns them."""
    kinds = takewhile(lambda path: f"{path}.kind" in semantics, (f"callbacks.{number}" for number in count()))
    parts = [(semantics[f"{path}.kind"], semantics.get(f"{path}.name")) for path in kinds]
    return [kind if name is None else f"{kind}_{name}" for kind, name in parts]


def read_json(path: Path, schema: TypeAdapter[T]) -> T:
    """Read a JSON object that tfkit wrote. Raise SpecError if it cannot be read or does not fit the schema."""
    try:
        return schema.validate_python(read_object(path, max_values=None))
    except ValidationError as error:
        raise SpecError(Diagnostic(f"cannot read {quoted_path(path)}: {cause_of(error)}")) from error


def cause_of(error: ValidationError) -> str:
    """Describe the first error of a schema."""
    first = error.errors(include_url=False)[0]
    name = quoted(".".join(map(str, first["loc"]))) if first["loc"] else "it"
    if first["type"] == "missing":
        return f"{name} is missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{name} is unknown to this version of tfkit"
    text = first["msg"].replace("Input should", "must").removeprefix("Value error, ")
    return f"{name} {text}; got {quoted(repr(first['input']))}"


def _different_run_error(
    folder: Path, names: list[str], before: Mapping[str, Any], now: Mapping[str, Any], help: str
) -> SpecError:
    """Return the error for a folder with the run of different settings, and list the differences."""
    message = f"{quoted(str(folder))} has a different run, which cannot continue with these settings"
    if CONTENT in names:
        names.remove(CONTENT)
        message = f"the data of the run in {quoted(str(folder))} has changed since it began"
    notes = [f"{name}: {_value_text(before, name)} -> {_value_text(now, name)}" for name in names[:MAX_DIFFERENCES]]
    notes += [f"... ({len(names)} in total)"] if len(names) > MAX_DIFFERENCES else []
    return SpecError(Diagnostic(message, notes=tuple(notes), help=help))


def _value_text(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else "not there"
