"""Losses of several outputs: next tokens at a distance, two tasks, documents in a row, micro-batches, processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import fx
from torch.nn import functional as F

import tfkit
from tfkit.errors import SpecError
from tfkit.learning import chunked_loss
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import IGNORE_INDEX, Batch, OutputConfig
from tfkit.run.training.evaluate import evaluate_splits
from tfkit.run.training.loop import Trainer
from tfkit.run.training.parallel import Together
from tfkit.testing import check_model

from .runs import PLUGINS, TEXT, Memory, trained

STACK = "n_layers: 1, attention: {kind: mha, n_heads: 2, position: rope}, ffn: {kind: relu, d_ff: 32}"
GRAPH = f"""
  vocab_size: data.vocab_size
  d_model: 16
  inputs: [tokens, after]
  graph:
    embedding: {{block: embedding, input: tokens}}
    decoder: {{block: decoder, {STACK}}}
    logits: lm_head
    after_embedding: {{block: embedding, input: after, tie: embedding}}
    both: {{block: add, inputs: [decoder, after_embedding]}}
    second_decoder: {{block: decoder, {STACK}}}
    second: {{block: lm_head}}
  outputs: [logits, second]
"""
RUN = f"""
tfkit: 1
name: two
seed: 3
model: {GRAPH}
data: {{kind: text, files: sheep.txt, split: {{train: 0.9, val: 0.013}}}}
batch: {{sequences: 6, length: 12}}
loss: {{kind: cross_entropy, outputs: {{logits: 1.0, second: {{weight: 0.3, shift: 2}}}}, ahead: {{after: 1}}}}
steps: 2
optimizer: {{kind: adamw, lr: 1e-2}}
eval: {{every: 2, splits: {{val: all}}, metrics: [loss, accuracy, bits_per_byte]}}
"""


def run_of(folder: Path, *sets: str, plugins: Any = PLUGINS, text: str = RUN) -> Run:
    (folder / "sheep.txt").write_text(TEXT, encoding="utf-8")
    (folder / "two.yaml").write_text(text, encoding="utf-8")
    return load_run(folder / "two.yaml", plugins, sets=sets)


def model_of(run: Run) -> fx.GraphModule:
    return tfkit.build(run.graph, seed=1)


def moved(tokens: torch.Tensor, distance: int, value: int = IGNORE_INDEX) -> torch.Tensor:
    return F.pad(tokens, (0, distance), value=value)[:, distance:]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "MIN_LOGITS", 1)
    monkeypatch.setattr(chunked_loss, "MAX_ROWS", 5)


def test_the_loss_is_the_weighted_sum_of_means(tmp_path: Path) -> None:
    model, tokens = model_of(run_of(tmp_path)), torch.randint(0, 27, (3, 9))
    inputs, mask = {"tokens": tokens, "after": moved(tokens, 1, 0)}, torch.ones(3, 9, dtype=torch.bool)
    mask[1, 6:] = False
    module = tfkit.Loss(model, outputs={"logits": 1.0, "second": {"weight": 0.3, "shift": 2}})
    loss = module({**inputs, "tokens_mask": mask})
    logits, second = model(**inputs, tokens_mask=mask)
    targets = tokens.masked_fill(~mask, IGNORE_INDEX)
    first_loss, second_loss = (
        F.cross_entropy(values.flatten(0, 1), moved(targets, distance).flatten())
        for distance, values in ((1, logits), (2, second))
    )
    torch.testing.assert_close(loss, first_loss + 0.3 * second_loss)
    gradients = [
        torch.autograd.grad(scalar, list(model.parameters())) for scalar in (loss, first_loss + 0.3 * second_loss)
    ]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(
        module(inputs, {"second": torch.full((3, 9), IGNORE_INDEX)}), tfkit.Loss(model, outputs={"logits": 1})(inputs)
    )


def test_a_run_trains_and_reports_each_output(tmp_path: Path) -> None:
    """A mean is over the positions that count for its output: one less in each row for `second`."""
    trainer = Trainer(run_of(tmp_path), Memory())
    batch = trainer.batch(1)
    tokens, targets = torch.from_numpy(batch.inputs["tokens"]), torch.from_numpy(batch.targets)
    logits, second = trainer.model(tokens, moved(tokens, 1, 0))
    expected = {
        name: F.cross_entropy(values.flatten(0, 1), moved(targets, distance).flatten()).item()
        for name, values, distance in (("logits.loss", logits, 0), ("second.loss", second, 1))
    }
    lines = trained(trainer.run)[0].lines
    step = next(line for line in lines if line.get("step") == 1)
    assert step["loss"] == pytest.approx(step["logits.loss"] + 0.3 * step["second.loss"], rel=1e-6)
    assert {name: step[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    names = {name for line in lines for name in line if name.startswith("val.")}
    assert names == {f"val.{name}" for name in ("loss", "second.loss", "accuracy", "second.accuracy", "bits_per_byte")}


@pytest.mark.slow
def test_micro_batches_change_nothing(tmp_path: Path) -> None:
    parts = trained(run_of(tmp_path, "machine.micro_batch=4"))[0].lines
    assert [pytest.approx(line, rel=2e-5) for line in parts] == trained(run_of(tmp_path))[0].lines


def test_the_metrics_of_an_output_are_of_its_targets(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    model = model_of(run)
    assert run.config.eval is not None
    numbers = evaluate_splits(model, run, run.config.eval.splits, run.config.eval.metrics)
    examples = run.data.examples("val", "sequential")
    batch = examples.batch(np.arange(len(examples)))
    tokens, targets = torch.from_numpy(batch.inputs["tokens"]), torch.from_numpy(batch.targets)
    logits, second = model(tokens, moved(tokens, 1, 0))
    for name, values, distance in (("val.loss", logits, 0), ("val.second.loss", second, 1)):
        expected = F.cross_entropy(values.flatten(0, 1), moved(targets, distance).flatten())
        assert numbers[name] == pytest.approx(expected.item(), rel=1e-6)


def test_targets_of_a_later_token_stay_within_a_document() -> None:
    targets = np.array([[1, 2, IGNORE_INDEX, 4, 5, 6]])
    batch = Batch({"tokens": targets}, targets, np.array([[0, 0, 0, 1, 1, 1]]))
    moved_targets = batch.targets_of({"a": OutputConfig(), "b": OutputConfig(shift=2)})
    assert moved_targets["a"].tolist() == targets.tolist()
    assert moved_targets["b"].tolist() == [[2, IGNORE_INDEX, IGNORE_INDEX, 5, 6, IGNORE_INDEX]]


HEADS = f"""
  outputs: [logits, second, third]
  inputs: [tokens, after, after_next]
  graph:
    embedding: {{block: embedding, input: tokens}}
    decoder: {{block: decoder, {STACK}}}
    logits: {{block: lm_head, tie: embedding}}
    next: {{block: embedding, input: after, tie: embedding, position: {{kind: learned, max_len: 24}}}}
    joined: {{block: concat, inputs: [decoder, next], along: width}}
    merged: {{block: linear, bias: false}}
    second_decoder: {{like: decoder}}
    second: {{block: lm_head, tie: embedding}}
    later: {{block: embedding, input: after_next, tie: embedding}}
    later_encoder: {{block: encoder, like: decoder}}
    joined_later: {{block: concat, inputs: [second_decoder, later_encoder], along: width}}
    merged_later: {{block: linear, bias: false}}
    third: {{block: lm_head, tie: embedding}}
