"""The model that `tfkit.build` returned, inside the wrappers of other tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import fx, nn

from tfkit.graph.expand import Graph
from tfkit.torch_private.sharding import computes_in

T = TypeVar("T")

INSIDE = {
    "torch.OptimizedModule": "_orig_mod",  # torch.compile
    "torch.DistributedDataParallel": "module",
    "torch.DataParallel": "module",
    "torch.AveragedModel": "module",
    "peft.PeftModel": "base_model",
    "peft.BaseTuner": "model",
    "lightning._FabricModule": "module",
    "lightning_fabric._FabricModule": "module",
    "tfkit.Loss": "model",
}
"""Package and class of wrappers, and the attribute that holds the wrapped module."""


def unwrapped(model: object) -> fx.GraphModule:
    """Return the model without wrappers that compute the same: `torch.compile`, DDP, averages, PEFT, `Loss`.

    Adapters that PEFT inserts belong to the model. Raises `ValueError` for modules that `tfkit.build` did not build,
    and for wrappers that change more than where or how the model runs.
    """
    module = model
    while not _is_built(module):
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                "the prompts that PEFT has learned are not in the model: call the result of `get_peft_model`"
            )
        attribute = next((INSIDE[name] for name in _names(module) if name in INSIDE), None)
        if attribute is None:
            raise ValueError(_unknown(module))
        module = getattr(module, attribute)
    assert isinstance(module, fx.GraphModule)
    return module


def is_sharded(module: nn.Module) -> bool:
    """Return True if `torch.distributed.fsdp.fully_shard` was called with this module."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def whole(model: object) -> fx.GraphModule:
    """Unwrap a model whose parameters are complete; raise ValueError if they are sharded or have no values."""
    built = unwrapped(model)
    check_values(built)
    if any(is_sharded(module) for module in built.modules()):
        raise ValueError(
            "the parameters of this model are sharded: gather them with "
            "`torch.distributed.checkpoint.state_dict.get_model_state_dict`, and load them into a model that is not"
        )
    return built


def check_values(model: nn.Module) -> None:
    """Raise ValueError if the parameters of a model have shapes alone."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device, where weights have no values: build it on another one")


def sharded_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the compute dtype of sharded modules, if their policy differs from the parameters' dtype."""
    dtypes = {computes_in(module) for module in model.modules() if is_sharded(module)}
    if len(dtypes) > 1:
        raise ValueError("`fully_shard` was called with several `MixedPrecisionPolicy`, but a cache has one type")
    return dtypes.pop() if dtypes else None


def called(model: nn.Module, run: Callable[[], T]) -> T:
    """Call `run`, which calls submodules of the model, as if it were the model's forward.

    `fully_shard` acts when a module is called: its parameters are gathered before and its gradients scattered later.
    """
    if not is_sharded(model):
        return run()
    model.__dict__["forward"] = run
    try:
        value: T = model()
        return value
    finally:
        del model.__dict__["forward"]


def _is_built(model: object) -> bool:
    return isinstance(model, fx.GraphModule) and isinstance(model.meta.get("graph"), Graph)


def _names(module: object) -> Iterator[str]:
    """Yield package and name of each class of a module, to recognize the module without an import."""
    return (f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(module).__mro__)


def _unknown(module: object) -> str:
    name = type(module).__name__
    if "torch.FullyShardedDataParallel" in _names(module):
        return f"{name} flattens the parameters of a model: use `torch.distributed.fsdp.fully_shard`"
    text = f"this module was not built by `tfkit.build`, or it has been wrapped: it is {name}"
    parts = module.named_modules() if isinstance(module, nn.Module) else ()
    path = next((path for path, part in parts if _is_built(part)), None)
    return f"{text}; pass the model itself" + ("" if path is None else f", which it has as `{path}`")
