"""Comparison with models of transformers: no difference, or the component that contains a wrong tensor is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from tfkit.tools.compare.comparison import Comparison, compare
from tfkit.tools.import_.importing import import_config
from tfkit.tools.save.save import save

from ..sampling import chosen
from .case import Trial, reference
from .cases import CASES

transformers.utils.logging.disable_progress_bar()
QUICK_CASES = {"gemma", "bloom", "falcon", "ernie_tasks"}
DEFECT = {name for name, case in CASES.items() if case.repair is not None or case.model_type == "youtu"}
"""Cases whose class is wrong: it is repaired after it was loaded, or zeroes a row of a tied table when it loads it."""


@pytest.mark.filterwarnings("ignore::tfkit.LeftOutWarning")
@pytest.mark.parametrize("name", chosen(sorted(CASES), QUICK_CASES))
def test_a_wrong_tensor_is_found_and_nothing_else(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial.of(CASES[name], tmp_path)
    graph = trial.ours.meta["graph"]
    if name in DEFECT:
        loaded: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
        monkeypatch.setattr(type(trial.theirs), "from_pretrained", lambda *args, **options: (trial.theirs, loaded))
    clean, seed = compare(graph, tmp_path / "theirs"), 0
    if clean.first is not None and "experts" in clean.first.name:  # rounding may choose between two of equal score
        clean, seed = compare(graph, tmp_path / "theirs", seed=1), 1
    assert clean.equal
    assert clean.difference is not None
    assert clean.difference < 1e-4

    holder = _holder(trial, clean, random.Random(name))
    save(trial.ours, tmp_path / "wrong", layout="tfkit")
    actual = compare(graph, tmp_path / "theirs", weights=tmp_path / "wrong" / "model.safetensors", seed=seed)
    assert actual.first is not None
    assert f"{actual.first.name}.".startswith(f"{holder}."), (
        "a fused matrix matches none of theirs: what follows is named"
    )


def test_outputs_are_those_before_something_is_added_to_them_in_place(tmp_path: Path) -> None:
    """As falcon adds its attention to what its FFN returned."""
    trial = Trial.of(CASES["falcon"], tmp_path)
    assert compare(trial.ours.meta["graph"], tmp_path / "theirs").forms == ()


def test_a_bfloat16_folder_is_compared_in_float32(tmp_path: Path, run: Callable[..., str]) -> None:
    """In bfloat16, a single rounding exceeds the tolerance."""
    theirs = reference(CASES["granite"]).bfloat16()
    theirs.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    graph = import_config(tmp_path / "theirs").graph
    assert compare(graph, tmp_path / "theirs").equal
    rounded = compare(graph, tmp_path / "theirs", dtype="bfloat16")
    assert not rounded.equal
    assert rounded.difference is not None
    assert rounded.difference < 0.2
    (tmp_path / "spec.yaml").write_text(import_config(tmp_path / "theirs").text)
    files = str(tmp_path / "spec.yaml"), str(tmp_path / "theirs")
    assert "equal to 1e-05" in run("compare", *files)
    assert '"equal": false' in run("compare", *files, "--dtype", "bfloat16", "--json", status=1)


def test_experts_of_any_width_are_compared(tmp_path: Path) -> None:
    """The grouped kernels of transformers need rows that are multiples of 16 bytes."""
    sizes = {"hidden_size": 18, "intermediate_size": 7, "num_attention_heads": 3, "num_key_value_heads": 3}
    trial = Trial.of(replace(CASES["mixtral"], config={**CASES["mixtral"].config, **sizes}), tmp_path)
    assert compare(trial.imported.graph, tmp_path / "theirs").equal


@torch.no_grad()
def _holder(trial: Trial, clean: Comparison, rng: random.Random) -> str:
    """Spoil a tensor; the name of the innermost component that holds it."""
    names = [part.name for part in clean.parts]
    result = {}
    for path, _ in trial.ours.named_parameters():
        if around := [name for name in names if path.startswith(f"{name}.")]:
            result[path] = max(around, key=len)
    path = rng.choice(sorted(result))
    trial.ours.get_parameter(path).mul_(1.5).add_(0.25)
    return result[path]