"""
"""A chain of heads: the input of the second has positions, and the input of the third is read in both directions."""
PACKED_RUN = f"""
tfkit: 1
name: two
seed: 3
model:
  vocab_size: data.vocab_size
  d_model: 16{HEADS}
data: {{kind: packed, of: {{kind: text, files: sheep.txt}}, separator: " "}}
batch: {{sequences: 6, length: 24}}
machine: {{micro_batch: 4}}
loss:
  kind: cross_entropy
  z_loss: 0.1
  outputs: {{logits: 1.0, second: {{weight: 0.3, shift: 2}}, third: {{weight: 0.2, shift: 3}}}}
  ahead: {{after: 1, after_next: 2}}
steps: 2
optimizer: {{kind: adamw, lr: 1e-2}}
"""


def test_heads_of_packed_documents_have_the_losses_and_gradients_of_separate_rows(tmp_path: Path) -> None:
    trainer = Trainer(run_of(tmp_path, text=PACKED_RUN), Memory())
    trainer.model.double()
    batch = trainer.batch(1)
    assert batch.documents is not None
    assert batch.documents.max() >= 3
    losses, _ = trainer._gradients(batch, 1)
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    terms = trainer.run.config.loss.terms
    sums, counts = [torch.zeros(())] * len(terms), [0] * len(terms)
    rows = zip(*map(torch.from_numpy, (batch.inputs["tokens"], batch.targets, batch.documents)), strict=True)
    for tokens, following, documents in rows:
        for document in (documents == number for number in documents.unique()):
            alone, targets = tokens[document][None], following[document][None]
            outputs = trainer.model(alone, after=moved(alone, 1, 0), after_next=moved(alone, 2, 0))
            for index, (term, logits) in enumerate(zip(terms.values(), outputs, strict=True)):
                of_output = moved(targets, term.shift - 1)[0]
                z = logits[0].logsumexp(-1).square()[of_output != IGNORE_INDEX].sum()
                sums[index] = sums[index] + F.cross_entropy(logits[0], of_output, reduction="sum") + 0.1 * z
                counts[index] += int((of_output != IGNORE_INDEX).sum())
    expected = torch.stack([total / count for total, count in zip(sums, counts, strict=True)])
    (expected * torch.tensor([term.weight for term in terms.values()])).sum().backward()
    assert counts[0] > counts[1] > counts[2] > 0
    torch.testing.assert_close(losses.double(), expected.detach(), atol=1e-6, rtol=0)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=0)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_group_of_one_process_computes_the_same(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with alone():
        lines = trained(run, processes=Together())[0].lines
    assert lines == trained(run)[0].lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loss.outputs={third: 1.0}", "`third` is not an output of the model"),
        ("loss.outputs.second.shift=13", "`shift` must be at most 12 for these targets; got 13"),
        ("loss.outputs.second.weight=0", "`weight` must be a number above 0; got 0"),
        ("loss.ahead={aftre: 1}", "`aftre` is not an input of tokens that the data lacks"),
        ("loss.ahead={}", "the data has the inputs tokens, but the model takes tokens, after"),
    ],
)
def test_a_name_or_a_number_that_does_not_fit_is_one_error(change: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        run_of(tmp_path, change)
    assert message in str(error.value)
    assert len(error.value.diagnostics) == 1


def test_a_model_of_two_outputs_needs_a_loss_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"the loss must name its outputs(.|\n)*two\.yaml"):
        Trainer(run_of(tmp_path, "loss.outputs={}"), Memory())


def test_generation_uses_the_named_output(tmp_path: Path) -> None:
    model = model_of(run_of(tmp_path)).eval()
    full = tfkit.generate(model, [[1, 2, 3]], max_new_tokens=4).tokens
    assert full.tolist() == tfkit.generate(model, [[1, 2, 3]], max_new_tokens=4, output="logits").tokens.tolist()
    cached = tfkit.CachedModel(model, length=8, output="logits")
    assert tfkit.generate(cached, [[1, 2, 3]], max_new_tokens=4).tokens.tolist() == full.tolist()
    with pytest.raises(ValueError, match="the output `second` takes after at every step"):
        tfkit.generate(model, [[1, 2, 3]], max_new_tokens=4, output="second")
    with pytest.raises(ValueError, match="`third` is not an output of `two`, which returns logits, second"):
        tfkit.CachedModel(model, length=8, output="third")
    with pytest.raises(ValueError, match="a CachedModel must be created with the output"):
        tfkit.generate(tfkit.CachedModel(model, length=8), [[1, 2, 3]], max_new_tokens=4)


# ---- two tasks ----


PAIRS = '''
"""Rows of symbols: each symbol has a class, and each row has a class."""

from typing import Literal

import numpy as np

import tfkit


class TwoTasksConfig(tfkit.DataConfig):
    """Rows of symbols, each symbol with its class, and each row with a class."""

    kind: Literal["two_tasks"] = "two_tasks"

    def build(self, length):
        return TwoTasks()


class TwoTasks:
    vocab_size, length, splits, fingerprint, tokenizer = 12, 6, ("train", "val"), "", None

    def examples(self, split, order):
        return self

    def __len__(self):
        return 10

    def batch(self, indices):
        rows = (indices[:, None] * 5 + np.arange(6) ** 2) % 12
        return tfkit.Batch({"tokens": rows}, rows % 3, further_targets={"row": rows.sum(1) % 2})


@tfkit.hookimpl
def tfkit_register(register):
    register(TwoTasksConfig)
'''
TASKS = """
tfkit: 1
name: tasks
seed: 1
model:
  vocab_size: data.vocab_size
  d_model: 16
  graph:
    embedding: {block: embedding, position: {kind: learned, max_len: 6}}
    encoder: {block: encoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 32}}
    token: {block: classifier, n_classes: 3}
    pooled: {block: pooler, input: encoder, select: mean}
    row: {block: classifier, n_classes: 2}
  outputs: [token, row]
