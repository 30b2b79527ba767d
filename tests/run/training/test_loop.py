"""The training loop: the numbers of a handwritten loop, and bit-identical results after interruptions."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfkit
from tfkit.building.placement import GLOBAL_GENERATORS
from tfkit.errors import SpecError
from tfkit.run.contract import Callback, Training
from tfkit.run.training.loop import Trainer

from ...sampling import some
from .runs import TEXT, Memory, same, small_run, trained

EVALUATED = ("eval={every: 2, splits: {val: all, train: {batches: 2}}}",)
SHORTER_NAMES = {
    "embedding.": "",
    "decoder.": "",
    "layers.": "",
    "position.table": "positions",
    "attention_norm_in": "0",
    "attention.project.qkv": "attention.in_proj",
    "attention.output": "attention.out_proj",
    "ffn_norm_in": "1",
    "ffn.up": "up",
    "ffn.down": "down",
    "in_proj.": "in_proj_",
    "final_norm": "norm",
    "head.output": "head",
}


class Layer(nn.ModuleDict):
    """A pre-LN layer by hand."""

    def __init__(self) -> None:
        attention = nn.MultiheadAttention(16, 2, batch_first=True)
        norms = {"0": nn.LayerNorm(16), "1": nn.LayerNorm(16)}
        super().__init__({**norms, "attention": attention, "up": nn.Linear(16, 32), "down": nn.Linear(32, 16)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self["0"](x)
        mask = torch.triu(torch.ones(12, 12, dtype=torch.bool), 1)
        x = x + self["attention"](y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self["down"](F.relu(self["up"](self["1"](x))))


class ByHand(nn.Module):
    """The model of `runs.RUN` in plain PyTorch."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, 16), nn.Embedding(12, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(12))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def renamed(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our weights by the names of the model by hand."""
    result = {}
    for name, tensor in state.items():
        new = name
        for ours, theirs in SHORTER_NAMES.items():
            new = new.replace(ours, theirs)
        result[f"layers.{new}" if new[0].isdigit() else new] = tensor.clone()
    return result


