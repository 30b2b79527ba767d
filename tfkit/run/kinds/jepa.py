"""A teacher by a moving average: a model predicts the teacher's vectors of hidden positions from the visible positions.

Joint-embedding prediction of images: https://arxiv.org/abs/2301.08243. Hidden positions that are the union of blocks,
and a context of all other positions: https://arxiv.org/abs/2404.08471.

b rows, t positions, m width of vectors, n blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tfkit
from tfkit import Diagnostic, Invalid, SpecError
from tfkit.component import Changeable, Count, PositiveFloat, Probability


class JepaConfig(tfkit.LossConfig):
    """Predict the vectors of hidden positions, which a moving average of the model computes from all positions.

    The model returns a prediction for each position, and the encoder's vector of each position. The loss hides blocks
    of a grid of positions by the padding mask of the model's input. The teacher's vectors have no gradient, and are
    normalized as by a LayerNorm without parameters. The loss is the smooth L1 distance, the mean over the width, per
    hidden position. `spread` is the variance of the teacher's vectors over the positions of a row: 0 if they collapse.
    """

    kind: Literal["jepa"] = "jepa"

    grid: tuple[Count, Count]
    """Rows and columns of the grid of positions. A text has a grid of one row."""
    blocks: Count = 4
    """The number of hidden blocks, which may overlap. A block that would leave no visible position is left out."""
    area: tuple[Probability, Probability] = (0.15, 0.2)
    """The smallest and the largest fraction of the grid in a block."""
    aspect: tuple[PositiveFloat, PositiveFloat] = (0.75, 1.5)
    """The smallest and the largest ratio of the rows to the columns of a block."""
    momentum: Changeable[Probability] = 0.996
    """The weight of the teacher in the average of teacher and model after each update."""

    def check(self) -> None:
        """Raise `Invalid` for a range that is empty, and for a grid without a position to predict."""
        super().check()
        for name in ("area", "aspect"):
            lower, upper = getattr(self, name)
            if lower > upper:
                raise Invalid(name, f"`{name}` must be the smallest and the largest value; got {lower:g}, {upper:g}")
        if self.grid[0] * self.grid[1] < 2:
            raise Invalid("grid", "`grid` must have at least 2 positions")

    @property
    def draws_noise(self) -> bool:
        return True

    def build(self, model: fx.GraphModule) -> nn.Module:
        graph: tfkit.Graph = model.meta["graph"]
        signals = [graph.node(name).output for name in graph.outputs]
        if len(signals) != 2 or any(signal.type != "sequence" for signal in signals):
            message = "the loss `jepa` needs a model that returns a prediction and a vector for each position"
            raise Invalid("", message, help="write `outputs: [prediction, encoder]`")
        if signals[0].width != signals[1].width:
            words = f"{signals[0].width} and {signals[1].width}"
            raise Invalid("", f"predictions must have the width of the vectors that they predict; got {words}")
        inputs = {name: signal.mask for name, signal in graph.inputs.items() if not signal.optional}
        (name, mask), *further = inputs.items()
        if further or mask is None:
            message = f"the loss `jepa` needs a model with one input, a sequence with a padding mask; got {name}"
            raise Invalid("", message, help="write `patches: {type: features, width: 16, length: 16, padded: true}`")
        return JepaLoss(model, name, mask, self)


class JepaLoss(nn.Module):
    """Inputs and noise -> the sum over the hidden positions of the distance to the teacher's vectors.

    Args:
        model: returns predictions and vectors, [b, t, m] each.
        name: the name of the model's input.
        mask: the name of its padding mask.
        config: the blocks that are hidden.
    """

    def __init__(self, model: fx.GraphModule, name: str, mask: str, config: JepaConfig) -> None:
        super().__init__()
        self.model, self.name, self.mask, self.config = model, name, mask, config
        self.momentum = config.momentum
        self.teacher = tfkit.frozen_copy(model).eval()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model. The teacher stays in eval mode: its vectors have no dropout."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, inputs: Mapping[str, Any], targets: Tensor | None, noise: tfkit.Noise) -> tfkit.LossSum:
        x, rows, columns = inputs[self.name], *self.config.grid
        if x.size(1) != rows * columns:
            message = f"`grid` must have the positions of the data, {x.size(1)}; got {rows} x {columns}"
            raise SpecError(Diagnostic(message, path="loss.grid"))
        present = inputs.get(self.mask, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device))
        if present.dim() != 2:  # pairs of positions in the same document
            message = "the loss `jepa` needs rows with a single example; the rows of the data have several documents"
            raise SpecError(Diagnostic(message, path="data", help="use data that does not pack documents into rows"))
        hidden = hidden_blocks(noise, self.config) & present
        with torch.no_grad():
            _, vectors = self.teacher(**{**inputs, self.mask: present})
            vectors = F.layer_norm(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), vectors.shape[-1:])
        predictions, _ = self.model(**{**inputs, self.mask: present & ~hidden})
        distances = F.smooth_l1_loss(predictions.to(vectors.dtype), vectors, reduction="none").mean(-1)  # [b, t]
        numbers = {"spread": tfkit.Ratio(_spread(vectors, present).sum(), len(x))}
        return tfkit.LossSum((distances * hidden).sum(), hidden.sum(), numbers)

    def after_step(self, step: int, steps: int) -> None:
        """Move the teacher towards the model."""
        for average, weight in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            average.lerp_(weight, 1 - self.momentum)
        for copied, value in zip(self.teacher.buffers(), self.model.buffers(), strict=True):
            copied.copy_(value)


def hidden_blocks(noise: tfkit.Noise, config: JepaConfig) -> Tensor:
    """Return the hidden positions of each row, [b, t]: blocks with random sizes at random positions of the grid."""
    (rows, columns), size = config.grid, (config.blocks, 1)
    areas, log_aspects = (
        lower + (upper - lower) * noise.rand(*size)
        for lower, upper in (config.area, torch.tensor(config.aspect).log().tolist())
    )
    areas, aspects = areas * rows * columns, log_aspects.exp()
    heights = (areas * aspects).sqrt().round().clamp(1, rows)  # [b, n, 1]
    widths = (areas / aspects).sqrt().round().clamp(1, columns)
    inside = []
    for sides, length in ((heights, rows), (widths, columns)):
        first = (noise.rand(*size) * (length - sides + 1)).floor()
        indices = torch.arange(length, device=first.device)
        inside.append((indices >= first) & (indices < first + sides))  # [b, n, length]
    blocks = (inside[0][..., :, None] & inside[1][..., None, :]).flatten(2)  # [b, n, t]
    hidden = torch.zeros_like(blocks[:, 0])
    for block in blocks.unbind(1):
        union = hidden | block
        hidden = torch.where(union.all(1, keepdim=True), hidden, union)
    return hidden


def _spread(vectors: Tensor, present: Tensor) -> Tensor:
    """Return the variance over the positions of each row, the mean over the width: [b]."""
    weights = present[..., None] / present.sum(1)[:, None, None]
    means = (vectors * weights).sum(1, keepdim=True)
    return ((vectors - means) ** 2 * weights).sum(1).mean(1)
