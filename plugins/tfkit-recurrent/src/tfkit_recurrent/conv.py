"""The short causal convolution of a mixer: each channel is a weighted sum of its last few tokens.

b batch, t positions, c channels, k size of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.nn import Context, is_scripting
from tfkit_recurrent.kernels import convolve, has_kernel
from tfkit_recurrent.recurrence import continues


class CausalConv(nn.Module):
    """x [b, t, c] -> [b, t, c]: a depthwise convolution of the last `size` tokens, without later tokens.

    Its state, [b, 1, k - 1, c], is its input at the last k - 1 tokens. The tokens of a row come before its padding, so
    that padding is never between two tokens.

    Args:
        width: number of channels; or names and numbers of channels of its parts, see `tfkit.Linear`.
        size: number of tokens.
        bias: true to add a bias.

    Attributes:
        weight: [c, 1, k], the newest token last, as in `nn.Conv1d`.
        bias: [c], or None.
    """

    def __init__(self, width: int | Mapping[str, int], size: int, *, bias: bool) -> None:
        super().__init__()
        self.parts = None if isinstance(width, int) else dict(width)
        width = width if isinstance(width, int) else sum(width.values())
        self.size = size
        self.weight = nn.Parameter(torch.empty(width, 1, size))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def reset_parameters(self) -> None:
        """Fill the parameters as `nn.Conv1d` does."""
        bound = self.size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, context: Context, index: int) -> Tensor:
        """Convolve x; `index` is the number of the state among the tensors that the mixer caches."""
        cache = context.cache
        if cache is None:
            return self.convolve(F.pad(x, [0, 0, self.size - 1, 0]), context.documents)
        state = cache.tensors[index]
        history = torch.cat((state[:, 0], x.to(state.dtype)), dim=1)
        state.copy_(last_tokens(history, context.padding, self.size - 1)[:, None])
        return self.convolve(history.to(x.dtype), None)

    def convolve(self, history: Tensor, documents: Tensor | None) -> Tensor:
        """Convolve k - 1 earlier tokens and the new ones, [b, k - 1 + t, c] -> [b, t, c]."""
        if documents is not None:
            return self.convolve_documents(history, documents)
        if not is_scripting():  # noqa: SIM102  TorchScript skips this `if`, but would compile its condition
            if has_kernel("causal_conv1d", history):
                return convolve(history, self.weight, self.bias)
        # Much faster than `F.conv1d`, which would move the channels in front of the positions and back.
        count = history.size(1) - self.size + 1
        y = history[:, :count] * self.weight[:, 0, 0]
        for tap in range(1, self.size):
            y = torch.addcmul(y, history[:, tap : tap + count], self.weight[:, 0, tap])
        return y if self.bias is None else y + self.bias

    def convolve_documents(self, history: Tensor, documents: Tensor) -> Tensor:
        """Convolve the tokens of each of the documents [b, t] alone, [b, k - 1 + t, c] -> [b, t, c]."""
        count = documents.size(1)
        y = history[:, self.size - 1 :] * self.weight[:, 0, self.size - 1]
        for tap in range(self.size - 1):
            same = continues(documents, self.size - 1 - tap)[:, :, None]
            y = torch.addcmul(y, history[:, tap : tap + count] * same, self.weight[:, 0, tap])
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.weight.size(0)}, size={self.size}, bias={self.bias is not None}"


def last_tokens(history: Tensor, padding: Tensor | None, count: int) -> Tensor:
    """Return the last tokens [b, count, c] of `count` earlier tokens and new ones, some of which may be padding.

    Args:
        history: [b, count + t, c].
        padding: [b, t], True for tokens; None if there is no padding.
        count: number of tokens.
    """
    if padding is None:
        return history[:, history.size(1) - count :]
    indices = padding.sum(dim=1)[:, None] + torch.arange(count, device=history.device)
    return history.gather(1, indices[:, :, None].expand(-1, -1, history.size(2)))
