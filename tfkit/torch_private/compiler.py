"""Settings of `torch.compile` that are not arguments, and the sources that torch.fx compiles.

torch.fx never discards the source of a function, and its loader has no public name.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, fx

from tfkit.torch_private import optional_name, private_name

COMPILED, CHECK = "decoding with a compiled model", "checking that `torch.compile` captures a model"


def stay_in_place(tensor: Tensor) -> None:
    """Guarantee to the compiler that the address of a tensor is constant, so that a CUDA graph can write to it."""
    private_name("torch._dynamo.mark_static_address", COMPILED)(tensor)


def compile_modes() -> list[str]:
    """Return the modes of `torch.compile`."""
    return list(private_name("torch._inductor.list_mode_options", COMPILED)())


def backend_function(name: str) -> Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]:
    """Return the function of a backend, by its name. A custom backend can call this function."""
    return private_name("torch._dynamo.lookup_backend", CHECK)(name)


def distinct_sizes() -> AbstractContextManager[None]:
    """Return a context in which dynamic sizes that are equal in the first call may differ later."""
    return private_name("torch.fx.experimental._config.patch", CHECK)(use_duck_shape=False)


def forget_source(function: Callable[..., Any]) -> None:
    """Remove the source of a function that torch.fx has compiled and that has been replaced."""
    file = function.__code__.co_filename
    loader = optional_name("torch.fx.graph_module._loader", "removing the code of edited models from memory")
    if loader is not None:
        loader.eval_cache.pop(file, None)
    linecache.cache.pop(file, None)
