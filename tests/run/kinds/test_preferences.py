"""Preferences: the data has two documents in a row, and the losses and their gradients equal TRL's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.run.checked_run import load_run
from tfkit.run.contract import IGNORE_INDEX
from tfkit.run.kinds.columns import Ragged
from tfkit.run.kinds.preferences import PreferenceExamples, PreferencesConfig, PreferencesLoss
from tfkit.run.training.evaluate import batch_tensors
from tfkit.run.training.loop import Trainer

PLUGINS = tfkit.load_plugins(entry_points=False)
ROWS = [
    {"prompt": "2+3=", "chosen": "5", "rejected": "seven"},
    {"prompt": "né→", "chosen": "été, oui", "rejected": "no"},
    {"prompt": "a", "chosen": "bcd", "rejected": "bce"},
    {"prompt": "long ", "chosen": "xyz", "rejected": "zyxzy"},
    {"prompt": "7-4=", "chosen": "3", "rejected": "4"},
]
SPEC: dict[str, Any] = {
    "tfkit": 1,
    "name": "small",
    "d_model": 16,
    "vocab_size": 300,
    "graph": {
        "embedding": {"block": "embedding", "position": {"kind": "learned", "max_len": 40}},
        "decoder": {
            "block": "decoder",
            "n_layers": 2,
            "attention": {"kind": "mha", "n_heads": 2},
            "ffn": {"kind": "gelu", "d_ff": 32},
        },
        "head": "lm_head",
    },
}


def run_of(folder: Path, *sets: str, rows: list[dict[str, str]] = ROWS) -> Any:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "preferences.jsonl").write_text(lines, encoding="utf-8")
    text = f"""\
tfkit: 1
name: preferences
seed: 3
model: {json.dumps({key: value for key, value in SPEC.items() if key not in ("tfkit", "name")})}
data: {{kind: preferences, files: {{train: preferences.jsonl, val: preferences.jsonl}}, tokenizer: bytes}}
batch: {{sequences: 5, length: 40}}
steps: 3
loss: {{kind: preferences, form: simpo, beta: 2.0}}
optimizer: {{kind: adamw, lr: 1e-2}}
eval: {{every: 3, splits: {{val: all}}, metrics: [objective]}}
"""
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return load_run(folder / "run.yaml", PLUGINS, sets=list(sets))


class Memory:
    """A record in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def restored(self, model: Any) -> None:
        return None

    def resume(self) -> None:
        """Nothing was recorded before."""

    def log(self, step: int, numbers: Any) -> None:
        self.lines.append({"step": step, **numbers})

    def text(self, step: int, name: str, text: str) -> None:
        """No text is kept."""

    def save(self, checkpoint: Any) -> None:
        """Nothing is saved."""

    def saving(self) -> Any:
        return self.save

    def close(self) -> None:
        """Nothing is left to write."""

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines if "loss" in line]


def answers(rows: list[dict[str, str]] = ROWS) -> list[tuple[list[int], list[list[int]]]]:
    """The prompt and the two answers of each row, as bytes with an end."""
    return [
        (list(row["prompt"].encode()), [[*row[side].encode(), 256] for side in ("chosen", "rejected")]) for row in rows
    ]


def expected_sums(model: Any) -> tuple[Tensor, Tensor]:
    """The log-probability of each answer after its prompt, each computed alone, [b, 2]; and the numbers of tokens."""
    sums, sizes = [], []
    for prompt, pair in answers():
        for answer in pair:
            ids = torch.tensor([[*prompt, *answer]])
            nats = F.log_softmax(model(ids[:, :-1])[0], -1)
            sums.append(nats.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum())
            sizes.append(len(answer))
    return torch.stack(sums).view(-1, 2), torch.tensor(sizes).view(-1, 2)


def models() -> tuple[Any, Any]:
    model, reference = (tfkit.build(tfkit.load(SPEC, plugins=PLUGINS)).double() for _ in range(2))
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in [*model.parameters(), *reference.parameters()]:
            parameter.normal_(std=0.4)
    return model, reference


def tensors_of(run: Any) -> tuple[dict[str, Tensor], Tensor]:
    batch = run.data.examples("train", "sequential").batch(np.arange(5))
    trainer_model = tfkit.build(tfkit.load(SPEC, plugins=PLUGINS))
    return batch_tensors(batch, trainer_model, torch.device("cpu"), run.config.loss)


