"""The attention weights of every layer and head of a model."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from tfkit.arguments import checked
from tfkit.building.builder import assemble_model, graph_of
from tfkit.building.model import BuiltModel, complete_model
from tfkit.checkpoint.adapters import merged_tensors
from tfkit.nn import Softmax


@checked
def attention_weights(model: BuiltModel, /, *inputs: Tensor, **named: Tensor | None) -> dict[str, Tensor]:
    """Return the weights that each query gives to each key, from one forward without dropout and gradients.

    The model may have any attention backend, and is not modified. A second model, whose attention is written out, uses
    the parameters of the model without copies.

    Args:
        model: a model that `tfkit.build` returned, or a wrapper that leaves its parameters as they are.
        inputs: arguments of the model's forward, in order.
        named: arguments by name, including padding masks.

    Returns:
        The weights [batch, heads, queries, keys] by the name of each attention, such as `decoder.layers.0.attention`,
        in the order in which they run. Rows sum to 1, or to 0 for queries that may not attend to any key. Attention
        that runs several times, in layers that share weights, has an entry for each run:
        `encoder.layers.0.attention[0]` and so on. Attention from a plugin is included if it uses `tfkit.nn.Softmax`.

    Raises:
        ValueError: the model was not built by `tfkit.build`, its modules were changed since, or none of its attentions
            exposes its weights.
    """
    model = complete_model(model)
    twin, tensors = written_out(model)
    names = softmax_names(twin)
    if not names:
        raise ValueError(f"`{graph_of(model).name}` has no attention that exposes its weights")
    runs: list[tuple[str, Tensor]] = []
    with ExitStack() as hooks, torch.no_grad():
        for path, name in names.items():
            handle = twin.get_submodule(path).register_forward_hook(partial(_record_weights, runs, name))
            hooks.callback(handle.remove)
        torch.func.functional_call(twin, tensors, inputs, named)
    return _numbered_runs(runs)


_TWINS: WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = WeakKeyDictionary()
"""Cache of the second models, which are slow to assemble."""


def written_out(model: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    """Return a second model in eval mode, whose attention is written out, and the tensors to call it with.

    Raise ValueError if the modules of the model were changed.
    """
    graph = graph_of(model)
    if model not in _TWINS or graph_of(_TWINS[model]) is not graph:  # of a run whose model changes by step
        with torch.device("meta"):
            _TWINS[model] = assemble_model(graph, attention_backend="eager")
    twin = _TWINS[model].eval()
    tensors = merged_tensors(model)
    if tensors.keys() != {name for name, _ in (*twin.named_parameters(), *twin.named_buffers())}:
        raise ValueError(f"`{graph.name}` must have the parameters that it was built with: its modules were changed")
    return twin, tensors


def softmax_names(model: fx.GraphModule) -> dict[str, str]:
    """Map the path of each softmax in an attention to the attention's path, or to its own path if there are several."""
    attentions = [path for path, config in model.meta["components"].items() if config.slot == "attention"]
    owners: dict[str, str] = {}
    for path, module in model.named_modules():
        around = [attention for attention in attentions if path.startswith(f"{attention}.")]
        if isinstance(module, Softmax) and around:
            owners[path] = max(around, key=len)
    counts = Counter(owners.values())
    return {path: owner if counts[owner] == 1 else path for path, owner in owners.items()}


def _record_weights(
    runs: list[tuple[str, Tensor]], name: str, _module: nn.Module, _args: object, weights: Tensor
) -> None:
    runs.append((name, weights))


def _numbered_runs(runs: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    total, seen = Counter(name for name, _ in runs), Counter[str]()
    weights_by_name: dict[str, Tensor] = {}
    for name, weights in runs:
        weights_by_name[name if total[name] == 1 else f"{name}[{seen[name]}]"] = weights
        seen[name] += 1
    return weights_by_name
