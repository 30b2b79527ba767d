"""Files that describe layer variants by a number; transformers writes a list instead, so no saved model has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import tfkit
from tfkit.components.stack import StackConfig
from tfkit.tools.import_.importing import import_config

PUBLISHED = Path(__file__).parents[1] / "published"


def windows(config: Path) -> list[bool]:
    """Which layers read no more than a window."""
    stack = import_config(config).graph.spec.model.graph["decoder"]
    assert isinstance(stack, StackConfig)
    masks = [layer.attention.mask for _, layer in stack.plan() if layer.attention is not None]
    return [mask is not None and mask.left is not None for mask in masks]


@pytest.mark.parametrize("number", [2, 3, 6])
@pytest.mark.parametrize(
    ("name", "field", "more"),
    [
        ("gemma3_1b", "sliding_window_pattern", {}),
        ("command_r7b", "sliding_window_pattern", {}),
        ("qwen2_0_5b", "max_window_layers", {"use_sliding_window": True}),
        ("qwen2_0_5b", "max_window_layers", {"use_sliding_window": False}),
    ],
)
def test_layers_by_number(name: str, field: str, more: dict[str, Any], number: int, tmp_path: Path) -> None:
    fields = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8")) | {field: number} | more
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert windows(tmp_path) == [type == "sliding_attention" for type in theirs.layer_types]


@pytest.mark.parametrize("interval", [2, 3, 4])
def test_layers_without_positions_by_number(interval: int, tmp_path: Path) -> None:
    fields = json.loads((PUBLISHED / "smollm3_3b.json").read_text(encoding="utf-8"))
    fields |= {"no_rope_layers": None, "no_rope_layer_interval": interval}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    stack = import_config(tmp_path).graph.spec.model.graph["decoder"]
    assert isinstance(stack, StackConfig)
    actual = [layer.attention is not None and layer.attention.position is not None for _, layer in stack.plan()]
    assert actual == [bool(flag) for flag in transformers.AutoConfig.from_pretrained(tmp_path).no_rope_layers]


@pytest.mark.parametrize(
    ("name", "thetas", "reason"),
    [
        ("granite_swa", [1e4] * 5, "needs a list with a number for each of the 24 layers"),
        ("granite_swa", [1e4, *[1e4, 1e3, 0] * 7, 1e4, 1e4], "`base` must not differ here: 1000.0, 10000.0"),
    ],
)
def test_a_number_for_each_layer_that_no_variant_has(
    name: str, thetas: list[float], reason: str, tmp_path: Path
) -> None:
    fields = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8")) | {"layer_rope_theta": thetas}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(tfkit.SpecError, match=reason):
        import_config(tmp_path)


def test_a_mistral_with_types_of_layers() -> None:
    """transformers takes such a file for another type."""
    path = PUBLISHED / "ministral_8b.json"
    types = json.loads(path.read_text(encoding="utf-8"))["layer_types"]
    assert windows(path) == [type == "sliding_attention" for type in types]
