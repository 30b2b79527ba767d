"""The state of the optimizer grows with the weights: by gradients of torch, and by a step of AdamW by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, fx
from torch.nn.functional import cross_entropy

import tfkit
from tfkit.building.transfer import Transfer, fill_from_model
from tfkit.checkpoint.weight_map import tensor_locations_of
from tfkit.run.checked_run import load_run
from tfkit.run.run_spec import WeightsConfig
from tfkit.run.training.initial_states import state_moves
from tfkit.run.training.order import indices_of
from tfkit.tools.grow.growth import grow
from tfkit.tools.grow.proof import initial_model

from .test_growth import TOKENS, small_model, weights_of

Run = Callable[..., str]
DEEPER, WIDER = ["n_layers=3", "d_ff=27", "n_heads=8"], ["d_model=32", "n_kv_heads=4", "n_layers=3"]
RESIZED = ("q.weight", "attention.output.weight", "gate.weight", "up.weight", "down.weight")
"""The weights with more heads or units."""


def gradients_of(model: fx.GraphModule) -> dict[str, Tensor]:
    """Return the gradient of each weight for cross-entropy."""
    model.zero_grad()
    logits = model(TOKENS)
    cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: location.view(gradients) for name, location in tensor_locations_of(model).items()}


@pytest.mark.parametrize(
    ("changes", "weights_with_state"), [pytest.param(DEEPER, 21, marks=pytest.mark.slow), (WIDER, 17)]
)
def test_states_move_as_gradients_do(changes: list[str], weights_with_state: int) -> None:
    """A moment that equals the gradient of the small model becomes the gradient of the large model."""
    plugins, source = tfkit.load_plugins(), small_model("dropout=0")
    growth = grow(source.meta["graph"], changes, plugins)
    larger = initial_model(growth.graph, seed=2).eval()
    fill_from_model(larger, source, Path(), Transfer(**growth.weights, allow_change=True))
    old, new = gradients_of(source), gradients_of(larger)
    moves = state_moves(larger, source, WeightsConfig(path="", **growth.weights, states=growth.states))
    assert len(moves) == growth.n_states == weights_with_state
    assert ("embedding.tokens.weight" in growth.repeated) is (changes is WIDER)  # along one of its axes
    sources = {location: name for name, location in tensor_locations_of(source).items()}
    for name, move in moves.items():
        gradient, expected = old[sources[move.source]], new[name]
        moved, squared = (move.moved(gradient**power, name, tuple(expected.shape), power, larger) for power in (1, 2))
        is_old = ~squared.isnan()
        torch.testing.assert_close(moved[is_old], expected[is_old], rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(squared[is_old], expected[is_old] ** 2, rtol=1e-9, atol=1e-20)
        assert not moved[~is_old].any()
        assert changes is WIDER or bool((~is_old).any()) == name.endswith(RESIZED)


# ---- runs ----

RUN = {
    "tfkit": 1,
    "name": "small",
    "model": {
        "extends": "char_swiglu",
        "vocab_size": "data.vocab_size",
        "d_model": 16,
        "dropout": 0,
        "graph": {
            "decoder": {
                "n_layers": 2,
                "attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "position": "rope"},
                "ffn": {"kind": "swiglu", "d_ff": 20},
            }
        },
    },
    "data": {"kind": "text", "files": "tinyshakespeare"},
    "batch": {"sequences": 4, "length": 16},
    "steps": 2,
    "optimizer": {"kind": "adamw", "lr": 1e-2},
}
AGAIN = {**RUN, "name": "again", "weights": {"path": "small", "states": ["*"]}}


@pytest.fixture
def small(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained run, and a run that continues with its weights and its state of the optimizer."""
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(json.dumps(RUN), encoding="utf-8")
    Path("again.yaml").write_text(json.dumps(AGAIN), encoding="utf-8")
    run("train", "small.yaml", "-o", "small", stderr=True)
    return tmp_path / "small"


