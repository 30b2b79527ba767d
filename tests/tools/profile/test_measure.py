"""Profiles: the steps that run, the errors, and the written files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tfkit
from tests.tools.profile.conftest import SPECS
from tfkit.errors import Diagnostic, SpecError
from tfkit.tools.cost.cost import UncountableError
from tfkit.tools.profile import measurement, models
from tfkit.tools.profile.limits import limits_of
from tfkit.tools.profile.measurement import count_steps
from tfkit.tools.profile.models import profile_models
from tfkit.tools.profile.profiled_step import Settings
from tfkit.tools.profile.result import Profile

ENCODER = """\
tfkit: 1
name: encoder
d_model: 16
vocab_size: 20
graph:
  embedding: {block: embedding}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
"""
Run = Callable[..., Profile]


@pytest.mark.slow
def test_what_a_profile_says(profile: Run) -> None:
    calls: list[tuple[int, int]] = []
    options = {"mode": "decode", "length": 9, "batch": 3, "dtype": torch.bfloat16}
    actual = profile("pair", **options, on_step=lambda done, of: calls.append((done, of)))
    settings = Settings(torch.device("cpu"), "decode", torch.bfloat16, False, 3, 9, 2, 1, None, False)
    assert calls == [(i + 1, count_steps(settings)) for i in range(count_steps(settings))]
    assert (actual.name, actual.device, actual.mode, actual.dtype) == ("pair", "cpu", "decode", "bfloat16")
    assert (actual.batch, actual.length, actual.tokens) == (3, 9, 3)
    assert len(actual.plain_steps) == 2
    assert actual.idle == 0
    assert not any(part.node in ("encoder", "source_embedding") for part in actual.parts)  # they ran before the step
    assert {part.path for part in actual.parts} >= {"decoder.layers.2.cross_attention", "decoder.shared.base.position"}
    assert actual.memory.cache > 0
    assert actual.memory.gradients == actual.memory.optimizer == 0


@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_a_model_without_logits(mode: Any) -> None:
    (actual,) = profile_models([tfkit.loads(ENCODER)], mode=mode, device="cpu", length=4, steps=2, warmup=0)
    assert {row.component for row in actual.parts} >= {"embedding", "attention", "norm", "encoder"}


def test_an_encoder_is_not_decoded() -> None:
    with pytest.raises(SpecError, match="cannot be decoded token by token"):
        profile_models([tfkit.loads(ENCODER)], mode="decode", device="cpu")


@pytest.mark.parametrize(
    ("invalid", "says"),
    [
        ({"steps": 1}, "an integer of 2 or more; got 1"),
        ({"batch": 0}, "an integer of 1 or more; got 0"),
        ({"warmup": -1}, "an integer of 0 or more; got -1"),
        ({"length": 65}, r"65 tokens are more than max_len \(64\)"),
    ],
)
def test_wrong_counts(invalid: dict[str, int], says: str, profile: Run) -> None:
    with pytest.raises(ValueError, match=says):
        profile("small", **invalid)


def test_weights_are_those_of_one_model() -> None:
    graph = tfkit.loads(SPECS["small"])
    with pytest.raises(ValueError, match="several models"):
        profile_models([graph, graph], weights=Path("a"))


def test_too_little_memory(profile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfkit.tools.common.memory_needs.free_memory", lambda device: 1000)
    with pytest.raises(SpecError, match="not enough memory on cpu: a step of `small` needs"):
        profile("small")


def test_a_component_that_fails(profile: Run, plant: Callable[..., None]) -> None:
    plant("decoder.layers.1.ffn", lambda x: x @ x)
    with pytest.raises(SpecError, match="a step of `small` fails: RuntimeError"):
        profile("small")


def test_a_model_that_cannot_be_counted(profile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise UncountableError(Diagnostic("it needs values"))

    monkeypatch.setattr(measurement, "cost", fails)
    result = profile("small", mode="prefill")
    assert result.notes == (measurement.UNPREDICTED,)
    assert all(part.floor is None for part in result.parts)


@pytest.mark.slow
def test_limits_of_this_machine() -> None:
    actual = limits_of(torch.device("cpu"), torch.float32)
    assert actual.source == "measured"
    assert actual.flops > 1e8
    assert actual.bandwidth > 1e7


@pytest.mark.slow
def test_what_is_written(profile: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    actual = profile("small", directory=tmp_path / "out", mode="prefill")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["profile.json", "report.html", "small"]
    trace, scalars = sorted((tmp_path / "out/small").iterdir(), key=lambda path: "tfevents" in path.name)
    assert trace.name == "small.pt.trace.json.gz"
    assert "tfevents" in scalars.name
    data = json.loads((tmp_path / "out/profile.json").read_text())
    assert data["profiles"][0]["folder"] == "small"
    assert data["profiles"][0]["step"] == actual.step
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    profile("small", directory=tmp_path / "out", mode="prefill")  # a former profile is replaced


@pytest.mark.slow
def test_scalars_for_tensorboard(profile: Run, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    actual = profile("small", directory=tmp_path / "out")
    events = accumulator.EventAccumulator(str(tmp_path / "out/small"))
    events.Reload()
    plain = [1000 * seconds for seconds in actual.plain_steps]
    assert [scalar.value for scalar in events.Scalars("step/milliseconds")] == pytest.approx(plain)
    (ffn,) = events.Scalars("milliseconds/FFN")
    assert ffn.value == pytest.approx(1000 * sum(part.time for part in actual.parts if part.component == "ffn"))
    assert events.Scalars("memory/peak")[0].value == pytest.approx(actual.memory.peak)


def test_two_models_of_one_name() -> None:
    assert models.folders_of(["a", "b/c", "a_2", "a", ".."]) == ["a", "b_c", "a_2", "a_3", "model"]


def test_other_files_are_not_overwritten(tmp_path: Path, profile: Run) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(SpecError, match=r"must hold only the files of a profile; got thesis\.tex"):
        profile("small", directory=tmp_path)
    with pytest.raises(SpecError, match="is a file"):
        profile("small", directory=tmp_path / "thesis.tex")


@pytest.mark.slow
@pytest.mark.parametrize(
    "invalid", [KeyboardInterrupt, pytest.param(OSError(28, "No space left on device"), marks=pytest.mark.slow)]
)
def test_nothing_half_written_is_left(
    invalid: Any, tmp_path: Path, profile: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = tmp_path / "deep/out"
    former.mkdir(parents=True)
    (former / "profile.json").write_text('{"profiles": []}')

    def fail(*args: Any) -> None:
        raise invalid

    monkeypatch.setattr(models, "write_profiles", fail)
    with pytest.raises((KeyboardInterrupt, SpecError)) as raised:
        profile("small", mode="prefill", directory=former)
    assert raised.type is KeyboardInterrupt or "No space left on device" in str(raised.value)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert [path.name for path in former.iterdir()] == ["profile.json"]
    with pytest.raises((KeyboardInterrupt, SpecError)):
        profile("small", mode="prefill", directory=tmp_path / "new/place")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
def test_a_compiled_model_is_one_row(mode: Any, profile: Run) -> None:
    actual = profile("small", mode=mode, compile=True)
    assert actual.compiled
    rest = {"train": {"loss", "optimizer", "zero_grad"}, "prefill": {"model"}, "decode": set()}
    assert {part.path for part in actual.parts} == {"compiled", *rest[mode]}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
@pytest.mark.parametrize("name", ["small", "pair"])
def test_on_cuda(name: str, mode: Any, profile: Run) -> None:
    actual = profile(name, mode=mode, device="cuda", length=32, batch=4, steps=6, warmup=4)
    assert actual.attributed >= 0.95
    assert sum(part.device for part in actual.parts) > 0
    assert actual.idle + sum(part.device for part in actual.parts) == pytest.approx(actual.step, rel=0.1)
    assert not any(kernel.name.startswith("aten::") for kernel in actual.kernels)
    assert actual.memory.peak > actual.memory.at_start >= actual.memory.weights
    attention = [part for part in actual.parts if part.component == "attention"]
    assert all(part.device > 0 for part in attention)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("path", ["decoder.layers.1.ffn", "decoder.layers.0.cross_attention"])
def test_a_product_in_one_part_on_cuda(path: str, profile: Run, plant: Callable[..., None]) -> None:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        block = torch.ones(8192, 8192, device=x.device)
        return x + 0 * (block @ block).sum()

    before = {part.path: part.device for part in profile("pair", device="cuda").parts}
    plant(path, multiply)
    after = {part.path: part.device for part in profile("pair", device="cuda").parts}
    grown = {name: seconds - before.get(name, 0) for name, seconds in after.items()}
    assert max(grown, key=lambda name: grown[name]) == path
    assert sum(seconds for name, seconds in grown.items() if name != path) < 0.1 * grown[path]
