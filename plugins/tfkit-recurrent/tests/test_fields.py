"""Fields of config.json that give the type of each layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tfkit_recurrent.fields import BlockTypesConfig, DeltaLayersConfig

TYPES = BlockTypesConfig(
    block_types={"linear": "base", "full": "full", "mamba": "base", "attention": "full"},
    older="pattern",
    letters={"M": "linear", "*": "full"},
    at="decoder",
)


def file(n_layers: int = 0, **present: Any) -> tuple[Any, dict[str, Any]]:
    """Return a config.json with these fields, and the values that a field reads from it or writes to it."""
    values: dict[str, Any] = {}
    entries = {name: {"": value} for name, value in present.items()}
    methods = {
        "present": lambda name: entries.get(name, {}),
        "used": lambda names: None,
        "value": present.get,
        "put": values.__setitem__,
        "arrange": values.__setitem__,
        "layers": lambda _: [None] * n_layers,
    }
    return SimpleNamespace(**methods), values


@pytest.mark.parametrize(
    "present", [{"types": ["mamba", "full", "linear"]}, {"pattern": "M*M"}, {"types": ["mamba"] * 3, "pattern": "M*M"}]
)
def test_a_list_of_types_precedes_the_older_letters(present: dict[str, Any]) -> None:
    reading, values = file(**present)
    TYPES.read("types", reading)
    variants = ["base"] * 3 if present.get("types") == ["mamba"] * 3 else ["base", "full", "base"]
    assert values == {"decoder.n_layers": 3, "decoder": variants}


def test_the_first_type_of_a_variant_is_written() -> None:
    writing, values = file()
    writing.layers = lambda path: {"decoder": ["full", "base", "base", "full"]}[path]
    TYPES.write("types", writing)
    assert values == {"types": ["full", "linear", "linear", "full"]}


def test_numbers_of_attention_layers_count_from_1() -> None:
    field = DeltaLayersConfig(delta_layers=("full", "kda"), sizes={}, at="decoder")
    reading, values = file(6, linear_attn_config={"full_attn_layers": [1, 4, 6]})
    field.read("linear_attn_config", reading)
    assert values == {"decoder": ["full", "kda", "kda", "full", "kda", "full"]}
    reading, values = file(6, linear_attn_config={"full_attn_layers": [1]}, layer_types=["full_attention"] * 6)
    field.read("linear_attn_config", reading)
    assert values == {}