def step_by_hand(source: Path) -> dict[str, Tensor]:
    """Return the change of each parameter in a third step of AdamW, from the first batch."""
    model, run = tfkit.build(source), load_run("again.yaml", tfkit.load_plugins())
    examples = run.data.examples("train", run.config.data.order)
    batch = examples.batch(indices_of(run.config.data.order, run.config.seed, 1, run.sizes, examples=len(examples)))
    (tokens,) = map(torch.from_numpy, batch.inputs.values())
    cross_entropy(model(tokens).flatten(0, 1), torch.from_numpy(batch.ids).flatten()).backward()
    states, changes = load_file(source / "step-2" / "optimizer.safetensors"), {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        mean = 0.9 * states[f"{name}/exp_avg"] + 0.1 * parameter.grad
        square = 0.999 * states[f"{name}/exp_avg_sq"] + 0.001 * parameter.grad**2
        changes[name] = -1e-2 * (mean / (1 - 0.9**3)) / ((square / (1 - 0.999**3)).sqrt() + 1e-8)
    return changes


def change_of(folder: str, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the change of each weight in the first step of a run."""
    return {name: tensor - start[name] for name, tensor in weights_of(folder).items()}


def old_part(name: str, tensor: Tensor) -> Tensor:
    """Return the old values of a weight of the deeper model: half of the heads of each group, and 20 units."""
    if ".q." in name:
        return tensor.view(2, 4, 4, 16)[:, :2].reshape(16, 16)
    if "attention.output" in name:
        return tensor.view(16, 2, 4, 4)[:, :, :2].reshape(16, 16)
    return tensor[:20] if ".gate." in name or ".up." in name else tensor[:, :20] if ".down." in name else tensor


@pytest.mark.slow
def test_the_first_step_of_adam_is_that_of_the_source(small: Path, run: Run) -> None:
    """With more layers, heads and units. A wider stream repeats the step, which its readers add up."""
    by_hand = step_by_hand(small)
    text = run("grow", "small", *DEEPER, "--states", "-o", "deeper.yaml")
    assert "optimizer: the state grows for 21 of 30 weights, else it is zero" in text
    assert "optimizer: the state grows for 21 of 21 weights\n" in run(
        "grow", "small", "d_model=32", "--states", "-o", "wider.yaml"
    )
    changes = {}
    for name in ("again", "deeper", "wider"):
        start = weights_of(filled_start(name))
        notes = run("train", f"{name}.yaml", "-o", name, "--stop-after", "1", stderr=True)
        assert re.search(r"^states: 21 of \d+ weights from small/step-2$", notes, re.MULTILINE)
        changes[name] = change_of(name, start)
    locations = tensor_locations_of(tfkit.build(small))
    for name, location in locations.items():
        step = location.view(by_hand)
        assert step.abs().mean() > 1e-4
        torch.testing.assert_close(changes["again"][name], step, rtol=1e-3, atol=2e-6)
        torch.testing.assert_close(old_part(name, changes["deeper"][name]), step, rtol=1e-3, atol=1e-5)
        if "attention" in name:  # its heads also get wider
            continue
        wide = changes["wider"][name]
        for dim in (dim for dim in range(step.dim()) if wide.size(dim) > step.size(dim)):
            step = step.repeat_interleave(2, dim)
        torch.testing.assert_close(wide, step, rtol=1e-2, atol=2e-5)
    new = changes["deeper"]["decoder.layers.2.ffn.down.weight"]
    assert 0.005 < new[new != 0].abs().mean() < 0.011


def filled_start(name: str) -> Path:
    """Write the initial weights of a run, and return their folder."""
    from tfkit.run.training.loop import Trainer

    from ...run.training.runs import Memory

    trainer = Trainer(load_run(f"{name}.yaml", tfkit.load_plugins()), Memory())
    tfkit.save(trainer.model, f"start-{name}")
    return Path(f"start-{name}")


@pytest.mark.slow
def test_states_need_the_optimizer_of_the_source(small: Path, run: Run) -> None:
    weights = ["train", "again.yaml", "--plan"]
    kind = "--set=optimizer={kind: sgd, momentum: 0.9, lr: 0.1}"
    text = run(*weights, kind, status=1, stderr=True)
    assert "`states` needs the optimizer of the run that the weights come from, adamw; got sgd" in text
    assert "no trained weight that the weights fill matches `decodr.*`" in run(
        *weights, "--set=weights.states=[decodr.*]", status=1, stderr=True
    )
    assert "got sgd" in run("train", "again.yaml", kind, status=1, stderr=True)
    (small / "step-2" / "optimizer.safetensors").unlink()
    text = run(*weights, status=1, stderr=True)
    assert "`states` needs the checkpoint of a run as weights; got `small/step-2`" in text


def test_states_need_a_run(run: Run) -> None:
    assert "--states has no effect without a run to write" in run(
        "grow", "char_swiglu", "d_ff=400", "--states", status=2, stderr=True
    )
