"""`tfkit.data`: a loop over the data of a run computes the bits of the training loop, from any step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tfkit
from tests.run.training import test_outputs
from tests.run.training.runs import PLUGINS, TEXT, trained, write_run
from tfkit.errors import SpecError
from tfkit.run.checked_run import load_run

DROPOUT = ["model.dropout=0.1", "schedule={kind: cosine, warmup: 3}", "clip=0.4", "steps=5"]
NOT_CAUSAL = "encoder: {block: encoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 32}}"
DIFFUSION = f"""model={{vocab_size: 28, d_model: 16, dropout: 0.1, graph: {{
  embedding: {{block: embedding, position: {{kind: learned, max_len: 13}}}}, {NOT_CAUSAL}, head: lm_head}}}}"""
CASES = {
    "groups": [*DROPOUT, "optimizer.groups=[{match: embedding.*, lr: 1e-3}]", "optimizer.weight_decay=0.2"],
    "sizes": [*DROPOUT, "batch.sequences={at: {0: 2, 2: 6}}", "data.order=sampled", "optimizer={kind: sgd, lr: 0.5}"],
    "frozen": [*DROPOUT, "freeze=[embedding.*]", "data.order=sequential"],
    "documents": ['data={kind: packed, of: {kind: text, files: sheep.txt}, separator: "\\n"}', "steps=3"],
    "noise": [DIFFUSION, "loss=masked_diffusion", "steps=3", "batch.sequences={at: {0: 2, 1: 6}}"],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    (tmp_path / "two.yaml").write_text(test_outputs.RUN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def losses_of(data: tfkit.RunData) -> tuple[list[float], dict[str, Tensor]]:
    """Train by a loop over the data: the loss of each step, and the weights."""
    torch.set_num_threads(data.config.machine.threads)
    model = data.build_model()
    loss, optimizer, terms = data.build_loss(model), data.build_optimizer(model), data.config.loss.terms
    rates, losses = [group["lr"] for group in optimizer.param_groups], []
    for step, batch in data.train.batches():
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * data.train.factor(step)
        torch.manual_seed(data.train.seed(step))
        noise = [data.train.noise(step)] if data.config.loss.draws_noise else []
        result = loss(batch.inputs, batch.targets, *noise)
        optimizer.zero_grad()
        if isinstance(result, tfkit.LossSum):
            assert result.count is not None
            result.total.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= float(result.count)
            mean = result.total.detach() / float(result.count)
        else:
            weights = torch.tensor([term.weight for term in terms.values()] or [1.0])
            counts = batch.arrays.counts_of(terms)
            mean = (torch.stack([of / n for of, n in zip(result.reshape(-1), counts, strict=True)]) * weights).sum()
            mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), data.config.clip or math.inf)
        optimizer.step()
        losses.append(mean.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_a_loop_computes_what_the_training_loop_computes(case: str) -> None:
    memory, weights = trained(load_run("small.yaml", PLUGINS, sets=CASES[case]))
    losses, actual = losses_of(tfkit.data("small.yaml", sets=CASES[case]))
    assert len(set(losses)) == len(losses) > 2
    assert losses == memory.losses
    assert all(bool((actual[name] == tensor).all()) for name, tensor in weights.items())


def test_a_loop_over_several_outputs() -> None:
    memory, _ = trained(load_run("two.yaml", PLUGINS, sets=["steps=3", "eval=null"]))
    assert losses_of(tfkit.data("two.yaml", sets=["steps=3"]))[0] == memory.losses


def test_a_loop_begins_with_the_weights_of_the_run() -> None:
    tfkit.train("small.yaml", output="first", sets="steps=2", quiet=True)
    sets = ["weights=first", "seed=5", "steps=3"]
    memory, _ = trained(load_run("small.yaml", PLUGINS, sets=sets))
    assert losses_of(tfkit.data("small.yaml", sets=sets))[0] == memory.losses


def test_batches_depend_on_the_step_alone() -> None:
    data = tfkit.data("small.yaml")
    assert len(data.train) == 8
    batches = dict(data.train.batches())
    assert list(batches) == [*range(1, 9)]
    assert [step for step, _ in data.train.batches(6)] == [6, 7, 8]
    assert [*data.train.batches(9)] == []
    assert torch.equal(data.train.batch(7).inputs["tokens"], batches[7].inputs["tokens"])
    assert not torch.equal(batches[6].inputs["tokens"], batches[7].inputs["tokens"])
    assert len({data.train.seed(step) for step in batches}) == 8
    assert (batches[3].size, batches[3].count, batches[3].arrays.ids.shape) == (6, 72, (6, 12))


def test_splits_have_the_batches_of_an_evaluation() -> None:
    data = tfkit.data("small.yaml", sets="eval={every: 4, splits: {val: {batches: 3}}, metrics: [accuracy]}")
    assert list(data.splits) == ["train", "val"]
    assert len(data.splits["val"]) == len([*data.splits["val"]]) == 3
    tfkit.train("small.yaml", output="out", sets="steps=2", quiet=True)
    data = tfkit.data("out")
    model = tfkit.build("out").eval()
    batches = [*data.splits["val"]]
    assert len(batches) == len(data.splits["val"])
    assert len({batch.size for batch in batches}) == 2  # the last batch has the rest
    with torch.no_grad():
        right = [(model(**batch.inputs).argmax(-1) == batch.targets).sum().item() for batch in batches]
    accuracy = tfkit.evaluate("out", splits=["val"], metrics=["accuracy"])["val.accuracy"]
    assert sum(right) / sum(batch.count for batch in batches) == pytest.approx(accuracy)


def test_the_source_has_the_tokenizer_and_the_sizes() -> None:
    source = tfkit.data("small.yaml").source
    assert source.tokenizer is not None
    assert (source.vocab_size, source.length, source.tokenizer.decode(source.tokenizer.encode("7 goats"))) == (
        len(set(TEXT)),
        12,
        "7 goats",
    )


def test_a_step_outside_of_the_run_is_an_error() -> None:
    train = tfkit.data("small.yaml").train
    for method, after in ((train.batch, 9), (train.factor, 9), (train.seed, 9), (train.noise, 9), (train.batches, 10)):
        with pytest.raises(ValueError, match=f"at most 8, the last step of the run; got {after}"):
            method(after)
        with pytest.raises(ValueError, match="must be an integer of 1 or more; got 0"):
            method(0)


def test_errors_are_those_of_training() -> None:
    for sets in ("steps=none", "optimizer.lrr=1", "data.files=missing.txt", "model.vocab_size=5"):
        texts = []
        for function in (tfkit.data, tfkit.train):
            with pytest.raises(SpecError) as caught:
                function("small.yaml", sets=sets)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
    data = tfkit.data("small.yaml", sets="optimizer.groups=[{match: embeding.*, lr: 1e-3}]")
    model = data.build_model()
    with pytest.raises(SpecError, match="no trained parameter matches `embeding"):
        data.build_optimizer(model)
    with pytest.raises(SpecError, match="`nowhere` is not a device"):
        tfkit.data("small.yaml", sets="machine.device=nowhere")


def test_a_start_that_only_the_training_loop_can_make_is_an_error() -> None:
    tfkit.train("small.yaml", output="first", sets="steps=2", quiet=True)
    for sets, key in (
        ("branch=first", "branch"),
        ('machine={float8: rowwise}\0precision="bfloat16"', "float8"),
    ):
        data = tfkit.data("small.yaml", sets=sets.split("\0"))
        with pytest.raises(SpecError, match=f"`{key}` has no effect in a training loop outside of tfkit"):
            data.build_model()
