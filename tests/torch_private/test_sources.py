"""torch.fx keeps the source of each function that it compiles, under the file name of the function's code."""

from __future__ import annotations

import linecache

from torch import fx, nn
from torch.fx.graph_module import _loader

from tfkit.torch_private.sources import forget_source


def test_a_source_is_removed() -> None:
    function = type(fx.symbolic_trace(nn.ReLU())).forward
    file = function.__code__.co_filename
    assert file in _loader.eval_cache
    assert file in linecache.cache
    forget_source(function)
    assert file not in _loader.eval_cache
    assert file not in linecache.cache
