"""Distillation against a loop of a few lines in float64, and in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import tfkit
from tfkit.run.kinds.distillation import DistillationConfig, DistillationLoss
from tfkit.run.training.loop import Trainer

from ..training.runs import Memory, same, small_run, trained

FFN = "{kind: relu, d_ff: 24}"
SPEC = """
    tfkit: 1
    name: small
    d_model: {width}
    vocab_size: 11
    dropout: 0.1
    graph:
      embedding: embedding
      decoder: {{block: decoder, n_layers: {layers}, attention: {{kind: mha, n_heads: 2}}, ffn: {ffn}}}
      logits: {head}
"""


def model(width: int = 16, layers: int = 1, head: str = "{block: lm_head, tie: embedding}") -> torch.fx.GraphModule:
    return tfkit.build(tfkit.loads(SPEC.format(width=width, layers=layers, head=head, ffn=FFN)), dtype=torch.float64)


def test_ten_steps_equal_a_loop_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfkit.run.kinds.distillation.MAX_LOGITS", 50)  # several chunks
    student, teacher = model().eval(), model(width=24, layers=2, head="lm_head")
    copy = model().eval()
    copy.load_state_dict(student.state_dict())
    loss = DistillationLoss(student, teacher, DistillationConfig(teacher="", temperature=3.0, weight=0.3))
    optimizer, plain_optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (student, copy))
    for step in range(10):
        tokens = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(step))
        inputs, targets = tokens[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] == 4, -100)
        counted = targets != -100
        optimizer.zero_grad()
        mean_loss = loss({"tokens": inputs}, targets) / counted.sum()
        mean_loss.backward()
        optimizer.step()
        plain_optimizer.zero_grad()
        logits = copy(inputs)[counted]
        with torch.no_grad():
            p = (teacher(inputs)[counted] / 3).softmax(-1)
        q = (logits / 3).softmax(-1)
        expected = 0.7 * F.cross_entropy(logits, targets[counted]) + 0.3 * 9 * (p * (p / q).log()).sum(-1).mean()
        expected.backward()
        plain_optimizer.step()
        torch.testing.assert_close(mean_loss, expected, rtol=1e-12, atol=0)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(parameter, copy.get_parameter(name), rtol=1e-9, atol=1e-11)
    assert not teacher.training
    assert all(not p.requires_grad for p in teacher.parameters())
    assert not any("teacher" in name for name, _ in loss.named_parameters())


def test_a_head_learns_behind_a_frozen_trunk() -> None:
    student, teacher = model(head="lm_head").eval(), model(layers=2)
    loss = DistillationLoss(student, teacher, DistillationConfig(teacher="", weight=1.0))
    tokens = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))
    weight = student.get_submodule("logits").get_parameter("output.weight")

    def gradient() -> torch.Tensor:
        weight.grad = None
        loss({"tokens": tokens[:, :-1]}, tokens[:, 1:]).backward()
        assert weight.grad is not None
        return weight.grad

    expected = gradient()
    for parameter in student.parameters():
        parameter.requires_grad_(parameter is weight)
    torch.testing.assert_close(gradient(), expected)


def test_a_run_learns_from_the_content_of_a_folder(tmp_path: Path) -> None:
    teacher = Trainer(small_run(tmp_path, "seed=7", "model.d_model=24"), Memory()).model
    tfkit.save(teacher, tmp_path / "teacher")
    loss = f"loss={{kind: distillation, teacher: {tmp_path}/teacher, weight: 0.9}}"
    sets = (loss, "steps=3")
    run = small_run(tmp_path, *sets)
    memory, weights = trained(run)
    first, _ = trained(small_run(tmp_path, *sets), until=2)
    rest, resumed = trained(small_run(tmp_path, *sets), Memory(first.saved))
    assert same(weights, resumed)
    assert memory.losses[2:] == rest.losses
    divided, _ = trained(small_run(tmp_path, *sets, "machine.micro_batch=4"))
    assert divided.losses == pytest.approx(memory.losses, rel=1e-5)
    changes = ("weight=0.8", "temperature=1.0")
    digests = {run.digest, *(small_run(tmp_path, *sets, f"loss.{change}").digest for change in changes)}
    with torch.no_grad():
        next(teacher.parameters()).mul_(1.1)
    tfkit.save(teacher, tmp_path / "teacher", force=True)
    assert len({*digests, small_run(tmp_path, *sets).digest}) == 4
    tfkit.save(
        tfkit.build(tfkit.loads(SPEC.format(width=16, layers=1, head="lm_head", ffn=FFN))),
        tmp_path / "teacher",
        force=True,
    )
    with pytest.raises(tfkit.SpecError, match="the teacher must return 27 logits for each position; it returns 11"):
        trained(small_run(tmp_path, *sets))