class Table(nn.Module):
    """A model of rows with two documents, whose numbers are stored for each document: [2 b, t, v], chosen first."""

    def __init__(self, numbers: list[Any]) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.tensor(numbers, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.numbers.new_full((*tokens.shape, self.numbers.size(-1)), 9.0)
        for row, sizes in enumerate(zip(*TRL_SIZES, strict=True)):
            parts = [self.numbers[row + side * len(rows), :size] for side, size in enumerate(sizes)]
            rows[row, : sum(sizes)] = torch.cat(parts)
        return rows


TRL = json.loads((Path(__file__).parent / "trl_losses.json").read_text(encoding="utf-8"))
TRL_SIZES = [
    [len(prompt) + len(answer) for prompt, answer in zip(TRL["prompts"], TRL[side], strict=True)]
    for side in ("chosen", "rejected")
]


@pytest.mark.parametrize("form", TRL["forms"])
def test_losses_and_gradients_equal_those_of_trl(form: Any, tmp_path: Path) -> None:
    values = TRL["forms"][form]
    prompts, chosen, rejected = (Ragged(TRL[name]) for name in ("prompts", "chosen", "rejected"))
    batch = PreferenceExamples(prompts, chosen, rejected).batch(np.arange(3))
    model = Table([[[score] for score in row] for row in TRL["scores"]] if form == "reward" else TRL["logits"])
    reference = Table(TRL["reference"]) if form in ("dpo", "ipo") else None
    fields = {name: values[name] for name in ("beta", "margin") if name in values}
    config = PreferencesConfig(form=form, reference=str(tmp_path) if reference else None, **fields)
    result = PreferencesLoss(model, reference, config)(
        {"tokens": torch.from_numpy(batch.inputs["tokens"])}, torch.from_numpy(batch.ids)
    )
    assert result.count == 3
    loss = result.total / 3  # of TRL: the mean over pairs
    assert loss.item() == pytest.approx(values["loss"], rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, model.numbers)
    expected = torch.tensor(values["gradient"], dtype=torch.float64).view_as(gradient)
    assert int((expected != 0).sum()) >= 6  # of rewards: one for each answer
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("form", ["dpo", "ipo", "simpo", "orpo"])
def test_margins_are_those_of_answers_alone(form: Any, tmp_path: Path) -> None:
    """The loss and its gradients equal TRL's for stored logits; here, a model computes the logits of both documents."""
    inputs, targets = tensors_of(run_of(tmp_path))
    model, reference = models()
    relative = form in ("dpo", "ipo")
    config = PreferencesConfig(form=form, beta=0.3, reference=str(tmp_path) if relative else None)
    result = PreferencesLoss(model, reference if relative else None, config)(inputs, targets)
    assert result.count == 5
    with torch.no_grad():
        sums, sizes = expected_sums(model)
        reference_sums, _ = expected_sums(reference)
    scores = (sums - reference_sums if relative else sums) / (1 if form == "dpo" else sizes)
    rewards = 0.3 * (scores[:, 0] - scores[:, 1])
    margins, accuracy = result.numbers["reward_margin"], result.numbers["reward_accuracy"]
    assert float(margins.total / margins.count) == pytest.approx(float(rewards.mean()), rel=1e-6)
    assert float(accuracy.total / accuracy.count) == pytest.approx(float((rewards > 0).double().mean()))
    assert 0 < float(accuracy.total) < 5


REWARD = ("model.head={block: linear, d_model: 1}", "loss={kind: preferences, form: reward}")


def test_a_reward_model_learns_and_is_evaluated_by_the_accuracy_of_pairs(tmp_path: Path) -> None:
    run, memory = run_of(tmp_path, *REWARD, "steps=12", "machine.micro_batch=2"), Memory()
    trainer = Trainer(run, memory)
    trainer.train()
    lines = [line for line in memory.lines if "val.objective" in line]
    with torch.no_grad():
        rewards = torch.tensor(
            [
                [trainer.model(torch.tensor([[*prompt, *answer]]))[0, -1, 0].item() for answer in pair]
                for prompt, pair in answers()
            ]
        )
    margins = rewards[:, 0] - rewards[:, 1]
    assert lines[-1]["val.reward_margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert lines[-1]["val.reward_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert lines[-1]["val.objective"] == pytest.approx(-F.logsigmoid(margins).mean().item(), rel=1e-4)
    assert lines[-1]["val.objective"] < lines[0]["val.objective"] - 0.1


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (REWARD[1:], "`reward` must have a model with a single output"),
        (REWARD[:1], "`simpo` must have a model that returns logits of tokens"),
        ((REWARD[0].replace("1}", "2}"), REWARD[1]), "of one number for each position"),
    ],
)
def test_a_model_that_does_not_fit_the_form_is_an_error_before_the_first_step(
    sets: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(tfkit.SpecError, match=message):
        Trainer(run_of(tmp_path, *sets), Memory())


def test_a_row_has_the_prompt_with_each_answer(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    examples = run.data.examples("train", "sequential")
    batch = examples.batch(np.array([3, 1]))
    for row, index in enumerate((3, 1)):
        prompt, (chosen, rejected) = answers()[index]
        ids = [*prompt, *chosen, *prompt, *rejected]
        assert batch.inputs["tokens"][row, : len(ids)].tolist() == ids
        assert batch.masks["tokens"][row].sum() == len(ids)
        ignored = [IGNORE_INDEX] * (len(prompt) - 1)
        targets = [*ignored, *chosen, IGNORE_INDEX, *ignored, *rejected, IGNORE_INDEX]
        assert batch.targets[row, : len(ids)].tolist() == targets
        assert (batch.targets[row, len(ids) :] == IGNORE_INDEX).all()
        first = len(prompt) + len(chosen)
        assert batch.documents[row, : len(ids)].tolist() == [0] * first + [1] * (len(ids) - first)
    sizes = [2 * len(prompt) + len(chosen) + len(rejected) for prompt, (chosen, rejected) in answers()]
    assert examples.positions == sum(sizes)


def test_a_row_is_too_long_with_its_prompt_twice(tmp_path: Path) -> None:
    longest = max(2 * len(prompt) + len(chosen) + len(rejected) for prompt, (chosen, rejected) in answers())
    for length, count in ((longest, len(ROWS)), (longest - 1, len(ROWS) - 1)):
        data = run_of(tmp_path, f"batch.length={length}", "data.long=skip").data
        assert len(data.examples("train", "sequential")) == count
    with pytest.raises(tfkit.SpecError, match=f"has {longest} positions, but `batch.length` is {longest - 1}"):
        run_of(tmp_path, f"batch.length={longest - 1}")


@pytest.mark.parametrize("loss", ["{kind: preferences, form: orpo, beta: 0.5}", "{kind: preferences, form: simpo}"])
def test_a_run_learns_and_logs(loss: str, tmp_path: Path) -> None:
    run, memory = run_of(tmp_path, f"loss={loss}", "steps=12", "machine.micro_batch=2"), Memory()
    Trainer(run, memory).train()
    lines = [line for line in memory.lines if "reward_margin" in line]
    assert lines[-1]["reward_margin"] > lines[0]["reward_margin"] + 0.1
    assert lines[-1]["reward_accuracy"] == 1.0
    objective = [line["val.objective"] for line in memory.lines if "val.objective" in line]
    assert objective[-1] < objective[0] - 0.05


def test_a_run_begins_at_its_reference(tmp_path: Path) -> None:
    """The difference of a model from itself is 0: the loss of DPO is log 2, whatever the pairs."""
    run = run_of(tmp_path)
    trainer = Trainer(run, Memory())
    tfkit.save(trainer.model, tmp_path / "reference")
    memory = Memory()
    Trainer(run_of(tmp_path, f"loss={{kind: preferences, reference: {tmp_path}/reference}}"), memory, until=1).train()
    assert memory.losses[0] == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"form": "dpo"}, "`reference` is missing: `dpo` compares with a model"),
        ({"form": "orpo", "reference": "folder"}, "`reference` has no effect: `orpo` has none"),
        ({"form": "ipo", "reference": "folder", "margin": 0.7}, "`margin` has no effect: `ipo` has none"),
        ({"form": "reward", "beta": 0.3}, "`beta` has no effect: `reward` has none"),
    ],
)
def test_fields_without_effect_are_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferencesConfig(**fields)


def test_answers_that_are_equal_are_an_error(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "a", "chosen": "bc", "rejected": "bc"}]
    with pytest.raises(tfkit.SpecError, match=r"line 6: column `rejected` must be a text that differs"):
        run_of(tmp_path, rows=rows)


def test_data_of_another_kind_is_an_error() -> None:
    loss = PreferencesLoss(models()[0], None, PreferencesConfig(form="simpo"))
    with pytest.raises(tfkit.SpecError, match="must have two answers in each row"):
        loss({"tokens": torch.tensor([[3, 4, 5]])}, torch.tensor([[4, 5, 6]]))
