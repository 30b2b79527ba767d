"""Write the losses and gradients of TRL for random logits, with which a test compares the loss `preferences`.

`python tools/trl_losses.py` needs TRL, as `make test-around` installs it, and writes `tests/run/kinds/trl_losses.json`.
The losses are computed by methods of TRL's trainers, in float64; a model that returns the logits takes the place of a
model of transformers. The form `orpo` is the mean of -P_chosen, minus TRL's term of the odds ratio: TRL's first term
also counts the tokens of prompts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor, nn
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import selective_log_softmax

FILE = Path(__file__).parents[1] / "tests" / "run" / "kinds" / "trl_losses.json"
VOCAB_SIZE = 5
PROMPTS = [[3, 1], [4, 0, 2], [1]]
CHOSEN = [[2, 0, 4], [3], [0, 3, 1, 2]]
REJECTED = [[1, 4], [2, 2, 0], [3, 4, 4]]
BETAS = {"dpo": 0.3, "ipo": 0.7, "simpo": 2.0, "orpo": 0.25}
MARGIN = 0.8


class Logits(nn.Module):
    """A model whose logits do not depend on its inputs."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, *inputs: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        logits = self.logits
        if labels is None:
            return SimpleNamespace(logits=logits)
        counted = labels[:, 1:] != -100
        log_probs = selective_log_softmax(logits[:, :-1], labels[:, 1:].clamp(min=0)) * counted
        of_metrics = {name: torch.zeros_like(log_probs) for name in ("entropy", "mean_logits")}
        return SimpleNamespace(log_probs=log_probs, is_top1=counted, **of_metrics)


def padded(rows: list[list[int]], fill: int) -> Tensor:
    """Return rows as a tensor of equal lengths."""
    length = max(map(len, rows))
    return torch.tensor([row + [fill] * (length - len(row)) for row in rows])


def trainer_of(trainer: type, model: nn.Module, **fields: Any) -> Any:
    """Return a trainer with the fields that its loss uses, without data and arguments."""
    built = trainer.__new__(trainer)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor
    )
    defaults = {"aux_loss_enabled": False, "is_encoder_decoder": False, "pad_token_id": 0, "padding_value": 0}
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    vars(built).update(defaults, model=model, accelerator=accelerator, _metrics=metrics, **fields)
    return built


def main() -> None:
    """Compute all losses, and write them with their inputs."""
    generator = torch.Generator().manual_seed(4)
    prompts = [*PROMPTS, *PROMPTS]
    rows = [prompt + answer for prompt, answer in zip(prompts, [*CHOSEN, *REJECTED], strict=True)]
    ids, attention = padded(rows, 0), padded([[1] * len(row) for row in rows], 0)
    completion = attention.clone()
    for row, prompt in zip(completion, prompts, strict=True):
        row[: len(prompt)] = 0
    labels = ids.masked_fill(completion == 0, -100)
    logits, reference = (
        torch.randn(*ids.shape, VOCAB_SIZE, generator=generator).mul(1000).round().double() / 1000 for _ in range(2)
    )
    scores = torch.randn(ids.shape, generator=generator).mul(1000).round().double() / 1000

    def dpo(model: nn.Module, form: str, beta: float) -> Tensor:
        trainer = trainer_of(
            trl.DPOTrainer,
            model,
            beta=beta,
            loss_types=["sigmoid" if form == "dpo" else form],
            loss_weights=[1.0],
            f_divergence_type="reverse_kl",
            ld_alpha=None,
            precompute_ref_logps=True,
            use_weighting=False,
            _total_train_tokens=0,
            _tp_size=1,
        )
        expected = Logits(reference)(labels=labels).log_probs.sum(1).detach().chunk(2)
        batch = {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
        names = ("ref_chosen_logps", "ref_rejected_logps")
        return trainer._compute_loss(model, {**batch, **dict(zip(names, expected, strict=True))}, return_outputs=False)

    of_sides = {
        f"{side}_{name}": tensor
        for name, tensors in {"input_ids": ids, "attention_mask": attention, "labels": labels}.items()
        for side, tensor in zip(("chosen", "rejected"), tensors.chunk(2), strict=True)
    }

    def simpo(model: nn.Module, form: str, beta: float) -> Tensor:
        fields = {"loss_type": form, "simpo_gamma": MARGIN, "cpo_alpha": 0.0, "alpha": 0.0, "label_smoothing": 0.0}
        trainer = trainer_of(CPOTrainer, model, beta=beta, **fields)
        return trainer.get_batch_loss_metrics(model, of_sides)[0]

    def orpo(model: nn.Module, form: str, beta: float) -> Tensor:
        trainer = trainer_of(ORPOTrainer, model, beta=beta)
        chosen, rejected = trainer.concatenated_forward(model, of_sides)[:2]
        return -chosen.mean() - trainer.odds_ratio_loss(chosen, rejected)[0].mean()

    losses: dict[str, Callable[[nn.Module, str, float], Tensor]] = {
        "dpo": dpo,
        "ipo": dpo,
        "simpo": simpo,
        "orpo": orpo,
    }
    forms = {}
    for form, function in losses.items():
        model = Logits(logits.clone())
        loss = function(model, form, BETAS[form])
        (gradient,) = torch.autograd.grad(loss, model.logits)
        margin = {"margin": MARGIN} if form == "simpo" else {}
        forms[form] = {"beta": BETAS[form], **margin, "loss": loss.item(), "gradient": gradient.tolist()}
    last = attention.sum(1, keepdim=True) - 1  # a reward model of transformers returns the number at the last token
    model = Logits(scores.gather(1, last))
    trainer = trainer_of(
        trl.RewardTrainer,
        model,
        args=SimpleNamespace(center_rewards_coefficient=None),
        _total_train_tokens=0,
        _tp_size=1,
    )
    loss = trainer.compute_loss(model, {"input_ids": ids, "attention_mask": attention})
    (gradient,) = torch.autograd.grad(loss, model.logits)
    forms["reward"] = {"loss": loss.item(), "gradient": torch.zeros_like(scores).scatter(1, last, gradient).tolist()}
    contents = {
        "command": "python tools/trl_losses.py",
        "trl": trl.__version__,
        "torch": torch.__version__.partition("+")[0],
        "prompts": PROMPTS,
        "chosen": CHOSEN,
        "rejected": REJECTED,
        "logits": logits.tolist(),
        "reference": reference.tolist(),
        "scores": scores.tolist(),
        "forms": forms,
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in contents.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
