"""Gate of the outputs of attention heads, https://arxiv.org/abs/2505.06708."""

from torch import Tensor, nn

from tfkit.nn.layers import Linear
from tfkit.nn.rearrange import Rearrange
from tfkit.nn.settings import settings


class HeadGate(nn.Module):
    """Outputs of the heads [b, q, h * d] times `width` factors for each head, computed from x [b, q, d_model].

    Args:
        d_model: width of x.
        n_heads: number of heads.
        width: number of factors of a head: d, or 1.
        activation: activation of the factors.
    """

    extra_repr = settings

    def __init__(self, d_model: int, n_heads: int, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.linear = Linear(d_model, n_heads * width, bias=False)
        self.activation = activation
        self.split_heads = Rearrange("b q (h d) -> b q h d", h=n_heads)
        self.merge_heads = Rearrange("b q h d -> b q (h d)")

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        factor = self.activation(self.linear(x))
        return self.merge_heads(self.split_heads(y) * self.split_heads(factor))
