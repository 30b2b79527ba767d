"""Training and decoding on a CUDA device, against the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tfkit
from tests.run.training.runs import PLUGINS, Memory, same, small_run
from tfkit.run.training.loop import Trainer
from tfkit.tools.train.train import train_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]


def losses(folder: Path, *sets: str) -> list[float]:
    """Train from weights that were drawn on the CPU, as each device has its own generator."""
    run = small_run(folder, "model.dropout=0", "machine.device=cuda", *sets)
    weights = Trainer(small_run(folder, "model.dropout=0", "machine.device=cpu"), Memory()).model.state_dict()
    trainer = Trainer(run, memory := Memory())
    trainer.model.load_state_dict(weights)
    trainer.train()
    return memory.losses


@pytest.mark.parametrize("micro_batch", [6, 2])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_losses_are_equal_to_the_losses_on_the_cpu(tmp_path: Path, compiled: str, micro_batch: int) -> None:
    sets = [f"machine.micro_batch={micro_batch}", f"machine.compile={compiled}"]
    assert losses(tmp_path, *sets) == pytest.approx(losses(tmp_path, "machine.device=cpu"), rel=1e-4)


def test_autocast_stays_near_float32(tmp_path: Path) -> None:
    expected = losses(tmp_path, "machine.device=cpu")
    assert losses(tmp_path, "precision=bfloat16") == pytest.approx(expected, rel=1e-2)


def test_a_thread_writes_the_checkpoints(tmp_path: Path) -> None:
    """They have the weights of their step, and the run continues from them to equal bits."""
    run = small_run(tmp_path, "machine.device=cuda", "steps=6", "checkpoint={every: 1, last: 9}")
    train_run(run, tmp_path / "full", PLUGINS, command="test")
    for until in (3, None):
        train_run(run, tmp_path / "stopped", PLUGINS, command="test", until=until)
    for step in (3, 6):
        for name in ("model", "optimizer"):
            full, stopped = (
                load_file(tmp_path / folder / f"step-{step}" / f"{name}.safetensors") for folder in ("full", "stopped")
            )
            assert same(full, stopped)


def test_a_run_on_cuda_has_the_same_bits_twice(tmp_path: Path) -> None:
    assert losses(tmp_path, "precision=bfloat16") == losses(tmp_path, "precision=bfloat16")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", ["false", "layers"])
def test_float8_is_near_its_emulation(tmp_path: Path, compiled: str, recipe: str) -> None:
    """The 72 positions of a step are no multiple of 16, so that the products of gradients are padded."""
    pytest.importorskip("torchao.float8")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    sets = ["precision=bfloat16", f"machine.float8={recipe}"]
    expected = losses(tmp_path, *sets, "machine.device=cpu")
    assert losses(tmp_path, *sets, f"machine.compile={compiled}") == pytest.approx(expected, abs=0.1)


SIZES = ["d_model=64", "vocab_size=96", "max_len=64", "decoder.n_layers=2", "decoder.attention.n_heads=4"]


@pytest.mark.parametrize("compiler", [False, True, "reduce-overhead"])
@pytest.mark.parametrize("name", ["gpt2", "llama3_8b", "gemma2_9b"])
def test_tokens_are_decoded_like_on_the_cpu(name: str, compiler: Any) -> None:
    grouped = [] if name == "gpt2" else ["decoder.attention.n_kv_heads=2", "decoder.ffn.d_ff=64"]
    sets = [*(SIZES if name != "gemma2_9b" else [s for s in SIZES if "max_len" not in s]), *grouped]
    model = tfkit.build(name, sets=sets, dtype=torch.float64).eval()
    prompt = torch.randint(96, (3, 9), generator=torch.Generator().manual_seed(0))
    expected = model(prompt)
    cached = tfkit.CachedModel(model.cuda(), length=16, compile=compiler)
    with torch.no_grad():
        chunks = [cached(piece.cuda()).cpu() for piece in (prompt[:, :5], *prompt[:, 5:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected, rtol=0, atol=1e-7)
