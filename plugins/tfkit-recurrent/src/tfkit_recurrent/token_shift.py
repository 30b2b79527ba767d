"""The token shift of RWKV, https://arxiv.org/abs/2305.13048: mixes of each token with the token before it.

b batch, t positions, m d_model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tfkit.nn import Context
from tfkit_recurrent.conv import last_tokens
from tfkit_recurrent.recurrence import continues


def previous_tokens(x: Tensor, context: Context, index: int) -> Tensor:
    """Return the token before each token, [b, t, m], or zeros before the first token of a sequence or document.

    Its state, number `index` of the cached tensors, [b, 1, 1, m], is the last token.
    """
    cache = context.cache
    if cache is None:
        previous, documents = F.pad(x, [0, 0, 1, -1]), context.documents
        return previous if documents is None else previous * continues(documents)[:, :, None]
    state = cache.tensors[index]
    history = torch.cat((state[:, 0].to(x.dtype), x), dim=1)
    state.copy_(last_tokens(history, context.padding, 1)[:, None])
    return history[:, :-1]


def reset_mix(mix: Tensor, exponent: float, shift: float = 0.0) -> None:
    """Fill the fraction of the newer token: it rises from 0 to 1 over the channels, to a power, plus `shift`."""
    channels = torch.arange(mix.size(0), dtype=torch.float32, device=mix.device)
    with torch.no_grad():
        mix.copy_((channels / mix.size(0)) ** exponent + shift)
