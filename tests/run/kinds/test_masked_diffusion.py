"""Masked diffusion: its expectation is the mean over all orders of the tokens of -log p, one token after the other."""

from __future__ import annotations

from itertools import permutations, product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tfkit
from tests.run.training.runs import Memory
from tfkit.run.checked_run import Run, load_run
from tfkit.run.kinds import masked_diffusion
from tfkit.run.kinds.masked_diffusion import MaskedDiffusionConfig, MaskedDiffusionLoss
from tfkit.run.training.evaluate import evaluate_splits
from tfkit.run.training.loop import Trainer
from tfkit.tools.cost.cost import cost
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.train.checkpoints import run_companions
from tfkit.tools.train.plan import run_plan

from .small import PLUGINS, small_run

MASK = 5
DATA = "{kind: copy, task: sort, symbols: 10, items: 3, sequences: 60}"
ONE_MORE = "model.vocab_size=data.vocab_size + 1"


class Table(nn.Module):
    """Logits [b, 4, 6] that depend on all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6**4, 4, 6, generator=torch.Generator().manual_seed(1)).double())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens @ torch.tensor([216, 36, 6, 1])]


class Fixed:
    """The first numbers of some rows of a table."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def rand(self, *size: int) -> Tensor:
        return self.rows[:, :1] if size == (1,) else self.rows[:, 1 : 1 + size[0]]


def any_order(model: nn.Module, ids: list[int], targets: list[int]) -> Tensor:
    """The mean over all orders of -log p of the asked tokens, each given those before it in the order."""
    totals = []
    for order in permutations(targets):
        tokens, total = torch.tensor([MASK if i in targets else token for i, token in enumerate(ids)]), 0.0
        for index in order:
            total = total - F.log_softmax(model(tokens[None])[0, index], -1)[ids[index]]
            tokens[index] = ids[index]
        totals.append(total)
    return torch.stack(totals).mean()