data: {kind: two_tasks}
batch: {sequences: 5}
loss: {kind: cross_entropy, outputs: {token: 1.0, row: 2.0}}
steps: 40
optimizer: {kind: adamw, lr: 1e-2}
eval: {every: 40, splits: {val: all}, metrics: [loss, accuracy]}
"""


def test_two_tasks_have_targets_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "pairs.py").write_text(PAIRS, encoding="utf-8")
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path / "plugins"], entry_points=False)
    run = run_of(tmp_path, plugins=plugins, text=TASKS)
    lines = trained(run)[0].lines
    last = {name: value for line in lines for name, value in line.items()}
    assert (last["val.accuracy"], last["val.row.accuracy"]) == (1.0, 1.0)
    step = next(line for line in lines if line.get("step") == 1)
    assert step["loss"] == pytest.approx(step["token.loss"] + 2 * step["row.loss"], rel=1e-6)
    with pytest.raises(SpecError, match="the data has targets of `row`, which is not in the loss"):
        run_of(tmp_path, "loss.outputs={token: 1.0}", plugins=plugins, text=TASKS)
    with pytest.raises(SpecError, match="`shift` must be at most 1 for these targets"):
        run_of(tmp_path, "loss.outputs.row={shift: 2}", plugins=plugins, text=TASKS)


@pytest.mark.slow
def test_a_model_of_several_outputs_keeps_all_guarantees(tmp_path: Path) -> None:
    check_model(run_of(tmp_path).graph)
