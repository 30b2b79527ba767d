"""Weights that are laid out for decoding: the strides differ, the model does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx

import tfkit
from tfkit import CachedModel
from tfkit.decoding import prepare
from tfkit.decoding.prepare import Layout, prepare_decoding
from tfkit.nn import kernels
from tfkit.nn.kernels import MIN_ELEMENTS, large_weights

from .small import build, spec_of, tokens


@pytest.fixture(autouse=True)
def _nobody_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_fastest", {})


@pytest.fixture
def model() -> fx.GraphModule:
    spec = spec_of({"n_layers": 2, "attention": {"n_heads": 4}, "ffn": {"kind": "gelu", "d_ff": MIN_ELEMENTS // 128}})
    return build(spec.replace("d_model: 16", "d_model: 128"))


def faster(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    """A machine that reads this layout faster."""

    def race(groups: list[list[torch.Tensor]], rows: int) -> list[dict[kernels.Kernel, float]]:
        return [{"torch": 1.0 + (group[0].is_contiguous() == (layout == "rows"))} for group in groups]

    monkeypatch.setattr(kernels, "_race", race)


def decoded(model: fx.GraphModule, rows: int) -> torch.Tensor:
    cached, text = CachedModel(model, length=12), tokens(rows, 6)
    return torch.cat([cached(text[:, :3]), *(cached(text[:, i : i + 1]) for i in range(3, 6))], dim=1)


def test_both_layouts_compute_the_same(model: fx.GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    want, state = decoded(model, 2), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    faster(monkeypatch, "columns")
    actual = prepare_decoding(model, 2)
    assert [(tensor.shape, tensor.count, tensor.layout) for tensor in actual] == [
        ((MIN_ELEMENTS // 128, 128), 2, "columns"),
        ((128, MIN_ELEMENTS // 128), 2, "columns"),
    ]
    assert not any(weight.is_contiguous() for group in large_weights(model) for weight in group)
    torch.testing.assert_close(decoded(model, 2), want, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    faster(monkeypatch, "rows")
    assert {tensor.layout for tensor in prepare_decoding(model, 2)} == {"rows"}
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_a_prepared_model_trains_is_written_and_is_read(
    model: fx.GraphModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    faster(monkeypatch, "columns")
    prepare_decoding(model)
    path = tmp_path / "m.safetensors"
    tfkit.export(model, path)
    other = tfkit.build(model.meta["graph"], seed=1)
    tfkit.load_weights(other, path)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    model.train()(tokens(2, 6)).sum().backward()
    other.train()(tokens(2, 6)).sum().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def test_a_small_gain_moves_nothing(model: fx.GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "GAIN", 3.0)
    faster(monkeypatch, "columns")
    assert {tensor.layout for tensor in prepare_decoding(model)} == {"rows"}


def test_a_machine_is_asked_once_for_each_batch(model: fx.GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    race = kernels._race
    monkeypatch.setattr(
        kernels, "_race", lambda groups, rows: (calls.append((len(groups), rows)), race(groups, rows))[1]
    )
    decoded(model, 1)
    decoded(model, 1)
    decoded(model, 2)
    assert calls == [(2, 1), (2, 2)]
    tfkit.generate(model, tokens(1, 3), max_new_tokens=2, n_samples=3, temperature=1.0)
    assert calls == [(2, 1), (2, 2), (2, 3)]


def test_what_has_no_choice_is_left_alone(model: fx.GraphModule) -> None:
    assert prepare_decoding(model.bfloat16()) == []
    assert prepare_decoding(model.to("meta")) == []
    with pytest.raises(ValueError, match="an integer of 1 or more; got 0"):
        prepare_decoding(model, 0)
