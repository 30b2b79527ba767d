"""The callback `components`: it does not affect training, and its heat maps and its table show planted faults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from xml.etree.ElementTree import tostring

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit.run.contract import Training
from tfkit.run.training.loop import Trainer
from tfkit.tools.common.history import History
from tfkit.tools.train.components import component_contents, component_findings, component_table, heat_maps

from ...run.training.runs import Memory, same, small_run, trained

SETS = ("callbacks={kind: components, every: 2, sequences: 3}", "clip=0.5", "steps=4")


class Weights:
    """A watcher that stores the weights and the gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, Tensor], dict[str, Tensor | None]]] = []

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        named = dict(training.model.named_parameters())
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}
        self.steps.append(({name: p.detach().clone() for name, p in named.items()}, gradients))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def norm(tensors: Mapping[str, Tensor | None], begin: str) -> float:
    return math.sqrt(
        sum(float(t.double().square().sum()) for n, t in tensors.items() if n.startswith(begin) and t is not None)
    )


def test_it_does_not_affect_training_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    plain, weights = trained(small_run(tmp_path, *SETS[1:]))
    watcher = Weights()
    trainer = Trainer(small_run(tmp_path, *SETS, "machine.micro_batch=4"), Memory(), watchers=[cast(Any, watcher)])
    trainer.train()
    memory, with_components = trained(small_run(tmp_path, *SETS))
    assert same(weights, with_components)
    assert memory.losses == plain.losses
    assert ["rms/decoder.layers.0.ffn.out" in line for line in memory.lines] == [False, True] * 2
    first, _ = trained(small_run(tmp_path, *SETS), until=1)
    rest, _ = trained(small_run(tmp_path, *SETS), Memory(first.saved))
    assert first.lines + rest.lines == memory.lines
    line = cast(Memory, trainer.record).lines[3]
    (after, gradients), (before, _) = watcher.steps[3], watcher.steps[2]
    updates = {name: after[name] - before[name] for name in after}
    for begin in ("decoder.layers.1.ffn", "embedding", "decoder.layers.0.attention_norm_in"):
        assert math.isclose(line[f"weight/{begin}"], norm(after, f"{begin}."), rel_tol=1e-5)
        assert math.isclose(line[f"gradient/{begin}"], norm(gradients, f"{begin}."), rel_tol=1e-5)
        assert math.isclose(line[f"update/{begin}"], norm(updates, f"{begin}."), rel_tol=1e-4)
    examples = trainer.data.examples("train", "sequential").batch(torch.arange(3).numpy())
    numbers = tfkit.activity(trainer.model, **trainer.inputs(examples))
    assert {name: cast(Memory, trainer.record).lines[3][name] for name in numbers} == numbers


def planted() -> History:
    """Return the numbers of six layers with a silent head, an exploding FFN and a dead FFN."""
    curves: dict[str, list[tuple[int, float]]] = {"loss": [(10, 1.0), (20, 0.9)]}
    for layer in range(6):
        path = f"decoder.layers.{layer}"
        ffn = {3: 40.0, 4: 1e-3}.get(layer, 0.3)
        curves[f"rms/{path}.ffn.out"] = [(10, 0.2), (20, ffn)]
        curves[f"dead/{path}.ffn"] = [(10, 0.0), (20, float(layer == 4))]
        for head in range(2):
            curves[f"rms/{path}.attention.heads.{head}"] = [(10, 0.4), (20, 0.0 if (layer, head) == (1, 1) else 0.5)]
            curves[f"entropy/{path}.attention.heads.{head}"] = [(10, 3.0), (20, 2.0)]
        curves[f"weight/{path}.ffn"], curves[f"update/{path}.ffn"] = [(10, 2.0), (20, 2.0)], [(10, 0.1), (20, 0.2)]
    return History(curves, [])


def test_planted_faults_are_in_the_picture_and_in_the_table() -> None:
    maps = heat_maps(planted())
    shades = {(m.quantity, layer, head): m.level(m.latest((layer, head))) for m in maps for layer, head in m.rows}
    steep = {key for key, level in shades.items() if abs(level) == 8 and key[0] != "entropy"}
    assert steep == {("rms", 3, None), ("rms", 4, None), ("rms", 1, 1), ("dead", 4, None)}
    assert shades["rms", 4, None] == shades["rms", 1, 1] == -8
    columns, rows = component_table(planted())
    assert columns == ["layer", "ffn", "head", "entropy", "dead", "update"]
    assert [row[2] for row in rows] == ["0.5", "0", "0.5", "0.5", "0.5", "0.5"]
    assert rows[3] == ["3", "40", "0.5", "2", "0", "0.1"]
    assert len([*component_findings(maps)]) == 4
    page = "".join(
        tostring(cast(Any, child), encoding="unicode") for child in component_contents(planted()) if child is not None
    )
    for cell in ('"M1 3.5h1" class="map high"', '"M1 4.5h1" class="map low"', '"M1 4.5h1" class="map part"'):
        assert f'<path d={cell} stroke-opacity="1"' in page
    assert [*component_contents(History({"loss": [(1, 1.0)]}, []))] == []


def test_several_processes_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(tfkit.SpecError, match="`components` cannot be used with several processes"):
        trained(small_run(tmp_path, *SETS))
