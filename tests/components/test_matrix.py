"""Every valid pair of kinds and options builds and keeps all guarantees; invalid pairs are rejected when read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import yaml

import tfkit
from tfkit.component import Component, InputPositionConfig
from tfkit.testing import check_capture, check_model, example_inputs
from tfkit.tools.check.components import Row, all_pairs

PLUGINS = tfkit.load_plugins(entry_points=False)
Part = dict[str, Any]

SMALL_FIELDS: Part = {"n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "activation": "silu", "factor": 2.0}
SMALL_FIELDS |= {"original_max_len": 16}

OPTIONS: dict[str, Part] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "qk_norm": {"qk_norm": "rmsnorm"},
    "qk_norm_full": {"qk_norm_full": {"kind": "layernorm", "bias": False}},
    "qk_norm_rotated": {"qk_norm_rotated": "rmsnorm"},
    "window": {"mask": {"left": 2, "right": 0}},
    "window_softcap": {"mask": {"left": 2, "right": 0}, "softcap": 5.0},
    "narrow": {"d_head": 6, "scale": 0.3},
    "biases": {"bias": {"q": True, "v": True}},
    "no_bias": {"bias": False},
    "keys_as_values": {"values": "keys", "value_norm": "rmsnorm", "bias": {"k": True}},
    "sinks": {"sinks": True, "clip": 0.3},
    "steps": {
        "qk_norm": "rmsnorm",
        "qk_norm_weight": "per_head",
        "value_norm": "rmsnorm",
        "temperature": {"beta": 0.5, "original_max_len": 2},
        "gate": "sigmoid",
        "inner_norm": "rmsnorm",
    },
}
VARIANTS: dict[str, dict[str, Part]] = {
    "position": {
        "sinusoidal_half": {"kind": "sinusoidal", "layout": "half", "endpoint": True, "offset": 2},
        "learned_offset": {"kind": "learned", "offset": 2},
        "rope_interleaved": {"kind": "rope", "style": "interleaved"},
        "rope_partial": {"kind": "rope", "width": 4, "reverse": True},
        "t5_per_layer": {"kind": "t5", "shared": False},
    },
    "norm": {
        "layernorm_no_bias": {"kind": "layernorm", "bias": False},
        "layernorm_bare": {"kind": "layernorm", "bias": False, "scale": False},
        "rmsnorm_offset": {"kind": "rmsnorm", "offset": 1},
        "rmsnorm_bare": {"kind": "rmsnorm", "scale": False},
    },
    "ffn": {
        "gelu_tanh_no_bias": {"kind": "gelu", "d_ff": 24, "approximate": "tanh", "bias": False},
        "glu_inner_norm": {"kind": "glu", "d_ff": 24, "activation": "xielu", "inner_norm": "rmsnorm"},
    },
    "rope_scaling": {
        "longrope": {
            "kind": "longrope",
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 4.0],
            "original_max_len": 16,
            "factor": 2.0,
        },
        "proportional": {"kind": "proportional", "width": 2},
    },
}
STACKS = ("encoder", "decoder", "memory")
PLACEMENTS = ("pre", "post", "sandwich", "output", "parallel", "parallel_two_norms")


def every_value(rows: Sequence[Row]) -> list[Row]:
    """Return a subset of the rows in which every value occurs at least once."""
    covered: set[tuple[str, Any]] = set()
    chosen = []
    for row in rows:
        if len(set(row.items()) - covered) > 1:
            chosen.append(row)
            covered |= set(row.items())
    for row in rows:
        if set(row.items()) - covered:
            chosen.append(row)
            covered |= set(row.items())
    return chosen


def kinds(slot: str) -> dict[str, Part]:
    """The mapping of every kind in a slot, with small values for the fields that it requires, and of our variants."""
    result = {}
    for kind, first in PLUGINS.registry.kinds(slot).items():
        fields = first.config.model_fields.items()
        result[kind] = {
            "kind": kind,
            **{n: SMALL_FIELDS[n] for n, info in fields if n in SMALL_FIELDS and info.is_required()},
        }
    return result | VARIANTS.get(slot, {})


@cache
def parts() -> dict[str, dict[str, Part]]:
    """What stands behind the values of the axes."""
    scaled = {f"rope_{k}": {"kind": "rope", "width": 4, "scaling": part} for k, part in kinds("rope_scaling").items()}
    positions: dict[str, Any] = {"none": None, **kinds("position"), **scaled}
    return {
        "attention": kinds("attention"),
        "option": OPTIONS,
        "position": positions,
        "norm": kinds("norm"),
        "stack": {name: {} for name in STACKS},
        "placement": {name: {} for name in PLACEMENTS},
        "ffn": kinds("ffn"),
    }


def config_of(slot: str, part: Part) -> type[Component]:
    component = PLUGINS.registry.find(slot, part["kind"])
    assert component is not None
    return component.config


def attention_of(row: Row) -> Part:
    """The attention of a row; options that its kind does not have are left out."""
    part = dict(parts()["attention"][row["attention"]])
    fields = config_of("attention", part).model_fields
    part |= {name: value for name, value in OPTIONS[row["option"]].items() if name in fields}
    if row["stack"] == "encoder" and "mask" in part:
        part["mask"] = {"left": 2, "right": 1}
    return part


def spec_of(row: Row) -> Part:
    """The spec of a row, for reading and for changing."""
    attention, position = attention_of(row), parts()["position"][row["position"]]
    embedding: Part = {"block": "embedding"}
    if position and issubclass(config_of("position", position), InputPositionConfig):
        embedding["position"] = position
    elif position:
        attention["position"] = position
    ffn = dict(parts()["ffn"][row["ffn"]])
    if "dropout" in config_of("ffn", ffn).model_fields:
        ffn["dropout"] = 0.1
    memory = row["stack"] == "memory"
    stack: Part = {"block": "decoder" if memory else row["stack"], "input": "embedding", "n_layers": 1}
    stack |= {"placement": row["placement"], "norm": parts()["norm"][row["norm"]]}
    stack |= {"attention": attention, "ffn": ffn, **({"memory": "source"} if memory else {})}
    head = {"block": "lm_head", "tie": "embedding"}
    inputs: Part = {"tokens": "tokens"}
    inputs |= {"source": {"type": "features", "width": 12}} if memory else {}
    spec: Part = {"tfkit": 1, "name": "row", "d_model": 32, "vocab_size": 17, "max_len": 32, "dropout": 0.1}
    return {
        **spec,
        "inputs": inputs,
        "graph": {"embedding": {**embedding, "input": "tokens"}, "stack": stack, "logits": head},
    }


def load(spec: Part) -> tfkit.Graph:
    return tfkit.loads(yaml.safe_dump(spec, sort_keys=False), plugins=PLUGINS)


def name_of(row: Row) -> str:
    return "-".join(row.values())


def rest(chosen: Sequence[Row], rows: Sequence[Row]) -> list[Any]:
    """The chosen rows, and the others as slow ones."""
    slow = [pytest.param(row, marks=pytest.mark.slow, id=name_of(row)) for row in rows if row not in chosen]
    return [*chosen, *slow]


AXES = {axis: list(values) for axis, values in parts().items()}
MEETING = [
    *[("attention", other) for other in ("option", "position", "stack")],
    *[("stack", other) for other in ("option", "position", "placement")],
    *[("placement", other) for other in ("norm", "ffn")],
]
"""Axes that meet in the code. Options and positions do too: they make nine tenths of all pairs, which are slow."""
ROWS = all_pairs(AXES)
MEETING_ROWS = all_pairs(AXES, MEETING)
CHOSEN = every_value(ROWS)


def test_the_rows_hold_every_kind_and_every_pair() -> None:
    for slot in ("attention", "position", "norm", "ffn"):
        assert set(PLUGINS.registry.kinds(slot)) <= set(parts()[slot])
    for rows, pairs in ((ROWS, combinations(AXES, 2)), (MEETING_ROWS, MEETING)):
        for first, second in pairs:
            actual = {(row[first], row[second]) for row in rows}
            assert len(actual) == len(AXES[first]) * len(AXES[second]), (first, second)
    assert len(MEETING_ROWS) < 0.6 * len(ROWS)
    for axis, values in AXES.items():
        assert {row[axis] for row in CHOSEN} == set(values)


PROMISES = ("weights", "state-dict", "look-ahead", "padding", "gradients", "padded-gradients", "cached")


def decoding(row: Row) -> Row:
    """A row, in a decoder where it is an encoder's."""
    return {**row, "stack": "memory" if row["placement"] == "pre" else "decoder"} if row["stack"] == "encoder" else row


