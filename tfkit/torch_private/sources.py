"""Sources of the functions that torch.fx compiles, which it keeps for good. Its loader has no public name."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

from torch.fx.graph_module import _loader


def forget_source(function: Callable[..., Any]) -> None:
    """Remove the source of a function that torch.fx has compiled, and that another one replaces."""
    file = function.__code__.co_filename
    _loader.eval_cache.pop(file, None)
    linecache.cache.pop(file, None)
