"""Weights from a file: bit-identical, in the requested dtype, and an error that lists all mismatches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tfkit
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.save.save import save


@pytest.fixture
def weights(small: tfkit.Graph, tmp_path: Path) -> Path:
    return save(tfkit.build(small, seed=7), tmp_path / "out")[1]


def test_the_model_is_the_one_that_was_saved(small: tfkit.Graph, weights: Path) -> None:
    expected, actual = tfkit.build(small, seed=7).state_dict(), build_with_weights(small, weights).state_dict()
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("expected", [None, torch.float32, torch.bfloat16])
def test_types(small: tfkit.Graph, weights: Path, stored: torch.dtype, expected: torch.dtype | None) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)
    model = build_with_weights(small, weights, dtype=expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name].to(expected or stored))


def test_several_types_become_float32(small: tfkit.Graph, weights: Path) -> None:
    tensors = load_file(weights)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].half()}, weights)
    assert {parameter.dtype for parameter in build_with_weights(small, weights).parameters()} == {torch.float32}


def test_the_file_may_go_once_it_is_read(small: tfkit.Graph, weights: Path) -> None:
    model = build_with_weights(small, weights)
    weights.write_bytes(b"")
    assert torch.equal(model.embedding.tokens.weight, tfkit.build(small, seed=7).embedding.tokens.weight)  # type: ignore[union-attr]


def test_numbers_that_are_none_are_refused_while_it_is_built(small: tfkit.Graph, weights: Path) -> None:
    tensors = load_file(weights)
    tensors["embedding.tokens.weight"][3, 1] = torch.nan
    save_file(tensors, weights)
    with pytest.raises(tfkit.SpecError, match=r"`embedding\.tokens\.weight` .* values that are infinite or NaN"):
        build_with_weights(small, weights)


def test_everything_wrong_is_said_at_once(small: tfkit.Graph, weights: Path) -> None:
    tensors = load_file(weights)
    up = "decoder.layers.{}.ffn.up.weight"
    tensors["embedding.token.weight"] = tensors.pop("embedding.tokens.weight")
    tensors |= {up.format(i): torch.zeros(16, 32) for i in range(2)}
    tensors["decoder.final_norm.bias"] = torch.zeros(16, dtype=torch.int64)
    save_file(tensors, weights)
    with pytest.raises(tfkit.SpecError) as refused:
        build_with_weights(small, weights)
    assert (
        str(refused.value)
        == """\
error: `model.safetensors` lacks tensors of the model
   = embedding.tokens.weight [50, 16]; the file has embedding.token.weight

error: `model.safetensors` has tensors that the model lacks
   = embedding.token.weight [50, 16]

error: `model.safetensors` has tensors of other shapes than the model
   = decoder.layers.0-1.ffn.up.weight: [16, 32] in the file, [32, 16] in the model

error: `model.safetensors` has tensors that are not floating-point numbers
   = decoder.final_norm.bias: int64

error: 4 errors"""
    )


def test_a_pickle_is_not_opened(small: tfkit.Graph, tmp_path: Path) -> None:
    state = tfkit.build(small).state_dict()
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.pt", "old.pt"):
        with pytest.raises(tfkit.SpecError, match="is a pickle, which can run any code when it is read") as refused:
            build_with_weights(small, tmp_path / name)
        assert f"tfkit convert {tmp_path / name} -o " in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 100])
def test_what_is_no_safetensors_file(small: tfkit.Graph, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(tfkit.SpecError, match="is not a valid safetensors file: "):
        build_with_weights(small, tmp_path / "w.safetensors")


def test_a_file_that_was_cut(small: tfkit.Graph, weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(tfkit.SpecError, match="is not a valid safetensors file: "):
        build_with_weights(small, weights)


def test_the_memory_is_asked_first(small: tfkit.Graph, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfkit.tools.common.memory_needs.free_memory", lambda device: 10_000)
    with pytest.raises(tfkit.SpecError, match="not enough memory on cpu"):
        build_with_weights(small, weights)


def test_buffers_that_no_file_holds_are_filled(
    small: tfkit.Graph, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(nn.LayerNorm):
        def __init__(self) -> None:
            super().__init__(16)
            self.register_buffer("factor", torch.empty(1), persistent=False)

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "factor"):
                self.factor.fill_(3.0)

    config = type(small.node("decoder").config.norm)  # type: ignore[attr-defined]
    monkeypatch.setattr(config, "build", lambda self, make, width: Scaled())
    model = build_with_weights(small, weights)
    assert [buffer.tolist() for buffer in model.buffers()] == [[3.0]] * 5
