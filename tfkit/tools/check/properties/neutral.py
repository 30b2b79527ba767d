"""The property that neutral values of a spec have no effect."""

from __future__ import annotations

import math
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx

from tfkit.checkpoint.weight_map import places
from tfkit.component import RopeScalingConfig
from tfkit.errors import SpecError
from tfkit.tools.check.changes import Place, put
from tfkit.tools.check.measure import DoesNotApplyError, Measured, property_of
from tfkit.tools.check.places import compared
from tfkit.tools.check.subject import Subject

Weights = Callable[[fx.GraphModule, fx.GraphModule], dict[str, Tensor]]


@property_of("neutral", "is not changed by neutral values")
def neutral(subject: Subject) -> Iterator[Measured]:
    """A window of all tokens, a bound of a billion, sinks of minus a billion, a rotary scaling by a factor of one.

    Also groups of query heads: separate key-value heads with equal weights compute the same. Values of one
    field are neutral together, and separately if the combination is rejected or has an effect.
    """
    measured = []
    for values in _neutral(subject).values():
        together = _with_and_without(subject, values)
        if not together or any(value.broken for value in together):
            together = [
                *(measurement for value in values for measurement in _with_and_without(subject, [value])),
                *together,
            ]
        measured += together
    if not measured:
        raise DoesNotApplyError("the spec has no value with a neutral one")
    yield from measured


@dataclass(frozen=True)
class _Neutral:
    """A neutral value, in words; the values of the spec with it and without, and the weights of the second model."""

    words: str
    present: dict[Place, Any]
    left_out: dict[Place, Any]
    weights: Weights


def _with_and_without(subject: Subject, values: Sequence[_Neutral]) -> list[Measured]:
    """Compare the model with these neutral values and the one without; nothing if the spec refuses one of the two."""
    neutral_values, left_out = (
        ChainMap(*(value.present for value in values)),
        ChainMap(*(value.left_out for value in values)),
    )
    try:
        first, second = (subject.build(subject.changed(put(changes))) for changes in (neutral_values, left_out))
    except (SpecError, ValueError):
        return []
    second.load_state_dict(values[0].weights(first, second))
    run = partial(subject.run, subject.inputs())
    runs = partial(run, first), partial(run, second)
    return [*compared(first, *runs, f"{values[0].words} changes the outputs by {{}}", second=second)]


def _neutral(subject: Subject) -> dict[str, list[_Neutral]]:
    """Return the neutral values, by the name of their field."""
    by_field = defaultdict[str, list[_Neutral]](list)
    for path, value in subject.values.items():
        name = ".".join(path[1:])
        if path[-1] == "softcap" and value is not None:
            candidate = _Neutral(f"`{name}: 1e9`", {path: 1e9}, {path: None}, _equal)
        elif path[-2:] == ("mask", "left") and value is not None:
            candidate = _Neutral(f"`{name}: 1000`", {path: 1000}, {path: None}, _equal)
        elif path[-1] == "sinks" and value:
            candidate = _Neutral(f"`{name}`, each minus a billion,", {}, {path: False}, _without_sinks)
        elif path[-1] == "n_kv_heads" and value < (heads := subject.values[*path[:-1], "n_heads"]):
            candidate = _Neutral(
                f"`{name}: {heads}`, with equal weights,", {}, {path: heads}, partial(_repeated, subject)
            )
        elif path[-2:] == ("scaling", "factor") and _is_neutral(subject, path):
            candidate = _Neutral(f"`{name}: 1`", {path: 1.0}, {path[:-1]: None}, _equal)
        else:
            continue
        by_field[path[-1]].append(candidate)
    return by_field


def _is_neutral(subject: Subject, path: Place) -> bool:
    """Return True if a factor of 1 is all that a rotary scaling needs to change nothing, as far as the check reads."""
    for place, part in subject.graph.configs(RopeScalingConfig):  # type: ignore[type-abstract]
        if tuple(place.split(".")) == path[:-1]:
            lists = any(isinstance(value, tuple) for _, value in part)
            short = dict(part).get("original_max_len", math.inf) >= subject.length
            return short and not lists and part.model_copy(update={"factor": 1.0}).attention_factor == 1
    return False


def _without_sinks(first: fx.GraphModule, second: fx.GraphModule) -> dict[str, Tensor]:
    state = first.state_dict()
    for name in state.keys() - second.state_dict().keys():
        state[name].fill_(-1e9)
    return {name: state[name] for name in second.state_dict()}


def _equal(first: fx.GraphModule, second: fx.GraphModule) -> dict[str, Tensor]:
    return first.state_dict()


def _repeated(subject: Subject, first: fx.GraphModule, second: fx.GraphModule) -> dict[str, Tensor]:
    """Repeat the weights of each key-value head for every query head that shares it."""
    ours, state, wider = places(first), first.state_dict(), second.state_dict()
    heads = {f"{attention.path}.": attention.config.kv_heads for attention in subject.attentions}
    for name, place in places(second).items():
        view, old = place.view(wider), ours[name].view(state)
        if view.shape != old.shape:
            owner = next(path for path in heads if name.startswith(path))
            each = old.unflatten(0, (heads[owner], -1))
            old = each.repeat_interleave(view.size(0) // old.size(0), dim=0).flatten(0, 1)
        view.copy_(old)
    return wider
