"""Parametrizations: how rates, initial values and factors of a model follow from smaller base sizes.

The table of muP, in the form without factors in the model: columns are the ratios of a weight's inputs, rows the ratios
of its outputs, and width the ratio of the residual stream.

    role                   std              adam: lr      decay      eps         sgd: lr
    hidden                 columns ** -0.5  1 / columns   columns    1 / width   rows / columns
    input, vector, table   1                1             1          1 / width   rows
    output                 1 / columns      1 / columns   columns    1           1 / columns
    latent                 columns ** -0.5  1 / columns   columns    1 / width   (no rule)
    fixed                  1                1             1          1           1

CompleteP divides epsilon of the weights in layers by the ratio of the numbers of layers.

An output matrix with std 1, rate 1 and a factor 1 / columns of the logits, as in the papers, has the same values and
the same updates. A head with the table of an embedding has this factor, because the table is an input. Matrices that
an optimizer such as Muon updates follow the spectral condition: the size of an update is sqrt(rows / columns).

muP: https://arxiv.org/abs/2203.03466, table 8. CompleteP: https://arxiv.org/abs/2505.01618, table 1.
The spectral condition: https://arxiv.org/abs/2310.17813.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from tfkit.errors import Invalid
from tfkit.run.contract import Factors, Growth, OptimizerConfig, ParametrizationConfig


class StandardConfig(ParametrizationConfig):
    """The settings of the run and the initial values of the spec, unchanged. Base sizes have no effect."""

    kind: Literal["standard"] = "standard"
    rescales = False
    covers_depth = True

    def factors(self, growth: Growth, optimizer: OptimizerConfig) -> Factors:
        return Factors()


class MuPConfig(ParametrizationConfig):
    """muP (https://arxiv.org/abs/2203.03466): updates of every value in the model have the same size at any width."""

    kind: Literal["mup"] = "mup"

    def check(self) -> None:
        """Raise `Invalid` without base sizes."""
        super().check()
        if self.base is None:
            help = "add the sizes at which the run is tuned, such as `base: {model.d_model: 64}`"
            raise Invalid("", f"`{self.kind_name()}` has no effect without `base`", help=help)

    def factors(self, growth: Growth, optimizer: OptimizerConfig) -> Factors:
        if growth.role == "fixed":
            return Factors()
        kind, rows, columns = optimizer.kind_name(), growth.rows, growth.columns
        if optimizer.update is None:
            message = f"`{self.kind_name()}` has no rule for the optimizer `{kind}`"
            raise Invalid("", message, help="use `adamw`, `sgd` or `muon`")
        if not optimizer.decoupled and optimizer.weight_decay:
            message = f"`{self.kind_name()}` has no rule for the weight decay of the optimizer `{kind}`"
            raise Invalid("", message, help="use `adamw`, or remove `weight_decay`")
        if growth.role in ("input", "vector", "table"):
            std, adam, sgd = 1.0, 1.0, rows
        elif growth.role == "output":
            std, adam, sgd = 1 / columns, 1 / columns, 1 / columns
        else:
            std, adam, sgd = columns**-0.5, 1 / columns, rows / columns
        if optimizer.update == "matrix":
            lr = _update_size(growth.shape, optimizer) / _update_size(growth.base, optimizer)
            return Factors(std, lr, 1 / lr)
        if optimizer.update == "adam":
            return Factors(std, adam, 1 / adam, 1.0 if growth.role == "output" else 1 / growth.width)
        if growth.role == "latent":
            message = f"`{self.kind_name()}` has no rule for matrices onto a fixed width with the optimizer `{kind}`"
            raise Invalid("", message, help="use `adamw`")
        return Factors(std, sgd, 1 / sgd)

    def head_factor(self, width: float) -> float:
        return 1 / width

    def score_factor(self, width: float) -> float:
        return 1 / width


def _update_size(shape: tuple[int, int], optimizer: OptimizerConfig) -> float:
    """Return the rate of a matrix, up to a constant, at which its update has the size sqrt(rows / columns)."""
    return math.sqrt(shape[0] / shape[1]) / optimizer.matrix_factor(*shape)


class CompletePConfig(MuPConfig):
    """CompleteP (https://arxiv.org/abs/2505.01618): muP, and sublayers' outputs are divided by the ratio of depths."""

    kind: Literal["completep"] = "completep"  # type: ignore[assignment]
    covers_depth = True

    def factors(self, growth: Growth, optimizer: OptimizerConfig) -> Factors:
        factors = super().factors(growth, optimizer)
        return replace(factors, eps=factors.eps / growth.depth)

    def branch_factor(self, depth: float) -> float:
        return 1 / depth
