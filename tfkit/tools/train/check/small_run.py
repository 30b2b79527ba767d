"""Runs as subjects of `tfkit check`: a run, and the small runs around a kind of a run's slot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tfkit.component import Component
from tfkit.errors import SpecError
from tfkit.plugin.manager import Plugins
from tfkit.reference import Kinds
from tfkit.run.checked_run import check_run, load_run
from tfkit.run.read_run import read_run
from tfkit.tools.check.components import all_pairs, required_values
from tfkit.tools.check.measure import SubjectType
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.train.check.run_under_test import LENGTH, RunUnderTest, reduced_run

LISTS: dict[str, dict[str, Any]] = {
    "muon": {"others": {"kind": "adamw", "lr": 3e-3}},
    "samples": {"prompt": "1", "tokens": 4},
    "stop_at": {"below": 0.0},
    "text": {"files": "tinyshakespeare"},
    "masked": {"of": {"kind": "copy"}},
    "mup": {"base": {"model.d_model": 8}},
    "completep": {"base": {"model.d_model": 8}},
}
"""Values for kinds that require text, a choice or other kinds."""
HELP = "check a run with a suitable model and suitable data instead: `tfkit check RUN`"


def small_run(slot: str, part: Mapping[str, Any], length: int | None = None) -> dict[str, Any]:
    """Return a small run with a component in its slot; `part` is its mapping. A data kind needs a single input."""
    stack = {"block": "decoder", "n_layers": 1, "attention": {"kind": "mha", "n_heads": 2, "position": "rope"}}
    stack["ffn"] = {"kind": "gelu", "d_ff": 24}
    model = {"vocab_size": "data.vocab_size", "d_model": 16, "dropout": 0.1}
    run: dict[str, Any] = {"tfkit": 1, "name": "small", "steps": 20}
    run["model"] = {**model, "graph": {"embedding": "embedding", "decoder": stack, "logits": "lm_head"}}
    run |= {"data": {"kind": "addition", "digits": 2}, "batch": {"sequences": 4}}
    run["optimizer"] = {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1}
    if slot == "metric":
        run["eval"] = {"every": 10, "splits": {"val": 1}, "metrics": [part]}
    elif slot == "callback":
        run["callbacks"] = [part]
    else:
        run[slot] = part
    if length is not None:
        run["batch"]["length"] = length
    return run


class RunSubject(SubjectType):
    """Runs: the properties of a training step."""

    name: ClassVar[str] = "run"
    slots: ClassVar[tuple[str, ...]] = (
        "callback",
        "data",
        "loss",
        "metric",
        "optimizer",
        "parametrization",
        "schedule",
    )
    further_slots: ClassVar[tuple[str, ...]] = ("tokenizer", "tracker")

    def read(
        self, spec: Any, plugins: Plugins, *, sets: Sequence[str] = (), seed: int = 0, kinds: Kinds | None = None
    ) -> RunUnderTest:
        return reduced_run(load_run(spec, plugins, sets=sets, count=flops_of_step), plugins, seed, kinds)

    def around(
        self,
        config: type[Component],
        plugins: Plugins,
        *,
        options: Mapping[str, Sequence[Any]],
        fields: Mapping[str, Any] | None = None,
        seed: int = 0,
        reference: Callable[..., Any] | None = None,
    ) -> dict[str, RunUnderTest]:
        runs: dict[str, RunUnderTest] = {}
        kind, rejected = config.kind_name(), list[SpecError]()
        kinds = None if reference is None else {config.slot: {kind: reference}}
        for row in all_pairs(options) or [{}]:
            part = {"kind": kind, **required_values(config), **LISTS.get(kind, {}), **(fields or {}), **row}
            words = "".join(f", {name}: {json.dumps(value)}" for name, value in row.items())
            for length in (None, LENGTH) if config.slot == "data" else (None,):
                try:
                    run = check_run(read_run(small_run(config.slot, part, length), plugins), count=flops_of_step)
                except SpecError as error:  # an error in the length or in the component
                    rejected.append(error)
                else:
                    runs[f"a small run{words}"] = reduced_run(run, plugins, seed, kinds)
        if not runs:
            cause = next((error for error in rejected if "`length`" not in str(error)), rejected[0])
            raise SpecError(*(replace(fault, help=fault.help or HELP) for fault in cause.diagnostics)) from cause
        return runs
