"""The terms of `balanced` against transformers, on the logits of the same routers; and the loss in a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from tfkit_moe import BalancedConfig, BalancedLoss
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

import tfkit
from tfkit.cli import main

from .layer import PLUGINS

PLUGIN = Path(__file__).parents[1]

SPEC: dict[str, Any] = {
    "tfkit": 1,
    "name": "small",
    "d_model": 16,
    "vocab_size": 29,
    "graph": {
        "embedding": "embedding",
        "decoder": {
            "block": "decoder",
            "n_layers": 2,
            "attention": {"kind": "mha", "n_heads": 2, "position": "rope"},
            "ffn": {"kind": "moe", "n_experts": 8, "n_experts_per_token": 2, "d_ff": 16},
        },
        "logits": "lm_head",
    },
}
TOKENS = torch.arange(24).view(3, 8) * 7 % 29
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [1] * 6 + [0] * 2]).bool()


class NothingConfig(tfkit.LossConfig):
    """No loss."""

    kind: Literal["nothing"] = "nothing"
    weight: float | None = None

    @property
    def terms(self) -> dict[str, Any]:
        return {} if self.weight is None else {"logits": SimpleNamespace(weight=self.weight)}

    def build(self, model: torch.fx.GraphModule) -> nn.Module:
        return Nothing(model)


def balanced(weight: float | None = None, **fields: Any) -> BalancedConfig:
    return BalancedConfig(base=NothingConfig(weight=weight), **fields)


class Nothing(nn.Module):
    """A base without a loss, which runs the model."""

    def __init__(self, model: torch.fx.GraphModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return self.model(**inputs).sum() * 0


def model_and_logits(inputs: dict[str, Tensor]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    model = tfkit.build(tfkit.load(SPEC, plugins=PLUGINS))
    for name, parameter in model.named_parameters():
        if "router" in name:
            nn.init.normal_(parameter, std=1.0, generator=torch.Generator().manual_seed(1))
    logits: list[Tensor] = []
    for layer in range(2):
        router = model.get_submodule(f"decoder.layers.{layer}.ffn.router")
        router.register_forward_hook(lambda module, args, _: logits.append(module.logits(*args)))  # type: ignore[operator]
    model(**inputs)
    return model, logits


@pytest.mark.parametrize("mask", [None, MASK], ids=["without padding", "with padding"])
def test_the_terms_are_those_of_transformers(mask: Tensor | None) -> None:
    inputs = {"tokens": TOKENS} | ({} if mask is None else {"tokens_mask": mask})
    model, logits = model_and_logits(inputs)
    expected = load_balancing_loss_func(tuple(logits), 8, 2, mask)
    real = torch.ones_like(MASK) if mask is None else mask
    z = router_z_loss_func(torch.cat([part[real.flatten()] for part in logits])[None])
    targets = torch.arange(24).view(3, 8)
    targets[0, 2:], targets[1, 7] = -100, -100
    counts = torch.tensor([2, 7, 8])
    loss = BalancedLoss(model, Nothing(model), balanced(balance=1.0, router_z=0.5))
    total = loss(inputs, targets) / 17
    torch.testing.assert_close(total, (expected + 0.5 * z)[None], rtol=1e-6, atol=0)
    parameters = [model.get_parameter(f"decoder.layers.{layer}.ffn.router.weight") for layer in range(2)]
    for ours, theirs in zip(
        torch.autograd.grad(total.sum(), parameters, retain_graph=True),
        torch.autograd.grad(expected + 0.5 * z, parameters, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    of_sequences = BalancedLoss(model, Nothing(model), balanced(balance=1.0, over="sequence"))
    rows = [tuple(part.view(3, 8, 8)[row] for part in logits) for row in range(3)]
    masks = [None if mask is None else mask[row : row + 1] for row in range(3)]
    means = [load_balancing_loss_func(row, 8, 2, of_row) for row, of_row in zip(rows, masks, strict=True)]
    torch.testing.assert_close(
        of_sequences(inputs, targets), (counts * torch.stack(means)).sum()[None], rtol=1e-6, atol=0
    )
    # The loop multiplies the loss of the main output by its weight, which must not scale the terms.
    weighted = BalancedLoss(model, Nothing(model), balanced(weight=0.3, balance=1.0, over="sequence"))
    torch.testing.assert_close(0.3 * weighted(inputs, targets), of_sequences(inputs, targets))
    assert len(model.get_submodule("decoder.layers.0.ffn.router")._forward_hooks) == 1  # the one of this test


def test_padding_on_either_side_of_tokens_with_a_capacity_does_not_count() -> None:
    sets = ["decoder.ffn.router={capacity: 3}"]
    model = tfkit.build(tfkit.load(SPEC, plugins=PLUGINS, sets=sets))
    loss = BalancedLoss(model, Nothing(model), balanced(balance=1.0, router_z=0.5))
    shifts = (8 - MASK.sum(dim=1)).tolist()
    left, left_mask = (
        torch.stack([row.roll(shift) for row, shift in zip(part, shifts, strict=True)]) for part in (TOKENS, MASK)
    )
    targets = torch.arange(24).view(3, 8)
    expected = loss({"tokens": TOKENS, "tokens_mask": MASK}, targets)
    torch.testing.assert_close(loss({"tokens": left, "tokens_mask": left_mask}, targets), expected)


RUN = """\
tfkit: 1
name: small
seed: 3
model: {d_model: 16, vocab_size: data.vocab_size, graph: GRAPH}
data: {kind: text, files: sheep.txt}
batch: {sequences: 6, length: 12}
steps: 4
optimizer: {kind: adamw, lr: 1e-2}
loss: {kind: balanced, balance: 0.5, router_z: 0.1, over: sequence}
"""


def train(folder: Path, name: str, *sets: str) -> list[float]:
    """The losses of a run."""
    folder.joinpath("sheep.txt").write_text("seven sheep and nine goats went up the hill.\n" * 40)
    path = folder / "small.yaml"
    path.write_text(RUN.replace("GRAPH", str(SPEC["graph"]).replace("'", "")))
    words = ["train", str(path), "-o", str(folder / name), "--plugin-dir", str(PLUGIN)]
    if main([*words, *(word for change in sets for word in ("--set", change))]):
        return []
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def errors(folder: Path, capsys: pytest.CaptureFixture[str], name: str, *sets: str) -> str:
    """The error of a run, in one line."""
    capsys.readouterr()
    assert not train(folder, name, *sets)
    return " ".join(capsys.readouterr().err.split())


def test_a_run_in_micro_batches_has_the_same_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    together = train(tmp_path, "together")
    assert train(tmp_path, "parts", "machine.micro_batch=2") == pytest.approx(together, rel=1e-5)
    message = "`balanced` must be computed from all sequences of a step together"
    assert message in errors(tmp_path, capsys, "wrong", "loss.over=batch", "machine.micro_batch=2")


@pytest.mark.slow
def test_every_field_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    together = train(tmp_path, "together")
    for change in ("over=batch", "balance=0.0", "router_z=0.0"):
        assert train(tmp_path, change, f"loss.{change}") != pytest.approx(together, rel=1e-5)
        assert "has a different run" in errors(tmp_path, capsys, "together", f"loss.{change}")
    assert "both weights are 0" in errors(tmp_path, capsys, "wrong", "loss={kind: balanced, balance: 0.0}")
    dense = "model.decoder.ffn={kind: relu, d_ff: 8}"
    assert "must have a mixture of experts" in errors(tmp_path, capsys, "wrong", dense)