@pytest.mark.parametrize("row", rest(CHOSEN[::7], ROWS), ids=name_of)
def test_every_pair_keeps_every_promise(row: Row) -> None:
    check_model(load(spec_of(row)), plugins=PLUGINS, only=PROMISES)
    if row["stack"] == "encoder":
        check_model(load(spec_of(decoding(row))), plugins=PLUGINS, only=["cached"])


@pytest.mark.parametrize("row", rest(CHOSEN[::12], MEETING_ROWS), ids=name_of)
def test_every_value_is_scripted(row: Row) -> None:
    check_model(load(spec_of(row)), plugins=PLUGINS, only=["script"])


@pytest.mark.slow
@pytest.mark.parametrize("row", CHOSEN, ids=name_of)
def test_every_value_is_captured_whole_and_so_is_every_step(row: Row) -> None:
    check_model(load(spec_of(row)), plugins=PLUGINS, level="full", only=["capture"])
    check_model(load(spec_of(decoding(row))), plugins=PLUGINS, level="full", only=["cached-step"])


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("row", CHOSEN[:3], ids=name_of)
def test_each_stack_through_the_real_compiler(row: Row) -> None:
    graph = load(spec_of(row))
    calls = [example_inputs(graph, length=n, padding="left") for n in (5, 8, 11)]
    check_capture(tfkit.build(graph), *calls, backend="inductor")