@pytest.mark.parametrize("positions", [[1, 2, 3], [2, 3]])
def test_its_expectation_is_the_mean_over_all_orders(positions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The expectation is a sum over all masks, and an integral over their probability, a polynomial of degree 2."""
    monkeypatch.setattr(masked_diffusion, "MIN_LEVEL", 0.0)
    ids, model = [3, 1, 4, 2], Table()
    targets = torch.tensor([[ids[i] if i in positions else -100 for i in range(1, 4)]])
    loss, total = MaskedDiffusionLoss(model, "tokens", MASK), torch.zeros((), dtype=torch.float64)
    nodes, weights = np.polynomial.legendre.leggauss(2)
    for level, weight in zip(((1 + nodes) / 2).tolist(), (weights / 2).tolist(), strict=True):
        for hidden in product([True, False], repeat=len(positions)):
            draws = dict(zip(positions, hidden, strict=True))  # other tokens would be hidden, but are not asked for
            row = [0.0 if draws.get(i, True) else 0.999 for i in range(4)]
            noise: Any = Fixed(torch.tensor([[level, *row]], dtype=torch.float64))
            result = loss({"tokens": torch.tensor([ids[:3]])}, targets, noise)
            assert (result.count, result.numbers["hidden"].total) == (len(positions), sum(hidden))
            probability = level ** sum(hidden) * (1 - level) ** (len(positions) - sum(hidden))
            total = total + weight * probability * result.total
    expected = any_order(model, ids, positions)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    (actual,) = torch.autograd.grad(total, model.table)
    (gradient,) = torch.autograd.grad(expected, model.table)
    torch.testing.assert_close(actual, gradient, rtol=1e-6, atol=1e-12)


def stack_model(block: str) -> fx.GraphModule:
    stack = {"block": block, "n_layers": 1, "attention": {"n_heads": 2}, "ffn": {"kind": "relu", "d_ff": 8}}
    graph = {"embedding": {"block": "embedding", "position": "sinusoidal"}, "stack": stack, "head": "lm_head"}
    return tfkit.build({"tfkit": 1, "name": "small", "d_model": 8, "vocab_size": 13, "graph": graph})


NUMBERS = torch.tensor([[0.7, 0.4, 0.9, 0.2, 0.8, 0.1, 0.6, 0.3], [0.5, 0.1, 0.7, 0.3, 0.2, 0.9, 0.6, 0.4]])
HIGHEST = 12
"""The highest id of `stack_model`."""


def loss_of(model: nn.Module, ids: list[int], first: int, level: float, draws: list[float]) -> float:
    """The loss of a sequence alone, whose tokens from `first` may be hidden."""
    level = 1e-3 + (1 - 1e-3) * level
    hidden = [i for i in range(first, len(ids)) if draws[i] < level]
    tokens = torch.tensor([HIGHEST if i in hidden else token for i, token in enumerate(ids)])
    return F.cross_entropy(model(tokens[None])[0], torch.tensor(ids), reduction="none")[hidden].sum().item() / level


def test_padding_does_not_change_the_loss() -> None:
    """The last token of each row is only a target, which padding follows in the second row."""
    model, noise = stack_model("encoder"), cast(Any, Fixed(NUMBERS))
    loss = MaskedDiffusionConfig().build(model)
    padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    inputs = {"tokens": torch.tensor([[5, 3, 8, 2, 9], [7, 1, 6, 0, 0]]), loss.padding: padding}
    result = loss(inputs, torch.tensor([[-100, 8, 2, 9, 4], [1, 6, 10, -100, -100]]), noise)
    (level, *draws), (level_2, *draws_2) = NUMBERS.tolist()
    expected = loss_of(model, [5, 3, 8, 2, 9, 4], 2, level, draws) + loss_of(model, [7, 1, 6, 10], 1, level_2, draws_2)
    assert result.total.item() == pytest.approx(expected)
    assert result.count == 7


@pytest.mark.parametrize("ids", [[7, 1, 6], [7, 1]], ids=["cut", "complete"])
def test_documents_of_a_row_have_the_loss_that_each_has_alone(ids: list[int]) -> None:
    """The last document is cut where the row ends, so its last token is only a target; or no token follows."""
    model, noise = stack_model("encoder"), cast(Any, Fixed(NUMBERS[:1]))
    loss = MaskedDiffusionConfig().build(model)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1]])
    inputs = {"tokens": torch.tensor([[5, 3, 8, 11, 7, 1]]), loss.padding: documents[:, :, None] == documents[:, None]}
    result = loss(inputs, torch.tensor([[3, 8, 11, -100, 1, *ids[2:], *[-100] * (3 - len(ids))]]), noise)
    level, *draws = NUMBERS[0].tolist()
    expected = loss_of(model, [5, 3, 8, 11], 1, level, draws) + loss_of(model, ids, 1, level, draws[4:])
    assert result.total.item() == pytest.approx(expected)
    assert result.count == 2 + len(ids)


def test_a_causal_model_is_an_error() -> None:
    model = stack_model("decoder")
    with pytest.raises(ValueError, match="a model that attends to later tokens"):
        MaskedDiffusionConfig().build(model)


def diffusion_run(folder: Path, *sets: str, data: str = DATA) -> Run:
    return small_run(folder, data, "model.decoder.block=encoder", "loss=masked_diffusion", *sets)


def test_a_run_without_a_token_for_the_mask_is_an_error(tmp_path: Path) -> None:
    assert (run := diffusion_run(tmp_path, ONE_MORE)).generation == tfkit.MaskedDiffusion(run.data.vocab_size)
    with pytest.raises(
        tfkit.SpecError, match=r"must not be one of the 11 tokens of the data; got 10(.|\n)*vocab_size \+ 1"
    ):
        diffusion_run(tmp_path)
    with pytest.raises(tfkit.SpecError, match=r"the mask token must be an id of the vocabulary of .*, 0 to 10; got 11"):
        diffusion_run(tmp_path, "model.head.vocab_size=12")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model.decoder.block=decoder"], "attends to later tokens"),
        (["model.outputs=[head, decoder]"], "whose only output is logits"),
        (["model.embedding.position.max_len=6"], "6 positions, and 1 of the loss, but the model has max_len 6"),
    ],
)
def test_a_model_that_cannot_fill_in_masks_is_an_error_when_the_run_is_read(
    sets: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(tfkit.SpecError, match=message):
        diffusion_run(tmp_path, ONE_MORE, *sets)


def test_the_plan_counts_the_position_of_the_last_target(tmp_path: Path) -> None:
    run = diffusion_run(tmp_path, ONE_MORE, "eval={every: 1, splits: {val: {batches: 2}}, metrics: [objective]}")
    size, steps = run.config.batch.largest, run.steps
    expected, longest = cost(run.graph, batch=size, length=run.data.length + 1), run_plan(run)
    assert longest.tokens == steps * size * run.data.length
    assert longest.flops == steps * (expected.total.flops_forward + expected.total.flops_backward)
    assert longest.flops_of_evaluations == (1 + steps) * 2 * expected.total.flops_forward
    length = run.data.length + 1
    assert longest.memory == cost(run.graph, batch=size, length=length, dtype=torch.float32, optimizer="adamw").peak
    sets = [ONE_MORE, "model.decoder.block=encoder", "loss=masked_diffusion", "steps=null", f"flops={longest.flops}"]
    assert load_run(tmp_path / "small.yaml", PLUGINS, sets=sets, count=flops_of_step).steps == steps


def test_samples_metrics_and_saved_weights_fill_in_masks(tmp_path: Path) -> None:
    text = "{kind: text, files: lines.txt}"
    (tmp_path / "lines.txt").write_text("a sheep and a goat\n" * 50, encoding="utf-8")
    samples = "callbacks={kind: samples, every: 2, prompt: 'a g', tokens: 9, temperature: 0.9}"
    run = diffusion_run(tmp_path, ONE_MORE, samples, "batch.length=12", "optimizer.lr=0.1", data=text)
    trainer = Trainer(run, memory := Memory())
    trainer.train()
    tokenizer = run.data.tokenizer
    assert tokenizer is not None
    options: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0.9, "seed": 2}
    way = tfkit.MaskedDiffusion(run.data.vocab_size)
    ids = tfkit.generate(trainer.model, [list(tokenizer.encode("a g"))], generation=way, **options).rows()[0]
    assert [line["sample"] for line in memory.lines if "sample" in line] == ["a g" + tokenizer.decode(ids)]
    assert run_companions(run, None).fields["mask_token_id"] == run.data.vocab_size


def test_decoded_answers_are_filled_in(tmp_path: Path) -> None:
    evaluated = "eval={every: 1, splits: {val: all}, metrics: [decoded_accuracy, decoded_exact_match]}"
    run = diffusion_run(tmp_path, ONE_MORE, evaluated, "batch.sequences=7", "machine.micro_batch=3", "optimizer.lr=0.1")
    trainer = Trainer(run, memory := Memory())
    trainer.train()
    examples = run.data.examples("val", "sequential")
    batch = examples.batch(np.arange(len(examples)))
    assert batch.targets is not None
    way = tfkit.MaskedDiffusion(run.data.vocab_size)
    correct = []
    for tokens, targets in zip(batch.inputs["tokens"], batch.targets, strict=True):
        counted = targets != -100
        prompt = tokens[: int(counted.argmax()) + 1].tolist()
        row = tfkit.generate(trainer.model, [prompt], max_new_tokens=int(counted.sum()), generation=way).rows()[0]
        correct.append([token == target for token, target in zip(row, targets[counted].tolist(), strict=True)])
    numbers = memory.lines[-1]
    assert numbers["val.decoded_accuracy"] == pytest.approx(np.mean(correct))
    assert numbers["val.decoded_exact_match"] == pytest.approx(np.mean([all(row) for row in correct]))
    assert 0 < np.mean(correct) < 1
    model = tfkit.build(run.graph)
    model.load_state_dict(trainer.model.state_dict())
    assert run.config.eval is not None
    evaluated_later = evaluate_splits(model, run, run.config.eval.splits, run.config.eval.metrics)
    assert evaluated_later.items() <= numbers.items()