def test_every_loss_and_weight_is_that_of_a_loop_by_hand(tmp_path: Path) -> None:
    decay = ("optimizer.weight_decay=0.1", "optimizer.decay_all=true")
    run = small_run(tmp_path, "steps=50", "data.order=sampled", "clip=1", *decay)
    memory = Memory()
    trainer = Trainer(run, memory)
    model = ByHand(trainer.data.vocab_size)
    model.load_state_dict(renamed(trainer.model.state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    characters, text = sorted(set(TEXT)), TEXT[: int(0.9 * len(TEXT))]
    losses = []
    for step in range(1, 51):
        batch = trainer.batch(step)
        tokens, last = torch.from_numpy(batch.inputs["tokens"]), torch.from_numpy(batch.targets[:, -1:])
        windows = torch.cat([tokens, last], 1)
        assert all("".join(characters[token] for token in window) in text for window in windows)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        losses.append(loss.item())
    trainer.train()
    torch.testing.assert_close(memory.losses, losses, atol=1e-4, rtol=0)
    for name, weight in renamed(trainer.model.state_dict()).items():
        if name.endswith("in_proj_bias"):
            weight[16:32] = model.get_parameter(name)[16:32].detach()  # keys: their true gradient is 0
        torch.testing.assert_close(weight, model.get_parameter(name).detach(), atol=1e-3, rtol=0)


def test_twice_and_with_evaluation_the_weights_are_bit_equal(tmp_path: Path) -> None:
    dropout = "model.dropout=0.3"
    first, weights = trained(small_run(tmp_path, dropout))
    second, again = trained(small_run(tmp_path, dropout))
    third, evaluated = trained(small_run(tmp_path, dropout, *EVALUATED))
    assert first.lines == second.lines
    assert first.losses == third.losses
    assert [line["step"] for line in third.lines if "val.loss" in line] == [0, 2, 4, 6, 8]
    without, _ = trained(small_run(tmp_path, "steps=1", *EVALUATED))
    assert third.lines[0] == without.lines[0]  # an evaluation has no dropout
    assert same(weights, again)
    assert same(weights, evaluated)
    assert trained(small_run(tmp_path, dropout, "seed=4"))[0].losses != first.losses


def test_runs_in_several_threads_draw_the_dropout_of_runs_alone(tmp_path: Path) -> None:
    runs = [small_run(tmp_path, "model.dropout=0.3", "steps=12", f"seed={seed}") for seed in (1, 2)]
    with ThreadPoolExecutor(len(runs)) as pool:
        together = [memory.losses for memory, _ in pool.map(trained, runs)]
    assert together == [trained(run)[0].losses for run in runs]


def test_a_build_waits_for_the_step_of_another_thread(tmp_path: Path) -> None:
    """Otherwise it would set the generator of dropout to an earlier state in the middle of the step."""
    build = threading.Thread(target=tfkit.build, args=(small_run(tmp_path).graph,))
    with GLOBAL_GENERATORS:
        build.start()
        build.join(0.1)
        assert build.is_alive()
    build.join()


@pytest.mark.parametrize("order", some(["sampled", "shuffled", "sequential"], 1))
@pytest.mark.parametrize("until", [1, 5])
def test_a_run_continues_with_the_same_bits(tmp_path: Path, order: str, until: int) -> None:
    sets = ["model.dropout=0.3", f"data.order={order}", "schedule=cosine", "callbacks={kind: spikes, window: 2}"]
    uninterrupted, weights = trained(small_run(tmp_path, *sets))
    part, _ = trained(small_run(tmp_path, *sets), until=until)
    torch.manual_seed(0)  # another process has another state
    rest, continued = trained(small_run(tmp_path, *sets), Memory(part.saved))
    assert part.losses + rest.losses == uninterrupted.losses
    assert len(part.losses) == until
    assert same(weights, continued)
    assert uninterrupted.saved
    assert rest.saved
    assert same(uninterrupted.saved.optimizer, rest.saved.optimizer)
    assert uninterrupted.saved.callbacks == rest.saved.callbacks


def test_the_gradient_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Sums over micro-batches of unequal size, divided by the targets of all."""
    uninterrupted, _ = trained(small_run(tmp_path, "data.split={train: 0.007, val: 0.5}"))
    for size in (1, 4):
        cut, _ = trained(small_run(tmp_path, "data.split={train: 0.007, val: 0.5}", f"machine.micro_batch={size}"))
        for first, other in zip(uninterrupted.lines, cut.lines, strict=True):
            assert first["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert first["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_batches_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    trainer = Trainer(small_run(tmp_path), Memory())
    batches = [trainer.batch(step).inputs["tokens"] for step in range(1, 9)]
    cut = Trainer(small_run(tmp_path, "machine.micro_batch=1", "model.decoder.ffn.kind=swiglu"), Memory())
    cut.train()
    assert all((tokens == cut.batch(step + 1).inputs["tokens"]).all() for step, tokens in enumerate(batches))
    assert not all((tokens == batches[0]).all() for tokens in batches)


def test_variants_begin_with_the_same_weights_where_they_share_them(tmp_path: Path) -> None:
    relu = Trainer(small_run(tmp_path), Memory()).model.state_dict()
    swiglu = Trainer(small_run(tmp_path, "model.decoder.ffn.kind=swiglu"), Memory()).model.state_dict()
    common = [name for name in relu if name in swiglu and relu[name].shape == swiglu[name].shape]
    assert len(common) > len(relu) - 10
    assert same(relu, swiglu, common)


def test_the_rate_of_each_step(tmp_path: Path) -> None:
    memory, _ = trained(small_run(tmp_path, "schedule={kind: linear, warmup: 4, end: 0.5}"))
    rates = [line["lr"] for line in memory.lines]
    assert rates == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 8.75e-3, 7.5e-3, 6.25e-3, 5e-3])


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    trainer = Trainer(small_run(tmp_path), Memory())
    with torch.no_grad():
        trainer.model.get_parameter("decoder.layers.1.ffn.up.weight").mul_(1e30)
        trainer.model.get_parameter("decoder.layers.1.ffn.down.weight").mul_(1e30)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(SpecError) as raised:
        trainer.train()
    assert "step 1 has a loss or a gradient that is not finite" in str(raised.value)
    assert "`decoder.layers.1.ffn.down` is the first" in str(raised.value)
    assert same(before, trainer.model.state_dict())


class Goal(Callback):
    """Stops a run after its third step."""

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        if training.step == 3:
            training.stop("enough")


def test_a_callback_may_stop_a_run(tmp_path: Path) -> None:
    memory = Memory()
    assert Trainer(small_run(tmp_path), memory, watchers=[Goal()]).train() == "enough"
    assert len(memory.losses) == 3
    again = Memory(memory.saved)
    assert Trainer(small_run(tmp_path), again).train() == "enough"
    assert not again.losses
    goal = ("callbacks={kind: stop_at, below: 3.3}", *EVALUATED)
    actual, _ = trained(small_run(tmp_path, *goal))
    assert actual.saved
    assert actual.saved.ended
    assert actual.saved.ended.startswith("val.loss is ")
    assert len(actual.losses) < 8


def test_bfloat16_changes_numbers_and_keeps_float32_weights(tmp_path: Path) -> None:
    memory, weights = trained(small_run(tmp_path, "precision=bfloat16"))
    plain, _ = trained(small_run(tmp_path))
    assert memory.losses != plain.losses
    assert memory.losses == pytest.approx(plain.losses, rel=0.02)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_an_evaluation_reads_every_token_once(tmp_path: Path) -> None:
    memory = Memory()
    run = small_run(
        tmp_path, "steps=1", "eval={every: 1, splits: {val: all}, metrics: [loss, bits_per_byte, accuracy]}"
    )
    trainer = Trainer(run, memory)
    with torch.no_grad():
        trainer.model.get_parameter("head.output.weight").zero_()
    trainer.train()
    size = len(set(TEXT))
    first = memory.lines[0]
    assert first["val.loss"] == pytest.approx(math.log(size), rel=1e-5)
    assert first["val.bits_per_byte"] == pytest.approx(math.log2(size), rel=1e-5)
    validation = TEXT[int(0.9 * len(TEXT)) + 1 :]
    assert first["val.accuracy"] == pytest.approx(validation.count(sorted(set(TEXT))[0]) / len(validation))
