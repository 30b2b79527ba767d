"""The keys of `machine` for layers: numbers do not change, and the work is done where the key states."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tfkit.errors import Diagnostic, SpecError
from tfkit.run.step_values import step_values
from tfkit.run.training.layers import EXPENSIVE
from tfkit.run.training.loop import Trainer
from tfkit.run.training.processes import check_count

from .runs import Memory, same, small_run, trained

DEEP = ("model.decoder.n_layers=3", "model.dropout=0.1", "steps=2")


def runs_of_layers(folder: Path, recompute: str) -> list[int]:
    """How often the FFN of each layer runs in a step."""
    trainer = Trainer(small_run(folder, *DEEP, "steps=1", f"machine.recompute={recompute}"), Memory())
    counts = [0, 0, 0]

    def count(number: int) -> None:
        counts[number] += 1

    for number in range(3):
        ffn = trainer.model.get_submodule(f"decoder.layers.{number}.ffn.up")
        ffn.register_forward_hook(lambda *_, number=number: count(number))
    trainer.train()
    return counts


@pytest.mark.parametrize(
    ("recompute", "counts"),
    [("none", [1, 1, 1]), ("full", [2, 2, 2]), ("2", [2, 1, 2]), ("selective", [2, 2, 2])],
)
def test_layers_run_again_and_weights_keep_their_bits(recompute: str, counts: list[int], tmp_path: Path) -> None:
    assert runs_of_layers(tmp_path, recompute) == counts
    if recompute != "none":
        again = trained(small_run(tmp_path, *DEEP, f"machine.recompute={recompute}"))
        assert same(again[1], trained(small_run(tmp_path, *DEEP))[1])


class Products(TorchDispatchMode):
    """The number of matrix products that are computed within."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in EXPENSIVE
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_keeps_matrix_products(tmp_path: Path) -> None:
    counts = {}
    for recompute in ("none", "full", "selective"):
        trainer = Trainer(small_run(tmp_path, *DEEP, "steps=1", f"machine.recompute={recompute}"), Memory())
        with Products() as products:
            trainer.train()
        counts[recompute] = products.count
    assert counts["none"] == counts["selective"] < counts["full"]


def test_attention_of_a_run_is_the_backend(tmp_path: Path) -> None:
    plain, eager = (trained(small_run(tmp_path, *sets)) for sets in ([], ["machine.attention=eager"]))
    assert plain[0].losses == pytest.approx(eager[0].losses, abs=1e-5)
    assert plain[0].losses != eager[0].losses  # the last bits


def test_machine_keys_that_cannot_have_an_effect(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"`gather: bfloat16` must not change the numbers of a run in float32"):
        small_run(tmp_path, "machine.gather=bfloat16")
    with pytest.raises(SpecError, match=r"`gather` has no effect in a single process(.|\n)*start several processes"):
        Trainer(small_run(tmp_path, "precision=bfloat16", "machine.gather=bfloat16"), Memory())
    with pytest.raises(SpecError, match=r"`recompute` must be at most 2, the number of layers; got 9") as caught:
        small_run(tmp_path, "machine.recompute=9")
    assert caught.value.diagnostics[0].path == "machine.recompute"
    bag = "model.graph={embedding: embedding, head: lm_head}"
    for key, lack in {"recompute=full": "layers", "compile=layers": "layers", "attention=eager": "attention"}.items():
        with pytest.raises(SpecError, match=f"has no effect: the model has no {lack}"):
            small_run(tmp_path, bag, f"machine.{key}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_equal_layers_are_compiled_once(recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, compile = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend=counter))
    sets = ["model.decoder.n_layers=4", f"machine.recompute={recompute}"]
    compiled = trained(small_run(tmp_path, *sets, "machine.compile=layers"))
    assert counter.frame_count == 1
    assert compiled[0].losses == pytest.approx(trained(small_run(tmp_path, *sets))[0].losses, abs=1e-6)


@pytest.mark.parametrize(("micro_batch", "valid"), [(None, True), (4, True), (3, False), ("auto", False)])
def test_an_undivided_loss_takes_all_sequences_together(micro_batch: int | str | None, valid: bool) -> None:
    sequences = 4
    config = SimpleNamespace(
        machine=SimpleNamespace(shard=None, micro_batch=micro_batch, gather="float32"),
        batch=SimpleNamespace(largest=sequences),
        micro_batch=micro_batch if isinstance(micro_batch, int) else sequences,
        loss=SimpleNamespace(undivided=True, kind_name=lambda: "loss"),
    )
    sizes, error = step_values(sequences), lambda text, *_, help: SpecError(Diagnostic(text, help=help))
    run = cast(Any, SimpleNamespace(config=config, sizes=sizes, error=error))
    for count in (1, 2):
        with nullcontext() if valid and count == 1 else pytest.raises(SpecError, match="of a step together"):
            check_count(run, count)
