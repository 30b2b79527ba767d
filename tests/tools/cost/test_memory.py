"""The peak memory of a training step, compared with the allocations in a trace of the PyTorch profiler."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from ...sampling import slow

SCRIPT = Path(__file__).parents[3] / "tools" / "bench" / "cost_memory.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    """The script that makes the table of the docs."""
    spec = importlib.util.spec_from_file_location("cost_memory", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cost_memory"] = module
    spec.loader.exec_module(module)
    return module


def hold(bench: Any, case: Any) -> None:
    diagnostic, (fixed, peak) = bench.predicted(case), bench.measured(case)
    memory = diagnostic.memory
    assert memory.weights + memory.gradients + memory.optimizer == pytest.approx(fixed, rel=0.001)
    # Experts are predicted for an even load, and the data decide which one they get.
    routed = diagnostic.total.active_parameters < diagnostic.total.parameters
    assert diagnostic.peak == pytest.approx(peak, rel=0.1 if routed else 0.01)


SMALL_SIZES = ("d_model=64", "vocab_size=5000", "dropout=0")


@pytest.mark.parametrize(("length", "recompute"), [(32, False), slow((32, True)), slow((4, False))])
@pytest.mark.parametrize(
    ("spec", "sets"),
    [
        ("gpt2", ("decoder.n_layers=3", "decoder.attention.n_heads=4", "decoder.ffn.d_ff=256")),
        ("llama3_8b", ("decoder.n_layers=3", "decoder.attention.n_heads=4", "decoder.attention.n_kv_heads=2")),
    ],
)
def test_small_models(bench: Any, spec: str, sets: tuple[str, ...], length: int, recompute: bool) -> None:
    dry = SMALL_SIZES if spec == "gpt2" else SMALL_SIZES[:2]
    hold(bench, bench.Case(spec, (*dry, *sets), 2, length, recompute))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "sets", "batch", "length"),
    [
        ("llama32_1b", ("decoder.n_layers=2",), 1, 128),
        ("albert_base", ("dropout=0",), 2, 128),
        ("t5_small", ("dropout=0",), 4, 128),
        ("vaswani_base", (), 4, 128),
        ("olmoe_1b_7b", ("decoder.n_layers=1", "decoder.ffn.n_experts=16"), 2, 128),
    ],
)
def test_real_widths(bench: Any, spec: str, sets: tuple[str, ...], batch: int, length: int) -> None:
    """Rotary positions, shared weights, biases of positions, dropout, experts."""
    hold(bench, bench.Case(spec, sets, batch, length))
