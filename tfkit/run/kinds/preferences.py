"""Preferences: data with a preferred and a rejected answer to each prompt, and losses that learn from their difference.

DPO: https://arxiv.org/abs/2305.18290. IPO: https://arxiv.org/abs/2310.12036. SimPO: https://arxiv.org/abs/2405.14734.
ORPO: https://arxiv.org/abs/2403.07691. Reward models: https://arxiv.org/abs/2203.02155, equation 1.

b pairs, t positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tfkit
from tfkit import Diagnostic, Invalid, SpecError
from tfkit.component import Changeable, ContentPath, PositiveFloat, slot
from tfkit.run.contract import (
    IGNORE_INDEX,
    Batch,
    Data,
    Ids,
    LossConfig,
    LossSum,
    NonNegative,
    Ratio,
    TokenizerConfig,
    bare_ids,
)
from tfkit.run.kinds.columns import (
    ColumnsConfig,
    Ragged,
    Token,
    data_fingerprint,
    encoded_text,
    fitting_indices,
    masks_of,
    new_token,
)
from tfkit.run.kinds.examples import RowsData
from tfkit.run.kinds.text import tokenizer_for

if TYPE_CHECKING:
    from tfkit.run.read_rows import Row


class PreferencesDataConfig(ColumnsConfig):
    """Prompts, each with a preferred and a rejected answer, as two documents of a row.

    Both documents begin with the prompt, of which no token counts. The model treats each as if it were alone, so a
    single forward computes both. `length` is the number of positions of the row.
    """

    kind: Literal["preferences"] = "preferences"

    prompt: str = "prompt"
    """The column of the prompt."""
    chosen: str = "chosen"
    """The column of the preferred answer. It follows the prompt directly; no space is added."""
    rejected: str = "rejected"
    """The column of the rejected answer."""
    end: Token | None = None
    """The token after an answer; by default a new token with the highest id."""
    long: Literal["error", "skip"] = "error"
    """The treatment of a row of more than `length` positions: report it, or omit it."""
    tokenizer: TokenizerConfig = slot("characters")
    """The tokenizer. Its special tokens are added around the prompt, but not around the answers."""

    def build(self, length: int | None) -> Data:
        assert length is not None
        parts = self.read()
        columns = (self.prompt, self.chosen, self.rejected)
        texts = [row.text(column) for rows in parts.values() for row in rows for column in columns]
        tokenizer = tokenizer_for(self.tokenizer, "".join(texts))
        end, vocab_size = new_token(self.end, tokenizer, tokenizer.vocab_size, "end")

        def encoded(row: Row) -> tuple[list[int], list[int], list[int]]:
            prompt = list(encoded_text(row, row.text(self.prompt), tokenizer.encode))
            chosen, rejected = (
                [*encoded_text(row, row.text(column), lambda text: bare_ids(tokenizer, text)), end]
                for column in columns[1:]
            )
            if chosen == rejected:
                raise row.error(self.rejected, f"a text that differs from `{self.chosen}`")
            return prompt, chosen, rejected

        examples = {}
        for name, rows in parts.items():
            ids = [encoded(row) for row in rows]
            sizes = [2 * len(prompt) + len(chosen) + len(rejected) for prompt, chosen, rejected in ids]
            fitting = [ids[index] for index in fitting_indices(rows, sizes, length, self.long)]
            prompts, chosen, rejected = zip(*fitting, strict=True)
            examples[name] = PreferenceExamples(Ragged(prompts), Ragged(chosen), Ragged(rejected))
        return RowsData(examples, length, vocab_size, tokenizer, data_fingerprint(texts, examples), end=end)


@dataclass(frozen=True)
class PreferenceExamples:
    """Prompts with two answers each. The last token of a document has no target, so the documents of a row differ."""

    prompts: Ragged
    chosen: Ragged
    rejected: Ragged

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def positions(self) -> int:
        """The number of positions of all examples, without padding."""
        return int(2 * self.prompts.sizes.sum() + self.chosen.sizes.sum() + self.rejected.sizes.sum())

    def digest(self) -> bytes:
        return self.prompts.digest() + self.chosen.digest() + self.rejected.digest()

    def batch(self, indices: Ids) -> Batch:
        parts = [part.padded(indices) for part in (self.prompts, self.chosen, self.prompts, self.rejected)]
        ids, mask = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
        columns = np.repeat(np.arange(4), [part.shape[1] for part, _ in parts])
        order = np.argsort(~mask, axis=1, kind="stable")[:, : mask.sum(1).max()]  # padding last
        ids, mask, part = (
            np.take_along_axis(array, order, 1) for array in (ids, mask, np.tile(columns, (len(ids), 1)))
        )
        after = np.zeros_like(mask)
        after[:, :-1] = mask[:, 1:] & (part[:, 1:] % 2 == 1)  # the next token is a token of the answer
        targets = np.where(after, np.roll(ids, -1, axis=1), IGNORE_INDEX)
        return Batch({"tokens": ids}, targets, documents=part // 2, masks=masks_of({"tokens": mask}))


class PreferencesConfig(LossConfig):
    """Learn to prefer one of two answers to a prompt; the data is of the kind `preferences`.

    P is the logarithm of the probability of an answer; with a reference, minus the reference's. In `ipo`, `simpo` and
    `orpo`, it is divided by the number of tokens of the answer. With `reward`, the model is a reward model, which
    returns a number for each position: R is its number at the last token of an answer.
    """

    kind: Literal["preferences"] = "preferences"

    form: Literal["dpo", "ipo", "simpo", "orpo", "reward"] = "dpo"
    """dpo: -log sigmoid(beta (P_chosen - P_rejected)); ipo: (P_chosen - P_rejected - 1 / (2 beta))^2; simpo:
    -log sigmoid(beta (P_chosen - P_rejected) - margin); orpo: -P_chosen - beta log sigmoid(log of the ratio of the odds
    of both answers); reward: -log sigmoid(R_chosen - R_rejected)."""
    beta: Changeable[PositiveFloat] = 0.1
    """The strength of the preference."""
    margin: NonNegative | None = None
    """The smallest difference of the rewards that `simpo` aims at, gamma in the paper; by default 0.5."""
    reference: ContentPath | None = None
    """A model folder, or a run folder, whose latest checkpoint is the reference of `dpo` and `ipo`. It must have the
    inputs and the vocabulary of the model. The digest of the run covers its content."""

    def check(self) -> None:
        """Raise `Invalid` for a missing reference, and for fields without effect."""
        super().check()
        relative = self.form in {"dpo", "ipo"}
        if relative and self.reference is None:
            help = "name the folder of the model that training starts from, or choose `form: simpo`"
            raise Invalid("reference", f"`reference` is missing: `{self.form}` compares with a model", help=help)
        if not relative and self.reference is not None:
            raise Invalid("reference", f"`reference` has no effect: `{self.form}` has none", help="remove it")
        if self.form != "simpo" and self.margin is not None:
            raise Invalid("margin", f"`margin` has no effect: `{self.form}` has none", help="remove it")
        if self.form == "reward" and "beta" in self.model_fields_set:
            raise Invalid("beta", "`beta` has no effect: `reward` has none", help="remove it")

    def build(self, model: fx.GraphModule) -> nn.Module:
        graph: tfkit.Graph = model.meta["graph"]
        output = graph.node(graph.outputs[0]).output
        if self.form == "reward" and (len(graph.outputs), output.type, output.width) != (1, "sequence", 1):
            message = "`reward` must have a model with a single output, of one number for each position"
            help = "use a linear layer as its output: `reward: {block: linear, d_model: 1}`"
            raise Invalid("form", message, help=help)
        if self.form != "reward" and output.type != "logits":
            message = f"`{self.form}` must have a model that returns logits of tokens"
            raise Invalid("form", message, help="use an `lm_head` as the output, or `form: reward`")
        reference = None if self.reference is None else tfkit.build(self.reference)
        return PreferencesLoss(model, reference, self)


class PreferencesLoss(nn.Module):
    """Inputs and targets of rows with two documents -> the sum of the losses of the pairs.

    The reference is in eval mode, has no gradient, and is not a submodule, so it is neither trained nor saved.
    """

    def __init__(self, model: nn.Module, reference: nn.Module | None, config: PreferencesConfig) -> None:
        super().__init__()
        self.model, self.config, self.beta = model, config, config.beta
        if reference is not None:
            weight = next(model.parameters())
            reference = reference.to(weight.device, weight.dtype).eval().requires_grad_(False)
        self._reference = (reference,)

    def forward(self, inputs: Mapping[str, Any], targets: Tensor) -> LossSum:
        counted = targets != IGNORE_INDEX
        starts = counted.clone()
        starts[:, 1:] &= ~counted[:, :-1]
        if not torch.compiler.is_compiling() and not bool((starts.sum(1) == 2).all()):
            message = "the loss `preferences` must have two answers in each row"
            raise SpecError(Diagnostic(message, path="loss", help="use data of the kind `preferences`"))
        rejected = starts.cumsum(1) == 2
        sides = torch.stack([counted & ~rejected, counted & rejected])  # [2, b, t]
        margins, losses = (self._of_rewards if self.config.form == "reward" else self._of_tokens)(
            inputs, targets, sides
        )
        numbers = {
            "reward_margin": Ratio(margins.detach().sum(), len(margins)),
            "reward_accuracy": Ratio((margins.detach() > 0).sum(), len(margins)),
        }
        return LossSum(losses.sum(), len(losses), numbers)

    def _of_rewards(self, inputs: Mapping[str, Any], _targets: Tensor, sides: Tensor) -> tuple[Tensor, Tensor]:
        """Return the margin and the loss of each pair, [b], for a model that returns rewards [b, t, 1]."""
        rewards = self.model(**inputs).squeeze(-1)
        before = sides & ~F.pad(sides[..., 1:], (0, 1))  # the target of this position is the last token of an answer
        last = F.pad(before, (1, 0))[..., :-1]
        chosen, other = (rewards.to(torch.promote_types(rewards.dtype, torch.float32)) * last).sum(-1)
        return chosen - other, -F.logsigmoid(chosen - other)

    def _of_tokens(self, inputs: Mapping[str, Any], targets: Tensor, sides: Tensor) -> tuple[Tensor, Tensor]:
        """Return the margin and the loss of each pair, [b], for a model that returns logits [b, t, v]."""
        form, beta = self.config.form, self.beta
        sizes = 1 if form == "dpo" else sides.sum(-1)
        chosen, other = (_log_probabilities(self.model, inputs, targets) * sides).sum(-1) / sizes
        rewards = beta * torch.stack([chosen, other])
        (reference,) = self._reference
        if reference is not None:
            with torch.no_grad():
                expected = (_log_probabilities(reference, inputs, targets) * sides).sum(-1) / sizes
            rewards = rewards - beta * expected
        margins = rewards[0] - rewards[1]
        if form == "ipo":
            return margins, (margins / beta - 1 / (2 * beta)) ** 2
        if form == "orpo":
            odds = [side - torch.log1p(-side.exp()) for side in (chosen, other)]
            return margins, -chosen - beta * F.logsigmoid(odds[0] - odds[1])
        margin = 0.0 if form == "dpo" else 0.5 if self.config.margin is None else self.config.margin
        return margins, -F.logsigmoid(margins - margin)


def _log_probabilities(model: nn.Module, inputs: Mapping[str, Any], targets: Tensor) -> Tensor:
    """Return the logarithm of the probability of each target, [b, t]; 0 where nothing counts."""
    logits = model(**inputs)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
    return -F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
